"""Requests as they are read: what they say counts, and what is out of range is named."""

import json

import pytest

from app.protocol import ChatRequest, Refused, parse
from app.settings import Settings

BODY = {"messages": [{"role": "user", "content": "x"}]}


def params(**fields):
    request = parse(ChatRequest, json.dumps({**BODY, **fields}).encode())
    return request.params(Settings(repeat_penalty=1.3), seed=0)


@pytest.mark.parametrize("name", ["repetition_penalty", "repeat_penalty"])
def test_a_penalty_of_zero_is_refused(name):
    with pytest.raises(Refused, match=r"^repetition_penalty must be from 1e-6"):
        params(**{name: 0})


def test_the_first_name_of_the_penalty_counts_then_the_second_then_the_setting():
    assert params(repetition_penalty=1.1, repeat_penalty=1.2).repetition_penalty == 1.1
    assert params(repeat_penalty=1.2).repetition_penalty == 1.2
    assert params().repetition_penalty == 1.3


def test_a_temperature_too_small_to_divide_by_is_refused():
    with pytest.raises(Refused, match="^temperature must be 0 .greedy. or at least 1e-6, not 1e-39") as raised:
        params(temperature=1e-39)
    assert raised.value.param == "temperature"
