"""The conversion of a GGUF file: the values its blocks stand for, progress that moves, errors that travel."""

import io

import pytest
import tiny
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file
from tiny_gguf import write_gguf
from tiny_tokenizer import tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from app import progress
from app.convert import convert


@pytest.fixture
def source(tmp_path):
    return write_gguf(tiny.tiny_model("llama"), tmp_path / "model.gguf", Kind.Q4_1, tokenizer=tiny_tokenizer())


def test_values_config_and_tokenizer_are_those_of_the_file(source, tmp_path):
    folder = tmp_path / "converted"
    folder.mkdir()
    told = []
    with progress.told(lambda *report: told.append(report)):
        convert(source, folder)
    shares = [done for _, done, total, _ in told if total == 100]
    assert shares == sorted(shares) and shares[-1] == 100
    expected = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert model.dtype == torch.bfloat16
    for name, values in load_file(folder / "model.safetensors").items():
        assert torch.equal(values, expected.state_dict()[name]), name
    text = "the cat sat on the mat"
    assert AutoTokenizer.from_pretrained(folder)(text) == AutoTokenizer.from_pretrained(
        source.parent, gguf_file=source.name
    )(text)


def test_what_cannot_be_read_is_named(tmp_path):
    (tmp_path / "bad.gguf").write_bytes(b"GGUF but no more")
    with pytest.raises(ValueError, match=r"bad\.gguf"):
        convert(tmp_path / "bad.gguf", tmp_path)


def test_who_listens_hears_of_the_end():
    told = []
    with progress.told(lambda *report: told.append(report)):
        with progress.Progress("load") as shown:
            shown(3, 8)
        with progress.watching("read", lambda: 5, 8):
            pass
    assert told == [("load", 3, 8, "B"), ("load", 8, 8, "B"), ("read", 5, 8, "B"), ("read", 8, 8, "B")]


def test_who_listens_hears_of_no_end_that_an_error_made():
    told = []

    def fail():
        with progress.Progress("load") as shown:
            shown(3, 8)
            raise OSError("gone")

    with progress.told(lambda *report: told.append(report)), pytest.raises(OSError, match="gone"):
        fail()
    assert told == [("load", 3, 8, "B")]


def test_a_pipe_gets_a_line_every_few_seconds(monkeypatch):
    seconds = iter(range(100))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(seconds))
    stream = io.StringIO()
    with progress.Progress("convert x", "%", stream=stream) as shown:
        for done in (0, 10, 20, 30, 40, 50):
            shown(done, 100)
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("convert x: 20 %, ") and lines[0].endswith(" s left")
    assert lines[1].startswith("convert x: 50 %, ") and lines[-1].startswith("convert x: 100 %, ")
    assert len(lines) == 3 and "of 100" not in stream.getvalue()
