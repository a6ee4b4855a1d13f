"""The project's strongest test: the same seed gives the same text with any drafter, any budget and with none."""

import numpy as np
import pytest
from oracles import PENALISED, AlwaysRight, AlwaysWrong, plain_text
from tiny import FAMILIES, VOCAB, tiny_model

from specexec.budget import Pace
from specexec.drafters import Drafter
from specexec.drafters.graft import GraftDrafter
from specexec.drafters.model import ModelDrafter
from specexec.drafters.ngram import NGramDrafter
from specexec.drafters.suffix import SuffixDrafter
from specexec.engine import generate
from specexec.lm import CachedLM
from specexec.sampling import SamplingParams, make_sampler

TOKENS = 24
GREEDY = SamplingParams()
PROMPT = [*np.random.default_rng(1).integers(3, VOCAB, 11).tolist(), 40, 41, 42, 40, 41]


def drafters(family: str, answer: list[int], target: CachedLM) -> dict[str, Drafter]:
    """`self` is the target's own weights slightly shaken, `rows` reads the target's KV rows too, `model` is another."""
    near = tiny_model(family)
    for parameter in near.parameters():
        parameter.mul_(1.02)
    return {
        "self": ModelDrafter(CachedLM(near, 400)),
        "model": ModelDrafter(CachedLM(tiny_model("llama", seed=9), 400)),
        "rows": ModelDrafter(CachedLM(near, 400, rows_of=target)),
        "ngram": NGramDrafter(),
        "suffix": SuffixDrafter(),
        "graft": GraftDrafter(ModelDrafter(CachedLM(near, 400)), SuffixDrafter()),
        "right": AlwaysRight(PROMPT, answer),
        "wrong": AlwaysWrong(PROMPT, answer),
    }


@pytest.mark.parametrize("params", [GREEDY, PENALISED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", FAMILIES)
def test_text_does_not_depend_on_draft_or_budget(family: str, params: SamplingParams) -> None:
    model = tiny_model(family)
    expected = plain_text(model, PROMPT, params, max_tokens=TOKENS)
    target = CachedLM(model, 200)
    for name, drafter in {**drafters(family, expected, target), "none": None}.items():
        for budget in (16, Pace()) if name in ("rows", "suffix", "graft") else (1, 4, 16, 64):
            sampler = make_sampler(params, (), len(PROMPT))
            steps = list(generate(target, drafter, PROMPT, sampler, budget=budget, max_tokens=TOKENS))
            text = [token for step in steps for token in step.tokens]
            assert text == expected, f"{name}, budget {budget}"
            if name == "right":
                assert len(steps) == -(-TOKENS // (min(budget, TOKENS) + 1))
            if name in ("wrong", "none"):
                assert len(steps) == TOKENS and not any(step.accepted for step in steps)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(20))
def test_greedy_text_over_twenty_prompts(family: str, seed: int) -> None:
    model = _models(family)
    prompt = np.random.default_rng(seed).integers(3, VOCAB, 5 + seed).tolist()
    expected = plain_text(model, prompt, GREEDY, max_tokens=8)
    drafter = ModelDrafter(CachedLM(_models(family, 1.05), 200))
    steps = generate(
        CachedLM(model, 100), drafter, prompt, make_sampler(GREEDY, (), len(prompt)), budget=16, max_tokens=8
    )
    assert [token for step in steps for token in step.tokens] == expected


_cache: dict = {}


def _models(family: str, factor: float = 1.0):
    if (family, factor) not in _cache:
        model = tiny_model(family)
        for parameter in model.parameters():
            parameter.mul_(factor)
        _cache[family, factor] = model
    return _cache[family, factor]
