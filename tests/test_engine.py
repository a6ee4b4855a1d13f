"""The loop's contract: stops, limits, counts, seeds (faults 1, 6, 7, 12, 13, 14)."""

import numpy as np
import pytest
from oracles import PENALISED, plain_text
from tiny import VOCAB, tiny_model

from specexec.drafters.model import ModelDrafter
from specexec.engine import Step, generate
from specexec.lm import CachedLM
from specexec.sampling import SamplingParams, make_sampler

PROMPT = [9, 8, 7, 6, 5, 4, 3]
GREEDY = SamplingParams()


def run(
    params: SamplingParams = GREEDY,
    *,
    budget: int = 16,
    max_tokens: int = 20,
    stop: frozenset[int] = frozenset(),
    prompt: list[int] = PROMPT,
    max_rows: int = 200,
) -> list[Step]:
    model = tiny_model("llama")
    sampler = make_sampler(params, stop, len(prompt))
    drafter = ModelDrafter(CachedLM(model, 400))  # draft = target: as much as possible is accepted
    return list(
        generate(CachedLM(model, max_rows), drafter, prompt, sampler, budget=budget, max_tokens=max_tokens, stop=stop)
    )


def text(steps: list[Step]) -> list[int]:
    return [token for step in steps for token in step.tokens]


@pytest.mark.parametrize("budget", [2, 4, 16, 64])
def test_a_stop_token_inside_a_verified_run_ends_the_text(budget: int) -> None:
    plain = plain_text(tiny_model("llama"), PROMPT, GREEDY, max_tokens=20)
    k = next(i for i in range(4, 20) if plain[i] not in plain[:i]) + 1  # its first occurrence is the k-th token
    for max_tokens in (k - 1, k, k + 1):
        steps = run(budget=budget, max_tokens=max_tokens, stop=frozenset({plain[k - 1]}))
        assert text(steps) == plain[: min(k, max_tokens)]
        assert [step.finish for step in steps[:-1]] == [None] * (len(steps) - 1)
        assert steps[-1].finish == ("stop" if max_tokens >= k else "length")


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7])
def test_max_tokens_is_exact(max_tokens: int) -> None:
    steps = run(max_tokens=max_tokens)
    assert len(text(steps)) == max_tokens
    assert steps[-1].finish == "length"
    assert all(len(step.tokens) - step.accepted in (0, 1) for step in steps)


def test_no_tokens_asked_for_gives_none() -> None:
    assert run(max_tokens=0) == []


@pytest.mark.parametrize("budget", [1, 2, 8, 64])
def test_penalties_and_seed_hold_at_every_budget(budget: int) -> None:
    assert text(run(PENALISED, budget=budget)) == plain_text(tiny_model("llama"), PROMPT, PENALISED, max_tokens=20)


def test_another_seed_gives_another_text() -> None:
    texts = {tuple(text(run(SamplingParams(temperature=1.5, seed=seed)))) for seed in range(4)}
    assert len(texts) == 4


@pytest.mark.parametrize(("temperature", "seed"), [(1.0, 0), (1.0, 1), (1.0, 2), (0.6, 3), (1.5, 4)])
def test_a_draft_that_is_the_target_guesses_every_token_of_a_flat_distribution(temperature: float, seed: int) -> None:
    """It is shown the noise of the very tokens that it guesses: those of a place before or behind agree by chance."""
    model = tiny_model("llama")
    model.lm_head.weight.mul_(0.1)
    params = SamplingParams(temperature=temperature, seed=seed)
    assert len(set(plain_text(model, PROMPT, params, max_tokens=16))) > 12
    drafter, lm = ModelDrafter(CachedLM(model, 400)), CachedLM(model, 200)
    for max_tokens in (1, 4):
        steps = generate(lm, drafter, PROMPT, make_sampler(params, (), len(PROMPT)), budget=64, max_tokens=max_tokens)
        assert [len(step.tokens) for step in steps] == [max_tokens]
    steps = list(generate(lm, drafter, PROMPT, make_sampler(params, (), len(PROMPT)), budget=64, max_tokens=40))
    for step in steps:
        assert step.accepted >= min(3, len(step.tokens) - 1)
    assert len(steps) <= 8


@pytest.mark.parametrize("length", range(190, 258, 6))
def test_near_the_limit_the_tree_shrinks(length: int) -> None:
    prompt = np.random.default_rng(length).integers(3, VOCAB, length).tolist()
    if length >= 256:
        with pytest.raises(ValueError, match=rf"the prompt has {length} tokens; it needs at least 1 and at most 255"):
            run(prompt=prompt, max_rows=256, budget=64)
        return
    steps = run(prompt=prompt, max_rows=256, budget=64, max_tokens=100)
    expected = plain_text(tiny_model("llama"), prompt, GREEDY, max_tokens=min(100, 256 - length))
    assert text(steps) == expected
    assert steps[-1].finish == "length"


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="the prompt has 0 tokens"):
        run(prompt=[])


@pytest.mark.parametrize(("target_rows", "draft_rows"), [(384, 320), (320, 384)])
def test_padding_ids_are_never_drafted_or_emitted(target_rows: int, draft_rows: int) -> None:
    target, draft = tiny_model("llama", vocab_size=target_rows), tiny_model("llama", vocab_size=draft_rows)
    for model in (target, draft):
        model.lm_head.weight[VOCAB:].mul_(50)  # the largest logits lie in the padding
    sampler = make_sampler(SamplingParams(temperature=1.0, seed=2), (), len(PROMPT))
    drafter = ModelDrafter(CachedLM(draft, 300, vocab_size=VOCAB))
    lm = CachedLM(target, 100, vocab_size=VOCAB)
    steps = list(generate(lm, drafter, PROMPT, sampler, budget=16, max_tokens=20))
    assert max(text(steps)) < VOCAB
    assert max(int(step.tree.tokens.max()) for step in steps if step.drafted) < VOCAB
