"""Samplers: validation, penalties that see their own path, noise of its own for every token."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from specexec.sampling import SamplingParams, make_sampler


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", 1e-39),
        ("top_p", 1.1),
        ("top_p", 0.0),
        ("top_k", -1),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e-39),
        ("repetition_penalty", 1e39),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -3.0),
        ("min_tokens", -1),
        ("seed", -1),
    ],
)
def test_bad_values_are_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^{field} must be"):
        SamplingParams(**{field: value})


def test_the_least_temperature_draws_the_likeliest_token() -> None:
    params = SamplingParams(temperature=1e-6)
    assert make_sampler(params, [], 0)(torch.tensor([3.0, 2e4, 3e4, 2.9e4]), np.zeros(1, np.int64)) == 2


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
    params = SamplingParams(temperature=0.8, top_k=3, seed=1)
    draws = 4000
    for by_token in (True, False):  # along one answer, and the same token of many
        counts = np.zeros(4)
        for number in range(draws):
            sampler = make_sampler(params if by_token else replace(params, seed=number), [], 2)
            counts[sampler(logits, np.zeros(2 + number * by_token, np.int64))] += 1
        assert counts[3] == 0
        expected = draws * (torch.tensor([2.0, 1.0, 0.0]) / 0.8).softmax(-1).numpy()
        statistic = ((counts[:3] - expected) ** 2 / expected).sum()
        assert statistic < 23, "the chance of this is 1e-5"


def test_neighbouring_tokens_are_drawn_independently() -> None:
    sampler, logits = make_sampler(SamplingParams(temperature=1.0, seed=3), [], 0), torch.tensor([0.5, 0.0, 0.0])
    drawn = [sampler(logits, np.zeros(number, np.int64)) for number in range(6001)]
    counts = np.zeros((3, 3))
    np.add.at(counts, (drawn[:-1], drawn[1:]), 1)
    probs = logits.softmax(-1).numpy()
    expected = 6000 * probs[:, None] * probs
    assert ((counts - expected) ** 2 / expected).sum() < 40, "the chance of this is below 1e-5"


def test_noise_depends_on_the_seed_and_the_token_s_number_only() -> None:
    params = SamplingParams(temperature=1.0, seed=7)
    sampler = make_sampler(params, [], 5)
    noise = {length: sampler.noise(length, 40).copy() for length in range(5, 105)}
    for length in (104, 5, 60):  # in any order, from the kept ones or not
        np.testing.assert_array_equal(sampler.noise(length, 40), noise[length])
        np.testing.assert_array_equal(make_sampler(params, [], 5).noise(length, 40), noise[length])
        np.testing.assert_array_equal(make_sampler(params, [], 3).noise(length - 2, 40), noise[length])
        np.testing.assert_array_equal(sampler.noise(length, 9), noise[length][:9])
        np.testing.assert_array_equal(sampler.noise(length, 60)[:40], noise[length])
        assert np.abs(make_sampler(replace(params, seed=8), [], 5).noise(length, 40) - noise[length]).min() > 0
    every = np.stack(list(noise.values()))
    assert len(np.unique(every)) == every.size


def test_a_draw_is_the_same_however_often_and_whatever_was_drawn_before() -> None:
    params, logits = SamplingParams(temperature=1.2, top_p=0.9, seed=2**62), torch.linspace(-1, 1, 50)
    sampler = make_sampler(params, [], 1)
    drawn = [sampler(logits, np.zeros(length, np.int64)) for length in (1, 2, 2, 9, 1)]
    assert drawn[0] == drawn[4] and drawn[1] == drawn[2]
    assert drawn[3] == make_sampler(params, [], 1)(logits, np.zeros(9, np.int64))
    sampler.uniform()
    assert drawn[0] == sampler(logits, np.zeros(1, np.int64))


def test_not_a_number_is_an_error_not_a_token() -> None:
    with pytest.raises(FloatingPointError, match="float32"):
        make_sampler(SamplingParams(), [], 0)(torch.tensor([0.0, float("nan")]), np.array([0]))
    with pytest.raises(FloatingPointError, match="float32"):
        make_sampler(SamplingParams(temperature=1.0), [], 0)(torch.tensor([0.0, float("nan")]), np.array([0]))
