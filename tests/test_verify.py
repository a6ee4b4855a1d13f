"""The walk is lossless: chi-square against the exact table on a toy target with fixed logits."""

import itertools

import numpy as np
import pytest
import torch

from specexec.sampling import Sampler, SamplingParams, make_sampler
from specexec.tree import TokenTree, empty_tree
from specexec.verify import verify

VOCAB = 8
DRAWS = 200_000
LOGITS = torch.randn(VOCAB + 1, VOCAB, generator=torch.Generator().manual_seed(0)) * 1.5  # by the token before


def exact_table(params: SamplingParams) -> np.ndarray:
    sampler = make_sampler(params, [], 1)
    rows = torch.stack([sampler.scores(LOGITS[last], np.array([0])) for last in range(VOCAB + 1)]).softmax(-1).numpy()
    return rows[VOCAB][:, None] * rows[:VOCAB]


def good_tree(num_nodes: int) -> TokenTree:
    first = LOGITS[VOCAB].argsort(descending=True).tolist()
    nodes = [(token, -1) for token in first[: max(num_nodes // 2, 1)]]
    for parent, (token, _) in list(enumerate(nodes)):
        nodes += [(child, parent) for child in LOGITS[token].argsort(descending=True).tolist()[:2]]
    return as_tree(nodes[:num_nodes])


def bad_tree(num_nodes: int) -> TokenTree:
    worst = LOGITS[VOCAB].argsort().tolist()
    return as_tree([(token, -1) for token in worst[:num_nodes]])


def as_tree(nodes: list[tuple[int, int]]) -> TokenTree:
    tokens, parents = np.array(nodes, np.int64).reshape(-1, 2).T
    return TokenTree(tokens, parents, np.zeros(len(nodes), np.float32))


def two_tokens(tree: TokenTree, sampler: object) -> tuple[int, int]:
    """The first two tokens of a text, as the engine would emit them with `tree` in the first pass."""
    rows = torch.cat([LOGITS[VOCAB:], LOGITS[torch.from_numpy(tree.tokens)]])
    tokens = verify(tree, rows, sampler, context=np.array([0]), stop=frozenset(), limit=2)
    if len(tokens) < 2:
        tokens += verify(
            empty_tree(), LOGITS[tokens[0]][None], sampler, context=np.array([0, tokens[0]]), stop=frozenset(), limit=1
        )
    return tokens[0], tokens[1]


FILTERS = ({"top_p": 0.6}, {"top_k": 3}, {"min_p": 0.2})


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
@pytest.mark.parametrize("tree", [good_tree(2), good_tree(6), bad_tree(4), empty_tree()], ids=["2", "6", "bad", "none"])
def test_two_tokens_follow_the_exact_distribution(temperature: float, tree: TokenTree) -> None:
    params = SamplingParams(temperature=temperature, **FILTERS[round(temperature * 10) % 3])
    sampler, expected = make_sampler(params, [], 1), exact_table(params)
    table = FixedScores(sampler)
    counts = np.zeros((VOCAB, VOCAB))
    for _ in range(DRAWS):
        counts[two_tokens(tree, table)] += 1
    possible = expected > 0
    assert counts[~possible].sum() == 0
    statistic = ((counts - DRAWS * expected)[possible] ** 2 / (DRAWS * expected)[possible]).sum()
    freedom = possible.sum() - 1
    assert statistic < freedom + 5 * np.sqrt(2 * freedom), "the chance of this with a lossless walk is below 1e-5"


class FixedScores:
    """The real sampler's noise, and its scores computed once per row: 400,000 draws of the same nine rows take seconds.

    Every draw is that of a further token of one answer.
    """

    def __init__(self, sampler: Sampler) -> None:
        self._rows: dict[bytes, np.ndarray] = {}
        self._sampler, self._lengths = sampler, itertools.count(1)

    def __call__(self, logits: torch.Tensor, path: np.ndarray) -> int:
        key = logits.numpy().tobytes()
        if key not in self._rows:
            self._rows[key] = self._sampler.scores(logits, path).double().numpy()
        return int((self._rows[key] + self._sampler.noise(next(self._lengths), VOCAB)).argmax())


def test_the_walk_stops_at_stop_tokens_and_at_the_limit() -> None:
    tree = as_tree([(3, -1), (4, 0), (5, 1)])
    rows = torch.full((4, VOCAB), -9.0)
    for row, token in enumerate((3, 4, 5, 6)):
        rows[row, token] = 9.0
    for limit, stop in itertools.product(range(1, 6), [frozenset(), frozenset({4})]):
        sampler = make_sampler(SamplingParams(), [], 1)
        tokens = verify(tree, rows, sampler, context=np.array([0]), stop=stop, limit=limit)
        expected = [3, 4, 5, 6][:limit]
        assert tokens == (expected[:2] if stop else expected)
