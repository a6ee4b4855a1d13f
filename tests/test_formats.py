"""Checkpoints quantized by others: decoded layer by layer, or refused by name; and overflow in float16."""

import json
import shutil

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from tiny_gguf import logits_of
from transformers import AutoModelForCausalLM

from app.blueprint import draw_up
from offload.checkpoint import open_checkpoint
from offload.load import load_model, outline
from offload.pack import open_pack
from offload.plan import plan
from offload.quantize import Nf4

IDS = torch.tensor([[1, 5, 9, 200, 77, 4, 31, 8, 150, 42]])
LINEAR = "_proj.weight"


def loaded(path, *, resident=0, dtype=torch.float32):
    checkpoint = open_checkpoint(path)
    layers = outline(checkpoint, dtype=dtype).layers
    chosen = plan(layers, fixed={}, limit_bytes=2**60, resident=resident)
    return load_model(checkpoint, chosen, dtype=dtype)


def requantized(directory, quantization, encode, family="llama", **changes):
    """Two checkpoints of one model: linear weights as `encode(weight)` stores them, and as what that stands for."""
    packed = tiny.save(tiny.tiny_model(family, hidden_size=160, **changes), directory / "packed")
    tensors = load_file(packed / "model.safetensors")
    plain = dict(tensors)
    for name, weight in list(tensors.items()):
        if name.endswith(LINEAR):
            del tensors[name]
            stored, plain[name] = encode(weight)
            tensors |= {name.replace("weight", leaf): tensor.contiguous() for leaf, tensor in stored.items()}
    config = json.loads((packed / "config.json").read_text())
    (directory / "plain").mkdir()
    (directory / "plain" / "config.json").write_text(json.dumps(config))
    save_file(plain, directory / "plain" / "model.safetensors", metadata={"format": "pt"})
    (packed / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    save_file(tensors, packed / "model.safetensors", metadata={"format": "pt"})
    return packed, directory / "plain"


def spread(scale, block, shape):
    return scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[: shape[0], : shape[1]]


def fp8_blocks(weight, block=(128, 128)):
    rows, columns = (-(-size // each) for size, each in zip(weight.shape, block, strict=True))
    scale = torch.rand(rows, columns) * 0.01 + 0.001
    spreaded = spread(scale, block, weight.shape)
    values = (weight / spreaded).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": values, "weight_scale_inv": scale}, values.float() * spreaded


def fp8_rows(weight):
    scale = weight.abs().amax(1, keepdim=True) / 448
    values = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": values, "weight_scale": scale, "input_scale": torch.ones(1)}, values.float() * scale


def fp8_tensor(weight):
    scale = weight.abs().max() / 448
    values = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": values, "weight_scale": scale}, values.float() * scale


def int8_rows(weight):
    scale = weight.abs().amax(1, keepdim=True) / 120
    zero = torch.randint(-7, 8, scale.shape, dtype=torch.int8)
    values = ((weight / scale).round() + zero).to(torch.int8)
    return {"weight": values, "weight_scale": scale, "weight_zero_point": zero}, (values.float() - zero) * scale


def packed_along(values, axis):
    """Unsigned 4-bit values, eight to an int32, lowest first."""
    values = values.movedim(axis, -1).to(torch.int64).unflatten(-1, (-1, 8))
    words = (values << torch.arange(0, 32, 4)).sum(-1)
    return words.to(torch.int32).movedim(-1, axis).contiguous()


def int4_groups(weight, symmetric=True):
    scale = weight.unflatten(1, (-1, 32)).abs().amax(2) / 7
    zero = torch.full(scale.shape, 8) if symmetric else torch.randint(5, 11, scale.shape)
    wide = [spread(each, (1, 32), weight.shape) for each in (scale, zero)]
    values = ((weight / wide[0]).round() + wide[1]).clamp(0, 15)
    stored = {"weight_packed": packed_along(values, 1), "weight_scale": scale, "weight_shape": torch.tensor([1, 2])}
    if not symmetric:
        stored["weight_zero_point"] = packed_along(zero, 0)
    return stored, (values - wide[1]) * wide[0]


def compressed(form, **weights):
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
FP8_ROWS = compressed("float-quantized", num_bits=8, type="float", strategy="channel")
INT8 = compressed("int-quantized", num_bits=8, type="int", strategy="channel", symmetric=False)
INT4 = compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32)


@pytest.mark.parametrize(
    ("quantization", "encode"),
    [
        (FP8, fp8_blocks),
        ({**FP8, "weight_block_size": None}, fp8_tensor),
        (FP8_ROWS, fp8_rows),
        (INT8, int8_rows),
        (INT4, int4_groups),
        (INT4, lambda weight: int4_groups(weight, symmetric=False)),
    ],
    ids=["fp8 blocks", "fp8 tensor", "fp8 rows", "int8 rows", "int4 groups", "int4 groups with zero points"],
)
def test_decoded_layer_by_layer(tmp_path, quantization, encode):
    packed, plain = requantized(tmp_path, quantization, encode)
    expected = logits_of(AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32), IDS)
    for resident in (0, 2, 4):
        with loaded(packed, resident=resident) as target:
            assert target.outline.layers[0].packed
            for _ in range(2):
                torch.testing.assert_close(logits_of(target.model, IDS), expected, rtol=1e-4, atol=1e-4)


def test_fp8_experts(tmp_path):
    packed, plain = requantized(tmp_path, FP8, fp8_blocks, family="mixtral")
    tensors = load_file(packed / "model.safetensors")
    assert not any("experts" in name and "scale" in name for name in tensors)  # w1, w2, w3: another name, done here
    dense = load_file(plain / "model.safetensors")
    for name, weight in list(tensors.items()):
        if ".experts." in name:
            stored, dense[name] = fp8_blocks(weight)
            tensors |= {name.replace("weight", leaf): tensor for leaf, tensor in stored.items()}
    save_file(tensors, packed / "model.safetensors", metadata={"format": "pt"})
    save_file(dense, plain / "model.safetensors", metadata={"format": "pt"})
    expected = logits_of(AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32), IDS)
    with loaded(packed, resident=1) as target:
        torch.testing.assert_close(logits_of(target.model, IDS), expected, rtol=1e-4, atol=1e-4)


def test_bytes_that_travel(tmp_path):
    packed, _ = requantized(tmp_path, FP8, fp8_blocks)
    layer = outline(open_checkpoint(packed)).layers[0]
    num_values = sum(entry.num_values for recipe in layer.recipes for entry in recipe.sources)
    assert num_values < layer.slot_bytes < 1.05 * num_values + 4 * 4096
    assert layer.unpacked_bytes == 160 * 160 * 4 or layer.unpacked_bytes == 160 * 96 * 4


def test_never_quantized_twice(tmp_path):
    packed, _ = requantized(tmp_path, FP8, fp8_blocks)
    with pytest.raises(ValueError, match=r"already quantized \(fp8\): leave out --bits"):
        open_pack(open_checkpoint(packed), tmp_path / "pack", Nf4())
    assert not (tmp_path / "pack").exists()


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "awq", "bits": 4},
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {"quant_method": "mxfp4"},
        {"quant_method": "fp8", "expert_dtype": "fp4"},
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": {}},
        {**INT4, "sparsity_config": {"format": "sparse-24-bitmask"}},
        {**INT4, "config_groups": {**INT4["config_groups"], "group_1": {"weights": {"num_bits": 8, "type": "int"}}}},
        {},
    ],
    ids=lambda quantization: str(quantization.get("quant_method")),
)
def test_others_are_refused_by_name(tmp_path, quantization):
    directory = tiny.save(tiny.tiny_model("llama"), tmp_path)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": quantization or {"bits": 3}}))
    with pytest.raises(ValueError, match="already quantized") as caught:
        open_checkpoint(directory)
    assert quantization.get("quant_method", "unknown") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_scale_that_is_missing(tmp_path):
    packed, _ = requantized(tmp_path, FP8, fp8_blocks)
    tensors = load_file(packed / "model.safetensors")
    del tensors["model.layers.2.mlp.up_proj.weight_scale_inv"]
    save_file(tensors, packed / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"layers\.2\.mlp\.up_proj\.weight has no scale"):
        open_checkpoint(packed)


@pytest.mark.parametrize("resident", [0, 2, 4])
def test_overflow_in_float16_names_the_layer(tmp_path, resident):
    model = tiny.tiny_model("llama")
    model.model.layers[2].mlp.down_proj.weight.mul_(1e6)
    tiny.save(model.bfloat16(), tmp_path)
    with loaded(tmp_path, resident=resident, dtype=torch.float16) as target:
        for _ in range(2):
            with pytest.raises(FloatingPointError, match=r"model\.layers\.2 .* --dtype float32"):
                logits_of(target.model, IDS)
    with loaded(tmp_path, resident=resident, dtype=torch.float32) as target:
        assert torch.isfinite(logits_of(target.model, IDS)).all()


def test_float16_without_overflow_is_left_alone(tmp_path):
    tiny.save(tiny.tiny_model("llama").half(), tmp_path)
    expected = logits_of(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float16), IDS)
    with loaded(tmp_path, dtype=torch.float16) as target:
        torch.testing.assert_close(logits_of(target.model, IDS), expected, rtol=1e-4, atol=1e-4)


def scaled_in_bf16(encode):
    def encoded(weight):
        stored, values = encode(weight)
        return {**stored, "weight_scale": stored["weight_scale"].bfloat16()}, values

    return encoded


@pytest.mark.parametrize(
    ("quantization", "encode"),
    [(FP8, fp8_blocks), (FP8_ROWS, fp8_rows), (INT8, int8_rows), (INT4, scaled_in_bf16(int4_groups))],
    ids=["fp8", "fp8 rows", "int8", "int4"],
)
def test_a_config_alone_tells_the_bytes_that_headers_tell(tmp_path, quantization, encode):
    packed, _ = requantized(tmp_path, quantization, encode, intermediate_size=1024)
    (tmp_path / "described").mkdir()
    shutil.copy(packed / "config.json", tmp_path / "described")
    here, described = (draw_up(str(path), offline=True) for path in (packed, tmp_path / "described"))
    assert (described.describe(16), described.is_packed) == (here.describe(16), True)
    drawn, real = (each.shape(16, torch.float32) for each in (described, here))
    for ours, theirs in zip(drawn.layers, real.layers, strict=True):
        # Scales of rows as narrow as these are not nothing, and files are read in whole blocks.
        assert abs(ours.slot_bytes - theirs.slot_bytes) < 0.03 * theirs.slot_bytes + 3 * 4096
    assert drawn.decoded_bytes == real.decoded_bytes
    assert described.copies(16, torch.float32)[0].stored_bytes == described.plain(torch.float32).stored_bytes
    with pytest.raises(ValueError, match="already quantized .*: leave out --bits"):
        described.shape(4, torch.float32)
