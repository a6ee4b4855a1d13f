"""GGUF targets: packed bytes stream from the file itself, and the logits are those of the weights dequantized."""

import gguf
import numpy as np
import pytest
import tiny
import torch
from gguf import GGMLQuantizationType as Kind
from tiny_gguf import logits_of, random_blocks, write_gguf
from transformers import AutoModelForCausalLM, GgufConfig

from offload.checkpoint import open_checkpoint
from offload.ggml import Ggml
from offload.load import load_model, outline
from offload.plan import plan

IDS = torch.tensor([[1, 5, 9, 200, 77, 4, 31, 8, 150, 42]])
QUANTIZABLE = [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.F16, Kind.F32]
RANDOM = [Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K]
WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 2}


def loaded(path, *, resident=0, dtype=torch.float32):
    checkpoint = open_checkpoint(path)
    attention = tiny.attention_of(checkpoint.config)
    layers = outline(checkpoint, dtype=dtype).layers
    chosen = plan(layers, fixed={}, limit_bytes=2**60, resident=resident)
    return load_model(checkpoint, chosen, dtype=dtype, attn_implementation=attention)


def dequantized(path, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        dtype=dtype,
        quantization_config=GgufConfig(dequantize=True),
        attn_implementation=tiny.attention_of(open_checkpoint(path).config),
    ).eval()


@pytest.mark.parametrize("kind", [*QUANTIZABLE, *RANDOM, Kind.BF16], ids=lambda kind: kind.name)
def test_every_type_against_the_gguf_package(kind):
    shape = (24, 512)
    if kind in RANDOM:
        blocks = random_blocks(shape, kind, seed=1)
    else:
        blocks = gguf.quants.quantize(np.random.default_rng(1).normal(size=shape).astype(np.float32), kind)
    expected = torch.from_numpy(np.array(gguf.quants.dequantize(blocks, kind)))
    payload = torch.from_numpy(np.array(blocks)).view(torch.uint8).flatten()
    for dtype in (torch.float32, torch.bfloat16):
        values = torch.empty(shape, dtype=dtype)
        Ggml(kind).decode(payload, (), values)
        assert torch.equal(values, expected.to(dtype))


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q5_1, Kind.Q4_K, Kind.F32], ids=lambda kind: kind.name)
def test_logits_are_those_of_the_dequantized_model(tmp_path, kind):
    path = write_gguf(tiny.tiny_model("llama", **WIDE), tmp_path / "model.gguf", kind)
    for dtype in (torch.float32, torch.bfloat16):
        expected = logits_of(dequantized(path, dtype), IDS)
        for resident in (0, 1, 2):
            with loaded(path, resident=resident, dtype=dtype) as target:
                for _ in range(2):
                    torch.testing.assert_close(logits_of(target.model, IDS), expected, rtol=1e-4, atol=1e-4)


LIKE_THE_DEFAULT = {"qwen3": {"head_dim": 128}, "qwen3_moe": {"moe_intermediate_size": 768, "mlp_only_layers": []}}


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "qwen3_moe"])
def test_families(tmp_path, family):
    model = tiny.tiny_model(family, **LIKE_THE_DEFAULT.get(family, {}))
    path = write_gguf(model, tmp_path / "model.gguf", Kind.Q8_0)
    with loaded(path, resident=1) as target:
        assert torch.allclose(logits_of(target.model, IDS), logits_of(dequantized(path), IDS), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_sizes_come_from_the_file(tmp_path, family):
    """transformers' reader leaves them at a default."""
    changes = {"mlp_only_layers": [], "norm_topk_prob": True} if family == "qwen3_moe" else {}
    model = tiny.tiny_model(family, **changes)
    with loaded(write_gguf(model, tmp_path / "model.gguf", Kind.F32)) as target:
        assert torch.allclose(logits_of(target.model, IDS), logits_of(model, IDS), rtol=1e-3, atol=1e-4)


def test_packed_bytes_travel(tmp_path):
    path = write_gguf(tiny.tiny_model("llama", **WIDE), tmp_path / "model.gguf", Kind.Q4_0)
    with loaded(path) as target:
        layer = target.outline.layers[0]
        num_values = sum(entry.num_values for recipe in layer.recipes for entry in recipe.sources)
        assert layer.slot_bytes < num_values * 4.5 / 8 + 2 * 4096 + 2 * 256 * 4
        assert layer.resident_bytes == layer.slot_bytes  # norms are fp32 in the file, as is the model
        assert {extent.file for extent in layer.extents} == {path}
        logits_of(target.model, IDS)
        assert all(target.model.get_parameter(name).is_meta for name in layer.packed)


def test_llama_3_rotary_scaling_is_read(tmp_path):
    scaling = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0}
    scaling |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    model = tiny.tiny_model("llama", rope_parameters=scaling)
    plain = tiny.tiny_model("llama").model.rotary_emb.inv_freq
    divisors = (plain / model.model.rotary_emb.inv_freq).numpy()
    path = write_gguf(model, tmp_path / "model.gguf", Kind.F32, {"rope_freqs.weight": divisors})
    with loaded(path) as target:
        torch.testing.assert_close(logits_of(target.model, IDS), logits_of(model, IDS), rtol=1e-4, atol=1e-4)
    write_gguf(model, path, Kind.F32, {"rope_freqs.weight": divisors[::-1].copy()})
    with pytest.raises(ValueError, match="rotary"):
        open_checkpoint(path)


def test_split_into_several_files(tmp_path):
    model = tiny.tiny_model("llama", **WIDE)
    whole = write_gguf(model, tmp_path / "whole.gguf", Kind.Q8_0)
    write_gguf(model, tmp_path / "split.gguf", Kind.Q8_0, split_max_tensors=8)
    files = sorted(tmp_path.glob("split-*"))
    assert len(files) > 2
    with loaded(whole) as one, loaded(files[0]) as several:
        assert torch.equal(logits_of(one.model, IDS), logits_of(several.model, IDS))
    with pytest.raises(ValueError, match="first file"):
        open_checkpoint(files[1])
    files[1].unlink()
    with pytest.raises(FileNotFoundError, match=files[1].name):
        open_checkpoint(files[0])


def test_what_is_refused(tmp_path):
    path = write_gguf(tiny.tiny_model("llama", **WIDE), tmp_path / "model.gguf", Kind.Q4_0)
    whole = path.read_bytes()
    for cut in (10, 1000, len(whole) - 5):
        path.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match=r"model\.gguf") as caught:
            open_checkpoint(path)
        assert "\n" not in str(caught.value)
    path.write_bytes(whole.replace(b"llama", b"lluma"))
    with pytest.raises(ValueError, match="'lluma'"):
        open_checkpoint(path)
    path.write_bytes(whole.replace(b"attn_output", b"attn_outpot", 1))
    with pytest.raises(ValueError, match="lacks"):
        outline(open_checkpoint(path))
