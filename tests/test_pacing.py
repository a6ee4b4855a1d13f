"""What is measured before the first answer: which drafts have prospects, and that measuring leaves nothing behind."""

import numpy as np
import pytest
import tiny

from app.pacing import measured_pace
from specexec.acceptance import Acceptance
from specexec.drafters.model import ModelDrafter
from specexec.drafters.window import WindowedLM
from specexec.engine import generate
from specexec.lm import CachedLM
from specexec.sampling import SamplingParams, make_sampler

PROMPT = (0, 0, 5, 9, 7)  # it begins as what is measured does


def lm(num_layers: int, rows: int = 128) -> CachedLM:
    return CachedLM(tiny.tiny_model("llama", num_hidden_layers=num_layers), rows)


@pytest.mark.parametrize(("target", "draft", "is_hopeless"), [(12, 1, False), (1, 12, True)])
def test_a_draft_slower_than_the_target_is_not_tried_at_once(target: int, draft: int, is_hopeless: bool) -> None:
    assert measured_pace(64, lm(target), lm(draft), Acceptance(), 0.0).is_paused == is_hopeless


def test_what_earlier_sessions_have_learned_counts() -> None:
    acceptance = Acceptance()
    for _ in range(2000):
        acceptance.observe(np.zeros(64), None, 0.0)
    assert acceptance.chance(0.0) < 0.02 < 0.9 < acceptance.chance(0.7)
    assert measured_pace(64, lm(12), lm(1), acceptance, 0.0).is_paused
    assert not measured_pace(64, lm(12), lm(1), acceptance, 0.7).is_paused


@pytest.mark.parametrize("kind", ["own rows", "the target's rows", "window"])
def test_measuring_leaves_nothing_behind(kind: str) -> None:
    sampler = make_sampler(SamplingParams(), (), len(PROMPT))
    plain = [each for step in generate(lm(4), None, PROMPT, sampler, budget=1, max_tokens=30) for each in step.tokens]
    target = lm(4)
    draft = CachedLM(tiny.tiny_model("llama"), 128, rows_of=target) if kind == "the target's rows" else lm(4)
    if kind == "window":
        draft = WindowedLM(draft, 16)
    measured_pace(8, target, draft, Acceptance(), 0.0)
    drafter = ModelDrafter(draft)
    sampler = make_sampler(SamplingParams(), (), len(PROMPT))
    steps = list(generate(target, drafter, PROMPT, sampler, budget=8, max_tokens=30))
    assert [each for step in steps for each in step.tokens] == plain
    assert len(steps) < 30


def test_the_fewest_rows_are_enough() -> None:
    assert not measured_pace(1, lm(12, rows=2), lm(1, rows=2), Acceptance(), 0.0).is_paused
