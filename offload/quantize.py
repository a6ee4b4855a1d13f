"""Weights to few bits and back: NF4 (QLoRA, Dettmers et al. 2023) and int8 by rows (LLM.int8, Dettmers et al. 2022)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from bitsandbytes.functional import (
    QuantState,
    dequantize_4bit,
    dequantize_blockwise,
    get_4bit_type,
    quantize_4bit,
    quantize_blockwise,
)

_CHUNK_VALUES = 1 << 20  # quantizing takes some 20 bytes a value on the side
_SCALES_PER_BLOCK = 256

StoredPart = tuple[torch.dtype, tuple[int, ...]]


@dataclass(frozen=True)
class Nf4:
    """Four bits a value and one absmax per `blocksize` values in memory order, itself in 8 bits with `double_quant`.

    Decoding whole matrices and multiplying by them beats bitsandbytes' own 4-bit product on the CPU by 3 to 20 times
    for 1 to 256 rows, and nothing is repacked in place there, which would break slots that layers share.
    """

    blocksize: int = 64
    double_quant: bool = True

    def layout(self, shape: tuple[int, ...]) -> dict[str, StoredPart]:
        """What a weight of `shape` (even width) is stored as: type and shape by ending of its name."""
        num_blocks = -(-torch.Size(shape).numel() // self.blocksize)
        packed = {"": (torch.uint8, (*shape[:-1], shape[-1] // 2))}
        if not self.double_quant:
            return {**packed, ".absmax": (torch.float32, (num_blocks,))}
        return {
            **packed,
            ".absmax": (torch.uint8, (num_blocks,)),
            ".absmax_scale": (torch.float32, (-(-num_blocks // _SCALES_PER_BLOCK),)),
            ".absmax_mean": (torch.float32, (1,)),
        }

    def encode(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """`weight` as `layout` says."""
        packed, absmax = [], []
        for chunk in weight.reshape(-1).split(_CHUNK_VALUES):
            values, state = quantize_4bit(_one_row(chunk), blocksize=self.blocksize, quant_type="nf4")
            packed.append(values.view(-1))
            absmax.append(state.absmax)
        payload = torch.cat(packed).view(*weight.shape[:-1], weight.shape[-1] // 2)
        scale = torch.cat(absmax)
        if not self.double_quant:
            return {"": payload, ".absmax": scale}
        mean = scale.mean()
        few_bits, state = quantize_blockwise(scale - mean, blocksize=_SCALES_PER_BLOCK)
        return {"": payload, ".absmax": few_bits, ".absmax_scale": state.absmax, ".absmax_mean": mean.view(1)}

    def decode(self, payload: torch.Tensor, scales: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """The weight that `encode` has rounded."""
        absmax = scales[0]
        if self.double_quant:
            absmax = dequantize_blockwise(absmax, absmax=scales[1], blocksize=_SCALES_PER_BLOCK) + scales[2]
        if payload.device.type not in ("cpu", "cuda"):
            out.copy_(plain_nf4(payload, absmax, out.shape, dtype=out.dtype, blocksize=self.blocksize))
            return
        values, packed = out.view(-1), payload.view(-1)
        step = len(values) if out.device.type == "cuda" else _CHUNK_VALUES // self.blocksize * self.blocksize
        for i in range(0, len(values), step):  # on the CPU its results are new memory, which is slow unless small
            row = _one_row(values[i : i + step])
            scale = absmax[i // self.blocksize : -(-(i + row.numel()) // self.blocksize)]
            state = QuantState(scale, shape=row.shape, blocksize=self.blocksize, quant_type="nf4", dtype=out.dtype)
            few_bits = packed[i // 2 : (i + row.numel()) // 2].view(-1, 1)
            if out.device.type == "cuda":
                dequantize_4bit(few_bits, state, out=row)
            else:
                row.copy_(dequantize_4bit(few_bits, state))


@dataclass(frozen=True)
class Int8:
    """Eight bits a value and one scale per row, with so few digits that no compute dtype rounds it again."""

    def layout(self, shape: tuple[int, ...]) -> dict[str, StoredPart]:
        """What a weight of `shape` is stored as: type and shape by ending of its name."""
        return {"": (torch.int8, shape), ".scale": (torch.float32, shape[:-1])}

    def encode(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """`weight` as `layout` says."""
        rows = weight.reshape(-1, weight.shape[-1])
        payload = torch.empty(rows.shape, dtype=torch.int8)
        scales = torch.empty(len(rows))
        step = max(1, _CHUNK_VALUES // rows.shape[1])
        for i in range(0, len(rows), step):
            chunk = rows[i : i + step].float()
            exact = chunk.abs().amax(1) / 127
            scale = exact.bfloat16().float()
            scale = torch.where(scale < exact, (scale * (1 + 2**-7)).bfloat16().float(), scale)  # no value overflows
            scale[scale == 0] = 1
            payload[i : i + step] = (chunk / scale[:, None]).round_()
            scales[i : i + step] = scale
        return {"": payload.view(weight.shape), ".scale": scales.view(weight.shape[:-1])}

    def decode(self, payload: torch.Tensor, scales: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """The weight that `encode` has rounded."""
        out.copy_(payload.view(out.shape)).mul_(scales[0].to(out.dtype)[..., None])


def plain_nf4(
    payload: torch.Tensor, absmax: torch.Tensor, shape: tuple[int, ...], *, dtype: torch.dtype, blocksize: int = 64
) -> torch.Tensor:
    """NF4 decoded by torch alone: for devices that bitsandbytes has no kernel for, and to check those it has."""
    levels = get_4bit_type("nf4", device=payload.device)
    high, low = payload.reshape(-1) >> 4, payload.reshape(-1) & 15
    values = levels[torch.stack([high, low], dim=1).view(-1).int()]
    scale = absmax.repeat_interleave(blocksize)[: values.numel()]
    return (values * scale).to(dtype).view(shape)


def nf4_roundtrip(weight: torch.Tensor, blocksize: int = 64) -> torch.Tensor:
    """`weight` rounded to NF4 with one absmax per `blocksize` values in memory order; shape and dtype stay."""
    rounded = torch.empty_like(weight, memory_format=torch.contiguous_format)
    chunks = zip(weight.reshape(-1).split(_CHUNK_VALUES), rounded.view(-1).split(_CHUNK_VALUES), strict=True)
    for source, target in chunks:
        packed, state = quantize_4bit(_one_row(source), blocksize=blocksize, quant_type="nf4")
        target.copy_(dequantize_4bit(packed, state).view(-1))
    return rounded


def nf4_matrices(name: str, parameter: torch.Tensor) -> torch.Tensor:
    """A transform for `load_model`: matrices and fused experts through NF4, norms and biases as they are."""
    return nf4_roundtrip(parameter) if parameter.dim() >= 2 and not name.endswith("bias") else parameter


def _one_row(values: torch.Tensor) -> torch.Tensor:
    """Where the width of rows is no multiple of the blocksize, bitsandbytes' CPU kernel takes the wrong absmax."""
    return values.view(1, -1)
