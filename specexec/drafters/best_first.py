"""The most probable tree over rows of children that are sorted already: a heap opens rows as it reaches them."""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from specexec.acceptance import NUM_CHILDREN, Acceptance
from specexec.budget import Budget
from specexec.drafters.coupling import Coupling
from specexec.tree import ROOT, TokenTree

Below = Callable[[int, int], int | None]  # the row of the children of a row's child of some rank, if there is one


@dataclass(frozen=True)
class Best:
    """A tree, best first, and where in the rows each of its nodes stands."""

    tree: TokenTree
    rows: list[int]
    ranks: list[int]


class Rows:
    """What may follow each node that has been looked behind: its NUM_CHILDREN best tokens and what they are worth.

    acceptances: one per slot of the block; a slot is what a row's children are guesses for, counted from the root's 0.
    to_target: int64 [Vd], the target's id of each id that logits are given for; None where they are the same.
    """

    def __init__(self, acceptances: Sequence[Acceptance], budget: Budget, to_target: np.ndarray | None) -> None:
        self._acceptances, self._temperature, self._to_target = acceptances, budget.temperature, to_target
        self._coupling = Coupling(budget, to_target)
        self.slots: list[int] = []
        self.tokens: list[np.ndarray] = []
        self.scores: list[list[float]] = []  # log-probabilities that the children are accepted if their parent is
        self._logits: list[np.ndarray] = []

    def add(self, logits: torch.Tensor, slots: np.ndarray) -> None:
        """Add a row for each of `logits` [n, Vd]; the root's comes first. slots: int64 [n]."""
        logits = self._coupling(logits, slots)
        values, ids = logits.topk(min(NUM_CHILDREN, logits.shape[-1]), dim=-1)
        values, ids = torch.stack([values.double(), ids.double()]).cpu().numpy()  # one transfer: ids are exact in both
        ids = ids.astype(np.int64)
        scores = np.empty(values.shape)
        for slot in np.unique(slots):
            same = slots == slot
            scores[same] = self._acceptances[slot].logprobs(values[same], self._temperature)
        self.slots += slots.tolist()
        self.tokens += list(ids if self._to_target is None else self._to_target[ids])
        self.scores += scores.tolist()
        self._logits += list(values)

    def best(self, num_nodes: int, below: Below) -> Best:
        """The `num_nodes` most probable nodes; those that rows below would add are missing where `below` knows none.

        A popped node makes way for its next sibling and its first child only, so that no more than two candidates a
        node are ever looked at (arXiv 2604.12989, after SpecExec's criterion).
        """
        tokens, parents, costs, rows, ranks = [], [], [], [], []
        heap = [(-self.scores[0][0], 0, 0, ROOT)]
        while heap and len(rows) < num_nodes:
            cost, row, rank, parent = heapq.heappop(heap)
            above = 0.0 if parent == ROOT else costs[parent]
            if rank + 1 < len(self.scores[row]):
                heapq.heappush(heap, (above - self.scores[row][rank + 1], row, rank + 1, parent))
            if (first := below(row, rank)) is not None:
                heapq.heappush(heap, (cost - self.scores[first][0], first, 0, len(rows)))
            tokens.append(int(self.tokens[row][rank]))
            parents.append(parent)
            costs.append(cost)
            rows.append(row)
            ranks.append(rank)
        tree = TokenTree(np.array(tokens, np.int64), np.array(parents, np.int64), -np.array(costs, np.float32))
        return Best(tree, rows, ranks)

    def teach(self, best: Best, below: Below, tokens: np.ndarray) -> None:
        """Show the acceptances where among the children of each node of `best` that was reached the text went on."""
        node, row = ROOT, 0
        for token in tokens.tolist():
            found = np.flatnonzero(self.tokens[row] == token)
            rank = int(found[0]) if len(found) else None
            self._acceptances[self.slots[row]].observe(self._logits[row], rank, self._temperature)
            child = best.tree.child(node, token)
            if child is None or (lower := below(best.rows[child], best.ranks[child])) is None:
                return
            node, row = child, lower


@dataclass(frozen=True)
class Proposal:
    """What was proposed after `context`, kept until the next context shows what has become of it."""

    context: np.ndarray
    rows: Rows
    best: Best
    below: Below

    def learn(self, context: np.ndarray) -> None:
        """Teach the acceptances, if `context` goes on from the proposal's."""
        known = len(self.context)
        if len(context) > known and np.array_equal(context[:known], self.context):
            self.rows.teach(self.best, self.below, context[known:])
