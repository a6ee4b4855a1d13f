"""Gated MLPs whose inner values share memory give bit for bit what the family's own class gives."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from tiny import FAMILIES, VOCAB, tiny_model
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextMLP
from transformers.models.llama.modeling_llama import LlamaMLP

import offload.gated
from offload.gated import has_formula, reuse_inner
from offload.heap import LARGE_BYTES
from offload.load import decoder_layers
from offload.product import put_weights_first

GATED = {"llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "olmo2"}


@pytest.mark.parametrize("large_bytes", [0, LARGE_BYTES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_bitwise_equal(family, dtype, large_bytes, monkeypatch):
    monkeypatch.setattr(offload.gated, "LARGE_BYTES", large_bytes)
    model = tiny_model(family).to(dtype)
    put_weights_first(model)
    ids = torch.arange(3, 53)[None] % VOCAB
    _, layers = decoder_layers(model)
    with torch.inference_mode():
        expected, of_few = model(input_ids=ids).logits, model(input_ids=ids[:, :7]).logits
        reuse_inner(layers)
        assert torch.equal(model(input_ids=ids).logits, expected)
        assert torch.equal(model(input_ids=ids[:, :7]).logits, of_few)
    with torch.no_grad():  # memory first taken in inference mode may be written to here
        assert torch.equal(model(input_ids=ids).logits, expected)
    assert family not in GATED or all("forward" in vars(layer.mlp) for layer in layers)


def test_biases(monkeypatch):
    monkeypatch.setattr(offload.gated, "LARGE_BYTES", 0)
    model = tiny_model("llama", mlp_bias=True)
    put_weights_first(model)
    _, layers = decoder_layers(model)
    rows = torch.randn(1, 9, model.config.hidden_size)
    with torch.inference_mode():
        expected = layers[0].mlp(rows)
        reuse_inner(layers)
        assert torch.equal(layers[0].mlp(rows), expected)


def test_another_formula_is_left_alone():
    model = tiny_model("llama")
    mlp = decoder_layers(model)[1][0].mlp
    assert has_formula(mlp)
    mlp.gate_proj = torch.nn.Sequential(mlp.gate_proj)
    assert not has_formula(mlp)
    assert Gemma3nTextMLP.forward.__code__.co_names != LlamaMLP.forward.__code__.co_names
    assert not has_formula(None) and not has_formula(torch.nn.Identity())


def test_threads_do_not_meet(monkeypatch):
    monkeypatch.setattr(offload.gated, "LARGE_BYTES", 0)
    model = tiny_model("llama")
    put_weights_first(model)
    mlp = decoder_layers(model)[1][0].mlp
    rows = torch.randn(2, 1, 9, model.config.hidden_size)
    with torch.no_grad():
        expected = [mlp(each) for each in rows]
    both = Barrier(2)
    act = mlp.act_fn.forward

    def wait(gated):
        both.wait(60)  # each has put its gate's product in place before the other goes on
        return act(gated)

    mlp.act_fn = torch.nn.Module()
    mlp.act_fn.forward = wait
    reuse_inner(decoder_layers(model)[1])

    def run(each):
        with torch.no_grad():
            return mlp(each)

    with ThreadPoolExecutor(2) as pool:
        for found, wanted in zip(pool.map(run, rows), expected, strict=True):
            assert torch.equal(found, wanted)
