"""The baselines are lossless: chi-square of two tokens against the exact table, and greedy text equal to plain text."""

import numpy as np
import pytest
import torch
from oracles import plain_text
from test_verify import FILTERS, LOGITS, VOCAB, exact_table
from tiny import tiny_model

from specexec.budget import Budget
from specexec.drafters.sampled import SampledDrafter, SampledTree
from specexec.engine import generate
from specexec.lm import CachedLM
from specexec.rejection import verify_sampled
from specexec.sampling import SamplingParams, make_sampler
from specexec.tree import depths

DRAWS = 6_000
DRAFT_LOGITS = LOGITS + torch.randn(LOGITS.shape, generator=torch.Generator().manual_seed(4))


class MarkovDraft:
    """Stands for a CachedLM: logits depend on the last token only."""

    vocab_size, num_free = VOCAB, 1000

    def __init__(self, logits: torch.Tensor) -> None:
        self._logits = logits

    def prefill(self, context: np.ndarray) -> torch.Tensor:
        return self._logits[VOCAB:]

    def extend(self, tokens: np.ndarray, parents: np.ndarray) -> torch.Tensor:
        return self._logits[torch.from_numpy(tokens)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("widths", "temperature"), [((1, 1), 0.7), ((1, 1), 1.5), ((3, 1), 1.0), ((2, 2), 0.7), ((2, 2), 1.5)]
)
def test_two_tokens_follow_the_exact_distribution(widths: tuple[int, ...], temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=1, **FILTERS[round(temperature * 10) % 3])
    sampler, expected = make_sampler(params, [], 1), exact_table(params)
    drafter = SampledDrafter(MarkovDraft(DRAFT_LOGITS), widths, seed=2)
    counts = np.zeros((VOCAB, VOCAB))
    table = {row.numpy().tobytes(): sampler.probs(row, np.array([0])) for row in LOGITS}
    sampler.probs = lambda logits, path: table[logits.numpy().tobytes()]
    for _ in range(DRAWS):
        tokens: list[int] = []
        while len(tokens) < 2:
            root = LOGITS[tokens[0]][None] if tokens else LOGITS[VOCAB:]
            tree = drafter.propose(np.array([0]), Budget(16, 2, temperature)) if not tokens else EMPTY
            rows = torch.cat([root, LOGITS[torch.from_numpy(tree.tokens)]])
            tokens += verify_sampled(
                tree, rows, sampler, context=np.array([0, *tokens]), stop=frozenset(), limit=2 - len(tokens)
            )
        counts[tokens[0], tokens[1]] += 1
    possible = expected > 0
    assert counts[~possible].sum() == 0
    statistic = ((counts - DRAWS * expected)[possible] ** 2 / (DRAWS * expected)[possible]).sum()
    freedom = possible.sum() - 1
    assert statistic < freedom + 5 * np.sqrt(2 * freedom)


EMPTY = SampledTree(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.float32), (), torch.empty(0, VOCAB))


def test_a_draft_equal_to_the_target_is_always_accepted() -> None:
    sampler = make_sampler(SamplingParams(temperature=1.0), [], 1)
    drafter = SampledDrafter(MarkovDraft(LOGITS), (1, 1, 1))
    for _ in range(50):
        tree = drafter.propose(np.array([0]), Budget(8, 9, 1.0))
        rows = torch.cat([LOGITS[VOCAB:], LOGITS[torch.from_numpy(tree.tokens)]])
        tokens = verify_sampled(tree, rows, sampler, context=np.array([0]), stop=frozenset(), limit=9)
        assert tokens[:3] == tree.tokens.tolist() and len(tokens) == 4


@pytest.mark.parametrize("widths", [(1,) * 6, (4, 1, 1, 1), (2, 2, 2)])
@pytest.mark.parametrize("budget", [1, 4, 16])
def test_greedy_text_is_that_of_plain_decoding(widths: tuple[int, ...], budget: int) -> None:
    model, near, prompt = tiny_model("llama"), tiny_model("llama"), [9, 8, 7, 6]
    for parameter in near.parameters():
        parameter.mul_(1.03)
    drafter = SampledDrafter(CachedLM(near, 200), widths)
    steps = list(
        generate(
            CachedLM(model, 200),
            drafter,
            prompt,
            make_sampler(SamplingParams(), (), 4),
            budget=budget,
            max_tokens=20,
            walk=verify_sampled,
        )
    )
    text = [token for step in steps for token in step.tokens]
    assert text == plain_text(model, prompt, SamplingParams(), max_tokens=20)
    assert all(step.drafted <= budget for step in steps)
    assert all(depths(step.tree.parents).max(initial=0) <= len(widths) for step in steps)
