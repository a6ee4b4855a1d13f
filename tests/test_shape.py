"""Sizes from a config alone: as many weights as the authors say, and the same bytes as headers tell."""

import numpy as np
import pytest
import shapes
import tiny
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from offload.checkpoint import open_checkpoint
from offload.load import outline
from offload.pack import encoding_for, packed_outline
from offload.plan import kv_cache_bytes
from offload.shape import anatomy, shape_of, sketch
from specexec.lm import CachedLM


@pytest.mark.parametrize("name", shapes.EIGHT)
def test_number_of_weights_and_bytes(name):
    parts = anatomy(shapes.known_config(name))
    whole, eight, four = (sketch(parts, bits=bits) for bits in (16, 8, 4))
    assert whole.stored_bytes / 2e9 == pytest.approx(shapes.NUM_WEIGHTS[name], rel=0.01)
    layers = [sum(layer.slot_bytes for layer in each.layers) for each in (whole, eight, four)]
    assert layers[1] / layers[0] == pytest.approx(8 / 16, rel=0.005)
    assert layers[2] / layers[0] == pytest.approx(4.127 / 16, rel=0.005)
    assert whole.rest_bytes == four.rest_bytes  # embedding, norm and head stay as they are
    assert (whole.decoded_bytes, four.decoded_bytes > 0) == (0, True)


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sketch_is_what_headers_tell(tmp_path, family, dtype):
    model = tiny.tiny_model(family)
    checkpoint = open_checkpoint(tiny.save(model, tmp_path))
    real = shape_of(outline(checkpoint, dtype=dtype), dtype)
    drawn = sketch(anatomy(model.config), dtype=dtype, stored=torch.float32)
    assert (real.num_weights, real.num_used, real.experts) == (drawn.num_weights, drawn.num_used, drawn.experts)
    assert len(real.layers) == len(drawn.layers)
    for ours, theirs in zip(drawn.layers, real.layers, strict=True):
        assert abs(ours.slot_bytes - theirs.slot_bytes) <= 3 * 4096  # files are read in whole blocks
    assert set(real.rest_bytes) == set(drawn.rest_bytes)


def test_experts_that_many_tokens_need():
    shape = sketch(anatomy(shapes.known_config("Qwen3 30B-A3B")))
    assert shape.experts == (128, 8)
    assert shape.distinct_experts(1) == pytest.approx(8)
    assert shape.distinct_experts(64) == pytest.approx(128 * (1 - (1 - 8 / 128) ** 64))
    assert shape.distinct_experts(10_000) == pytest.approx(128)
    assert shape.num_used == pytest.approx(3.0e9, rel=0.1)


@pytest.mark.parametrize("family", [*tiny.FAMILIES, "qwen2_moe", "granitemoe", "gpt2", "cohere"])
@pytest.mark.parametrize("bits", [8, 4])
def test_a_sketch_quantizes_what_a_pack_does(tmp_path, family, bits):
    model = tiny.tiny_model(family) if family in tiny.FAMILIES else own_model(family)
    source = open_checkpoint(tiny.save(model, tmp_path))
    announced, parts = packed_outline(source, encoding_for(bits)), anatomy(model.config)
    made = {
        target.removeprefix(f"{unit.name}.")
        for unit in announced.layers
        for recipe in unit.recipes
        for target in recipe.targets
        if recipe.sources[0].encoding is not None
    }
    assert {name for name, _ in parts.quantized} == made
    assert not any(word in name.split(".") for name in made for word in ("gate", "router", "shared_expert_gate"))
    packed, drawn = shape_of(announced, torch.float32), sketch(parts, bits=bits, dtype=torch.float32)
    # Files of a pack have a header of whole blocks, experts scales of their own.
    for ours, theirs in zip(drawn.layers, packed.layers, strict=True):
        assert ours.slot_bytes == pytest.approx(theirs.slot_bytes, abs=2 * 4096)


def own_model(family):
    """With what neither a few bits nor a linear layer's name tells: routers by other names, norms of matrices."""
    fields = {name: value for name, value in vars(tiny.tiny_config("llama")).items() if name in tiny._SHAPE}
    own = {
        "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
        "granitemoe": {"num_local_experts": 512},  # a router of 128 KiB
        "gpt2": {"n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": tiny.VOCAB},
        "cohere": {"use_qk_norm": True, "hidden_size": 1024, "num_attention_heads": 256, "num_key_value_heads": 256},
    }
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**fields, **own[family]}))


def test_weights_that_their_authors_have_quantized():
    parts = anatomy(shapes.known_config("Llama 3 8B"))
    whole, eight = sketch(parts), sketch(parts, stored_bits=8)
    assert sum(layer.slot_bytes for layer in eight.layers) == pytest.approx(
        sum(layer.slot_bytes for layer in whole.layers) / 2, rel=0.001
    )
    assert eight.rest_bytes == whole.rest_bytes
    assert eight.decoded_bytes == 4096 * 14336 * 2


_LATENT = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
_LATENT |= {"num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}


@pytest.mark.parametrize("family", [*tiny.FAMILIES, "deepseek_v2", "deepseek_v3"])
def test_keys_and_values_are_what_a_run_holds(family):
    if family in tiny.FAMILIES:
        config = tiny.tiny_config(family)
    else:
        config = AutoConfig.for_model(family, **{**tiny._SHAPE, **_LATENT, "moe_intermediate_size": 32})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    lm = CachedLM(model, 40)
    lm.prefill(np.arange(1, 11))
    held = sum(rows.nbytes for layer in lm._cache.layers for rows in (layer.keys, layer.values))
    assert kv_cache_bytes(config, 40, torch.float32) == held
