"""One stored tensor: where its bytes lie, and how they become values."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch


class Encoding(Protocol):
    """How packed bytes become values; stateless, and the same on every device."""

    def decode(self, payload: torch.Tensor, scales: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Fills `out`, contiguous and on the device of `payload`, with values in its own shape and type."""


@dataclass(frozen=True)
class TensorEntry:
    """One stored tensor: `nbytes` at byte `offset` of `file`.

    With an `encoding`, `shape` is that of the values, `dtype` that of the packed bytes, and `scales` are what else is
    needed to decode them. `crc32` is checked when the bytes are first read, where it is known.
    """

    name: str
    file: Path
    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    encoding: Encoding | None = None
    scales: tuple["TensorEntry", ...] = ()
    crc32: int | None = None

    @property
    def parts(self) -> tuple["TensorEntry", ...]:
        """Everything that has to be read: the tensor itself, then its scales."""
        return (self, *self.scales)

    @property
    def num_values(self) -> int:
        """How many values it holds, however they are stored."""
        return math.prod(self.shape)
