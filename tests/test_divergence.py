"""The check against plain decoding: nothing in float32, and the first difference with the gap of its logits."""

import pytest
import tiny
import torch
from tiny_tokenizer import tiny_tokenizer

from app.divergence import first_divergence, in_words
from app.session import Session
from specexec.drafters.model import ModelDrafter
from specexec.lm import CachedLM
from specexec.sampling import SamplingParams

TOKENIZER = tiny_tokenizer()
PROMPT = [1, 40, 41, 42]


def session(model):
    drafter = ModelDrafter(CachedLM(model, 144, vocab_size=len(TOKENIZER)))
    target = CachedLM(model, 144, vocab_size=len(TOKENIZER))
    return Session(target, drafter, TOKENIZER, ctx=128, budget=16, stop_ids=frozenset({2}))


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0.9, seed=3)], ids=["greedy", "seed"])
def test_nothing_in_float32(params):
    opened = session(tiny.tiny_model("llama"))
    tokens = [token for chunk in opened.stream(PROMPT, params, max_tokens=20) for token in chunk.step.tokens]
    assert first_divergence(opened, PROMPT, params, tokens) is None
    assert in_words(None, opened, 20) == "check: all 20 tokens are those of plain decoding"


def test_first_difference_and_its_gap():
    model = tiny.tiny_model("llama")
    opened = session(model)
    tokens = [token for chunk in opened.stream(PROMPT, SamplingParams(), max_tokens=12) for token in chunk.step.tokens]
    with torch.inference_mode():
        scores = model(input_ids=torch.tensor([[*PROMPT, *tokens[:7]]])).logits[0, -1]
    second = int(scores[: len(TOKENIZER)].topk(2).indices[1])
    changed = [*tokens[:7], second, *tokens[8:]]
    found = first_divergence(opened, PROMPT, SamplingParams(), changed)
    assert (found.at, found.said, found.plain) == (7, second, tokens[7])
    assert found.gap == pytest.approx(float(scores[tokens[7]] - scores[second]), abs=1e-4)
    assert "token 8 is" in in_words(found, opened, 12) and f"{found.gap:.4f} apart" in in_words(found, opened, 12)


def test_a_token_that_is_no_rival_has_no_gap():
    model = tiny.tiny_model("llama")
    opened = session(model)
    with torch.inference_mode():
        scores = model(input_ids=torch.tensor([PROMPT])).logits[0, -1, : len(TOKENIZER)]
    found = first_divergence(opened, PROMPT, SamplingParams(), [int(scores.argmin())])
    assert found.gap is None and "far apart" in in_words(found, opened, 1)
