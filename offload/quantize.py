"""NF4 (QLoRA, Dettmers et al. 2023) applied to weights and undone: the self-draft, held dequantized."""

import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit

_CHUNK_VALUES = 1 << 20  # quantizing takes some 20 bytes a value on the side


def nf4_roundtrip(weight: torch.Tensor, blocksize: int = 64) -> torch.Tensor:
    """`weight` rounded to NF4 with one absmax per `blocksize` values in memory order; shape and dtype stay."""
    rounded = torch.empty_like(weight, memory_format=torch.contiguous_format)
    chunks = zip(weight.reshape(-1).split(_CHUNK_VALUES), rounded.view(-1).split(_CHUNK_VALUES), strict=True)
    for source, target in chunks:
        # One row: where the width of rows is no multiple of the blocksize, the CPU kernel takes the wrong absmax.
        packed, state = quantize_4bit(source.view(1, -1), blocksize=blocksize, quant_type="nf4")
        target.copy_(dequantize_4bit(packed, state).view(-1))
    return rounded


def nf4_matrices(name: str, parameter: torch.Tensor) -> torch.Tensor:
    """A transform for `load_model`: matrices and fused experts through NF4, norms and biases as they are."""
    return nf4_roundtrip(parameter) if parameter.dim() >= 2 and not name.endswith("bias") else parameter
