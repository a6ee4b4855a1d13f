"""Blocks of GGUF files to values, by torch operations on the device where the blocks are."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from transformers.integrations.gguf.dequant import GGML_BLOCK, dequantize

_CHUNK_VALUES = 1 << 20  # decoding takes some 12 bytes a value on the side, which should stay in a cache
_PLAIN = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}


@dataclass(frozen=True)
class Ggml:
    """A tensor of one ggml type, and what llama.cpp's converter did to it besides.

    heads: the rows of each of so many heads are stored in pairs, as its rotary embedding takes them; 0 for none.
    offset: what was added to every value.
    """

    kind: GGMLQuantizationType
    heads: int = 0
    offset: float = 0.0

    def decode(self, payload: torch.Tensor, scales: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """The values, computed in fp32 and rounded once."""
        values = out.view(len(out), -1)
        rows = payload.reshape(len(out), -1)
        if self.heads:
            half = len(out) // self.heads // 2
            rows = rows.view(self.heads, half, 2, -1).transpose(1, 2).reshape(rows.shape)
        step = max(1, _CHUNK_VALUES // values.shape[1])
        for i in range(0, len(out), step):
            chunk = self._values(rows[i : i + step])
            values[i : i + step] = (chunk - self.offset if self.offset else chunk).view(-1, values.shape[1])

    def _values(self, rows: torch.Tensor) -> torch.Tensor:
        if self.kind in _PLAIN:
            return rows.view(_PLAIN[self.kind]).float()
        if self.kind not in _DECODERS:
            return dequantize(rows, int(self.kind))
        codes = _DECODERS[self.kind](rows.reshape(-1, GGML_QUANT_SIZES[self.kind][1]))
        values = codes.codes.reshape(*codes.scale.shape, -1).float()
        if codes.zero:
            values -= codes.zero
        values *= codes.scale[..., None]
        if codes.minimum is not None:
            values += codes.minimum[..., None]
        return values


def plain_dtype(kind: GGMLQuantizationType) -> torch.dtype | None:
    """The type of values that are stored as they are; None for blocks."""
    return _PLAIN.get(kind)


def is_supported(kind: GGMLQuantizationType) -> bool:
    """Whether `Ggml` can decode the type."""
    return kind in _PLAIN or kind in _DECODERS or kind in GGML_BLOCK


class _Codes(NamedTuple):
    """values = (codes - zero) * scale + minimum; a scale and a minimum for each group of a block, (blocks, groups)."""

    codes: torch.Tensor
    scale: torch.Tensor
    minimum: torch.Tensor | None = None
    zero: int = 0


def _fields(data: torch.Tensor, bits: int, run: int) -> torch.Tensor:
    """Fields of `bits` bits in (blocks, bytes): of each `run` of bytes first all the lowest, then all the next.

    (blocks, runs, 8 / bits, run), uint8. Whole words are shifted at once: several times faster on a CPU than bytes.
    """
    word, size = (torch.int64, 8) if run % 8 == 0 else (torch.int32, 4)
    words = data.contiguous().view(word).view(len(data), -1, run // size)
    mask = int.from_bytes(bytes([(1 << bits) - 1]) * size, "little")
    fields = torch.empty(*words.shape[:2], 8 // bits, run // size, dtype=word, device=data.device)
    for i in range(8 // bits):
        torch.bitwise_and(words >> (i * bits), mask, out=fields[:, :, i])
    return fields.view(torch.uint8)


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The fp16 number at byte `at` of each block, in fp32, (blocks, 1)."""
    return blocks[:, at : at + 2].view(torch.float16).float()


def _q8_0(blocks: torch.Tensor) -> _Codes:
    return _Codes(blocks[:, 2:].view(torch.int8), _half(blocks, 0))


def _q4_0(blocks: torch.Tensor) -> _Codes:
    return _Codes(_fields(blocks[:, 2:], 4, 16), _half(blocks, 0), zero=8)


def _q4_1(blocks: torch.Tensor) -> _Codes:
    return _Codes(_fields(blocks[:, 4:], 4, 16), _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: torch.Tensor) -> _Codes:
    return _Codes(_with_fifth_bit(blocks[:, 6:], blocks[:, 2:6]), _half(blocks, 0), zero=16)


def _q5_1(blocks: torch.Tensor) -> _Codes:
    return _Codes(_with_fifth_bit(blocks[:, 8:], blocks[:, 4:8]), _half(blocks, 0), _half(blocks, 2))


def _with_fifth_bit(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=low.device)
    fifth = (high[..., None] >> shifts & 1).view(-1, 32)
    return _fields(low, 4, 16).view(-1, 32) | fifth << 4


def _q2_k(blocks: torch.Tensor) -> _Codes:
    scale, minimum = _fields(blocks[:, :16], 4, 16)[:, 0].float().unbind(1)
    return _Codes(_fields(blocks[:, 16:80], 2, 32), _half(blocks, 80) * scale, -(_half(blocks, 82) * minimum))


def _q3_k(blocks: torch.Tensor) -> _Codes:
    low = _fields(blocks[:, 96:104], 4, 8).view(-1, 16)
    scale = (low | _fields(blocks[:, 104:108], 2, 4).view(-1, 16) << 4).float() - 32
    codes = _fields(blocks[:, 32:96], 2, 32).view(-1, 256) | _fields(blocks[:, :32], 1, 32).view(-1, 256) << 2
    return _Codes(codes, _half(blocks, 108) * scale, zero=4)


def _q4_k(blocks: torch.Tensor) -> _Codes:
    return _Codes(_fields(blocks[:, 16:], 4, 32), *_six_bit_scales(blocks))


def _q5_k(blocks: torch.Tensor) -> _Codes:
    high = _fields(blocks[:, 16:48], 1, 32).view(-1, 256)
    return _Codes(_fields(blocks[:, 48:], 4, 32).view(-1, 256) | high << 4, *_six_bit_scales(blocks))


def _six_bit_scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and minimum of 8 groups: 4 of each in low bits of 8 bytes, the others in 4 bytes and those high bits."""
    first, second, both = blocks[:, 4:16].split(4, dim=1)
    scale = torch.cat([first & 63, both & 15 | first >> 6 << 4], dim=1)
    minimum = torch.cat([second & 63, both >> 4 | second >> 6 << 4], dim=1)
    return _half(blocks, 0) * scale, -(_half(blocks, 2) * minimum)


def _q6_k(blocks: torch.Tensor) -> _Codes:
    codes = _fields(blocks[:, :128], 4, 64).view(-1, 256) | _fields(blocks[:, 128:192], 2, 32).view(-1, 256) << 4
    return _Codes(codes, _half(blocks, 208) * blocks[:, 192:208].view(torch.int8), zero=32)


_DECODERS: dict[GGMLQuantizationType, Callable[[torch.Tensor], _Codes]] = {
    GGMLQuantizationType.Q8_0: _q8_0,
    GGMLQuantizationType.Q4_0: _q4_0,
    GGMLQuantizationType.Q4_1: _q4_1,
    GGMLQuantizationType.Q5_0: _q5_0,
    GGMLQuantizationType.Q5_1: _q5_1,
    GGMLQuantizationType.Q2_K: _q2_k,
    GGMLQuantizationType.Q3_K: _q3_k,
    GGMLQuantizationType.Q4_K: _q4_k,
    GGMLQuantizationType.Q5_K: _q5_k,
    GGMLQuantizationType.Q6_K: _q6_k,
}
