"""The SpecExec drafter: a resident model grows the tree of its most probable continuations, best first."""

import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from specexec.acceptance import NUM_CHILDREN, Acceptance, AsScored
from specexec.budget import Budget, CostCurve
from specexec.drafters import DraftLM
from specexec.drafters.coupling import Coupling
from specexec.tree import ROOT, TokenTree

_LEAST_GAIN = 0.01
_SAMPLES = 64
_RANKS = 8


class ModelDrafter:
    """Grows trees with a causal LM that shares the target's vocabulary.

    Each step runs the most probable unexpanded nodes of the best `num_nodes` so far through the model as one batch and
    adds their children to the pool (SpecExec, arXiv 2406.02532, algorithm 2). It ends when every node that could still
    gain a child inside the budget has been expanded: the tree is then the most probable one of its size. Where time
    matters (`budget.rate`), a step takes only the nodes that should bring more than their rows cost, and the tree is
    done when there are none.

    acceptance: what the draft's scores are worth; it learns from each proposal's outcome, which the next context shows.
        It says too whether these are scores with the target's own noise (`is_coupled`).
    """

    def __init__(self, lm: DraftLM, *, max_batch: int = 32, acceptance: Acceptance | AsScored | None = None) -> None:
        self.lm = lm
        self.max_batch = max_batch
        self.acceptance = acceptance or Acceptance()
        self._proposed: tuple[np.ndarray, _Pool] | None = None
        self._step_s = CostCurve()  # of a step, by its rows
        self._offspring = _Offspring()

    @property
    def layers(self) -> Sequence[nn.Module]:
        """The draft model's; see Drafter."""
        return self.lm.layers

    def propose(self, context: np.ndarray, budget: Budget) -> TokenTree:
        """Guess what follows `context`; see Drafter."""
        self._learn(context)
        pool = _Pool(budget, self.acceptance)
        pool.add_children(self.lm.prefill(context), np.array([ROOT]))
        room = self.lm.num_free
        batch = max(self.max_batch, budget.num_nodes // 8)
        is_first, seen = True, []
        while len(nodes := self._paying(pool, pool.frontier(min(batch, room)), is_first=is_first)):
            started = time.perf_counter()
            pool.add_children(self.lm.extend(pool.tokens[nodes], pool.rows_of_parents(nodes)), nodes)
            self._step_s.observe(len(nodes), time.perf_counter() - started)
            seen.append(pool.last_chances)
            room -= len(nodes)
            is_first = False
        for chances in seen:
            self._offspring.observe(chances)
        self._proposed = context, pool
        return pool.tree()

    def _paying(self, pool: "_Pool", nodes: np.ndarray, *, is_first: bool) -> np.ndarray:
        """The first of `nodes`, best first, that should bring more tokens than their time could bring otherwise.

        Where the rate is not known, a step has to bring a hundredth of the tokens expected so far: the last ones of a
        tree only exchange its least probable nodes. The first step is always taken: a time that was bad once would
        otherwise never be measured again.
        """
        if not len(nodes) or not self._offspring.is_known:
            return nodes
        gains = np.cumsum(self._offspring.gains(pool.probabilities(nodes), pool.price))
        if not pool.budget.rate:
            return nodes if is_first or gains[-1] > _LEAST_GAIN * (1 + pool.value) else nodes[:0]
        gains -= pool.budget.rate * self._step_s(np.arange(1, len(nodes) + 1))
        best = int(gains.argmax())
        return nodes[: best + 1] if gains[best] > 0 or is_first else nodes[:0]

    def _learn(self, context: np.ndarray) -> None:
        """Compare the last proposal with what has become of it."""
        if self._proposed is None:
            return
        earlier, pool = self._proposed
        self._proposed = None
        if len(context) > len(earlier) and np.array_equal(context[: len(earlier)], earlier):
            pool.teach(context[len(earlier) :], self.acceptance)


class _Offspring:
    """How probable the children of the nodes were that were expanded lately, given their parents."""

    def __init__(self) -> None:
        self._chances = np.empty((0, _RANKS))  # [up to _SAMPLES, _RANKS], of each node's most probable children

    @property
    def is_known(self) -> bool:
        return len(self._chances) > 0

    def observe(self, chances: np.ndarray) -> None:
        """Learn the probabilities [n, m] of the children of n nodes, the most probable first."""
        most = np.zeros((len(chances), _RANKS))
        most[:, : chances.shape[1]] = chances[:, :_RANKS]
        self._chances = np.concatenate([self._chances, most])[-_SAMPLES:]

    def gains(self, probabilities: np.ndarray, price: float) -> np.ndarray:
        """Tokens [n] that children of nodes with `probabilities` [n] should bring beyond what each of them costs."""
        children = probabilities[:, None, None] * self._chances
        return np.maximum(children - price, 0).sum(-1).mean(-1)


class _Pool:
    """All candidates seen so far, parents before children, as growing arrays."""

    def __init__(self, budget: Budget, acceptance: Acceptance | AsScored) -> None:
        self.budget = budget
        self.value = 0.0  # of the best tree so far, in tokens
        self.price = 0.0  # in tokens: what a node takes away that enters the best tree
        self.last_chances = np.empty((0, 0))  # of the children added last, given their parents
        self._acceptance = acceptance
        self._coupling = Coupling(budget) if acceptance.is_coupled else None
        self.tokens = np.empty(0, np.int64)
        self._parents = np.empty(0, np.int64)
        self._depths = np.empty(0, np.int64)
        self._scores = np.empty(0, np.float32)
        self._rows = np.empty(0, np.int64)  # a node's index among the draft's pending rows, or -1
        self._children: list[tuple[np.ndarray, np.ndarray]] = []  # by row, the root's first: logits, tokens
        self._best = np.empty(0, np.int64)  # the best num_nodes candidates, best first

    def add_children(self, logits: torch.Tensor, parents: np.ndarray) -> None:
        """Add those children of `parents` [n] that can enter the tree, given the draft's logits [n, V]."""
        above = np.append(self._depths, 0)[parents]
        if self._coupling is not None:
            logits = self._coupling(logits, above)
        values, ids = logits.topk(min(NUM_CHILDREN, logits.shape[-1]), dim=-1)
        values, ids = torch.stack([values.double(), ids.double()]).cpu().numpy()  # one transfer: ids are exact in both
        ids = ids.astype(np.int64)
        if parents[0] != ROOT:
            self._rows[parents] = np.arange(len(self._children) - 1, len(self._children) - 1 + len(parents))
        self._children += zip(values, ids, strict=True)
        scores = self._acceptance.logprobs(values, self.budget.temperature)
        self.last_chances = np.exp(scores)
        scores += np.append(self._scores, np.float32(0))[parents][:, None]
        entering = scores > self._threshold()
        rows = np.nonzero(entering)[0]
        self.tokens = np.concatenate([self.tokens, ids[entering]])
        self._parents = np.concatenate([self._parents, parents[rows]])
        self._depths = np.concatenate([self._depths, above[rows] + 1])
        self._scores = np.concatenate([self._scores, scores[entering]])
        self._rows = np.concatenate([self._rows, np.full(len(rows), -1)])
        # A stable sort keeps parents before children of equal score, so that the best are always a tree.
        self._best = np.argsort(-self._scores, kind="stable")[: self.budget.num_nodes]
        values = self.budget.values(self._scores[self._best])
        self.value = float(values.max())
        self.price = max(float(np.exp(self._threshold())), self.budget.price(int(values.argmax())))

    def frontier(self, limit: int) -> np.ndarray:
        """The most probable nodes of the tree that have not been expanded and may have children, best first."""
        best = self._best
        return best[(self._rows[best] < 0) & (self._depths[best] < self.budget.max_depth)][: max(limit, 0)]

    def probabilities(self, nodes: np.ndarray) -> np.ndarray:
        """How likely each of `nodes` is accepted."""
        return np.exp(self._scores[nodes], dtype=np.float64)

    def rows_of_parents(self, nodes: np.ndarray) -> np.ndarray:
        return np.append(self._rows, ROOT)[self._parents[nodes]]

    def teach(self, tokens: np.ndarray, acceptance: Acceptance | AsScored) -> None:
        """Show `acceptance` where among the children of each node that was reached the target's token was."""
        node, row = ROOT, 0
        for token in tokens.tolist():
            logits, ids = self._children[row]
            found = np.flatnonzero((ids == token) & np.isfinite(logits))  # a small vocabulary's ranks end in -inf
            acceptance.observe(logits, int(found[0]) if len(found) else None, self.budget.temperature)
            reached = np.flatnonzero((self._parents == node) & (self.tokens == token))
            if not len(reached) or self._rows[reached[0]] < 0:
                return
            node, row = int(reached[0]), int(self._rows[reached[0]]) + 1

    def tree(self) -> TokenTree:
        index = np.full(len(self.tokens) + 1, ROOT)
        index[self._best] = np.arange(len(self._best))
        return TokenTree(self.tokens[self._best], index[self._parents[self._best]], self._scores[self._best])

    def _threshold(self) -> float:
        """The score that a candidate must exceed to enter the tree."""
        full = len(self._best) == self.budget.num_nodes
        return float(self._scores[self._best[-1]]) if full else -np.inf
