"""What chosen layers of a target put out, kept for every row of its KV cache as learned drafts read it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from specexec.device import compute_device

EMBEDDING = -1  # the layer id of what goes into the first layer


class FeatureTap:
    """Rows of hidden states beside the KV rows: row i belongs to token i of the context. Made by CachedLM.tap.

    layers: ids of decoder layers whose outputs stand side by side in a row, in this order; EMBEDDING is what the first
        layer reads. final_norm: the hidden state that the head reads stands behind them.
    max_rows: as many as the KV cache has.
    commit: keeps the rows that a context shares with those computed and says how many that are.
    width: of a row. Raises ValueError for ids that the model does not have, or none at all.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layers: Sequence[int],
        max_rows: int,
        *,
        final_norm: bool,
        commit: Callable[[np.ndarray], int],
    ) -> None:
        self._decoder = model.get_decoder()
        count = len(self._decoder.layers)
        unknown = [layer for layer in layers if not EMBEDDING <= layer < count]
        if unknown:
            raise ValueError(f"the target has layers 0 to {count - 1} (and {EMBEDDING}, its embedding), not {unknown}")
        if not layers and not final_norm:
            raise ValueError("a tap needs at least one layer to listen to")
        self._layers, self._final_norm, self._commit = tuple(layers), final_norm, commit
        self._size = model.config.get_text_config().hidden_size
        self.width = self._size * (len(layers) + final_norm)
        device = compute_device(model)
        self._rows = torch.zeros(max_rows, self.width, dtype=model.dtype, device=device)

    def rows(self, context: np.ndarray) -> torch.Tensor | None:
        """Features [len(context) - 1, width] of all tokens before the root, or None if the target lacks any of them."""
        known = self._commit(context)
        return self._rows[:known] if known == len(context) - 1 and known else None

    @contextmanager
    def listening(self, start: int) -> Iterator[None]:
        """While it lasts, a pass of the model writes the rows from `start` on; hooks stay no longer than the pass."""
        handles = [self._listen(layer, start, column) for column, layer in enumerate(self._layers)]
        if self._final_norm:
            column = len(self._layers)
            handles.append(self._decoder.register_forward_hook(lambda *call: self._keep(call[-1], start, column)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def move(self, rows: torch.Tensor, start: int) -> None:
        """Copy `rows` (int64 [n]) to start..start+n-1, as RowLayer.move does with keys and values."""
        self._rows[start : start + len(rows)] = self._rows.index_select(0, rows)

    def _listen(self, layer: int, start: int, column: int) -> torch.utils.hooks.RemovableHandle:
        if layer != EMBEDDING:
            module: nn.Module = self._decoder.layers[layer]
            return module.register_forward_hook(lambda *call: self._keep(call[-1], start, column))

        def before(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            self._keep(args[0] if args else kwargs["hidden_states"], start, column)

        return self._decoder.layers[0].register_forward_pre_hook(before, with_kwargs=True)

    def _keep(self, output: Any, start: int, column: int) -> None:
        """Write the hidden states [1, n, size] that a module put out, alone or as the first of several."""
        states = (output if isinstance(output, torch.Tensor) else output[0])[0]
        self._rows[start : start + len(states), column * self._size : (column + 1) * self._size] = states
