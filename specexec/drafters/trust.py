"""How far repetition may be trusted: the probability that what has agreed for some tokens agrees for one more."""

import numpy as np

from specexec.tree import ROOT, TokenTree

_LENGTHS = np.array([1, 2, 3, 4, 6, 9, 14, 22])  # matches are told apart by which of these they reach
_PRIOR = np.array([0.15, 0.3, 0.5, 0.65, 0.8, 0.88, 0.92, 0.95])
_PRIOR_COUNT = 6.0
_MEMORY = 0.99
_MOST = 0.99
_DEEPEST = 512


class Trust:
    """Learns from each proposal's outcome, which the next context shows, so that scores are probabilities."""

    def __init__(self) -> None:
        self._counts = np.stack([_PRIOR, np.ones(len(_LENGTHS))]) * _PRIOR_COUNT  # [followed, all]
        self._context = np.empty(0, np.int64)
        self._proposed: tuple[TokenTree, int] | None = None

    def behind(self, length: int) -> np.ndarray:
        """By depth - 1: the probability that a continuation of a match of `length` tokens goes on for one more."""
        followed, tried = self._counts
        return np.minimum(followed / tried, _MOST)[_bins(np.arange(length, length + _DEEPEST))]

    def goes_on(self, context: np.ndarray) -> bool:
        """Whether `context` continues the one before; if so, learns what has become of the proposal for that."""
        known = len(self._context)
        if len(context) <= known or not np.array_equal(context[:known], self._context):
            return False
        if self._proposed is not None:
            self._learn(context[known:], *self._proposed)
        return True

    def remember(self, context: np.ndarray, tree: TokenTree, length: int) -> None:
        """`tree` continues a match of `length` tokens at the end of `context`."""
        self._context, self._proposed = context, (tree, length)

    def _learn(self, tokens: np.ndarray, tree: TokenTree, length: int) -> None:
        node: int | None = ROOT
        for token in tokens.tolist():
            if node is None or not (tree.parents == node).any():
                return
            node = tree.child(node, token)
            bin_ = _bins(np.array([length]))[0]
            self._counts[:, bin_] = self._counts[:, bin_] * _MEMORY + (node is not None, 1.0)
            length += 1


def _bins(lengths: np.ndarray) -> np.ndarray:
    return np.searchsorted(_LENGTHS, lengths, side="right") - 1
