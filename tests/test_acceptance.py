"""Acceptance: priors, what is learned from outcomes, and that a tree's scores stay a tree's."""

import json

import numpy as np
import pytest
import torch
from tiny import tiny_model

from specexec.acceptance import Acceptance, AsScored
from specexec.budget import Budget
from specexec.drafters.model import ModelDrafter
from specexec.lm import CachedLM, as_ids
from specexec.tree import ROOT

RNG = np.random.default_rng(0)


def outcomes(sharpness: float, reach: float, count: int) -> list[tuple[np.ndarray, int | None]]:
    """What a target shows that agrees with a draft's logits at some sharpness, and looks elsewhere at times."""
    found = []
    for _ in range(count):
        logits = np.sort(RNG.normal(0, 2, 64))[::-1]
        probs = np.exp(logits / sharpness - (logits / sharpness).max())
        index = int(RNG.choice(64, p=probs / probs.sum())) if RNG.random() < reach else None
        found.append((logits, index))
    return found


@pytest.mark.parametrize(("sharpness", "reach"), [(0.3, 0.99), (0.5, 0.95), (1.0, 0.9), (2.0, 0.5)])
def test_sharpness_and_reach_are_found(sharpness: float, reach: float) -> None:
    acceptance = Acceptance()
    for logits, index in outcomes(sharpness, reach, 800):
        acceptance.observe(logits, index, 0.0)
    logits = np.array([[2.0, 1.0, 0.0]])
    expected = np.exp(logits / sharpness)
    found = np.exp(acceptance.logprobs(logits, 0.0))
    np.testing.assert_allclose(found, reach * expected / expected.sum(), atol=0.08)
    for temperature in (0.0, 1.0):  # of coupled scores no less: with the noise added, a sampling target is a greedy one
        assert np.exp(Acceptance().logprobs(logits, temperature))[0, 0] == pytest.approx(0.867 * 0.99, abs=0.01)


def test_every_sampling_temperature_learns_for_itself() -> None:
    acceptance = Acceptance()
    before = acceptance.logprobs(np.array([[1.0, 0.0]]), 1.0)
    for logits, index in outcomes(0.2, 1.0, 300):
        acceptance.observe(logits, index, 0.0)
    np.testing.assert_array_equal(acceptance.logprobs(np.array([[1.0, 0.0]]), 1.0), before)


def test_what_was_learned_survives_json() -> None:
    acceptance = Acceptance()
    for logits, index in outcomes(0.8, 0.7, 50):
        acceptance.observe(logits, index, 0.6)
    copy = Acceptance.from_data(json.loads(json.dumps(acceptance.to_data())))
    logits = RNG.normal(0, 1, (3, 64))
    np.testing.assert_array_equal(copy.logprobs(logits, 0.6), acceptance.logprobs(logits, 0.6))


@pytest.mark.parametrize(
    "data", [{"x": {}}, {"0.00": {"evidence": [1], "counts": [1, 2]}}, {"0.00": 3}, {"0.00": {"evidence": []}}]
)
def test_a_record_of_another_form_is_refused(data: dict) -> None:
    with pytest.raises(ValueError, match="not an acceptance record"):
        Acceptance.from_data(data)


def test_a_draft_that_is_always_right_gains_confidence_and_a_wrong_one_loses_it() -> None:
    model = tiny_model("llama")
    text = list(range(5, 15))
    with torch.inference_mode():
        for _ in range(40):
            text.append(int(model(input_ids=torch.tensor([text])).logits[0, -1].argmax()))
    confidence = {}
    for name, answer in (("right", text), ("wrong", [*text[:10], *RNG.integers(3, 320, 40).tolist()])):
        drafter = ModelDrafter(CachedLM(model, 600))
        for length in range(10, 50, 2):
            tree = drafter.propose(as_ids(answer[:length]), Budget(8, 20))
            inner = tree.parents != ROOT
            assert (tree.scores[inner] <= tree.scores[tree.parents[inner]]).all()
        confidence[name] = float(np.exp(tree.scores[0]))
    assert confidence["right"] > 0.7 > 0.3 > confidence["wrong"]


def test_scores_taken_as_they_are() -> None:
    """The published methods' reading: the draft's own distribution at the sampling temperature, whatever came of it."""
    logits = RNG.normal(0, 2, (3, 8))
    scored = AsScored()
    for _ in range(100):
        scored.observe(logits[0], None, 0.5)
    for temperature, divisor in ((0.0, 1.0), (0.5, 0.5)):
        expected = torch.from_numpy(logits / divisor).log_softmax(-1).numpy()
        np.testing.assert_allclose(scored.logprobs(logits, temperature), expected, rtol=1e-5)
