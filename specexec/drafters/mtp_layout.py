"""The public layouts of MTP layers, in a target's checkpoint or beside it, into the one that MtpNet has."""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from specexec.drafters.experts import ExpertsShape
from specexec.drafters.latent import LatentShape
from specexec.drafters.layouts import AttentionShape, Shapes, Sources, TargetShape, has_any, on_meta, require_all
from specexec.drafters.mtp import MtpConfig, MtpNet

_JOINT = {  # names of what stands around the block, by layout
    "deepseek": {"enorm": "embed_norm", "hnorm": "hidden_norm", "eh_proj": "fc", "shared_head.norm": "norm"},
    "qwen": {"pre_fc_norm_embedding": "embed_norm", "pre_fc_norm_hidden": "hidden_norm", "fc": "fc", "norm": "norm"},
    "speculators": {
        "token_layernorm": "embed_norm",
        "hidden_layernorm": "hidden_norm",
        "input_proj": "fc",
        "final_layernorm": "norm",
    },
}
_COPIES = ("embed_tokens.weight", "shared_head.head.weight", "rotary_emb.inv_freq")  # of the target's own
_MLP = (
    (r"mlp\.gate\.weight", "mlp.gate.weight"),
    (r"mlp\.gate\.e_score_correction_bias", "mlp.gate.bias"),
    (r"mlp\.experts\.(gate_up_proj|down_proj)", r"mlp.\1"),
    (r"mlp\.shared_experts?\.(.+)", r"mlp.shared.\1"),
    (r"mlp\.shared_expert_gate\.weight", "mlp.shared_gate.weight"),
)
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")
_ZERO_CENTERED = ("qwen3_next", "qwen3_5")


def mtp_names(names: Iterable[str], num_layers: int) -> list[str]:
    """Those of a checkpoint's names that belong to MTP layers of a target with `num_layers` layers of its own."""
    return [name for name in names if _place(name, num_layers) is not None]


def mtp_layout(config: Mapping[str, Any], shapes: Shapes, target: TargetShape) -> tuple[MtpConfig, Sources]:
    """The layers' shape, and what is stored of each tensor of MtpNet.

    Known: DeepSeek and GLM (`model.layers.{L + k}.` with `eh_proj`), Qwen3-Next and 3.5 (`mtp.`), and speculators
    (`mtp_layers.{k}.`). The next step reads the hidden state after the final norm, but before it with DeepSeek's.
    ValueError for layers of another target and for tensors that are missing, left over or of another shape.
    """
    layer = config.get("transformer_layer_config") or config.get("text_config") or config
    places = {name: _place(name, target.num_layers) for name in shapes}
    lost = sorted(name for name, place in places.items() if place is None)
    if lost:
        raise ValueError(f"the draft has tensors that this layout has no place for: {', '.join(lost)}")
    kind = _kind(shapes)
    num_layers = 1 + max((number for number, _ in places.values() if number is not None), default=0)
    target.require(hidden_size=layer["hidden_size"], vocab_size=layer["vocab_size"])
    sources: dict[str, tuple[str, ...]] = {}
    experts: dict[str, dict[tuple[int, str], str]] = {}
    for name, (number, rest) in places.items():
        if rest.endswith(_COPIES):
            continue
        for k in range(num_layers) if number is None else (number,):
            if found := _EXPERT.fullmatch(rest):
                joint = "down_proj" if found[2] == "down" else "gate_up_proj"
                experts.setdefault(f"layers.{k}.block.mlp.{joint}", {})[int(found[1]), found[2]] = name
            else:
                sources[f"layers.{k}.{_own_name(rest, kind)}"] = (name,)
    sources |= {place: tuple(parts[key] for key in sorted(parts)) for place, parts in experts.items()}
    result = _shape(layer, kind, num_layers, sources, shapes)
    kept = {name: shapes[name] for name, (_, rest) in places.items() if not rest.endswith(_COPIES)}
    require_all(on_meta(MtpNet, result), kept, sources)
    return result, sources


def _place(name: str, num_layers: int) -> tuple[int | None, str] | None:
    """Which MTP layer a stored tensor belongs to (None: all of them) and its name there; None if to no such layer."""
    if found := re.fullmatch(r"(?:model\.)?mtp_layers\.(\d+)\.(.+)", name):
        return int(found[1]), found[2]
    if found := re.fullmatch(r"mtp\.layers\.(\d+)\.(.+)", name):
        return int(found[1]), found[2]
    if name.startswith("mtp."):
        return None, name.removeprefix("mtp.")
    found = re.fullmatch(r"(?:model\.)?(?:language_model\.)?layers\.(\d+)\.(.+)", name)
    return (int(found[1]) - num_layers, found[2]) if found and int(found[1]) >= num_layers else None


def _kind(names: Iterable[str]) -> str:
    if has_any(names, "pre_fc_norm_hidden"):
        return "qwen"
    return "speculators" if has_any(names, "mtp_layers.") else "deepseek"


def _own_name(rest: str, kind: str) -> str:
    module, _, leaf = rest.rpartition(".")
    if module in _JOINT[kind]:
        return f"{_JOINT[kind][module]}.{leaf}"
    for pattern, own in _MLP:
        if found := re.fullmatch(pattern, rest):
            return f"block.{found.expand(own)}"
    return f"block.{rest}"


def _shape(layer: Mapping[str, Any], kind: str, num_layers: int, sources: Sources, shapes: Shapes) -> MtpConfig:
    shape, stem = AttentionShape.read(layer), "layers.0.block."
    queries = sources.get(f"{stem}self_attn.q_proj.weight", ("",))[0]
    return MtpConfig(
        hidden_size=shape.hidden_size,
        num_layers=num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=layer.get("intermediate_size") or 0,
        experts=_experts(layer, sources, shapes) if f"{stem}mlp.gate.weight" in sources else None,
        latent=_latent(layer, shape, sources) if f"{stem}self_attn.kv_b_proj.weight" in sources else None,
        eps=shape.eps,
        rope_theta=shape.rope_theta,
        rope_scaling=shape.rope_scaling,
        rotary_factor=shape.rotary_factor,
        max_positions=shape.max_positions,
        bias=f"{stem}self_attn.q_proj.bias" in sources,
        output_bias=f"{stem}self_attn.o_proj.bias" in sources,
        qk_norm=f"{stem}self_attn.q_norm.weight" in sources,
        gated=shapes.get(queries, (0,))[0] == 2 * shape.num_heads * shape.head_dim,
        zero_centered=kind == "qwen" or str(layer.get("model_type", "")).startswith(_ZERO_CENTERED),
        recurrent_norm=kind != "deepseek",
    )


def _experts(layer: Mapping[str, Any], sources: Sources, shapes: Shapes) -> ExpertsShape:
    stem = "layers.0.block.mlp."
    num_experts = shapes[sources[f"{stem}gate.weight"][0]][0]
    shared = sources.get(f"{stem}shared.gate_proj.weight")
    corrected = f"{stem}gate.bias" in sources
    return ExpertsShape(
        num_experts=num_experts,
        num_chosen=layer["num_experts_per_tok"],
        inner_size=layer["moe_intermediate_size"],
        renormalize=layer.get("norm_topk_prob", True),
        sigmoid=corrected or layer.get("scoring_func") == "sigmoid",
        corrected=corrected,
        num_groups=layer.get("n_group") or 1,
        chosen_groups=layer.get("topk_group") or 1,
        scale=layer.get("routed_scaling_factor") or 1.0,
        shared_size=shapes[shared[0]][0] if shared else 0,
        shared_gate=f"{stem}shared_gate.weight" in sources,
    )


def _latent(layer: Mapping[str, Any], shape: AttentionShape, sources: Sources) -> LatentShape:
    plain, turning = layer["qk_nope_head_dim"], layer["qk_rope_head_dim"]
    return LatentShape(
        num_heads=shape.num_heads,
        query_rank=layer.get("q_lora_rank") or 0,
        kv_rank=layer["kv_lora_rank"],
        plain_size=plain,
        rope_size=turning,
        value_size=layer["v_head_dim"],
        interleaved=layer.get("rope_interleave", True),
        scale=(plain + turning) ** -0.5 * _long_context_scale(shape.rope_scaling) ** 2,
        bias="layers.0.block.self_attn.o_proj.bias" in sources,
    )


def _long_context_scale(scaling: Mapping[str, Any]) -> float:
    """What YaRN with mscale_all_dim multiplies queries and keys by, each."""
    factor, mscale = scaling.get("factor") or 1.0, scaling.get("mscale_all_dim") or 0.0
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
