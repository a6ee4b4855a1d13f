"""Packs: what is in them, that nothing damaged, stale or half-made is ever used, and that work is not done twice."""

import json
import multiprocessing
import os
import random
import shutil
import subprocess
import time
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file
from tiny_gguf import logits_of, write_gguf
from transformers import AutoModelForCausalLM

from offload import pack
from offload.checkpoint import open_checkpoint
from offload.hardware import peak_rss_bytes
from offload.load import load_model, outline
from offload.manifest import read_manifest
from offload.pack import open_pack, packed_outline
from offload.plan import plan
from offload.quantize import Int8, Nf4

PATIENCE_S = 300  # for a process that has to import torch first
IDS = torch.tensor([[1, 5, 9, 200, 77, 4, 31, 8, 150, 42]])
ENCODINGS = [Nf4(), Nf4(double_quant=False), Int8()]
FEW = pytest.mark.parametrize("encoding", ENCODINGS, ids=str)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    directory = tmp_path_factory.mktemp("llama")
    return open_checkpoint(tiny.save(tiny.tiny_model("llama"), directory, max_shard_size="150KB"))


def loaded(checkpoint, *, resident=0, tier="disk", dtype=torch.float32):
    attention = tiny.attention_of(checkpoint.config)
    layers = outline(checkpoint, dtype=dtype).layers
    ram_bytes = 2**60 if tier == "ram" else None
    chosen = plan(layers, fixed={}, limit_bytes=2**60, resident=resident, ram_bytes=ram_bytes)
    return load_model(checkpoint, chosen, dtype=dtype, attn_implementation=attention)


def dense_logits(source, encoding, checkpoint):
    """Of transformers' own model, its matrices rounded by `encoding`."""
    attention = tiny.attention_of(source.config)
    model = AutoModelForCausalLM.from_pretrained(source.path, dtype=torch.float32, attn_implementation=attention)
    with loaded(checkpoint, resident=source.config.num_hidden_layers) as target:
        for unit in target.outline.layers:
            for recipe in unit.recipes:
                for name in recipe.targets:
                    if name in unit.packed:
                        rounded = [_rounded(encoding, source, entry) for entry in recipe.sources]
                        parameter = model.get_parameter(name)
                        _fill(recipe, model, parameter, rounded)
    return logits_of(model, IDS)


def _rounded(encoding, source, entry):
    stored = source.tensors[entry.name]
    weight = load_file(stored.file)[entry.name]
    payload, *scales = encoding.encode(weight).values()
    rounded = torch.empty(weight.shape)
    encoding.decode(payload.flatten(), scales, rounded)
    return rounded


def _fill(recipe, model, parameter, sources):
    with torch.no_grad():
        if (regions := recipe.regions(parameter)) is None:
            parameter.copy_(recipe.convert(model, sources)[recipe.targets[0]])
        else:
            for region, tensor in zip(regions, sources, strict=True):
                region.copy_(tensor)


@pytest.mark.parametrize("family", ["llama", "phi3", "gemma3_text", "mixtral", "qwen3_moe", "gpt_oss"])
@FEW
def test_logits_are_those_of_the_rounded_weights(tmp_path, family, encoding):
    source = open_checkpoint(tiny.save(tiny.tiny_model(family), tmp_path / "source"))
    checkpoint = open_pack(source, tmp_path / "pack", encoding)
    expected = dense_logits(source, encoding, checkpoint)
    for resident, tier in ((0, "disk"), (0, "ram"), (2, "disk"), (4, "disk")):
        with loaded(checkpoint, resident=resident, tier=tier) as target:
            for _ in range(2):
                torch.testing.assert_close(logits_of(target.model, IDS), expected, rtol=1e-4, atol=1e-4)


@FEW
def test_streamed_equals_resident_in_bf16(llama, tmp_path, encoding):
    checkpoint = open_pack(llama, tmp_path / "pack", encoding)
    outcomes = []
    for resident in (0, 2, 4):
        with loaded(checkpoint, resident=resident, dtype=torch.bfloat16) as target:
            outcomes.append(logits_of(target.model, IDS))
    assert all(torch.equal(outcome, outcomes[0]) for outcome in outcomes)


def test_what_is_quantized(tmp_path):
    source = open_checkpoint(tiny.save(tiny.tiny_model("qwen3_moe"), tmp_path / "source"))
    checkpoint = open_pack(source, tmp_path / "pack", Nf4())
    kept = set(checkpoint.unquantized)
    assert kept == set(read_manifest(tmp_path / "pack").unquantized)
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.layers.1.mlp.gate.weight"} <= kept
    assert all("norm" in name or "mlp.gate." in name for name in kept if ".layers." in name)
    assert "model.layers.1.mlp.experts.0.gate_proj.weight" not in kept


@FEW
def test_size_on_disk(tmp_path, encoding):
    changes = {"hidden_size": 256, "intermediate_size": 1024}
    source = open_checkpoint(tiny.save(tiny.tiny_model("llama", **changes).bfloat16(), tmp_path / "source"))
    checkpoint = open_pack(source, tmp_path / "pack", encoding)
    bits = {Nf4(): 4 + 8 / 64 + 32 / 64 / 256, Nf4(double_quant=False): 4.5, Int8(): 8 + 32 / 256}[encoding]
    num_values = sum(entry.num_values for entry in checkpoint.tensors.values() if entry.encoding)
    kept = sum(entry.nbytes for entry in checkpoint.tensors.values() if entry.encoding is None)
    on_disk = sum(file.stat().st_size for file in (tmp_path / "pack").glob("*.safetensors"))
    headers = 2 * 4096 * len(list((tmp_path / "pack").glob("*.safetensors")))
    assert abs(on_disk - headers / 2 - kept - num_values * bits / 8) < 0.03 * num_values * bits / 8 + headers / 2
    announced = packed_outline(source, encoding)
    assert [u.slot_bytes for u in announced.layers] == [u.slot_bytes for u in outline(checkpoint).layers]
    assert [u.slot_bytes for u in announced.rest] == [u.slot_bytes for u in outline(checkpoint).rest]


def fork_server(monkeypatch):
    """Processes that start at once: what they need is imported once for all."""
    here = Path(__file__).parent
    monkeypatch.setenv("PYTHONPATH", f"{here}{os.pathsep}{here.parent}")
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["test_pack"])
    return processes


def answer_in_a_new_process(folder, answer):
    with loaded(open_checkpoint(folder), resident=1) as target:
        answer.send(logits_of(target.model, IDS).tolist())


def test_round_trip_in_a_new_process(llama, tmp_path, monkeypatch):
    with loaded(open_pack(llama, tmp_path / "pack", Nf4())) as target:
        expected = logits_of(target.model, IDS)
    receiver, answer = multiprocessing.Pipe(duplex=False)
    child = fork_server(monkeypatch).Process(target=answer_in_a_new_process, args=(tmp_path / "pack", answer))
    child.start()
    assert receiver.poll(PATIENCE_S)
    assert torch.equal(torch.tensor(receiver.recv()), expected)
    child.join()


def digests(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file() and file.suffix != ".lock"}


@FEW
def test_made_once(llama, tmp_path, encoding):
    seen = []
    open_pack(llama, tmp_path / "pack", encoding, progress=lambda *now: seen.append(now))
    assert seen[0][0] == 0
    assert seen[-1][0] == seen[-1][1]
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "pack").iterdir()}
    open_pack(llama, tmp_path / "pack", encoding, progress=lambda *_: pytest.fail("converted again"))
    assert before == {file: file.stat().st_mtime_ns for file in (tmp_path / "pack").iterdir()}
    assert not list(tmp_path.glob("*.partial"))


def convert(source, folder, units, turns):
    """Goes on from unit to unit only as it is let."""

    def progress(done, total):
        units.release()
        turns.acquire()

    torch.set_num_threads(1)
    open_pack(open_checkpoint(source), Path(folder), Nf4(), progress=progress)


def test_killed_at_ten_moments(tmp_path, monkeypatch):
    model = tiny.tiny_model("llama", num_hidden_layers=24, hidden_size=128, intermediate_size=384)
    source = open_checkpoint(tiny.save(model, tmp_path / "source", max_shard_size="2MB"))
    originals = digests(source.path)
    open_pack(source, tmp_path / "whole", Nf4())
    folder, partial = tmp_path / "pack", tmp_path / "pack.partial"
    processes = fork_server(monkeypatch)
    chance = random.Random(7)
    written = {}
    for _ in range(10):
        units, turns = processes.Semaphore(0), processes.Semaphore(0)
        child = processes.Process(target=convert, args=(source.path, folder, units, turns), daemon=True)
        child.start()
        for _ in range(chance.randint(1, 3)):
            assert units.acquire(timeout=PATIENCE_S)
            turns.release()
        time.sleep(chance.uniform(0, 0.02))
        child.kill()
        child.join()
        assert not folder.exists()
        names = json.loads((partial / "pack.json").read_text())["pack"]["files"]
        now = {name: (partial / name).stat().st_mtime_ns for name in names if name.endswith(".safetensors")}
        assert written.items() <= now.items()  # nothing is done again
        written = now
        assert read_manifest(folder) is None
    assert len(written) > 5
    open_pack(source, folder, Nf4())
    assert written.items() <= {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}.items()
    assert digests(folder) == digests(tmp_path / "whole")
    assert digests(source.path) == originals


def convert_and_tell_peak(source, folder, answer):
    torch.set_num_threads(1)
    checkpoint = open_checkpoint(source)
    open_pack(checkpoint, Path(folder) / "first", Nf4(), progress=lambda done, total: None)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = peak_rss_bytes()
    open_pack(checkpoint, Path(folder) / "second", Nf4())
    answer.send(peak_rss_bytes() - before)


def test_the_whole_model_is_never_in_memory(tmp_path, monkeypatch):
    model = tiny.tiny_model("llama", num_hidden_layers=20, hidden_size=256, intermediate_size=1024)
    source = tiny.save(model, tmp_path / "source")
    assert sum(file.stat().st_size for file in source.glob("*.safetensors")) > 75e6
    receiver, answer = multiprocessing.Pipe(duplex=False)
    child = fork_server(monkeypatch).Process(target=convert_and_tell_peak, args=(source, tmp_path, answer))
    child.start()
    assert receiver.poll(PATIENCE_S)
    assert receiver.recv() < 40e6
    child.join()


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 50 MB."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a tmpfs needs root")
    folder = tmp_path / "small"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=50M", "none", str(folder)], capture_output=True).returncode:
        pytest.skip("this container may not mount a tmpfs")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_full_disk(tmp_path, small_disk):
    """Too small from the beginning; filled by others on the way; enough in the end."""
    model = tiny.tiny_model("llama", num_hidden_layers=8, hidden_size=128, intermediate_size=384)
    source = open_checkpoint(tiny.save(model, tmp_path / "source"))
    folder, filler = small_disk / "pack", small_disk / "filler"
    filler.write_bytes(bytes(36_000_000))
    with pytest.raises(OSError, match=r"full: [\d,]+ bytes are needed .* are missing") as caught:
        open_pack(source, folder, Nf4())
    assert "\n" not in str(caught.value)
    filler.unlink()

    def fill(done, total):
        if done > total / 2:
            filler.write_bytes(bytes(shutil.disk_usage(small_disk).free - 4096))

    with pytest.raises(OSError, match="missing"):
        open_pack(source, folder, Nf4(), progress=fill)
    filler.unlink()
    kept = {file.name: file.stat().st_mtime_ns for file in (small_disk / "pack.partial").glob("unit-*")}
    assert len(kept) > 4
    open_pack(source, folder, Nf4())
    assert kept.items() <= {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}.items()


def test_disk_that_fills_while_a_file_is_written(llama, tmp_path, monkeypatch):
    def no_space(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pack.os, "fsync", no_space)
    with pytest.raises(OSError, match="No space"):
        open_pack(llama, tmp_path / "pack", Nf4())
    assert not list((tmp_path / "pack.partial").glob(".unit*"))


def flip(file, position):
    content = bytearray(file.read_bytes())
    content[position] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("resident", [0, 4])
def test_any_flipped_byte_is_found_before_there_is_text(llama, tmp_path, resident):
    folder = tmp_path / "pack"
    open_pack(llama, folder, Nf4())
    chance = random.Random(3)
    for file in sorted(folder.iterdir()):
        size = file.stat().st_size
        for position in (0, size // 3, size - 1, chance.randrange(size)):
            flip(file, position)
            with (
                pytest.raises((ValueError, OSError)) as caught,
                loaded(open_checkpoint(folder), resident=resident) as it,
            ):
                logits_of(it.model, IDS)
            assert file.name in str(caught.value)
            assert "\n" not in str(caught.value)
            flip(file, position)
    with loaded(open_checkpoint(folder), resident=resident) as target:
        logits_of(target.model, IDS)


def test_truncated_or_incomplete(llama, tmp_path):
    folder = tmp_path / "pack"
    open_pack(llama, folder, Nf4())
    for file in [*sorted(folder.glob("unit-*"))[:3], folder / "config.json"]:
        content = file.read_bytes()
        for length in (0, 9, len(content) - 1):
            file.write_bytes(content[:length])
            with pytest.raises(ValueError, match=file.name):
                open_pack(llama, folder, Nf4())
        file.unlink()
        with pytest.raises(FileNotFoundError, match=file.name):
            open_pack(llama, folder, Nf4())
        file.write_bytes(content)
    shutil.copyfile(llama.path / sorted(llama.tensors.values(), key=str)[0].file.name, folder / "other.safetensors")
    with pytest.raises(ValueError, match=r"other\.safetensors"):
        open_pack(llama, folder, Nf4())
    (folder / "other.safetensors").unlink()
    (folder / "pack.json").write_text("{")
    with pytest.raises(ValueError, match=r"pack\.json"):
        open_pack(llama, folder, Nf4())


def test_damage_in_a_half_made_pack_costs_one_file(llama, tmp_path):
    def stop(done, total):
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_pack(llama, tmp_path / "pack", Nf4(), progress=stop)
    files = sorted((tmp_path / "pack.partial").glob("unit-*"))
    times = {file.name: file.stat().st_mtime_ns for file in files}
    flip(files[-1], files[-1].stat().st_size - 1)
    open_pack(llama, tmp_path / "pack", Nf4())
    now = {name: (tmp_path / "pack" / name).stat().st_mtime_ns for name in times}
    assert [name for name in times if now[name] != times[name]] == [files[-1].name]
    with loaded(open_checkpoint(tmp_path / "pack")) as target:
        logits_of(target.model, IDS)


def test_changed_source(tmp_path):
    directory = tiny.save(tiny.tiny_model("llama"), tmp_path / "source")
    folder = tmp_path / "pack"
    open_pack(open_checkpoint(directory), folder, Nf4())
    with pytest.raises(ValueError, match="other files"):
        open_pack(open_checkpoint(directory), folder, Int8())
    tiny.save(tiny.tiny_model("llama", seed=1), directory)
    with pytest.raises(ValueError, match="other files") as caught:
        open_pack(open_checkpoint(directory), folder, Nf4())
    assert "\n" not in str(caught.value)


def test_partial_pack_of_another_source_is_not_continued(tmp_path):
    def stop(done, total):
        if done > total / 2:
            raise KeyboardInterrupt

    directory = tiny.save(tiny.tiny_model("llama"), tmp_path / "source")
    with pytest.raises(KeyboardInterrupt):
        open_pack(open_checkpoint(directory), tmp_path / "pack", Nf4(), progress=stop)
    tiny.save(tiny.tiny_model("llama", seed=1), directory)
    open_pack(open_checkpoint(directory), tmp_path / "pack", Nf4())
    open_pack(open_checkpoint(directory), tmp_path / "fresh", Nf4())
    assert digests(tmp_path / "pack") == digests(tmp_path / "fresh")


def test_never_quantized_twice(llama, tmp_path):
    packed = open_pack(llama, tmp_path / "pack", Nf4())
    model = tiny.tiny_model("llama")
    for source in (packed, open_checkpoint(write_gguf(model, tmp_path / "model.gguf", 8))):
        with pytest.raises(ValueError, match="already quantized .* leave out --bits"):
            open_pack(source, tmp_path / "twice", Nf4())
    assert not list(tmp_path.glob("twice*"))
