"""Exactness with both rooms at work: a streamed target and a self-draft give the text of the plain resident model."""

import threading

import numpy as np
import pytest
import torch
from oracles import PENALISED, plain_text
from tiny import FAMILIES, VOCAB, attention_of, save, tiny_model

from app.cancel import Cancelled, leave_between_layers
from offload.checkpoint import open_checkpoint
from offload.load import load_model, outline
from offload.plan import plan
from offload.quantize import nf4_matrices
from specexec.budget import Budget
from specexec.drafters.model import ModelDrafter
from specexec.engine import generate
from specexec.lm import CachedLM, as_ids
from specexec.sampling import SamplingParams, make_sampler

PROMPT = np.random.default_rng(4).integers(3, VOCAB, 12).tolist()
TOKENS = 16


@pytest.fixture(scope="module", params=FAMILIES)
def stored(request, tmp_path_factory):
    """A checkpoint of several shards, its layer units, and what the plain model says to PROMPT."""
    model = tiny_model(request.param)
    checkpoint = open_checkpoint(save(model, tmp_path_factory.mktemp(request.param), max_shard_size="150KB"))
    attention = attention_of(model.config)
    texts = {params: plain_text(model, PROMPT, params, max_tokens=TOKENS) for params in (SamplingParams(), PENALISED)}
    return checkpoint, attention, outline(checkpoint, attn_implementation=attention).layers, texts


@pytest.mark.parametrize("tier", ["disk", "ram"])
@pytest.mark.parametrize("resident", [0, 2, 4])
def test_streamed_text_equals_the_resident_models(stored, resident, tier):
    checkpoint, attention, layers, texts = stored
    before = set(threading.enumerate())
    for num_slots in (1, 2, 3) if resident < 4 else (2,):
        chosen = plan(
            layers,
            fixed={},
            limit_bytes=2**40,
            num_slots=num_slots,
            resident=resident,
            ram_bytes=2**40 if tier == "ram" else None,
        )
        everything = plan(layers, fixed={}, limit_bytes=2**40, resident=4)
        with (
            load_model(checkpoint, chosen, attn_implementation=attention) as target,
            load_model(
                checkpoint, everything, attn_implementation=attention, transform=nf4_matrices, share=target
            ) as draft,
        ):
            for params, expected in texts.items():
                lm = CachedLM(target.model, 100)
                drafter = ModelDrafter(CachedLM(draft.model, 100, rows_of=lm))
                sampler = make_sampler(params, (), len(PROMPT))
                steps = list(generate(lm, drafter, PROMPT, sampler, budget=16, max_tokens=TOKENS))
                assert [token for step in steps for token in step.tokens] == expected
                assert len(steps) < TOKENS, "the self-draft was never right"
            assert (target.streamer is None) == (resident == 4)
    assert set(threading.enumerate()) <= before


def test_hooks_of_shared_layers_do_no_harm_in_the_draft_s_passes(tmp_path):
    model = tiny_model("qwen3")
    checkpoint = open_checkpoint(save(model, tmp_path))
    layers = outline(checkpoint).layers
    chosen, everything = (plan(layers, fixed={}, limit_bytes=2**40, resident=count) for count in (2, 4))
    expected = plain_text(model, PROMPT, SamplingParams(), max_tokens=TOKENS)
    with (
        load_model(checkpoint, chosen) as target,
        load_model(checkpoint, everything, transform=nf4_matrices, share=target) as draft,
    ):
        lm = CachedLM(target.model, 100)
        tap = lm.tap(chosen.resident[:1])
        drafter = ModelDrafter(CachedLM(draft.model, 100, rows_of=lm))
        calls_while_drafting = iter([False, False, False, True])  # the draft's second pass is left half way
        is_drafting = []
        draft.model.register_forward_pre_hook(lambda *_: is_drafting.append(True))
        draft.model.register_forward_hook(lambda *_: is_drafting.clear(), always_call=True)
        leave_between_layers(lm.layers, lambda: bool(is_drafting) and next(calls_while_drafting, False))

        def text():
            sampler = make_sampler(SamplingParams(), (), len(PROMPT))
            steps = generate(lm, drafter, PROMPT, sampler, budget=16, max_tokens=TOKENS)
            return [token for step in steps for token in step.tokens]

        with pytest.raises(Cancelled):
            text()
        assert text() == expected
        whole = as_ids([*PROMPT, *expected])
        with torch.inference_mode():
            states = model(torch.from_numpy(whole[:-1])[None], use_cache=False, output_hidden_states=True).hidden_states
        features = states[chosen.resident[0] + 1][0]
        lm.prefill(whole)
        drafter.propose(whole, Budget(16, 8))
        torch.testing.assert_close(tap.rows(whole), features, atol=1e-4, rtol=1e-4)
