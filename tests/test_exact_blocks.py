"""The same seed gives the same text with DFlash and DSpark drafts, whatever the budget, resident and streamed."""

import numpy as np
import pytest
from blocks import config_of, tensors_of
from oracles import PENALISED, plain_text
from tiny import VOCAB, attention_of, save, tiny_model

from offload.checkpoint import open_checkpoint
from offload.load import load_model, outline
from offload.plan import plan
from specexec.budget import Pace
from specexec.drafters import Drafter
from specexec.drafters.dflash_layout import block_drafter
from specexec.drafters.graft import GraftDrafter
from specexec.drafters.suffix import SuffixDrafter
from specexec.engine import generate
from specexec.lm import CachedLM
from specexec.sampling import SamplingParams, make_sampler

TOKENS = 12
FAMILIES = {  # by what sets them apart: windows, soft-caps, sinks, experts
    "llama": (1, 4, 16, 64),
    **dict.fromkeys(("gemma2", "mistral", "qwen3_moe", "gpt_oss"), (16,)),
}
KINDS = {  # of draft: the layout, the Markov head, how many ids it knows
    "dflash": ("z-lab", None, VOCAB),
    "anchor-first dflash": ("DeepSpec", None, VOCAB),
    "vanilla": ("speculators", "vanilla", 40),
    "gated": ("SpecForge", "gated", VOCAB),
    "rnn": ("Model-Optimizer", "rnn", VOCAB),
}
PROMPT = [*np.random.default_rng(1).integers(3, VOCAB, 11).tolist(), 40, 41, 42, 40, 41]


def drafter_of(kind: str, target: CachedLM) -> Drafter:
    layout, head, num_ids = KINDS[kind]
    return block_drafter(config_of(layout, head, num_ids=num_ids), tensors_of(layout, head, num_ids=num_ids), target)


def text_of(target: CachedLM, drafter: Drafter, params: SamplingParams, budget: int | Pace) -> tuple[list[int], int]:
    sampler = make_sampler(params, (), len(PROMPT))
    steps = list(generate(target, drafter, PROMPT, sampler, budget=budget, max_tokens=TOKENS))
    return [token for step in steps for token in step.tokens], sum(step.drafted for step in steps)


@pytest.mark.parametrize("params", [SamplingParams(), PENALISED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", FAMILIES)
def test_text_does_not_depend_on_draft_or_budget(family: str, params: SamplingParams) -> None:
    model = tiny_model(family)
    expected = plain_text(model, PROMPT, params, max_tokens=TOKENS)
    for kind in KINDS:
        target = CachedLM(model, 200)
        drafter = drafter_of(kind, target)
        for budget in (*FAMILIES[family], Pace()):
            text, drafted = text_of(target, drafter, params, budget)
            assert text == expected, f"{kind}, budget {budget}"
            assert drafted > 0
    target = CachedLM(model, 200)
    grafted = GraftDrafter(drafter_of("gated", target), SuffixDrafter())
    assert text_of(target, grafted, params, 16)[0] == expected


@pytest.mark.parametrize(("family", "resident"), [("llama", 0), ("gemma3_text", 2)])
def test_streamed_text_equals_the_resident_model_s(family: str, resident: int, tmp_path) -> None:
    model = tiny_model(family)
    checkpoint, attention = open_checkpoint(save(model, tmp_path)), attention_of(model.config)
    layers = outline(checkpoint, attn_implementation=attention).layers
    chosen = plan(layers, fixed={}, limit_bytes=2**40, num_slots=2, resident=resident)
    with load_model(checkpoint, chosen, attn_implementation=attention) as loaded:
        assert loaded.streamer is not None
        for kind, params in ((kind, params) for kind in KINDS for params in (SamplingParams(), PENALISED)):
            target = CachedLM(loaded.model, 100)
            text, drafted = text_of(target, drafter_of(kind, target), params, 16)
            assert text == plain_text(model, PROMPT, params, max_tokens=TOKENS), kind
            assert drafted > TOKENS
