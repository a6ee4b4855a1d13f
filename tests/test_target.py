"""What `--bits` and a .gguf target do on the command line."""

import json

import pytest
import tiny
from gguf import GGMLQuantizationType as Kind
from tiny_gguf import write_gguf
from tiny_tokenizer import tiny_tokenizer

from app.cli import main
from app.target import load_tokenizer

TINY = ["--dtype", "float32", "--max-tokens", "8", "--ctx", "128", "--budget", "4", "--draft", "ngram", "--raw"]


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("SPECEXEC_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory):
    model = tiny.tiny_model("llama")
    return write_gguf(model, tmp_path_factory.mktemp("gguf") / "tiny.gguf", Kind.Q8_0, tokenizer=tiny_tokenizer())


def run(capsys, *arguments):
    code = main(["run", *map(str, arguments), *TINY])
    return code, *capsys.readouterr()


@pytest.mark.parametrize("bits", [4, 8])
def test_a_pack_is_made_once_and_listed(chat_model, capsys, tmp_path, bits):
    words = ("the cat", "--target", chat_model, "--bits", bits, "--resident", 1, "--verbose", "--json")
    code, first, said = run(capsys, *words)
    assert code == 0
    assert f"weights: {bits}-bit pack; stored as they are: lm_head.weight, model.embed_tokens.weight, " in said
    assert "model.layers.*.input_layernorm.weight" in said
    folder = next((tmp_path / "cache" / "packs").glob(f"[!.]*-{bits}bit-*"))
    times = {file: file.stat().st_mtime_ns for file in folder.iterdir()}
    code, second, _ = run(capsys, *words)
    assert json.loads(second)["text"] == json.loads(first)["text"]
    assert times == {file: file.stat().st_mtime_ns for file in folder.iterdir()}
    assert run(capsys, "the cat", "--target", folder)[:2] == (0, json.loads(first)["text"] + "\n")


def test_sixteen_bits_are_the_checkpoint_itself(chat_model, capsys, tmp_path):
    plain = run(capsys, "the cat", "--target", chat_model)
    assert run(capsys, "the cat", "--target", chat_model, "--bits", 16)[:2] == plain[:2]
    assert not (tmp_path / "cache" / "packs").exists()


def test_a_damaged_pack_gives_one_line_and_no_text(chat_model, capsys, tmp_path):
    words = ("the cat", "--target", chat_model, "--bits", 4, "--resident", 1)
    assert run(capsys, *words)[0] == 0
    file = sorted((tmp_path / "cache" / "packs").glob("*/unit-*"))[-1]
    content = bytearray(file.read_bytes())
    content[-1] ^= 64
    file.write_bytes(content)
    code, text, said = run(capsys, *words)
    assert (code, text.strip()) == (1, "")
    assert "damaged" in said
    assert "delete" in said


def test_gguf_is_not_converted(gguf_file, capsys, tmp_path):
    code, text, said = run(capsys, "the cat", "--target", gguf_file, "--resident", 2, "--verbose")
    assert code == 0, said
    assert text.strip()
    assert "weights: GGUF" in said
    assert not (tmp_path / "cache" / "models").exists()
    assert load_tokenizer(gguf_file)("the cat sat")["input_ids"] == tiny_tokenizer()("the cat sat")["input_ids"]


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_bits_of_what_is_quantized_already(gguf_file, chat_model, capsys, tmp_path, bits):
    code, text, said = run(capsys, "x", "--target", gguf_file, "--bits", bits)
    assert (code, text) == (1, "")
    assert said.strip().splitlines()[-1].endswith("is already quantized (GGUF): leave out --bits")


def test_bits_that_there_are_not(chat_model, capsys):
    code, _, said = run(capsys, "x", "--target", chat_model, "--bits", 3)
    assert code == 2
    assert "--bits must be 16, 8 or 4" in said
