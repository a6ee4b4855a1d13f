"""The n-gram drafter: what followed the last few tokens earlier will follow them again; no model, no memory."""

import heapq
import math

import numpy as np

from specexec.budget import Budget
from specexec.tree import ROOT, TokenTree


class NGramDrafter:
    """Looks up the longest suffix of the context (up to `max_ngram` tokens) that occurred before, and grows a tree of
    its continuations by how often each was taken, recent ones first where counts are equal."""

    def __init__(self, *, max_ngram: int = 3, max_matches: int = 32, max_length: int = 32) -> None:
        self._max_ngram, self._max_matches, self._max_length = max_ngram, max_matches, max_length

    def propose(self, context: np.ndarray, budget: Budget) -> TokenTree:
        """Guess what follows `context`; see Drafter."""
        length = min(self._max_length, budget.max_depth)
        continuations = [context[end : end + length].tolist() for end in self._matches(context)]
        return _grow(continuations, budget.num_nodes)

    def _matches(self, context: np.ndarray) -> list[int]:
        """Positions behind earlier occurrences of the longest suffix that has any, the latest first."""
        for size in range(min(self._max_ngram, len(context) - 1), 0, -1):
            windows = np.lib.stride_tricks.sliding_window_view(context[:-1], size)
            ends = np.flatnonzero((windows == context[-size:]).all(axis=1)) + size
            if len(ends):
                return ends[::-1][: self._max_matches].tolist()
        return []


def _grow(continuations: list[list[int]], num_nodes: int) -> TokenTree:
    """The most probable nodes of the trie of `continuations`, where a branch's probability is its share of them."""
    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    heap: list[tuple[float, int, int, int, list[list[int]]]] = []  # -score, order of insertion, parent, token, rest

    def push_children(cost: float, node: int, followers: list[list[int]]) -> None:
        branches: dict[int, list[list[int]]] = {}
        for continuation in followers:
            if continuation:
                branches.setdefault(continuation[0], []).append(continuation[1:])
        for token, rest in branches.items():
            share = len(rest) / len(followers)
            heapq.heappush(heap, (cost - math.log(share), len(tokens) + len(heap), node, token, rest))

    push_children(0.0, ROOT, continuations)
    while heap and len(tokens) < num_nodes:
        cost, _, parent, token, rest = heapq.heappop(heap)
        tokens.append(token)
        parents.append(parent)
        scores.append(-cost)
        push_children(cost, len(tokens) - 1, rest)
    return TokenTree(np.array(tokens, np.int64), np.array(parents, np.int64), np.array(scores, np.float32))
