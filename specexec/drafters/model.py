"""The SpecExec drafter: a resident model grows the tree of its most probable continuations, best first."""

import numpy as np
import torch

from specexec.budget import Budget
from specexec.lm import CachedLM
from specexec.tree import ROOT, TokenTree

SHARPEST = 0.5


class ModelDrafter:
    """Grows trees with a causal LM that shares the target's vocabulary.

    Each step runs the most probable unexpanded nodes of the best `num_nodes` so far through the model as one batch and
    adds their children to the pool (SpecExec, arXiv 2406.02532, algorithm 2). It ends when every node that could still
    gain a child inside the budget has been expanded: the tree is then the most probable one of its size.
    """

    def __init__(self, lm: CachedLM, *, max_batch: int = 32) -> None:
        self.lm = lm
        self.max_batch = max_batch

    def propose(self, context: np.ndarray, budget: Budget) -> TokenTree:
        """Guess what follows `context`; see Drafter."""
        pool = _Pool(budget)
        # Under greedy decoding only the target's argmax is accepted, and a draft's probability of that token being
        # the argmax is sharper than its probability of the token itself.
        temperature = max(budget.temperature, SHARPEST)
        room = self.lm.max_rows - len(context)
        pool.add_children(self.lm.prefill(context) / temperature, np.array([ROOT]))
        batch = max(self.max_batch, budget.num_nodes // 8)
        while len(nodes := pool.frontier(min(batch, room))):
            logits = self.lm.extend(pool.tokens[nodes], pool.rows_of_parents(nodes))
            pool.mark_expanded(nodes)
            pool.add_children(logits / temperature, nodes)
            room -= len(nodes)
        return pool.tree()


class _Pool:
    """All candidates seen so far, parents before children, as growing arrays."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self.tokens = np.empty(0, np.int64)
        self._parents = np.empty(0, np.int64)
        self._depths = np.empty(0, np.int64)
        self._scores = np.empty(0, np.float32)
        self._rows = np.empty(0, np.int64)  # a node's index among the draft's pending rows, or -1
        self._num_expanded = 0
        self._best = np.empty(0, np.int64)  # the best num_nodes candidates, best first
        self._threshold = -np.inf  # a candidate below it cannot enter the tree any more

    def add_children(self, logits: torch.Tensor, parents: np.ndarray) -> None:
        """Add those children of `parents` [n] that can enter the tree, given the draft's logits [n, V]."""
        base = np.append(self._scores, np.float32(0))[parents]
        depths = np.append(self._depths, 0)[parents] + 1
        rows, tokens, scores = _candidates(logits, base, self._threshold, self._budget.num_nodes)
        self.tokens = np.concatenate([self.tokens, tokens])
        self._parents = np.concatenate([self._parents, parents[rows]])
        self._depths = np.concatenate([self._depths, depths[rows]])
        self._scores = np.concatenate([self._scores, scores])
        self._rows = np.concatenate([self._rows, np.full(len(tokens), -1)])
        # A stable sort keeps parents before children of equal score, so that the best are always a tree.
        self._best = np.argsort(-self._scores, kind="stable")[: self._budget.num_nodes]
        if len(self._best) == self._budget.num_nodes:
            self._threshold = float(self._scores[self._best[-1]])

    def frontier(self, limit: int) -> np.ndarray:
        """The most probable nodes of the tree that have not been expanded and may have children, best first."""
        best = self._best
        return best[(self._rows[best] < 0) & (self._depths[best] < self._budget.max_depth)][: max(limit, 0)]

    def rows_of_parents(self, nodes: np.ndarray) -> np.ndarray:
        return np.append(self._rows, ROOT)[self._parents[nodes]]

    def mark_expanded(self, nodes: np.ndarray) -> None:
        self._rows[nodes] = np.arange(self._num_expanded, self._num_expanded + len(nodes))
        self._num_expanded += len(nodes)

    def tree(self) -> TokenTree:
        index = np.full(len(self.tokens) + 1, ROOT)
        index[self._best] = np.arange(len(self._best))
        return TokenTree(self.tokens[self._best], index[self._parents[self._best]], self._scores[self._best])


def _candidates(
    logits: torch.Tensor, base: np.ndarray, threshold: float, most: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows, tokens and cumulative scores of continuations above `threshold`, at most `most` per row."""
    logits = logits.float()
    offset = torch.from_numpy(base).to(logits.device) - logits.logsumexp(-1)
    if threshold == -np.inf:
        values, tokens = logits.topk(min(most, logits.shape[-1]), dim=-1)
        scores = (values + offset[:, None]).flatten()
        rows = torch.arange(len(logits), device=logits.device).repeat_interleave(tokens.shape[-1])
        tokens = tokens.flatten()
    else:
        rows, tokens = (logits > (threshold - offset)[:, None]).nonzero(as_tuple=True)
        scores = logits[rows, tokens] + offset[rows]
    return rows.cpu().numpy(), tokens.cpu().numpy(), scores.cpu().numpy()
