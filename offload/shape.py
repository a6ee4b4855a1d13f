"""A model as sizes, from its config alone: what each layer takes at rest and in use, and what a pass computes with."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from offload.entries import TensorEntry
from offload.gather import embedding_names, is_tied
from offload.load import Outline, decoder_layers
from offload.plan import Sized
from offload.quantize import Int8, Nf4

_QUANTIZED = {8: Int8(), 4: Nf4()}
_ROUTER = re.compile(r"(router|mlp\.gate|moe\.gate)\.weight$")

Kind = tuple[tuple[str, tuple[int, ...]], ...]  # a layer's parameters: names and shapes


@dataclass(frozen=True)
class Anatomy:
    """Names and shapes of a model's parameters, layer by layer, and of the `rest`: embedding, norm and head.

    embedding: names of the input embedding's.
    """

    config: PretrainedConfig
    layers: tuple[Kind, ...]
    rest: Kind
    is_eager: bool
    embedding: frozenset[str]


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
    parts: Anatomy, *, bits: int = 16, dtype: torch.dtype = torch.bfloat16, stored: torch.dtype | None = None
) -> Shape:
    """The shape of a model at rest in `bits` (16: in `stored`, the compute type by default), with nothing at hand.

    Matrices of the layers and fused experts are quantized; norms, biases, routers, embedding and head are not.
    """
    if bits not in (16, 8, 4):
        raise ValueError(f"16, 8 or 4 bits per weight, not {bits}")
    alike = {kind: _sketched_layer(kind, bits, dtype, stored or dtype) for kind in set(parts.layers)}
    rest_bytes = {name: math.prod(shape) * dtype.itemsize for name, shape in parts.rest}
    largest = max(math.prod(shape) for kind in alike for name, shape in kind if is_matrix(name, shape))
    grows = bits != 16 or (stored or dtype).itemsize < dtype.itemsize
    decoded_bytes = largest * dtype.itemsize if grows else 0
    return _shape(parts, dtype, [alike[kind] for kind in parts.layers], rest_bytes, decoded_bytes=decoded_bytes)


def is_matrix(name: str, shape: Sequence[int]) -> bool:
    """Whether a layer's parameter is one that passes multiply with, and that few bits suffice for."""
    return len(shape) >= 2 and not name.endswith("bias") and not _ROUTER.search(name)


def _anatomy_of(model: PreTrainedModel) -> Anatomy:
    stem, layers = decoder_layers(model)
    text = model.config.get_text_config(decoder=True)
    named = [(name, tuple(each.shape)) for name, each in model.named_parameters()]
    return Anatomy(
        model.config,
        tuple(tuple((name, tuple(each.shape)) for name, each in layer.named_parameters()) for layer in layers),
        tuple((name, shape) for name, shape in named if not name.startswith(stem)),
        model.config._attn_implementation == "eager" or bool(getattr(text, "attn_logit_softcapping", None)),
        embedding_names(model),
    )


def _sketched_layer(kind: Kind, bits: int, dtype: torch.dtype, stored: torch.dtype) -> SketchedLayer:
    count = sum(math.prod(shape) for _, shape in kind)
    signature = (hash(kind),)
    if bits == 16 and stored.itemsize < dtype.itemsize:
        vectors = sum(math.prod(shape) for _, shape in kind if len(shape) == 1) * dtype.itemsize
        return SketchedLayer(count * stored.itemsize, count * stored.itemsize + vectors, vectors, signature)
    if bits == 16:
        workspace = 0 if stored == dtype else count * dtype.itemsize
        return SketchedLayer(count * stored.itemsize, count * dtype.itemsize, workspace, signature)
    size = 0
    for name, shape in kind:
        stored_parts = _QUANTIZED[bits].layout(shape).values() if is_matrix(name, shape) else [(dtype, shape)]
        size += sum(each.itemsize * math.prod(dimensions) for each, dimensions in stored_parts)
    return SketchedLayer(size, size, 0, signature)


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
