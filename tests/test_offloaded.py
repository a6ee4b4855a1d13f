"""Exactness with both rooms at work: a streamed target and a self-draft give the text of the plain resident model."""

import threading

import numpy as np
import pytest
from oracles import PENALISED, plain_text
from tiny import FAMILIES, VOCAB, attention_of, save, tiny_model

from offload.checkpoint import open_checkpoint
from offload.load import load_model, outline
from offload.plan import plan
from offload.quantize import nf4_matrices
from specexec.drafters.model import ModelDrafter
from specexec.engine import generate
from specexec.lm import CachedLM
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
    before = threading.active_count()
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
                checkpoint, everything, attn_implementation=attention, transform=nf4_matrices, share=target.model
            ) as draft,
        ):
            for params, expected in texts.items():
                drafter = ModelDrafter(CachedLM(draft.model, 200))
                sampler = make_sampler(params, (), len(PROMPT))
                steps = list(
                    generate(CachedLM(target.model, 100), drafter, PROMPT, sampler, budget=16, max_tokens=TOKENS)
                )
                assert [token for step in steps for token in step.tokens] == expected
                assert len(steps) < TOKENS, "the self-draft was never right"
            assert (target.streamer is None) == (resident == 4)
    assert threading.active_count() == before
