"""An offloaded model is the plain model: same logits for every family, placement and number of slots."""

import gc
import threading
from pathlib import Path

import pytest
import tiny
import torch
from bitsandbytes.functional import get_4bit_type
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from offload.checkpoint import open_checkpoint
from offload.hardware import measure_read_bps, peak_rss_bytes, probe
from offload.load import load_model, outline
from offload.plan import plan
from offload.product import put_weights_first
from offload.quantize import nf4_matrices, nf4_roundtrip

IDS = torch.randint(3, tiny.VOCAB, (2, 24), generator=torch.Generator().manual_seed(1))
SHARD = "200KB"


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


def loaded(checkpoint, *, resident=0, num_slots=2, tier="disk", dtype=None, **options):
    layers = outline(checkpoint, dtype=dtype).layers
    ram_bytes = 10**12 if tier == "ram" else None
    chosen = plan(layers, fixed={}, limit_bytes=10**12, num_slots=num_slots, resident=resident, ram_bytes=ram_bytes)
    return load_model(checkpoint, chosen, dtype=dtype, **options)


@torch.no_grad()
def logits(model, ids=IDS):
    put_weights_first(model)  # the oracle's sums run the same way, so that equality can be exact
    return model(ids).logits


@pytest.fixture(scope="module", params=tiny.FAMILIES)
def saved(request, tmp_path_factory):
    """A checkpoint of one family, and the plain model's logits."""
    directory = tiny.save(tiny.tiny_model(request.param), tmp_path_factory.mktemp("model"), max_shard_size=SHARD)
    return open_checkpoint(directory), logits(AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32))


@pytest.fixture
def llama(tmp_path):
    """A llama in several shards."""
    return open_checkpoint(tiny.save(tiny.tiny_model("llama"), tmp_path, max_shard_size="100KB"))


@pytest.mark.parametrize("tier", ["disk", "ram"])
@pytest.mark.parametrize("resident", [0, 2, 3, 4])
def test_logits_are_the_plain_models(saved, resident, tier):
    checkpoint, expected = saved
    for num_slots in (1, 2, 3):
        with loaded(checkpoint, resident=resident, num_slots=num_slots, tier=tier) as target:
            for _ in range(3):
                assert torch.equal(logits(target.model), expected)


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sixteen_bits_at_rest(tmp_path, family, dtype):
    directory = tiny.save(tiny.tiny_model(family).bfloat16(), tmp_path, max_shard_size=SHARD)
    expected = logits(AutoModelForCausalLM.from_pretrained(directory, dtype=dtype))
    for resident in (0, 2, 4):
        with loaded(open_checkpoint(directory), resident=resident, dtype=dtype) as target:
            assert target.model.dtype == dtype
            assert torch.equal(logits(target.model), expected)
            assert torch.equal(logits(target.model), expected)


def test_ordinary_model(saved):
    checkpoint, _ = saved
    plain = AutoModelForCausalLM.from_pretrained(checkpoint.path, dtype=torch.float32)
    with loaded(checkpoint, resident=1) as target:
        model = target.model
        assert type(model) is type(plain)
        assert not model.training
        assert not any(parameter.requires_grad for parameter in model.parameters())
        assert model.generation_config.to_dict() == plain.generation_config.to_dict()
        tied = plain.lm_head.weight is plain.model.embed_tokens.weight
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
        ours, theirs = dict(model.named_buffers()), dict(plain.named_buffers())
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
        greedy = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(IDS)}
        assert torch.equal(model.generate(IDS, **greedy), plain.generate(IDS, **greedy))


def test_counters(llama):
    with loaded(llama) as target:
        per_pass = sum(unit.slot_bytes for i, unit in enumerate(target.outline.layers) if i in target.plan.streamed)
        assert per_pass == target.plan.streamed_bytes
        for _ in range(3):
            logits(target.model)
        assert target.streamer.passes == 3
        assert target.streamer.streamed_bytes >= 3 * per_pass
        assert target.streamer.read_s > 0


def test_tensors_at_odd_addresses(llama):
    """A header that is no multiple of the type's size leaves every tensor unaligned."""
    expected = logits(AutoModelForCausalLM.from_pretrained(llama.path, dtype=torch.float32))
    for file in llama.path.glob("*.safetensors"):
        content = file.read_bytes()
        length = int.from_bytes(content[:8], "little")
        file.write_bytes((length + 1).to_bytes(8, "little") + content[8 : 8 + length] + b" " + content[8 + length :])
    for resident in (0, 2, 4):
        with loaded(open_checkpoint(llama.path), resident=resident) as target:
            assert torch.equal(logits(target.model), expected)


@pytest.mark.parametrize("change", [0.0, 1.0])
def test_head_stored_beside_the_embedding_it_is_tied_to(tmp_path, change):
    directory = tiny.save(tiny.tiny_model("qwen2"), tmp_path)
    tensors = load_file(directory / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + change
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    expected = logits(AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32))
    with loaded(open_checkpoint(directory)) as target:
        assert torch.equal(logits(target.model), expected)


def thrice(model):
    return [logits(model) for _ in range(3)]


@pytest.mark.parametrize("resident", [0, 1])
def test_file_that_shrinks_in_use_is_named_and_forgiven(llama, resident):
    with loaded(llama, resident=resident) as target:
        expected = logits(target.model)
        contents = {file: file.read_bytes() for file in llama.path.glob("*.safetensors")}
        for file in contents:
            with file.open("r+b") as stream:
                stream.truncate(100)
        with pytest.raises(OSError, match=r"\.safetensors") as caught:
            thrice(target.model)
        assert "\n" not in str(caught.value)
        for file, content in contents.items():
            with file.open("r+b") as stream:
                stream.write(content)
        for _ in range(2):
            assert torch.equal(logits(target.model), expected)


def test_files_deleted_in_use_do_no_harm(llama):
    with loaded(llama) as target:
        expected = logits(target.model)
        for file in llama.path.glob("*.safetensors"):
            file.unlink()
        assert torch.equal(logits(target.model), expected)


def test_file_deleted_before_loading_is_named(llama):
    victim = sorted(llama.path.glob("*.safetensors"))[0]
    victim.unlink()
    threads, files = threading.active_count(), open_files()
    with pytest.raises(FileNotFoundError, match=victim.name):
        loaded(llama)
    assert (threading.active_count(), open_files()) == (threads, files)


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_interrupted_pass_leaves_the_next_one_right(llama, interrupt, num_slots):
    with loaded(llama, resident=1, num_slots=num_slots) as target:
        expected = logits(target.model)
        for i in range(4):

            def stop(*_, kind=interrupt):
                raise kind

            for module in (target.model.model.layers[i], target.model.model.layers[i].mlp):
                hook = module.register_forward_pre_hook(stop)
                with pytest.raises(interrupt):
                    logits(target.model)
                hook.remove()
                assert torch.equal(logits(target.model), expected)


def test_a_layer_called_alone(llama):
    plain = AutoModelForCausalLM.from_pretrained(llama.path, dtype=torch.float32)
    put_weights_first(plain)
    hidden = torch.randn(1, 5, 64)
    positions = plain.model.rotary_emb(hidden, torch.arange(5)[None])
    with loaded(llama) as target, torch.no_grad():
        for i in (2, 0, 3, 3, 1):
            layers = plain.model.layers[i], target.model.model.layers[i]
            expected, found = (layer(hidden, position_embeddings=positions) for layer in layers)
            assert torch.equal(found, expected)
        assert torch.equal(logits(target.model), logits(plain))


@pytest.mark.parametrize("tier", ["disk", "ram"])
def test_nothing_is_left_behind(llama, tier):
    gc.collect()
    threads, files = threading.active_count(), open_files()
    target = loaded(llama, tier=tier)
    logits(target.model)
    target.close()
    target.close()
    assert (threading.active_count(), open_files()) == (threads, files)
    with pytest.raises(RuntimeError, match="closed"):
        logits(target.model)
    dropped = loaded(llama, tier=tier)
    logits(dropped.model)
    del dropped
    gc.collect()
    assert (threading.active_count(), open_files()) == (threads, files)


def test_self_draft_shares_the_rest_and_quantizes_the_layers(saved):
    checkpoint, _ = saved
    seen = []
    with loaded(checkpoint) as target:
        draft = loaded(checkpoint, resident=4, share=target, transform=nf4_matrices, progress=lambda *x: seen.append(x))
        assert draft.model.model.embed_tokens.weight.data_ptr() == target.model.model.embed_tokens.weight.data_ptr()
        assert draft.model.lm_head.weight.data_ptr() == target.model.lm_head.weight.data_ptr()
    plain = AutoModelForCausalLM.from_pretrained(checkpoint.path, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in plain.model.layers.named_parameters():
            parameter.copy_(nf4_matrices(name, parameter))
    assert torch.equal(logits(draft.model), logits(plain))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1]


@pytest.mark.parametrize("resident", [1, 2, 3])
def test_self_draft_shares_resident_layers_and_quantizes_streamed_ones(saved, resident):
    checkpoint, expected = saved
    with loaded(checkpoint, resident=resident) as target:
        draft = loaded(checkpoint, resident=4, share=target, transform=nf4_matrices)
        layers = list(zip(target.model.model.layers, draft.model.model.layers, strict=True))
        assert [i for i, (theirs, mine) in enumerate(layers) if mine is theirs] == list(target.plan.resident)
        plain = AutoModelForCausalLM.from_pretrained(checkpoint.path, dtype=torch.float32)
        with torch.no_grad():
            for i in target.plan.streamed:
                for name, parameter in plain.model.layers[i].named_parameters():
                    parameter.copy_(nf4_matrices(name, parameter))
        for _ in range(2):
            assert torch.equal(logits(draft.model), logits(plain))
            assert torch.equal(logits(target.model), expected)


def test_shared_layers_may_be_held_in_fewer_bytes(tmp_path):
    checkpoint = open_checkpoint(tiny.save(tiny.tiny_model("llama").bfloat16(), tmp_path))
    seen = []
    with loaded(checkpoint, resident=2, dtype=torch.float32) as target:
        draft = loaded(
            checkpoint,
            resident=4,
            dtype=torch.float32,
            share=target,
            transform=nf4_matrices,
            progress=lambda *now: seen.append(now),
        )
        assert target.outline.layers[0].packed
        assert seen[-1] == (sum(target.outline.layers[i].slot_bytes for i in target.plan.streamed),) * 2
        plain = AutoModelForCausalLM.from_pretrained(checkpoint.path, dtype=torch.bfloat16)
        with torch.no_grad():
            for i in target.plan.streamed:
                for name, parameter in plain.model.layers[i].named_parameters():
                    parameter.copy_(nf4_matrices(name, parameter))
        assert torch.equal(logits(draft.model), logits(plain.float()))


@pytest.mark.parametrize("tier", ["disk", "ram"])
def test_progress_ends_at_all_bytes(llama, tier):
    seen = []
    with loaded(llama, resident=2, tier=tier, progress=lambda *now: seen.append(now)):
        assert len(seen) == 3 + (2 if tier == "disk" else 4)
        assert seen[-1][0] == seen[-1][1]
        assert all(total == seen[0][1] for _, total in seen)


def test_layers_from_ram_and_from_disk_in_one_pass(saved):
    checkpoint, expected = saved
    layers = outline(checkpoint).layers
    room = sum(unit.slot_bytes for unit in layers) - 1
    chosen = plan(layers, fixed={}, limit_bytes=10**12, resident=0, ram_bytes=room)
    assert {*chosen.tiers} == {"ram", "disk"}
    assert 0 < chosen.ram_bytes < chosen.streamed_bytes
    with load_model(checkpoint, chosen) as target:
        for _ in range(3):
            assert torch.equal(logits(target.model), expected)


def test_sharing_needs_one_dtype(llama):
    with loaded(llama) as target, pytest.raises(ValueError, match=r"cannot share .* one dtype"):
        loaded(llama, resident=4, dtype=torch.bfloat16, share=target)


@pytest.mark.parametrize("shape", [(64, 64), (3, 5), (2, 32, 48), (7, 130), (4, 96), (1100, 1024)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nf4_against_a_plain_oracle(shape, dtype):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    levels = get_4bit_type("nf4", device="cpu")
    flat = weight.float().flatten()
    blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % 64)).view(-1, 64)
    scale = blocks.abs().amax(1, keepdim=True)
    nearest = (blocks[..., None] / scale[..., None] - levels).abs().argmin(-1)
    expected = (levels[nearest] * scale).flatten()[: flat.numel()].view(shape).to(dtype)
    found = nf4_roundtrip(weight)
    assert (found.dtype, found.shape) == (weight.dtype, weight.shape)
    assert torch.allclose(found.float(), expected.float(), rtol=1e-2, atol=1e-6)
    assert torch.equal(weight, torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype))


def test_probe_and_rates(llama):
    hardware = probe()
    assert 0 < hardware.base_bytes <= peak_rss_bytes()
    assert 0 < hardware.free_bytes <= hardware.total_bytes
    files = sorted({entry.file for entry in llama.tensors.values()})
    assert measure_read_bps(files, most_bytes=1 << 20) > 0
