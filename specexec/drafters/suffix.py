"""The suffix drafter: what followed this passage before, in this text or an earlier one, will follow it again."""

from collections.abc import Iterable

import numpy as np
from torch import nn

from specexec.budget import Budget
from specexec.drafters.ngram import grow
from specexec.drafters.trust import Trust
from specexec.tree import TokenTree, empty_tree

_MOST_MATCHES = 64
_NOTHING = -1  # a token that stands between texts and matches none


class SuffixDrafter:
    """Finds where the last tokens of the context occurred before and follows the most probable continuation counts.

    It is SuffixDecoding (arXiv 2411.04975) over plain arrays: the match may lie in the context or in one of the last
    texts, is as long as possible up to `max_match`, and of its shorter suffixes that one is taken whose tree should
    bring most. How far a match of some length may be trusted is learned as it goes: a node's score is the probability
    that it is accepted. A context that does not go on from the one before starts a new text; the old one is remembered,
    up to `memory` tokens in all.
    """

    layers: tuple[nn.Module, ...] = ()

    def __init__(self, texts: Iterable[np.ndarray] = (), *, max_match: int = 32, memory: int = 200_000) -> None:
        self._max_match, self._memory = max_match, memory
        self._past = np.full(max_match, _NOTHING)
        for text in texts:
            self._remember(text)
        self._text = np.empty(0, np.int64)
        self._known = self._past  # all that is searched: earlier texts and the present one
        self._trust = Trust()

    @property
    def texts(self) -> list[np.ndarray]:
        """What is remembered, the oldest first, the present text included."""
        ends = np.flatnonzero(self._past == _NOTHING)
        return [text for text in (*(part[part >= 0] for part in np.split(self._past, ends)), self._text) if len(text)]

    def propose(self, context: np.ndarray, budget: Budget) -> TokenTree:
        """Guess what follows `context`; see Drafter."""
        if not self._trust.goes_on(context):
            self._remember(self._text)
        self._text, self._known = context, np.concatenate([self._past, context])
        tree, length = self._best_tree(context, budget)
        self._trust.remember(context, tree, length)
        return tree

    def beyond(self, path: np.ndarray, budget: Budget) -> TokenTree:
        """Guess what follows `path`, tokens (int64 [length]) that may come behind the context last proposed for."""
        return self._best_tree(np.concatenate([self._text[-self._max_match :], path]), budget)[0]

    def _best_tree(self, recent: np.ndarray, budget: Budget) -> tuple[TokenTree, int]:
        """What should follow the tokens `recent`, and how many of them the match has."""
        ends, lengths = self._matches(recent[-self._max_match :])
        best, best_length, best_value = empty_tree(), 0, 0.0
        depth = min(budget.max_depth, budget.num_nodes)
        for length in np.unique(lengths)[::-1]:
            # Of equally long matches the latest count; shorter ones contain the longer.
            chosen = ends[lengths >= length][::-1][:_MOST_MATCHES]
            trust = self._trust.behind(int(length))
            tree = grow([self._known[end : end + depth] for end in chosen], budget.num_nodes, trust=trust)
            value = float(np.exp(tree.scores).sum())
            if value > best_value:
                best, best_length, best_value = tree, int(length), value
        return best, best_length

    def _matches(self, recent: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Positions behind occurrences of the last of `recent`, and how many tokens agree there."""
        ends = np.flatnonzero(self._known[:-1] == recent[-1]) + 1
        lengths = np.ones(len(ends), np.int64)
        alive = np.arange(len(ends))
        for back in range(2, len(recent) + 1):
            alive = alive[ends[alive] >= back]
            alive = alive[self._known[ends[alive] - back] == recent[-back]]
            if not len(alive):
                break
            lengths[alive] = back
        return ends, lengths

    def _remember(self, text: np.ndarray) -> None:
        self._past = np.concatenate([self._past, text, [_NOTHING]])[-self._memory :].astype(np.int64)
