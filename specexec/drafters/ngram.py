"""The n-gram drafter: what followed the last few tokens earlier will follow them again; no model, no memory."""

import heapq
import math
from collections.abc import Sequence

import numpy as np
from torch import nn

from specexec.budget import Budget
from specexec.drafters.trust import Trust
from specexec.tree import ROOT, TokenTree


class NGramDrafter:
    """Looks up the longest suffix of the context (up to `max_ngram` tokens) that occurred before, and grows a tree of
    its continuations by how often each was taken, recent ones first where counts are equal. A node's score is the
    probability that it is accepted, as far as earlier proposals have shown."""

    layers: tuple[nn.Module, ...] = ()

    def __init__(self, *, max_ngram: int = 3, max_matches: int = 32, max_length: int = 32) -> None:
        self._max_ngram, self._max_matches, self._max_length = max_ngram, max_matches, max_length
        self._trust = Trust()

    def propose(self, context: np.ndarray, budget: Budget) -> TokenTree:
        """Guess what follows `context`; see Drafter."""
        self._trust.goes_on(context)
        length = min(self._max_length, budget.max_depth)
        ends, size = self._matches(context)
        tree = grow(
            [context[end : end + length] for end in ends], budget.num_nodes, trust=self._trust.behind(max(size, 1))
        )
        self._trust.remember(context, tree, size)
        return tree

    def _matches(self, context: np.ndarray) -> tuple[list[int], int]:
        """Positions behind earlier occurrences of the longest suffix that has any, the latest first; and its size."""
        for size in range(min(self._max_ngram, len(context) - 1), 0, -1):
            windows = np.lib.stride_tricks.sliding_window_view(context[:-1], size)
            ends = np.flatnonzero((windows == context[-size:]).all(axis=1)) + size
            if len(ends):
                return ends[::-1][: self._max_matches].tolist(), size
        return [], 0


def grow(continuations: Sequence[np.ndarray], num_nodes: int, *, trust: np.ndarray) -> TokenTree:
    """The most probable nodes of the trie of `continuations`, best first; one with no token left counts no more.

    A branch's probability is its share of the continuations that reach its parent, times the parent's own, times
    `trust[depth - 1]`: the probability that any of the guesses at a depth is right if its parent was.
    """
    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    heap: list[tuple[float, int, int, int, int, list[int]]] = []  # -score, age, depth, parent, token, who goes there
    num_pushed = 0

    def push_children(cost: float, depth: int, node: int, followers: list[int]) -> None:
        nonlocal num_pushed
        branches: dict[int, list[int]] = {}
        for follower in followers:
            if len(continuations[follower]) > depth:
                branches.setdefault(int(continuations[follower][depth]), []).append(follower)
        certainty = float(trust[min(depth, len(trust) - 1)])
        for token, there in branches.items():
            share = certainty * len(there) / len(followers)
            heapq.heappush(heap, (cost - math.log(share), num_pushed, depth + 1, node, token, there))
            num_pushed += 1

    push_children(0.0, 0, ROOT, list(range(len(continuations))))
    while heap and len(tokens) < num_nodes:
        cost, _, depth, parent, token, there = heapq.heappop(heap)
        if token < 0:  # the end of a text
            continue
        tokens.append(token)
        parents.append(parent)
        scores.append(-cost)
        push_children(cost, depth, len(tokens) - 1, there)
    return TokenTree(np.array(tokens, np.int64), np.array(parents, np.int64), np.array(scores, np.float32))
