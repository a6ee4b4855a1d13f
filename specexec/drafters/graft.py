"""Two drafters in one tree: repetition fills the part of the budget where it is the better guess."""

import numpy as np
from torch import nn

from specexec.budget import Budget
from specexec.drafters import Drafter
from specexec.tree import ROOT, TokenTree


class GraftDrafter:
    """The best nodes of two drafters' trees, whose scores must both be calibrated log-probabilities of acceptance.

    A node that both propose counts once, with the better score.
    """

    def __init__(self, first: Drafter, second: Drafter) -> None:
        self._drafters = first, second

    @property
    def layers(self) -> tuple[nn.Module, ...]:
        """Those of both; see Drafter."""
        return tuple(layer for drafter in self._drafters for layer in drafter.layers)

    def propose(self, context: np.ndarray, budget: Budget) -> TokenTree:
        """Guess what follows `context`; see Drafter."""
        first, second = (drafter.propose(context, budget) for drafter in self._drafters)
        return best_of(first, second, budget.num_nodes)


def best_of(first: TokenTree, second: TokenTree, num_nodes: int) -> TokenTree:
    """The `num_nodes` best-scored nodes of the union of two trees, best first."""
    tokens, parents, scores = first.tokens.tolist(), first.parents.tolist(), first.scores.tolist()
    numbers = {place: node for node, place in enumerate(zip(parents, tokens, strict=True))}
    there = {ROOT: ROOT}  # nodes of the second tree in the union
    for node, (token, parent, score) in enumerate(
        zip(second.tokens.tolist(), second.parents.tolist(), second.scores.tolist(), strict=True)
    ):
        place = there[parent], token
        if place not in numbers:
            numbers[place] = len(tokens)
            tokens.append(token)
            parents.append(place[0])
            scores.append(score)
        there[node] = numbers[place]
        scores[there[node]] = max(scores[there[node]], score)
    # Parents stand before their children and score at least as much, so a stable sort keeps the best a tree.
    best = np.argsort(-np.array(scores, np.float32), kind="stable")[:num_nodes]
    index = np.full(len(tokens) + 1, ROOT)
    index[best] = np.arange(len(best))
    return TokenTree(
        np.array(tokens, np.int64)[best],
        index[np.array(parents, np.int64)[best]],
        np.array(scores, np.float32)[best],
    )
