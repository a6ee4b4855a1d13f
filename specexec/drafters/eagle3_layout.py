"""The public layouts of EAGLE-3 heads, told apart by config and names, into the one that Eagle3Net has."""

from collections.abc import Mapping
from typing import Any

from specexec.drafters.eagle3 import Eagle3Config, Eagle3Net
from specexec.drafters.layouts import AttentionShape, Shapes, Sources, TargetShape, has_any, on_meta, require_all


def eagle3_layout(config: Mapping[str, Any], shapes: Shapes, target: TargetShape) -> tuple[Eagle3Config, Sources]:
    """The head's shape, and what is stored of each tensor of Eagle3Net.

    Known: SafeAILab, AngelSlim and SpecForge (`midlayer.`), Model-Optimizer (`eagle_config`), speculators
    (`transformer_layer_config`) and DeepSpec (`target_layer_ids`). ValueError for a head of another target, a variant
    that is not supported, or tensors that are missing, left over or of another shape.
    """
    options = config.get("eagle_config") or {}
    _refuse_variants(config, options, shapes)
    sources = {_own_name(name): (name,) for name in shapes if not name.endswith(("t2d", "rotary_emb.inv_freq"))}
    layer = {**config, **(config.get("transformer_layer_config") or {})}
    result = _shape(config, layer, options, set(sources), target)
    num_ids = result.draft_vocab_size
    num_rows = shapes[sources["lm_head.weight"][0]][0] if result.own_head else num_ids
    if num_rows != num_ids or (num_ids != result.vocab_size and not result.mapped):
        raise ValueError(
            f"the draft's vocabulary of {num_ids:,} tokens needs a lm_head of as many rows (found {num_rows:,}) and, "
            "being smaller than the target's, a d2t"
        )
    require_all(on_meta(Eagle3Net, result), {name: shapes[name] for (name,) in sources.values()}, sources)
    return result, sources


def _own_name(name: str) -> str:
    name = name.removeprefix("model.")
    return f"layers.0.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name


def _shape(
    config: Mapping[str, Any],
    layer: Mapping[str, Any],
    options: Mapping[str, Any],
    names: set[str],
    target: TargetShape,
) -> Eagle3Config:
    shape = AttentionShape.read(layer)
    layer_ids = _layer_ids(config, options, target.num_layers)
    target_hidden = layer.get("target_hidden_size") or shape.hidden_size
    target.require(hidden_size=target_hidden, vocab_size=layer["vocab_size"], layer_ids=layer_ids)
    made_for = config.get("num_target_layers", target.num_layers)
    if made_for != target.num_layers:
        raise ValueError(f"the draft was made for another target: {made_for} layers, this one has {target.num_layers}")
    if shape.hidden_size != target_hidden and "embed_tokens.weight" not in names:
        raise ValueError(f"the draft's hidden size is {shape.hidden_size:,} and it brings no embedding of that size")
    first = "layers.0.self_attn"
    return Eagle3Config(
        hidden_size=shape.hidden_size,
        target_hidden_size=target_hidden,
        layer_ids=layer_ids,
        vocab_size=layer["vocab_size"],
        draft_vocab_size=layer.get("draft_vocab_size") or layer["vocab_size"],
        intermediate_size=layer["intermediate_size"],
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        num_layers=layer.get("num_hidden_layers", 1),
        eps=shape.eps,
        rope_theta=shape.rope_theta,
        rope_scaling=shape.rope_scaling,
        max_positions=shape.max_positions,
        bias=f"{first}.q_proj.bias" in names,
        output_bias=f"{first}.o_proj.bias" in names,
        mlp_bias="layers.0.mlp.gate_proj.bias" in names,
        qk_norm=f"{first}.q_norm.weight" in names,
        fc_norm=bool(config.get("fc_norm")) or has_any(names, "fc_norm."),
        norm_before_fc=bool(config.get("norm_before_fc")) or "input_norm.weight" in names,
        norm_embedding=options.get("use_input_layernorm_in_first_layer", True)
        or "layers.0.input_layernorm.weight" in names,
        norm_before_residual=bool(config.get("norm_before_residual")),
        norm_output=bool(config.get("norm_output")),
        final_norm=options.get("use_last_layernorm", True) or "norm.weight" in names,
        mapped="d2t" in names,
        own_embedding="embed_tokens.weight" in names,
        own_head="lm_head.weight" in names,
    )


def _layer_ids(config: Mapping[str, Any], options: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Three ways of counting: ids of layer outputs (DeepSpec, Model-Optimizer, SpecForge), indices into hidden_states,
    where 0 is the embedding (speculators), and none, which means the authors' low, middle and high layer."""
    if ids := config.get("target_layer_ids") or options.get("eagle_aux_hidden_state_layer_ids"):
        return tuple(ids)
    if indices := config.get("eagle_aux_hidden_state_layer_ids"):
        return tuple(index - 1 for index in indices)
    return 1, num_layers // 2 - 1, num_layers - 4


def _refuse_variants(config: Mapping[str, Any], options: Mapping[str, Any], shapes: Shapes) -> None:
    num_layers = (config.get("transformer_layer_config") or config).get("num_hidden_layers", 1)
    for refused, what in (
        (not options.get("use_aux_hidden_state", True), "it reads the last hidden state only (EAGLE-1 and 2)"),
        ((options.get("parallel_draft_step") or 1) > 1, "it drafts several tokens in parallel"),
        (options.get("use_mtp_layernorm"), "it has norms of the MTP kind"),
        (not options.get("next_layer_regular", True) and num_layers > 1, "its further layers read the embedding too"),
        (has_any(shapes, "kv_a_proj"), "its attention is latent (MLA)"),
        (has_any(shapes, "mlp.experts."), "it has experts"),
    ):
        if refused:
            raise ValueError(f"this EAGLE-3 draft is of a variant that is not supported: {what}")
