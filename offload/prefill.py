"""Long prompts cross a layer's MLP in chunks of rows: weights cross the link once, activations stay small.

Attention needs no chunks: its fused kernels hold no matrix of scores. An MLP's intermediate activations are what a long
prompt would otherwise take: 8,192 rows of a 70B model are 1.4 GB in 16 bits, several times over.
"""

from collections.abc import Callable, Iterable

import torch

CPU_ROWS, GPU_ROWS = 257, 1025  # a root and so many nodes


def chunk_rows(device: torch.device) -> int:
    """The most rows that an MLP works on at a time: packed matrices are decoded anew for each chunk of them.

    A GPU, whose products take less time than that, has them fewer and larger.
    """
    return CPU_ROWS if device.type == "cpu" else GPU_ROWS


def chunk_mlps(layers: Iterable[torch.nn.Module], most_rows: int) -> None:
    """Makes every MLP (dense or of experts) of `layers` work on at most `most_rows` rows at a time."""
    for layer in layers:
        if isinstance(mlp := getattr(layer, "mlp", None), torch.nn.Module):
            mlp.forward = _RowChunks(mlp.forward, most_rows)


class _RowChunks:
    """A row-wise forward, applied to slices of its input [1, rows, hidden] and concatenated again."""

    def __init__(self, forward: Callable[[torch.Tensor], object], most_rows: int) -> None:
        self._forward, self._most_rows = forward, most_rows

    def __call__(self, hidden: torch.Tensor) -> object:
        if hidden.shape[1] <= self._most_rows:
            return self._forward(hidden)
        count = -(-hidden.shape[1] // self._most_rows)
        parts = [self._forward(chunk) for chunk in hidden.tensor_split(count, dim=1)]  # of nearly the same size
        if isinstance(parts[0], torch.Tensor):
            return torch.cat(parts, dim=1)
        # Some experts also give their router's scores, which have no batch dimension.
        return tuple(torch.cat(each, dim=each[0].dim() - 2) for each in zip(*parts, strict=True))
