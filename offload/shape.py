"""A model as sizes, from its config alone: what each layer takes at rest and in use, and what a pass computes with."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from offload.entries import TensorEntry
from offload.gather import embedding_names, is_tied
from offload.load import Outline, decoder_layers
from offload.plan import Sized
from offload.quantize import Int8, Nf4

_QUANTIZED = {8: Int8(), 4: Nf4()}
_ROUTERS = {"gate", "router", "shared_expert_gate"}

Kind = tuple[tuple[str, tuple[int, ...]], ...]  # a layer's parameters: names and shapes


@dataclass(frozen=True)
class Anatomy:
    """Names and shapes of a model's parameters, layer by layer, and of the `rest`: embedding, norm and head.

    embedding: names of the input embedding's. quantized: those parameters of layers that few bits suffice for.
    """

    config: PretrainedConfig
    layers: tuple[Kind, ...]
    rest: Kind
    is_eager: bool
    embedding: frozenset[str]
    quantized: frozenset[tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class SketchedLayer:
    """A layer of which only the shape is known."""

    slot_bytes: int
    resident_bytes: int
    workspace_bytes: int
    signature: tuple


@dataclass(frozen=True)
class Shape:
    """A model as a planner sees it.

    layers: in order of use. rest_bytes: embedding, norm and head, by name. num_weights: what a pass over many tokens
    reads; num_used: what each single token multiplies with, which is less where experts are chosen.
    decoded_bytes: of matrices that are stored in fewer bytes, in the compute type, those of one module, or 0.
    experts: how many there are and how many each token uses, or None.
    is_eager: whether attention keeps the scores of all pairs of tokens.
    embedding: which of the rest the input embedding has.
    packed: the matrices of a layer that are decoded, where headers tell of them: to measure how fast that is.
    """

    config: PretrainedConfig
    dtype: torch.dtype
    layers: tuple[Sized, ...]
    rest_bytes: Mapping[str, int]
    num_weights: int
    num_used: int
    decoded_bytes: int
    experts: tuple[int, int] | None
    is_eager: bool
    embedding: frozenset[str]
    packed: tuple[TensorEntry, ...] = ()

    @property
    def text(self) -> PretrainedConfig:
        """The language model's part of the config."""
        return self.config.get_text_config(decoder=True)

    @property
    def embedding_bytes(self) -> int:
        """Of the input embedding, which the head may share."""
        return sum(nbytes for name, nbytes in self.rest_bytes.items() if name in self.embedding)

    @property
    def is_tied(self) -> bool:
        """Whether the head's matrix is the embedding's."""
        return is_tied(self.config)

    @property
    def matrix(self) -> tuple[int, int]:
        """Height and width of the matrices that most of the time goes into."""
        inner = getattr(self.text, "moe_intermediate_size", None) if self.experts else None
        inner = inner or getattr(self.text, "intermediate_size", None) or 4 * self.text.hidden_size
        return inner, self.text.hidden_size

    @property
    def stored_bytes(self) -> int:
        """The whole model at rest."""
        return sum(layer.slot_bytes for layer in self.layers) + sum(self.rest_bytes.values())

    def distinct_experts(self, num_tokens: int) -> float:
        """How many of a layer's experts `num_tokens` tokens are expected to need, all experts being as likely."""
        total, used = self.experts or (1, 1)
        return total * (1 - (1 - used / total) ** num_tokens)


def anatomy(config: PretrainedConfig) -> Anatomy:
    """The parameters that `config` describes; nothing is allocated."""
    with torch.device("meta"):
        return _anatomy_of(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16))


def shape_of(outline: Outline, dtype: torch.dtype) -> Shape:
    """The shape of a checkpoint whose headers have been read."""
    parts = _anatomy_of(outline.model)
    shape = _shape(parts, dtype, outline.layers, outline.rest_bytes, decoded_bytes=outline.unpacked_bytes)
    sources = [entry for recipe in outline.layers[0].recipes for entry in recipe.sources]
    packed = (entry for entry in sources if entry.encoding is not None or entry.dtype.itemsize < dtype.itemsize)
    return replace(shape, packed=tuple(packed))


def rounded_shape_of(outline: Outline, dtype: torch.dtype) -> Shape:
    """The shape of a copy with other values than those stored: numbers stay as they are, codes are decoded for good."""
    layers = [SketchedLayer(u.slot_bytes, u.rounded_bytes, u.workspace_bytes, u.signature) for u in outline.layers]
    decoded_bytes = max((unit.unpacked_bytes for unit in outline.layers if not unit.is_encoded), default=0)
    return replace(shape_of(outline, dtype), layers=tuple(layers), decoded_bytes=decoded_bytes)


def sketch(
    parts: Anatomy,
    *,
    bits: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    stored: torch.dtype | None = None,
    stored_bits: float | None = None,
) -> Shape:
    """The shape of a model at rest in `bits` (16: in `stored`, the compute type by default), with nothing at hand.

    What a pack quantizes is counted in its bits, the other parameters as they are. stored_bits: of a weight that the
    authors have quantized themselves, which `bits` of 16 leave so.
    """
    if bits not in (16, 8, 4):
        raise ValueError(f"16, 8 or 4 bits per weight, not {bits}")
    kinds, stored = set(parts.layers), stored or dtype
    if bits != 16 or stored_bits is not None:
        few_bytes = partial(_pack_bytes, bits) if bits != 16 else partial(_authored_bytes, stored_bits)
        alike = {kind: _quantized_layer(kind, parts.quantized, dtype, few_bytes) for kind in kinds}
        decoded = parts.quantized
    else:
        alike = {kind: _plain_layer(kind, dtype, stored) for kind in kinds}
        decoded = {each for kind in kinds for each in kind if stored.itemsize < dtype.itemsize and is_matrix(*each)}
    rest_bytes = {name: math.prod(shape) * dtype.itemsize for name, shape in parts.rest}
    decoded_bytes = max((math.prod(shape) for _, shape in decoded), default=0) * dtype.itemsize
    return _shape(parts, dtype, [alike[kind] for kind in parts.layers], rest_bytes, decoded_bytes=decoded_bytes)


def is_matrix(name: str, shape: Sequence[int]) -> bool:
    """Whether a layer's parameter is one that passes multiply with."""
    return len(shape) >= 2 and not name.endswith("bias")


def is_quantized(model: torch.nn.Module, name: str, shape: Sequence[int]) -> bool:
    """Whether few bits suffice for what parameter `name` of `model` is stored as, in `shape`.

    They do for weights of linear layers and for fused experts of even width, not for what chooses among experts.
    """
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    is_linear = isinstance(module, torch.nn.Linear) and leaf == "weight"
    is_experts = getattr(module, leaf).dim() == 3
    is_router = not _ROUTERS.isdisjoint(owner.split("."))
    return (is_linear or is_experts) and not is_router and len(shape) > 1 and shape[-1] % 2 == 0


def _anatomy_of(model: PreTrainedModel) -> Anatomy:
    stem, layers = decoder_layers(model)
    text = model.config.get_text_config(decoder=True)
    named = [(name, tuple(each.shape)) for name, each in model.named_parameters()]
    kinds = [tuple((name, tuple(each.shape)) for name, each in layer.named_parameters()) for layer in layers]
    return Anatomy(
        model.config,
        tuple(kinds),
        tuple((name, shape) for name, shape in named if not name.startswith(stem)),
        model.config._attn_implementation == "eager" or bool(getattr(text, "attn_logit_softcapping", None)),
        embedding_names(model),
        frozenset(
            each for layer, kind in zip(layers, kinds, strict=True) for each in kind if is_quantized(layer, *each)
        ),
    )


def _plain_layer(kind: Kind, dtype: torch.dtype, stored: torch.dtype) -> SketchedLayer:
    count = sum(math.prod(shape) for _, shape in kind)
    signature = (hash(kind),)
    if stored.itemsize < dtype.itemsize:
        vectors = sum(math.prod(shape) for _, shape in kind if len(shape) == 1) * dtype.itemsize
        return SketchedLayer(count * stored.itemsize, count * stored.itemsize + vectors, vectors, signature)
    workspace = 0 if stored == dtype else count * dtype.itemsize
    return SketchedLayer(count * stored.itemsize, count * dtype.itemsize, workspace, signature)


def _quantized_layer(
    kind: Kind, quantized: Collection[tuple], dtype: torch.dtype, few_bytes: Callable[[tuple[int, ...]], int]
) -> SketchedLayer:
    size = sum(few_bytes(each[1]) if each in quantized else math.prod(each[1]) * dtype.itemsize for each in kind)
    return SketchedLayer(size, size, 0, (hash(kind),))


def _pack_bytes(bits: int, shape: tuple[int, ...]) -> int:
    return sum(dtype.itemsize * math.prod(own) for dtype, own in _QUANTIZED[bits].layout(shape).values())


def _authored_bytes(bits: float, shape: tuple[int, ...]) -> int:
    return round(math.prod(shape) * bits / 8)


def _shape(
    parts: Anatomy, dtype: torch.dtype, layers: Sequence[Sized], rest_bytes: Mapping[str, int], *, decoded_bytes: int
) -> Shape:
    text = parts.config.get_text_config(decoder=True)
    total = getattr(text, "num_local_experts", None) or getattr(text, "num_experts", None) or 1
    used = getattr(text, "num_experts_per_tok", None) or 1
    shapes = [shape for kind in parts.layers for name, shape in kind if is_matrix(name, shape)]
    dense = sum(math.prod(shape) for shape in shapes if len(shape) == 2) + text.vocab_size * text.hidden_size
    fused = sum(math.prod(shape) for shape in shapes if len(shape) > 2)
    return Shape(
        parts.config,
        dtype,
        tuple(layers),
        rest_bytes,
        dense + fused,
        dense + fused * used // total,
        decoded_bytes,
        (total, used) if fused else None,
        parts.is_eager,
        parts.embedding,
    )
