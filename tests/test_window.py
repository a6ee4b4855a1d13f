"""A draft that sees the tail only: same text, bounded rows, and no recomputation at every pass."""

import numpy as np
import pytest
from oracles import plain_text
from tiny import VOCAB, tiny_model

from specexec.budget import Budget
from specexec.drafters.model import ModelDrafter
from specexec.drafters.window import WindowedLM
from specexec.engine import generate
from specexec.lm import CachedLM, as_ids
from specexec.sampling import SamplingParams, make_sampler

PROMPT = np.random.default_rng(3).integers(3, VOCAB, 70).tolist()
WINDOW = 24


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0.8, seed=3)], ids=["greedy", "T"])
def test_the_text_is_the_target_s(params: SamplingParams) -> None:
    model, near = tiny_model("llama"), tiny_model("llama", max_position_embeddings=40)
    inner = CachedLM(near, 40)
    drafter = ModelDrafter(WindowedLM(inner, WINDOW))
    sampler = make_sampler(params, (), len(PROMPT))
    steps = list(generate(CachedLM(model, 200), drafter, PROMPT, sampler, budget=16, max_tokens=60))
    assert [token for step in steps for token in step.tokens] == plain_text(model, PROMPT, params, max_tokens=60)
    assert sum(step.accepted for step in steps) > 0
    assert inner._cache.num_rows <= inner.max_rows == inner._cache.layers[0].keys.shape[2]


def test_logits_are_those_of_the_tail_and_rows_are_computed_in_blocks() -> None:
    model = tiny_model("llama")
    inner, whole = CachedLM(model, 64), as_ids(PROMPT)
    windowed = WindowedLM(inner, WINDOW)
    starts = []
    for length in range(10, 70):
        before = inner.num_computed
        logits = windowed.prefill(whole[:length])
        shown = inner.num_committed
        assert (length <= WINDOW and shown == length) or WINDOW - WINDOW // 4 < shown <= WINDOW
        assert np.array_equal(inner._context, whole[length - shown : length])
        starts.append(length - shown)
        if len(starts) == 1 or starts[-1] == starts[-2]:
            assert inner.num_computed - before == (length if len(starts) == 1 else 1)
    assert np.unique(starts).tolist() == list(range(0, 49, 6))
    expected = CachedLM(model, 64).prefill(whole[starts[-1] : 69])
    np.testing.assert_allclose(logits.numpy(), expected.numpy(), atol=1e-4)


def test_trees_grow_in_the_rows_that_are_left() -> None:
    lm = WindowedLM(CachedLM(tiny_model("llama"), WINDOW + 4), WINDOW)
    tree = ModelDrafter(lm).propose(as_ids(PROMPT), Budget(64, 50))
    assert len(tree) == 64
    assert lm.num_free >= 0
