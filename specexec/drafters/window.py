"""A draft model that sees the tail of the text only: for texts longer than the positions it knows, or than its rows."""

import numpy as np
import torch

from specexec.lm import CachedLM


class WindowedLM:
    """A CachedLM that is shown at most the last `window` tokens of a context, as if the text began with them.

    The tail's first token moves on by a quarter of the window at a time: in between, rows stay at hand, and only when
    it moves is the tail computed anew.
    """

    def __init__(self, lm: CachedLM, window: int) -> None:
        self.model, self.layers, self.vocab_size = lm.model, lm.layers, lm.vocab_size
        self._lm, self._window = lm, window

    @property
    def num_free(self) -> int:
        return self._lm.num_free

    @property
    def num_computed(self) -> int:
        return self._lm.num_computed

    def prefill(self, context: np.ndarray) -> torch.Tensor:
        """Logits [1, V] of what follows `context`, given its tail."""
        block = max(self._window // 4, 1)
        start = -(-max(len(context) - self._window, 0) // block) * block
        return self._lm.prefill(context[start:])

    def extend(self, tokens: np.ndarray, parents: np.ndarray) -> torch.Tensor:
        """As CachedLM.extend."""
        return self._lm.extend(tokens, parents)
