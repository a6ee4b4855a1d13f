"""Samplers: validation, penalties that see their own path, one draw per token."""

import numpy as np
import pytest
import torch

from specexec.sampling import SamplingParams, make_sampler


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_p", 1.1),
        ("top_p", 0.0),
        ("top_k", -1),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -3.0),
        ("min_tokens", -1),
        ("seed", -1),
    ],
)
def test_bad_values_are_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^{field} must be"):
        SamplingParams(**{field: value})


def test_penalties_count_the_answer_not_the_prompt() -> None:
    params = SamplingParams(temperature=1.0, presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=2.0)
    scores = make_sampler(params, [], 2).scores(torch.ones(6), np.array([0, 1, 2, 2, 3]))
    # repetition: every token of prompt and answer halves its positive logit; the others count the answer alone
    assert scores.tolist() == [0.5, 0.5, 0.5 - 0.5 - 0.5, 0.5 - 0.5 - 0.25, 1.0, 1.0]


def test_min_tokens_forbids_every_eos_until_then() -> None:
    params = SamplingParams(temperature=1.0, min_tokens=2)
    sampler = make_sampler(params, [1, 3], 2)
    early = sampler.scores(torch.zeros(5), np.array([0, 0, 4]))
    late = sampler.scores(torch.zeros(5), np.array([0, 0, 4, 4]))
    assert early.isinf().tolist() == [False, True, False, True, False]
    assert not late.isinf().any()


def test_frequencies_follow_the_filtered_distribution() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    sampler = make_sampler(SamplingParams(temperature=1.0, top_k=3, seed=1), [], 0)
    draws = np.bincount([sampler(logits, np.empty(0, np.int64)) for _ in range(4000)], minlength=4) / 4000
    expected = torch.tensor([2.0, 1.0, 0.0]).softmax(-1).numpy()
    assert draws[3] == 0
    np.testing.assert_allclose(draws[:3], expected, atol=0.03)


def test_not_a_number_is_an_error_not_a_token() -> None:
    with pytest.raises(FloatingPointError, match="float32"):
        make_sampler(SamplingParams(), [], 0)(torch.tensor([0.0, float("nan")]), np.array([0]))
