"""Passes over nodes in a few fixed shapes, so that each can be recorded once and replayed; knows nothing of devices."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

Masks = torch.Tensor | dict[str, torch.Tensor]
# Given a shape (queries, rows) and a pass over fixed tensors, its logits: by running it, or by replaying an earlier run
# over the same tensors. They are only good until the next call. None: it cannot be done, and nothing has been.
Recorder = Callable[[tuple[int, int], Callable[[], torch.Tensor]], torch.Tensor | None]

_QUERIES = (8, 32, 128)
_LEAST_ROWS = 512


@dataclass(frozen=True)
class Frame:
    """The inputs of passes of one shape, overwritten for each: Q queries, the last ones padding, that see R rows.

    ids, positions: int64 [1, Q]. slots: int64 [Q], the rows of the cache that they are written to.
    masks: additive [1, 1, Q, R], one per attention pattern.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    masks: Masks

    @property
    def num_rows(self) -> int:
        """How many rows of the cache are seen."""
        return next(iter(_each(self.masks))).shape[-1]

    def fill(self, ids: np.ndarray, positions: np.ndarray, start: int, masks: Masks) -> None:
        """Overwrite all with a pass over `ids` (int64 [n]) whose first row is `start`; masks: [1, 1, n, start + n].

        What is padded is written behind what counts, where nothing is kept, and sees the first row only.
        """
        for mine, theirs in ((self.ids, ids), (self.positions, positions)):
            padded = np.zeros(mine.shape[1], np.int64)
            padded[: len(theirs)] = theirs
            mine.copy_(torch.from_numpy(padded)[None])
        self.slots.copy_(torch.arange(start, start + len(self.slots)))
        for mine, theirs in zip(_each(self.masks), _each(masks), strict=True):
            mine.fill_(torch.finfo(mine.dtype).min)
            mine[..., 0] = 0
            mine[..., : theirs.shape[-2], : theirs.shape[-1]] = theirs


def frame_shape(num_queries: int, start: int, max_rows: int) -> tuple[int, int] | None:
    """Queries and rows of the least frame for a pass whose first row is `start`; None if a cache has no room for it.

    A GPU takes no longer for 8 queries than for one, and hidden rows cost little beside the weights: a few shapes do.
    """
    queries = next((each for each in _QUERIES if each >= num_queries), None)
    if queries is None or start + queries > max_rows:
        return None
    rows = _LEAST_ROWS
    while rows < start + queries:
        rows *= 2
    return queries, min(rows, max_rows)


def make_frame(shape: tuple[int, int], masks: Masks) -> Frame:
    """A frame of (queries, rows) for passes with such `masks`, on their device."""
    first = next(iter(_each(masks)))
    if isinstance(masks, dict):
        empty: Masks = {kind: mask.new_empty(1, 1, *shape) for kind, mask in masks.items()}
    else:
        empty = masks.new_empty(1, 1, *shape)
    ids, positions = torch.zeros(2, 1, shape[0], dtype=torch.int64, device=first.device)
    return Frame(ids, positions, torch.zeros(shape[0], dtype=torch.int64, device=first.device), empty)


def _each(masks: Masks) -> list[torch.Tensor]:
    return list(masks.values()) if isinstance(masks, dict) else [masks]
