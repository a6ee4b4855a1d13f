"""Commands for vLLM and SGLang: option names, what has no equivalent there, and that a shell reads them back whole."""

import json
import shlex

import pytest

from app.cli import main


@pytest.fixture
def export(capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", "/nowhere")

    def call(engine, *arguments):
        assert main(["export", engine, *map(str, arguments), "--offline"]) == 0
        out, notes = capsys.readouterr()
        assert out.count("\n") == 1
        return shlex.split(out), notes

    return call


def options(words):
    """{flag: value} of all that follows the model."""
    return dict(zip(words[::2], words[1::2], strict=True))


def test_a_preset_for_vllm(export):
    words, notes = export("vllm", "--preset", "rtx-4090")
    assert words[:3] == ["vllm", "serve", "meta-llama/Llama-3.3-70B-Instruct"]
    given = options(words[3:])
    assert (given["--max-model-len"], given["--quantization"]) == ("8192", "bitsandbytes")
    assert json.loads(given["--speculative-config"]) == {
        "method": "draft_model",
        "model": "meta-llama/Llama-3.2-1B-Instruct",
        "num_speculative_tokens": 5,
    }
    assert "--tensor-parallel-size" in notes


def test_a_preset_for_sglang(export):
    words, notes = export("sglang", "--preset", "gpu-32gb")
    assert words[:3] == ["python", "-m", "sglang.launch_server"]
    given = options(words[3:])
    assert given["--model-path"] == "meta-llama/Llama-3.3-70B-Instruct"
    assert (given["--context-length"], given["--quantization"]) == ("8192", "fp8")
    assert given["--speculative-algorithm"] == "STANDALONE"
    assert given["--speculative-draft-model-path"] == "meta-llama/Llama-3.2-1B-Instruct"
    assert given["--speculative-draft-model-quantization"] == "unquant"
    assert int(given["--speculative-num-draft-tokens"]) == int(given["--speculative-num-steps"]) + 1
    assert "fp8 is the nearest" in notes


@pytest.mark.parametrize(
    ("draft", "method", "algorithm", "vllm_note", "sglang_note"),
    [
        ("ngram", "ngram", "NGRAM", "", ""),
        ("suffix", "suffix", "NGRAM", "", "no draft suffix"),
        ("self", "ngram", "NGRAM", "the draft self exists only here; ngram", "no draft self"),
        ("graft", "suffix", "NGRAM", "the draft graft exists only here; suffix", "no draft graft"),
        ("none", None, None, "", ""),
    ],
)
def test_drafts_without_a_model(export, draft, method, algorithm, vllm_note, sglang_note):
    words, notes = export("vllm", "--target", "a/b", "--draft", draft)
    asked = json.loads(options(words[3:]).get("--speculative-config", "{}"))
    assert (asked.get("method"), "model" in asked) == (method, False)
    assert vllm_note in notes
    assert ("exists only here" in notes) == bool(vllm_note)
    words, notes = export("sglang", "--target", "a/b", "--draft", draft)
    assert options(words[3:]).get("--speculative-algorithm") == algorithm
    assert sglang_note in notes
    assert ("is the nearest" in notes) == bool(sglang_note)


@pytest.mark.parametrize(
    ("architecture", "method", "algorithm", "num_guesses"),
    [
        ("LlamaForCausalLMEagle3", "eagle3", "EAGLE3", 3),
        ("DFlashDraftModel", "dflash", "DFLASH", 12),
        ("Qwen3DSparkModel", "dspark", "DSPARK", 12),
        ("MiMoMTPModel", "mtp", "EAGLE", 1),
        ("Qwen3ForCausalLM", "draft_model", "STANDALONE", 5),
    ],
)
def test_a_draft_is_known_by_its_config(export, tmp_path, architecture, method, algorithm, num_guesses):
    folder = tmp_path / "a draft"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture], "block_size": 12}))
    words, _ = export("vllm", "--target", "a/b", "--draft", folder)
    asked = json.loads(options(words[3:])["--speculative-config"])
    assert asked == {"method": method, "model": str(folder), "num_speculative_tokens": num_guesses}
    words, _ = export("sglang", "--target", "a/b", "--draft", folder)
    given = options(words[3:])
    assert (given["--speculative-algorithm"], given["--speculative-draft-model-path"]) == (algorithm, str(folder))


def test_a_name_tells_where_no_config_is_at_hand(export):
    words, _ = export("vllm", "--target", "a/b", "--draft", "someone/EAGLE-3-of-b")
    assert json.loads(options(words[3:])["--speculative-config"])["method"] == "eagle3"


def test_what_is_grafted_onto_a_draft_stays_here(export):
    words, notes = export("vllm", "--target", "a/b", "--draft", "graft:someone/EAGLE-3-of-b")
    assert json.loads(options(words[3:])["--speculative-config"])["model"] == "someone/EAGLE-3-of-b"
    assert "graft:someone/EAGLE-3-of-b guesses from repetitions, too, here only" in notes


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["vllm", "--target", "x.gguf"], 1, "GGUF"),
        (["tgi"], 2, "vllm"),
        (["vllm", "--engine", "http://x"], 1, "--engine"),
        (["vllm", "--preset", "rtx-4091"], 2, "4090"),
    ],
)
def test_what_cannot_be_exported(capsys, arguments, code, words):
    assert main(["export", *arguments]) == code
    out, error = capsys.readouterr()
    assert not out and words in error and error.count("\n") == 1
