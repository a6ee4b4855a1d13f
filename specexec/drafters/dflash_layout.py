"""Recognises DFlash and DSpark checkpoints in their public layouts, checks them and makes drafters of their tensors.

z-lab and speculators DFlash; Model-Optimizer, SpecForge, DeepSpec and speculators DSpark. They differ in where the
config keeps its keys, in how target layers are counted, in what the root's place guesses and in the heads' names.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from specexec.acceptance import Acceptance
from specexec.drafters.dflash import BlockShape, DFlashDrafter, DFlashNet
from specexec.drafters.dspark import DSparkDrafter, DSparkNet, GatedMix, PlainMix, RecurrentMix
from specexec.drafters.layouts import AttentionShape, Shapes, Sources, TargetShape, fill, require_all
from specexec.lm import CachedLM

_MIXES = {"vanilla": lambda hidden, rank: PlainMix(), "gated": GatedMix, "rnn": RecurrentMix}
_BACKBONE = re.compile(
    r"(fc|hidden_norm|norm|embed_tokens|lm_head)\.weight|d2t"
    r"|layers\.\d+\.((input|post_attention)_layernorm|self_attn\.([qkvo]_proj|[qk]_norm)|mlp\.(gate|up|down)_proj)\.\w+"
)
_HEADS = (  # of DeepSpec, SpecForge and speculators, or of Model-Optimizer
    (re.compile(r"(?:markov_head\.)?(markov_w[12])\.weight"), r"\1.weight"),
    (re.compile(r"(?:markov_head\.)?(?:gate|joint)_proj\.(weight|bias)"), r"mix.proj.\1"),
    (re.compile(r"(?:confidence_head\.proj|confidence_proj)\.(weight|bias)"), r"confidence_proj.\1"),
)


@dataclass(frozen=True)
class BlockLayout:
    """A recognised checkpoint: whose layout it is, the net that it fills and what is stored of each of its tensors.

    rank: of the Markov head, 0 where there is none (DFlash); head: its type; confidence: as DSparkNet takes it.
    """

    name: str
    shape: BlockShape
    rank: int
    head: str
    confidence: str | None
    sources: Sources

    def net(self) -> DFlashNet | DSparkNet:
        """The net, its weights not yet those of the checkpoint."""
        if not self.rank:
            return DFlashNet(self.shape)
        mix = _MIXES[self.head](self.shape.hidden, self.rank)
        return DSparkNet(self.shape, self.rank, mix, self.confidence)


def is_block_draft(config: Mapping[str, Any], names: Iterable[str]) -> bool:
    """Whether a checkpoint is of this kind, be it supported or not: what block_layout refuses it says by name."""
    described = [*(config.get("architectures") or []), str(config.get("speculators_model_type", ""))]
    return bool({"fc.weight", "hidden_norm.weight"} <= set(names)) or any(
        word in each.lower() for each in described for word in ("dflash", "dspark", "domino")
    )


def block_layout(config: Mapping[str, Any], shapes: Shapes, target: TargetShape) -> BlockLayout:
    """Recognise a checkpoint by its config.json and its tensors' names and shapes.

    ValueError for a draft of another target, for variants that are not supported, for keys that the config lacks, and
    with the list of tensors that are left over, missing or of another shape than the config says.
    """
    keys = {**(config.get("transformer_layer_config") or {}), **config, **(config.get("dflash_config") or {})}
    name = _name(config, keys, shapes)
    _refuse_variants(config, keys)
    rank = keys.get("markov_rank")
    if rank is None:
        rank = _width(shapes, "markov_head.markov_w1.weight", "markov_w1.weight")
    try:
        shape = _shape(name, keys, shapes)
    except KeyError as error:
        raise ValueError(f"the config.json of this {name} draft lacks {error}") from error
    _check_target(keys, shape, target)
    head = str(keys.get("markov_head_type") or "vanilla").lower()
    if head not in _MIXES:
        raise ValueError(f"unknown markov_head_type {head!r}; known: {', '.join(_MIXES)}")
    if rank and head == "rnn" and not shape.anchor_first:
        raise ValueError("an rnn Markov head whose root's place guesses nothing is not supported")
    width, confidence = _width(shapes, "confidence_head.proj.weight", "confidence_proj.weight"), None
    if rank and (width or keys.get("enable_confidence_head") or keys.get("use_confidence_head")):
        confidence = "hidden" if width == shape.hidden else "markov"
    dropped = {"t2d"} if shape.num_ids < shape.vocab_size else {"t2d", "d2t"}  # what says nothing that the net needs
    kept = {each: size for each, size in shapes.items() if each not in dropped}
    layout = BlockLayout(name, shape, rank, head, confidence, {_own_name(each, rank > 0): (each,) for each in kept})
    with torch.device("meta"):
        require_all(layout.net(), kept, layout.sources)
    return layout


def block_drafter(
    config: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    target: CachedLM,
    *,
    acceptance: Acceptance | None = None,
    dtype: torch.dtype | None = None,
) -> DFlashDrafter | DSparkDrafter:
    """The drafter that a checkpoint describes, on the target's device; ValueError as block_layout.

    acceptance: what is known of its scores, slot by slot. dtype: of its net; the target's where none is given.
    """
    model = target.model.config.get_text_config()
    shape = TargetShape(model.hidden_size, model.num_hidden_layers, model.vocab_size)
    layout = block_layout(config, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, shape)
    if "t2d" in tensors:
        _check_vocabulary(tensors)
    net = block_net(layout, tensors, dtype or target.model.dtype).to(target.device)
    if isinstance(net, DSparkNet):
        return DSparkDrafter(net, target, acceptance=acceptance)
    return DFlashDrafter(net, target, acceptance=acceptance)


def block_net(layout: BlockLayout, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> DFlashNet | DSparkNet:
    """The net with the weights of a checkpoint's tensors, ready for inference."""
    with torch.device("meta"):
        net = layout.net()
    fill(net, layout.sources, tensors.__getitem__, dtype)
    return net


def _name(config: Mapping[str, Any], keys: Mapping[str, Any], shapes: Iterable[str]) -> str:
    architectures = " ".join(config.get("architectures") or [])
    if "Gemma4DSpark" in architectures:
        raise ValueError("Gemma 4 drafts of DeepSpec (Gemma4DSparkModel) are not supported: their layers differ")
    if "speculators_model_type" in config:
        return "speculators"
    if "Qwen3DSparkModel" in architectures:
        return "DeepSpec"
    if "DSparkDraftModel" in architectures or str(keys.get("projector_type", "")).lower() == "dspark":
        return "Model-Optimizer" if "markov_w1.weight" in shapes else "SpecForge"
    return "z-lab"


def _refuse_variants(config: Mapping[str, Any], keys: Mapping[str, Any]) -> None:
    projector = str(keys.get("projector_type") or "dflash").lower()
    words = " ".join(
        [*(config.get("architectures") or []), projector, str(config.get("speculators_model_type"))]
    ).lower()
    convolves = keys.get("conv_kernel_size") or keys.get("selector_rank")
    for variant, is_it in {"DFlash2": convolves or "dflash2" in words, "Domino": "domino" in words}.items():
        if is_it:
            raise ValueError(f"{variant} drafts are another architecture, which is not supported")
    if projector not in ("dflash", "dspark"):
        raise ValueError(f"drafts with projector_type {projector!r} are not supported")


def _shape(name: str, keys: Mapping[str, Any], shapes: Shapes) -> BlockShape:
    if "fc.weight" not in shapes:
        raise ValueError(f"the {name} draft lacks fc.weight")
    layer, layers = AttentionShape.read(keys), _target_layers(name, keys)
    windows, causal = _sight(keys, by_kind=name in ("z-lab", "speculators"))
    anchors = [keys[key] for key in ("sample_from_anchor", "shift_label") if keys.get(key) is not None]
    usual = name not in ("z-lab", "speculators") or keys.get("speculators_model_type") == "dspark"
    num_ids = shapes["d2t"][0] if "d2t" in shapes else keys["vocab_size"]
    if keys.get("draft_vocab_size", num_ids) != num_ids:
        raise ValueError(f"draft_vocab_size is {keys['draft_vocab_size']}, but the tensors make it {num_ids}")
    return BlockShape(
        hidden=layer.hidden_size,
        inner=keys["intermediate_size"],
        heads=layer.num_heads,
        kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        eps=layer.eps,
        target_layers=layers,
        target_hidden=_width(shapes, "fc.weight") // len(layers),
        block_size=keys["block_size"],
        mask_token=keys["mask_token_id"],
        anchor_first=bool(anchors[0]) if anchors else usual,
        windows=windows,
        causal=causal,
        vocab_size=keys["vocab_size"],
        num_ids=num_ids,
        own_embedding="embed_tokens.weight" in shapes,
        own_head="lm_head.weight" in shapes,
        bias=bool(keys.get("attention_bias")),
        theta=layer.rope_theta,
        scaling=layer.rope_scaling,
        rotary_factor=layer.rotary_factor,
        max_positions=layer.max_positions,
        embedding_scale=keys.get("input_embedding_scale") or 1.0,
        logit_scale=keys.get("output_multiplier") or 1.0,
        softcap=keys.get("final_logit_softcapping"),
    )


def _check_target(keys: Mapping[str, Any], shape: BlockShape, target: TargetShape) -> None:
    target.require(hidden_size=shape.target_hidden, vocab_size=shape.vocab_size, layer_ids=shape.target_layers)
    if (made_for := keys.get("num_target_layers") or target.num_layers) != target.num_layers:
        raise ValueError(f"the draft was made for another target: {made_for} layers, this one has {target.num_layers}")
    if shape.hidden != target.hidden_size and not (shape.own_embedding and shape.own_head):
        raise ValueError(
            f"the draft's hidden size is {shape.hidden:,} and it brings no embedding and head of that size"
        )
    if not 0 <= shape.mask_token < shape.vocab_size:
        raise ValueError(f"the draft's mask token {shape.mask_token:,} is not one of {shape.vocab_size:,} tokens")


def _target_layers(name: str, keys: Mapping[str, Any]) -> tuple[int, ...]:
    """Which layers' outputs are read; speculators counts the embedding as 0, all others the first layer."""
    if name == "speculators":
        return tuple(layer - 1 for layer in keys["aux_hidden_state_layer_ids"])
    if layers := keys.get("target_layer_ids"):
        return tuple(layers)
    last, count = keys["num_target_layers"] - 3, keys["num_hidden_layers"]
    return tuple(round(1 + i * (last - 1) / (count - 1)) for i in range(count)) if count > 1 else ((last + 3) // 2,)


def _sight(keys: Mapping[str, Any], *, by_kind: bool) -> tuple[tuple[int | None, ...], tuple[bool, ...]]:
    """Windows and causality of each layer; `by_kind`: windowed layers are causal unless the config says otherwise."""
    count = keys["num_hidden_layers"]
    kinds = keys.get("layer_types") or ["full_attention"] * count
    if len(kinds) != count or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise ValueError(f"{count} layers of full or sliding attention are needed; layer_types is {kinds}")
    sliding = [kind == "sliding_attention" and keys.get("use_swa") is not False for kind in kinds]
    window = (keys.get("swa_window_size") or keys.get("sliding_window")) if any(sliding) else None
    if any(sliding) and not window:
        raise ValueError("layers of sliding attention need sliding_window in the config")
    always = keys.get("causal") if keys.get("causal") is not None else keys.get("is_causal")
    by_kind = by_kind and not keys.get("sliding_window_non_causal")
    causal = [bool(always) if always is not None else by_kind and each for each in sliding]
    return tuple(window if each else None for each in sliding), tuple(causal)


def _own_name(name: str, markov: bool) -> str:
    """A tensor's name in the net; what the net has no place for keeps its own."""
    if markov and _BACKBONE.fullmatch(name):
        return f"backbone.{name}"
    for pattern, new in _HEADS:
        if pattern.fullmatch(name):
            return pattern.sub(new, name)
    return name


def _check_vocabulary(tensors: Mapping[str, torch.Tensor]) -> None:
    """t2d marks the target's ids that the draft has, and so says the same as d2t."""
    marked = tensors["t2d"].flatten().nonzero().flatten().cpu()
    chosen = tensors["d2t"].cpu() + torch.arange(len(tensors["d2t"])) if "d2t" in tensors else torch.arange(len(marked))
    if not torch.equal(marked, chosen):
        raise ValueError("t2d and d2t of this draft describe different vocabularies")


def _width(shapes: Shapes, *names: str) -> int:
    """The last dimension of the one of `names` that is there, 0 if none is."""
    return next((shapes[name][-1] for name in names if name in shapes), 0)
