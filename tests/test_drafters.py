"""Drafters: the model's tree is the most probable one of its size, the n-gram's follows counts."""

import heapq
import itertools

import numpy as np
import pytest
import torch
from oracles import noise
from tiny import VOCAB, tiny_model

from specexec.acceptance import NUM_CHILDREN, Acceptance, AsScored
from specexec.budget import Budget
from specexec.drafters.model import ModelDrafter
from specexec.drafters.ngram import NGramDrafter
from specexec.lm import CachedLM, as_ids
from specexec.sampling import SamplingParams, make_sampler
from specexec.tree import depths

CONTEXT = as_ids(range(5, 20))


def best_first(model: torch.nn.Module, budget: Budget) -> list[tuple[int, ...]]:
    """The continuations most probably accepted, one at a time, each from a forward over its whole path."""
    found: list[tuple[int, ...]] = []
    heap: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    while heap and len(found) <= budget.num_nodes:
        cost, path = heapq.heappop(heap)
        found.append(path)
        if len(path) < budget.max_depth:
            with torch.inference_mode():
                logits = model(input_ids=torch.tensor([[*CONTEXT.tolist(), *path]]), use_cache=False).logits[0, -1]
            if budget.noise:
                logits = logits + budget.temperature * torch.from_numpy(noise(len(path), VOCAB))
            values, tokens = logits.topk(NUM_CHILDREN)
            logprobs = Acceptance().logprobs(values.double().numpy()[None], budget.temperature)[0]
            for token, logprob in zip(tokens.tolist(), logprobs.tolist(), strict=True):
                heapq.heappush(heap, (cost - logprob, (*path, token)))
    return found[1:]


@pytest.mark.parametrize(
    "budget",
    [
        Budget(1, 9),
        Budget(12, 9),
        Budget(40, 3, 1.0, noise=noise),
        Budget(64, 20, 0.8, noise=noise),
        Budget(64, 20, 3.0, noise=noise),
        Budget(64, 20, 0.8),
    ],
    ids=lambda budget: f"{budget.num_nodes}-{budget.temperature}-{'coupled' if budget.noise else 'plain'}",
)
def test_the_tree_is_the_most_probable_one(budget: Budget) -> None:
    model = tiny_model("llama")
    expected = best_first(model, budget)
    for max_batch in (1, 5, 32):
        tree = ModelDrafter(CachedLM(model, 2000), max_batch=max_batch).propose(CONTEXT, budget)
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        assert sorted(paths) == sorted(expected)
        assert (np.diff(tree.scores) <= 0).all()


@pytest.mark.parametrize(("acceptance", "is_coupled"), [(Acceptance, True), (AsScored, False)])
def test_published_drafts_do_not_see_the_target_s_noise(acceptance: type, is_coupled: bool) -> None:
    trees = [
        ModelDrafter(CachedLM(tiny_model("llama"), 200), acceptance=acceptance()).propose(
            CONTEXT, Budget(24, 6, 2.0, noise=make_sampler(SamplingParams(2.0, seed=seed), [], 0).noise)
        )
        for seed in range(3)
    ]
    for tree in trees[1:]:
        same = tree.tokens.tolist() == trees[0].tokens.tolist() and (tree.scores == trees[0].scores).all()
        assert same != is_coupled


def test_a_draft_without_room_proposes_what_it_can() -> None:
    lm = CachedLM(tiny_model("llama"), len(CONTEXT) + 3)
    tree = ModelDrafter(lm).propose(CONTEXT, Budget(64, 50))
    assert 0 < len(tree) <= 64 and depths(tree.parents).max() <= 4


def test_ngram_follows_the_longest_match_and_its_counts() -> None:
    text = as_ids([1, 2, 3, 7, 8, 9, 1, 2, 3, 7, 5, 9, 1, 2, 3, 7, 8, 4, 1, 2, 3])
    tree = NGramDrafter().propose(text, Budget(4, 10))
    assert tree.tokens.tolist() == [7, 8, 9, 4] or tree.tokens.tolist()[:2] == [7, 8]
    assert tree.parents.tolist()[:2] == [-1, 0]
    np.testing.assert_allclose(np.exp(tree.scores[0]), 0.5, rtol=1e-6)  # three tokens agree: as often as not, at first
    np.testing.assert_allclose(np.exp(tree.scores[1] - tree.scores[0]), 2 / 3 * 0.65, rtol=1e-6)


def test_ngram_without_any_repetition_proposes_nothing() -> None:
    assert len(NGramDrafter().propose(as_ids(range(30)), Budget(16, 10))) == 0
    assert len(NGramDrafter().propose(as_ids([4]), Budget(16, 10))) == 0


def test_ngram_respects_nodes_and_depth() -> None:
    rng = np.random.default_rng(0)
    for num_nodes, max_depth in itertools.product((1, 3, 16), (1, 2, 8)):
        tree = NGramDrafter().propose(as_ids(rng.integers(0, 4, 200)), Budget(num_nodes, max_depth))
        assert 0 < len(tree) <= num_nodes
        assert depths(tree.parents).max() <= max_depth
        assert (tree.tokens < VOCAB).all()


class Moody:
    """A draft that knows nothing while the context is odd, and is sure of every next token while it is even."""

    num_free, layers = 1000, ()

    def prefill(self, context):
        self._is_sure = int(context[-1]) % 2 == 0
        return self._logits(1)

    def extend(self, tokens, parents):
        return self._logits(len(tokens))

    def _logits(self, count):
        logits = torch.linspace(0, 1e-3, 100).repeat(count, 1)
        logits[:, 7] += 20.0 * self._is_sure
        return logits


@pytest.mark.parametrize("rate", [0.0, 10.0], ids=["fixed", "auto"])
def test_a_stretch_without_luck_is_soon_forgotten(rate):
    drafter = ModelDrafter(Moody(), acceptance=AsScored())
    budget = Budget(12, 12, rate=rate, verify_s=(lambda rows: np.full(len(rows), 0.1)) if rate else None)
    for _ in range(30):
        drafter.propose(np.array([1]), budget)
    lengths = [int(depths(drafter.propose(np.array([2]), budget).parents).max()) for _ in range(8)]
    assert lengths[-1] == 12
