"""The suffix drafter: what followed this passage before, in this text or an earlier one, will follow it again."""

from collections.abc import Iterable

import numpy as np

from specexec.budget import Budget
from specexec.drafters.ngram import grow
from specexec.tree import ROOT, TokenTree, empty_tree

_LENGTHS = np.array([1, 2, 3, 4, 6, 9, 14, 22])  # matches are told apart by which of these they reach
_PRIOR_TRUST = np.array([0.15, 0.3, 0.5, 0.65, 0.8, 0.88, 0.92, 0.95])
_PRIOR_COUNT = 12.0
_MEMORY = 0.99
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

    def __init__(self, texts: Iterable[np.ndarray] = (), *, max_match: int = 32, memory: int = 200_000) -> None:
        self._max_match, self._memory = max_match, memory
        self._past = np.full(max_match, _NOTHING)
        for text in texts:
            self._remember(text)
        self._text = np.empty(0, np.int64)
        self._proposed: tuple[TokenTree, int] | None = None  # the tree and the length of its match
        self._counts = np.stack([_PRIOR_TRUST, np.ones(len(_LENGTHS))]) * _PRIOR_COUNT  # [followed, all]

    def propose(self, context: np.ndarray, budget: Budget) -> TokenTree:
        """Guess what follows `context`; see Drafter."""
        goes_on = len(context) > len(self._text) and np.array_equal(context[: len(self._text)], self._text)
        if goes_on and self._proposed is not None:
            self._learn(context[len(self._text) :], *self._proposed)
        if not goes_on:
            self._remember(self._text)
        self._text = context
        tree, length = self._best_tree(np.concatenate([self._past, context]), budget)
        self._proposed = tree, length
        return tree

    def _best_tree(self, text: np.ndarray, budget: Budget) -> tuple[TokenTree, int]:
        ends, lengths = self._matches(text)
        best, best_length, best_value = empty_tree(), 0, 0.0
        depth = min(budget.max_depth, budget.num_nodes)
        for length in np.unique(lengths)[::-1]:
            # Of equally long matches the latest count; shorter ones contain the longer.
            chosen = ends[lengths >= length][::-1][:_MOST_MATCHES]
            tree = grow([text[end : end + depth] for end in chosen], budget.num_nodes, trust=self._trust(int(length)))
            value = float(np.exp(tree.scores).sum())
            if value > best_value:
                best, best_length, best_value = tree, int(length), value
        return best, best_length

    def _matches(self, text: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Positions behind earlier occurrences of the last token, and how many tokens agree there."""
        ends = np.flatnonzero(text[:-1] == text[-1]) + 1
        lengths = np.ones(len(ends), np.int64)
        alive = np.arange(len(ends))
        for back in range(2, self._max_match + 1):
            alive = alive[(ends[alive] >= back) & (len(text) > back)]
            alive = alive[text[ends[alive] - back] == text[-back]]
            if not len(alive) or text[-back] == _NOTHING:
                break
            lengths[alive] = back
        return ends, lengths

    def _trust(self, length: int) -> np.ndarray:
        """By depth - 1: the probability that a continuation of a match of `length` tokens goes on for one more."""
        return self._rates()[_bins(np.arange(length, length + 512))]

    def _rates(self) -> np.ndarray:
        followed, tried = self._counts
        return np.minimum(followed / tried, 0.99)

    def _learn(self, tokens: np.ndarray, tree: TokenTree, length: int) -> None:
        """Count how far the guesses were followed."""
        node: int | None = ROOT
        for token in tokens.tolist():
            if node is None or not (tree.parents == node).any():
                return
            node = tree.child(node, token)
            bin_ = _bins(np.array([length]))[0]
            self._counts[:, bin_] = self._counts[:, bin_] * _MEMORY + (node is not None, 1.0)
            length += 1

    def _remember(self, text: np.ndarray) -> None:
        self._past = np.concatenate([self._past, text, [_NOTHING]])[-self._memory :].astype(np.int64)


def _bins(lengths: np.ndarray) -> np.ndarray:
    return np.searchsorted(_LENGTHS, lengths, side="right") - 1
