"""Checkpoints that their authors have quantized: FP8 and compressed-tensors are decoded, others refused by name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from offload.entries import TensorEntry

_FORMATS = {"float-quantized", "int-quantized", "naive-quantized", "pack-quantized"}
_PLAIN = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
_PAYLOADS = ("weight", "weight_packed")
_SCALES = ("weight_scale_inv", "weight_scale")
_JOINED = {*_SCALES, "weight_zero_point"}
_UNUSED = {"input_scale", "input_zero_point", "output_scale", "activation_scale", "k_scale", "v_scale", "weight_shape"}


@dataclass(frozen=True)
class Scaled:
    """Values less a zero point (none: 0), times a scale: one for the whole, each row or each `block` of rows x columns.

    Activations stay in the compute dtype, whatever the checkpoint plans for them.
    """

    block: tuple[int, int] = (1, 1)

    def decode(self, payload: torch.Tensor, scales: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """The values, computed in fp32 and rounded once."""
        height = self.block[0] if self.block[0] > 1 else len(out)
        parts = zip(out.split(height), payload.view(out.shape).split(height), strict=True)
        for i, (target, part) in enumerate(parts):  # never all of it in fp32
            own = [each if height == len(out) or each.numel() == 1 else each[i : i + 1] for each in scales]
            wide = part.float()
            if len(own) > 1:
                wide -= _spread(own[1], self.block, part.shape)
            target.copy_(wide.mul_(_spread(own[0], self.block, part.shape)))


@dataclass(frozen=True)
class PackedInts:
    """Unsigned integers of `bits` bits packed along rows into int32, lowest first; scaled as in `Scaled`.

    Zero points, where there are any, are packed along columns; else the zero is in the middle.
    """

    bits: int
    block: tuple[int, int]

    def decode(self, payload: torch.Tensor, scales: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """The values, computed in fp32 and rounded once."""
        values = self._unpack(payload.view(len(out), -1))
        if len(scales) > 1:
            values -= _spread(self._unpack(scales[1].T).T[: len(out)], self.block, out.shape)
        else:
            values -= 1 << (self.bits - 1)
        torch.mul(values, _spread(scales[0], self.block, out.shape), out=values)
        out.copy_(values)

    def _unpack(self, words: torch.Tensor) -> torch.Tensor:
        shifts = torch.arange(0, 32, self.bits, dtype=torch.int32, device=words.device)
        return ((words[..., None] >> shifts) & ((1 << self.bits) - 1)).flatten(1).float()


def decodable(
    path: Path, quantization: Mapping[str, Any], tensors: Mapping[str, TensorEntry]
) -> dict[str, TensorEntry]:
    """`tensors` with scales joined to what they scale; ValueError where one is missing or is not understood."""
    scheme = _scheme(path, quantization)
    joined: dict[str, TensorEntry] = {}
    for name, entry in tensors.items():
        stem, _, leaf = name.rpartition(".")
        scale = next((tensors[f"{stem}.{each}"] for each in _SCALES if f"{stem}.{each}" in tensors), None)
        if leaf in _PAYLOADS and entry.dtype not in _PLAIN:
            if scale is None or f"{stem}.weight_g_idx" in tensors:
                raise ValueError(f"{path}: {name} has no scale beside it or reordered columns, and cannot be decoded")
            joined[f"{stem}.weight"] = _scaled(entry, stem, scale, tensors, scheme)
        elif leaf not in _JOINED and leaf not in _UNUSED:
            joined[name] = entry
    return joined


def require_decodable(path: Path, quantization: Mapping[str, Any]) -> None:
    """ValueError naming a quantization that is neither FP8 nor compressed-tensors with plain scales."""
    _scheme(path, quantization)


def _scheme(path: Path, quantization: Mapping[str, Any]) -> tuple[int, tuple[int, int]]:
    """Bits of packed integers, and rows x columns that share a scale where a row does not."""
    method = str(quantization.get("quant_method", "unknown"))
    if method == "fp8" and quantization.get("expert_dtype", "fp8") == "fp8":
        return 8, tuple(quantization.get("weight_block_size") or (1, 1))
    schemes = [group.get("weights") or {} for group in (quantization.get("config_groups") or {}).values()]
    kinds = {
        (int(each.get("num_bits", 8)), str(each.get("type")), each.get("group_size"), str(each.get("block_structure")))
        for each in schemes
    }
    is_dense = (quantization.get("sparsity_config") or {}).get("format", "dense") == "dense"
    if method == "compressed-tensors" and quantization.get("format") in _FORMATS and is_dense and len(kinds) == 1:
        bits, kind, group_size, _ = kinds.pop()
        if (kind == "int" and bits in (4, 8)) or (kind == "float" and bits == 8):
            return bits, tuple(schemes[0].get("block_structure") or (1, group_size or 1))
        method = f"{method}, {bits}-bit {kind}"
    raise ValueError(
        f"{path} is already quantized ({method}), which cannot be decoded layer by layer;"
        " use the original 16-bit checkpoint with --bits 4, or an FP8 or GGUF version"
    )


def _scaled(
    entry: TensorEntry,
    stem: str,
    scale: TensorEntry,
    tensors: Mapping[str, TensorEntry],
    scheme: tuple[int, tuple[int, int]],
) -> TensorEntry:
    bits, block = scheme
    zero = tensors.get(f"{stem}.weight_zero_point")
    scales = (scale,) if zero is None else (scale, zero)
    if entry.dtype != torch.int32:
        return replace(entry, encoding=Scaled(block), scales=scales)
    # Widths are whole words: the padding of others could be known only from the values of weight_shape.
    shape = (entry.shape[0], entry.shape[1] * (32 // bits))
    return replace(entry, name=f"{stem}.weight", shape=shape, encoding=PackedInts(bits, block), scales=scales)


def _spread(scale: torch.Tensor, block: tuple[int, int], shape: tuple[int, ...]) -> torch.Tensor:
    """The scale of every value, or something that broadcasts to it."""
    scale = scale.float()
    if scale.numel() == 1:
        return scale.view(())
    if scale.dim() == 1:
        scale = scale[:, None]
    for axis, size in enumerate(shape):
        if scale.shape[axis] not in (1, size):
            scale = scale.repeat_interleave(block[axis], axis).narrow(axis, 0, size)
    return scale
