"""The command `plan`: what a person needs to know before a download, for any machine, in words and as JSON."""

import json
import shlex

import pytest
import shapes

from app.cli import main

MACHINE = ["--gpu", "RTX 4090", "--ram", "64GB", "--disk-rate", "3GB/s"]


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("SPECEXEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))


@pytest.fixture(scope="module")
def described(tmp_path_factory):
    """Directories with nothing but a config: a 70B, its 8B, a mixture of experts."""
    folders = {}
    for name in ("Llama 3 70B", "Llama 3 8B", "Qwen3 30B-A3B"):
        folders[name] = tmp_path_factory.mktemp("described")
        shapes.known_config(name).save_pretrained(folders[name])
    return folders


def plan(capsys, *arguments):
    code = main(["plan", *map(str, arguments)])
    return code, *capsys.readouterr()


def test_this_machine_and_a_checkpoint(chat_model, capsys):
    code, text, _ = plan(capsys, "--target", chat_model, "--ctx", "128", "--json")
    assert code == 0
    for words in ("GB free of", "measured", "KV cache", "verdict: fits", "tokens/s", "first token"):
        assert words in text
    report = json.loads(text.splitlines()[-1])
    expected = "s_per_pass tokens_per_s num_resident num_streamed budget tiers memory total_bytes limit_bytes levers"
    assert set(expected.split()) <= set(report)
    assert (report["num_resident"], report["num_streamed"], report["tiers"]) == (4, 0, {"ram": 0, "disk": 0})
    assert sum(report["memory"].values()) == report["total_bytes"] <= report["limit_bytes"]


def test_limits_and_residents_are_kept(chat_model, capsys):
    options = ["--target", chat_model, "--ctx", "128", "--budget", "16", "--dtype", "float32", "--json"]
    report = json.loads(plan(capsys, *options, "--resident", "1", "--draft", "ngram")[1].splitlines()[-1])
    assert (report["num_resident"], report["num_streamed"], report["draft"]) == (1, 3, "ngram")
    assert report["tiers"] == {"ram": 0, "disk": 3}
    assert report["streamed_bytes"] > 0


def test_a_machine_and_a_model_that_are_not_here(described, capsys):
    target, draft = described["Llama 3 70B"], described["Llama 3 8B"]
    code, text, _ = plan(capsys, "--target", target, "--bits", "4", "--draft", draft, *MACHINE, "--json")
    assert code == 0
    assert "streams from RAM" in text
    assert "25.2 GB/s (PCIe 4.0 x16)" in text
    report = json.loads(text.splitlines()[-1])
    assert report["tiers"]["ram"] == report["num_streamed"] > 0
    assert report["host_memory"]["arena"] == report["streamed_bytes"]
    assert (report["memory"]["embedding"], report["host_memory"]["embedding"]) == (0, 128256 * 8192 * 2)
    assert "RAM:      2.1 GB  embedding" in text
    assert 0.9 < report["s_per_pass"] < 1.6
    assert report["budget"] > 64


def test_levers_are_commands_that_do_what_they_say(described, capsys):
    code, text, _ = plan(capsys, "--target", described["Llama 3 70B"], *MACHINE, "--json")
    report = json.loads(text.splitlines()[-1])
    assert code == 0
    assert "needs the disk" in report["verdict"]
    best = next(lever for lever in report["levers"] if "--bits 4" in lever["command"])
    arguments = shlex.split(best["command"])
    assert arguments[:2] == ["specexec", "plan"]
    _, text, _ = plan(capsys, *arguments[2:], "--json")
    found = json.loads(text.splitlines()[-1])["tokens_per_s"] / report["tokens_per_s"]
    assert found == pytest.approx(best["gain"], rel=0.01)


def test_what_does_not_fit_says_the_smallest_change(described, capsys):
    limits = [*MACHINE, "--device-limit", "7GB"]
    code, text, _ = plan(capsys, "--target", described["Llama 3 70B"], *limits, "--json")
    assert code == 1
    report = json.loads(text.splitlines()[-1])
    assert report["verdict"] == "does not fit"
    assert "are needed at least" in report["error"]
    assert "smallest change: specexec plan" in text
    _, text, _ = plan(capsys, *shlex.split(report["levers"][0]["command"])[2:], "--json")
    assert json.loads(text.splitlines()[-1])["s_per_pass"] > 0


def test_experts_are_told_of(described, capsys):
    text = plan(capsys, "--target", described["Qwen3 30B-A3B"], "--gpu", "3060", "--ram", "64GB", "--draft", "ngram")[1]
    assert "experts: 8 of 128 per token" in text
    assert "whole layers stream" in text


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--gpu", "RTX 4091"], 1, "did you mean RTX 4090"),
        (["--bits", "5"], 2, "--bits must be 16, 8 or 4, not 5"),
        (["--ram", "64GB"], 2, "--gpu"),
        (["--gpu", "4090", "--disk-rate", "fast"], 2, "--disk-rate must be a size"),
        (["--budget", "many"], 2, "--budget"),
        (["--ctx", "999999999"], 1, "--ctx"),
    ],
)
def test_what_cannot_be_planned(described, capsys, arguments, code, words):
    outcome = plan(capsys, "--target", described["Llama 3 8B"], *arguments)
    assert outcome[0] == code
    assert words in outcome[2]
    assert outcome[2].count("\n") == 1


def test_models_that_are_none(tmp_path, capsys):
    for target, words in [(tmp_path, "config.json"), ("some/model", "specexec pull some/model")]:
        code, text, error = plan(capsys, "--target", target, *MACHINE, "--offline")
        assert (code, text) == (1, "")
        assert words in error
        assert error.count("\n") == 1
    (tmp_path / "config.json").write_text('{"model_type": "teapot"}')
    assert "is not a model that transformers knows" in plan(capsys, "--target", tmp_path, *MACHINE)[2]


def test_run_uses_the_plan_and_compares(chat_model, capsys):
    options = ["--target", chat_model, "--dtype", "float32", "--ctx", "128", "--max-tokens", "8", "--resident", "0"]
    assert main(["run", "the cat", *map(str, options), "--json", "--verbose", "--draft", "ngram"]) == 0
    out, status = capsys.readouterr()
    report = json.loads(out.splitlines()[-1])
    assert report["planned_s_per_pass"] > 0
    assert report["planned_peak_bytes"] >= 0.85 * report["peak_bytes"]
    assert "planned: " in status
    assert "actual: " in status
