"""What a directory must hold to be a checkpoint, and what is said when it does not."""

import json
import struct

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from offload.checkpoint import open_checkpoint, read_header


@pytest.fixture
def sharded(tmp_path):
    """A llama in several shards with an index."""
    return tiny.save(tiny.tiny_model("llama"), tmp_path / "model", max_shard_size="150KB")


def shards_of(directory):
    return sorted(directory.glob("*.safetensors"))


def edit_index(directory, change):
    file = directory / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    change(index["weight_map"])
    file.write_text(json.dumps(index))


def edit_config(directory, **changes):
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def message_of(error, directory):
    with pytest.raises(error) as caught:
        open_checkpoint(directory)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_entries_are_where_the_bytes_are(sharded):
    checkpoint = open_checkpoint(sharded)
    assert len({entry.file for entry in checkpoint.tensors.values()}) == len(shards_of(sharded)) > 2
    for shard in shards_of(sharded):
        for name, tensor in load_file(shard).items():
            entry = checkpoint.tensors[name]
            raw = entry.file.read_bytes()[entry.offset : entry.offset + entry.nbytes]
            assert raw == tensor.contiguous().view(torch.uint8).numpy().tobytes()
            assert (entry.dtype, entry.shape) == (tensor.dtype, tuple(tensor.shape))


def test_index_is_not_needed(sharded):
    with_index = open_checkpoint(sharded).tensors
    (sharded / "model.safetensors.index.json").unlink()
    assert open_checkpoint(sharded).tensors == with_index


def test_single_file_and_generation_config(tmp_path):
    directory = tiny.save(tiny.tiny_model("qwen2"), tmp_path)
    checkpoint = open_checkpoint(directory)
    assert {entry.file.name for entry in checkpoint.tensors.values()} == {"model.safetensors"}
    assert checkpoint.generation_config.eos_token_id == 2
    assert checkpoint.dtype == torch.float32


def test_language_part_of_a_larger_model(tmp_path):
    directory = tiny.save(tiny.tiny_model("gemma3_text"), tmp_path)
    text = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    tensors = {f"language_model.{name}": tensor for name, tensor in load_file(directory / "model.safetensors").items()}
    save_file({**tensors, "vision_tower.weight": torch.zeros(3)}, directory / "model.safetensors")
    checkpoint = open_checkpoint(directory)
    assert checkpoint.config.model_type == "gemma3_text"
    assert set(checkpoint.tensors) == {name.removeprefix("language_model.") for name in tensors}


@pytest.mark.parametrize("cut", [1, 5000, 10**9])
def test_shard_cut_short(sharded, cut):
    victim = shards_of(sharded)[1]
    whole = victim.stat().st_size
    with victim.open("r+b") as file:
        file.truncate(max(0, whole - cut))
    message = message_of(ValueError, sharded)
    assert victim.name in message
    if cut <= 5000:
        assert f"{whole:,}" in message
        assert f"{whole - cut:,}" in message


def test_shard_too_long(sharded):
    victim = shards_of(sharded)[0]
    with victim.open("ab") as file:
        file.write(b"more")
    assert victim.name in message_of(ValueError, sharded)


def test_missing_shard(sharded):
    victim = shards_of(sharded)[1]
    victim.unlink()
    assert victim.name in message_of(FileNotFoundError, sharded)


def test_index_names_the_wrong_shard(sharded):
    first, second = (shard.name for shard in shards_of(sharded)[:2])

    def move(names):
        victim = next(name for name, shard in names.items() if shard == first)
        names[victim] = second

    edit_index(sharded, move)
    assert second in message_of(ValueError, sharded)


def test_index_names_a_tensor_that_is_nowhere(sharded):
    edit_index(sharded, lambda names: names.update({"model.ghost": shards_of(sharded)[0].name}))
    assert "model.ghost" in message_of(ValueError, sharded)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}'])
def test_index_unreadable(sharded, text):
    (sharded / "model.safetensors.index.json").write_text(text)
    assert "index" in message_of(ValueError, sharded)


@pytest.mark.parametrize(
    "fields",
    [
        {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
        {"dtype": "F99", "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]},
        {"dtype": "F32"},
        None,
    ],
)
def test_header_that_contradicts_its_file(tmp_path, fields):
    header = json.dumps({"x": fields}).encode()
    file = tmp_path / "odd.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    with pytest.raises(ValueError, match=r"odd\.safetensors"):
        read_header(file)


def test_tensor_stored_twice(sharded):
    (sharded / "model.safetensors.index.json").unlink()
    tensors = load_file(shards_of(sharded)[0])
    save_file(dict(list(tensors.items())[:1]), sharded / "zz.safetensors")
    assert "zz.safetensors" in message_of(ValueError, sharded)


def test_not_a_checkpoint(tmp_path, sharded):
    assert "nowhere" in message_of(FileNotFoundError, tmp_path / "nowhere")
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    assert "model.gguf" in message_of(ValueError, file)
    (tmp_path / "empty").mkdir()
    assert "config.json" in message_of(FileNotFoundError, tmp_path / "empty")
    for shard in shards_of(sharded):
        shard.unlink()
    (sharded / "model.safetensors.index.json").unlink()
    assert "safetensors" in message_of(FileNotFoundError, sharded)


def test_unknown_architecture(sharded):
    edit_config(sharded, model_type="no_such_model")
    assert "no_such_model" in message_of(ValueError, sharded)


def test_not_a_causal_model(sharded):
    edit_config(sharded, model_type="vit")
    assert "causal" in message_of(ValueError, sharded)


def test_already_quantized(sharded):
    edit_config(sharded, quantization_config={"quant_method": "awq", "bits": 4})
    assert "awq" in message_of(ValueError, sharded)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"model_type": "mamba"}, "recurrent"),
        ({"model_type": "lfm2", "layer_types": ["conv", "full_attention"] * 2}, "conv"),
        ({"model_type": "qwen3_next"}, "linear_attention"),
    ],
)
def test_recurrent_layers_are_refused_by_name(sharded, changes, word):
    edit_config(sharded, **changes)
    assert word in message_of(ValueError, sharded)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": None}, ["hidden_size", "NoneType"]),
        ({"hidden_size": "big"}, ["hidden_size", "'big'"]),
        ({"num_attention_heads": 0}, ["zero"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers is 0", "1 or more"]),
        ({"quantization_config": 3}, ["to_dict"]),
        ({"model_type": "gemma3n_text", "intermediate_size": [96] * 4}, ["intermediate_size is [96, 96", "one number"]),
        ({"model_type": "gemma4_text", "global_head_dim": 32, "head_dim": 16}, ["head_dim", "one size"]),
    ],
)
def test_a_wrong_value_in_a_config_is_named(sharded, changes, words):
    edit_config(sharded, **changes)
    message = message_of(ValueError, sharded)
    assert all(word in message for word in ["config.json", *words]), message
