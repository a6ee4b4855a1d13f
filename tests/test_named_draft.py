"""What `plan` counts for a draft is what `run` then counts: heads, windows, copies of packed targets."""

import json
from pathlib import Path

import blocks
import eagles
import mtps
import pytest
import tiny
from gguf import GGMLQuantizationType
from test_heads import written
from tiny_gguf import write_gguf
from tiny_tokenizer import tiny_tokenizer

from app.cli import main
from app.launch import open_session
from app.presets import chosen_settings

COMMON = {"dtype": "float32", "ctx": "128", "budget": "16", "resident": "1"}
LEARNED = {"draft", "draft's KV cache", "draft's features", "draft's logits"}


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPECEXEC_CACHE", str(tmp_path / "cache"))


def model(directory: Path, **changes: object) -> Path:
    tiny_tokenizer().save_pretrained(tiny.save(tiny.tiny_model("llama", **changes), directory))
    return directory


def both(capsys: pytest.CaptureFixture, target: Path, draft: str, **flags: str) -> tuple[dict, dict, dict]:
    """What a plan and a run say alike: memory but for this process, draft's seconds, tokens per pass."""
    flags = {**COMMON, "target": str(target), "draft": draft, **flags}
    options = [part for key, value in flags.items() for part in (f"--{key.replace('_', '-')}", value)]
    assert main(["plan", *options, "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    with open_session(chosen_settings(None, flags), offline=True, note=lambda line: None) as running:
        actual, prediction = dict(running.plan.items), running.choice.prediction
    assert running.draft == report["draft"] == draft
    assert report["tokens_per_pass"] == prediction.tokens_per_pass[1]
    del report["memory"]["this process"], actual["this process"]
    assert report["memory"] == actual
    assert (report["draft_s"] > 0) == (prediction.draft_s > 0)
    return {name: nbytes for name, nbytes in actual.items() if name.startswith("draft")}


def head(kind: str, directory: Path) -> Path:
    if kind == "eagle3":
        return written(directory, *eagles.stored("safeailab")[:2])
    if kind == "mtp":
        config, tensors = mtps.Reference("speculators").stored()
        return written(directory, {**config, "speculators_model_type": "mtp"}, tensors)
    layout, variant = {"dflash": ("z-lab", None), "dspark": ("SpecForge", "gated")}[kind]
    return written(directory, blocks.config_of(layout, variant), blocks.tensors_of(layout, variant))


@pytest.mark.parametrize("kind", ["eagle3", "mtp", "dflash", "dspark"])
def test_learned_drafts_are_known_by_their_headers(kind, tmp_path, capsys) -> None:
    target = model(tmp_path / "target", num_hidden_layers=6 if kind == "eagle3" else 4)
    directory = head(kind, tmp_path / "draft")
    found = both(capsys, target, str(directory))
    assert found.keys() == LEARNED
    stored = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    assert found["draft"] == pytest.approx(stored, rel=0.35)  # names and shapes take their part of a tiny file


def test_a_window_of_the_text(tmp_path, capsys) -> None:
    target, draft = model(tmp_path / "target"), model(tmp_path / "draft", num_hidden_layers=2)
    whole = both(capsys, target, str(draft))["draft's KV cache"]
    assert both(capsys, target, str(draft), draft_ctx="20")["draft's KV cache"] * (128 + 16) == whole * (20 + 16)
    assert both(capsys, target, f"graft:{draft}")["draft's KV cache"] == whole
    few = model(tmp_path / "few", num_hidden_layers=2, max_position_embeddings=64)
    assert both(capsys, target, str(few))["draft's KV cache"] * (128 + 16) == whole * 64
    assert main(["plan", "--target", str(target), "--draft", str(few), "--draft-ctx", "65"]) == 1
    assert "--draft-ctx 65 is more than the 64 positions" in capsys.readouterr().err


@pytest.mark.parametrize("bits", ["16", "8", "4", "gguf"])
def test_a_copy_of_the_target_holds_no_scratch_that_it_never_uses(bits, tmp_path, capsys) -> None:
    source = model(tmp_path / "target")
    target = source
    if bits == "gguf":
        kind = GGMLQuantizationType.Q8_0
        target = write_gguf(tiny.tiny_model("llama"), tmp_path / "t.gguf", kind, tokenizer=tiny_tokenizer())
    flags = {"resident": "0"} | ({} if bits in ("16", "gguf") else {"bits": bits})
    found = both(capsys, target, "self", **flags)
    plain = sum(parameter.nbytes for parameter in tiny.tiny_model("llama").model.layers.parameters())
    assert found["draft"] == pytest.approx(plain, rel=0.06)  # 64 bytes for every vector, blocks of the file
    assert found["draft's decoded matrix"] == 0


@pytest.mark.parametrize("bits", ["16", "4"])
def test_a_type_of_its_own(bits, tmp_path, capsys) -> None:
    target, draft = model(tmp_path / "target"), model(tmp_path / "draft", num_hidden_layers=2)
    same, half = (both(capsys, target, str(draft), draft_bits=bits, **own) for own in ({}, {"draft_dtype": "bfloat16"}))
    assert half["draft"] == pytest.approx(same["draft"] / 2, rel=0.06)
    assert half["draft's KV cache"] == same["draft's KV cache"] / 2
