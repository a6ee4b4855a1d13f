"""A model's tree with repetition grafted on, where it is the better guess."""

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice

import numpy as np
from torch import nn

from specexec.budget import Budget
from specexec.drafters import Drafter
from specexec.drafters.suffix import SuffixDrafter
from specexec.lm import as_ids
from specexec.tree import ROOT, TokenTree

_MOST_STOCKS = 16  # nodes that repetition is looked for behind, the most probable ones
_MOST_NODES = 64  # that repetition adds behind one of them
_ENOUGH = math.log(0.5)  # of a node's probability: where repetition has led there with as much, it goes on already
_PRIOR, _PRIOR_COUNT = 0.3, 4.0
_MEMORY = 0.97

Path = tuple[int, ...]  # tokens from the root to a node


class GraftDrafter:
    """The best nodes of two trees, whose scores must both be calibrated log-probabilities of acceptance.

    Repetition goes on behind the context and behind the model's most probable nodes: where a passage begins that has
    been seen before, the model guesses its first words and repetition the rest. A node that both propose counts once,
    with the better score. Where the model has guesses and repetition has another, how often repetition has been right
    in such cases counts: seldom against a good model, mostly against a weak one in a text that repeats itself.
    """

    def __init__(self, model: Drafter, suffix: SuffixDrafter) -> None:
        self._model, self._suffix = model, suffix
        self._disputes = _Disputes()

    @property
    def layers(self) -> tuple[nn.Module, ...]:
        """The model's; see Drafter."""
        return tuple(self._model.layers)

    def propose(self, context: np.ndarray, budget: Budget) -> TokenTree:
        """Guess what follows `context`; see Drafter."""
        stocks = paths_of(self._model.propose(context, budget))
        self._disputes.begin(context, stocks)
        grafted: dict[Path, float] = {}
        self._graft(grafted, (), 0.0, self._suffix.propose(context, budget))
        for path, score in islice(stocks.items(), _MOST_STOCKS):
            most, depth = min(budget.num_nodes, _MOST_NODES), budget.max_depth - len(path)
            if depth <= 0 or grafted.get(path, -math.inf) >= score + _ENOUGH:
                continue
            room = replace(budget, num_nodes=most, max_depth=depth)
            self._graft(grafted, path, score, self._suffix.beyond(as_ids(path), room))
        for path, score in stocks.items():
            _keep_better(grafted, path, score)
        return best_of(grafted, budget.num_nodes)

    def _graft(self, grafted: dict[Path, float], stock: Path, score: float, scion: TokenTree) -> None:
        """Adds the paths of `scion`, which grows behind `stock`."""
        settled = {(): score}
        told = paths_of(scion)
        for rest, likely in told.items():
            before = rest[:-1]
            step = likely - told.get(before, 0.0)
            settled[rest] = settled[before] + self._disputes.settle((*stock, *rest), step)
            _keep_better(grafted, (*stock, *rest), settled[rest])


class _Disputes:
    """How probable a guess of repetition is behind a node where the model has guesses of its own, but not this one."""

    def __init__(self) -> None:
        self._followed, self._tried = _PRIOR * _PRIOR_COUNT, _PRIOR_COUNT
        self._context = np.empty(0, np.int64)
        self._stocks: Mapping[Path, float] = {}
        self._judged: set[Path] = set()  # where the model has guesses
        self._open: dict[Path, int] = {}  # by node: the most probable of repetition's guesses that the model lacks

    def begin(self, context: np.ndarray, stocks: Mapping[Path, float]) -> None:
        """Learns from `context` how the last disputes have ended; `stocks` are the model's guesses for the next."""
        known = len(self._context)
        if len(context) > known and np.array_equal(context[:known], self._context):
            deepest = max(map(len, self._open), default=-1)
            tokens = tuple(context[known:][: deepest + 1].tolist())
            for i, token in enumerate(tokens):
                if (guess := self._open.get(tokens[:i])) is not None:
                    self._followed = self._followed * _MEMORY + (guess == token)
                    self._tried = self._tried * _MEMORY + 1
        self._context, self._stocks, self._open = context, stocks, {}
        self._judged = {path[:-1] for path in stocks}

    def settle(self, path: Path, step: float) -> float:
        """The log-probability of a path's last token given the others, `step` by repetition's own account."""
        before = path[:-1]
        if before not in self._judged or path in self._stocks:
            return step
        self._open.setdefault(before, path[-1])
        return min(step, math.log(self._followed / self._tried))


def paths_of(tree: TokenTree) -> dict[Path, float]:
    """The path and the score of every node, in order; of two children with one token the first."""
    paths: list[Path] = []
    scores: dict[Path, float] = {}
    for token, parent, score in zip(tree.tokens.tolist(), tree.parents.tolist(), tree.scores.tolist(), strict=True):
        paths.append((*(paths[parent] if parent != ROOT else ()), token))
        scores.setdefault(paths[-1], score)
    return scores


def best_of(scores: Mapping[Path, float], num_nodes: int) -> TokenTree:
    """The `num_nodes` best-scored paths as a tree, best first; a path's beginnings must score at least as much."""
    best = sorted(scores, key=lambda path: (-scores[path], len(path)))[:num_nodes]
    numbers = {(): ROOT} | {path: node for node, path in enumerate(best)}
    return TokenTree(
        as_ids([path[-1] for path in best]),
        as_ids([numbers[path[:-1]] for path in best]),
        np.array([scores[path] for path in best], np.float32),
    )


def _keep_better(scores: dict[Path, float], path: Path, score: float) -> None:
    scores[path] = max(score, scores.get(path, -math.inf))
