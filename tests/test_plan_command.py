"""The command `plan`: what a person needs to know before a download, for any machine, in words and as JSON."""

import json
import shlex

import pytest
import shapes
import tiny
from gguf import GGMLQuantizationType
from tiny_gguf import write_gguf

from app.blueprint import draw_up
from app.cli import main
from app.plan_command import Elsewhere, outlook
from app.settings import resolve

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


@pytest.mark.parametrize(
    "options",
    [
        "--gpu none --ram 2GB --bits 4",
        "--gpu none --ram 10GB --bits 4",
        "--gpu none --ram 64GB --bits 4 --ram-limit 2GB",
        "--gpu none --ram 64GB --bits 4 --ram-limit 2GB --device-limit 20GB",
        "--gpu none --ram 64GB --bits 4 --resident 3 --draft ngram",
        "--gpu 4090 --ram 64GB --bits 4 --ram-limit 8GB --draft ngram",
        "--gpu 4090 --ram 64GB --bits 4 --ram-limit 500MB --draft ngram",
        "--gpu 4090 --ram 500MB",
        "--gpu 4090 --ram 64GB --bits 8 --device-limit 9GB",
        "--gpu 4090 --bits 4 --device-limit 2GB",
        "--gpu 4090 --bits 4 --resident 80 --draft none",
        "--gpu 4090 --bits 4 --slots 70 --resident 0 --draft none",
        "--gpu 4090 --bits 4 --slots 9 --budget 16 --draft self",
        "--gpu 3060 --ram 16GB --ctx 8192",
    ],
)
def test_every_command_that_is_offered_brings_what_it_promises(described, capsys, options):
    code, text, _ = plan(capsys, "--target", described["Llama 3 70B"], *options.split(), "--json")
    report = json.loads(text.splitlines()[-1])
    offered = [lever for lever in report["levers"] if "--draft MODEL" not in lever["command"]]
    assert offered
    for lever in offered:
        assert f"{lever['command']} " in text
        worked, text_after, _ = plan(capsys, *shlex.split(lever["command"])[2:], "--json")
        assert worked == 0
        assert "note: " not in text_after
        found = json.loads(text_after.splitlines()[-1])
        if code == 0:
            assert found["tokens_per_s"] / report["tokens_per_s"] == pytest.approx(lever["gain"], rel=0.001)
            assert lever["gain"] > 1.04


def test_a_limit_of_this_machine_is_raised_where_it_refuses(chat_model, capsys):
    options = ["--target", chat_model, "--ctx", "128", "--device", "cpu", "--ram-limit", "50MB", "--json"]
    code, text, _ = plan(capsys, *options)
    assert code == 1
    (lever,) = json.loads(text.splitlines()[-1])["levers"]
    assert "--ram-limit" in lever["command"] and "--ram " not in lever["command"]
    assert plan(capsys, *shlex.split(lever["command"])[2:])[0] == 0


def test_a_lever_leaves_out_what_only_a_draft_model_has(described, capsys):
    options = ["--bits", "4", "--gpu", "4090", "--device-limit", "9GB"]
    draft = [
        "--draft",
        str(described["Llama 3 8B"]),
        "--draft-bits",
        "4",
        "--draft-ctx",
        "512",
        "--draft-dtype",
        "float16",
    ]
    code, text, _ = plan(capsys, "--target", described["Llama 3 70B"], *options, *draft, "--json")
    assert code == 1
    command = json.loads(text.splitlines()[-1])["levers"][0]["command"]
    assert "--draft ngram" in command
    assert plan(capsys, *shlex.split(command)[2:])[0] == 0


@pytest.mark.parametrize(
    ("limits", "num_notes"),
    [
        ("--gpu 4090 --ram 64GB --device-limit 200GB", 1),
        ("--gpu none --ram 64GB --ram-limit 100GB --device-limit 500GB", 2),
        ("--gpu none --ram 64GB --ram-limit 20GB --device-limit 30GB", 0),
    ],
)
def test_limits_are_held_to_the_machine(described, capsys, limits, num_notes):
    _, text, _ = plan(capsys, "--target", described["Llama 3 70B"], "--bits", "4", *limits.split(), "--json")
    assert text.count("note: ") == text.count(" is more than there is: ") == num_notes
    report = json.loads(text.splitlines()[-1])
    assert report["total_bytes"] <= report["limit_bytes"] < 60 * 10**9
    if num_notes:
        bare = limits.partition("GB ")[0] + "GB"
        _, text, _ = plan(capsys, "--target", described["Llama 3 70B"], "--bits", "4", *bare.split(), "--json")
        assert json.loads(text.splitlines()[-1])["limit_bytes"] == report["limit_bytes"]


def test_a_refusal_offers_no_limit_that_nobody_set(described, capsys):
    text = plan(capsys, "--target", described["Llama 3 70B"], "--gpu", "4090", "--ram", "500MB")[1]
    assert "take more main memory" in text
    (change,) = (line for line in text.splitlines() if line.startswith("smallest change: "))
    assert "--ram-limit" not in change and "--ram " in change


def test_the_first_token_of_a_model_that_knows_few_positions(tmp_path, capsys):
    config = shapes.known_config("SmolLM2 135M")
    config.max_position_embeddings = 512
    config.save_pretrained(tmp_path)
    text = plan(capsys, "--target", tmp_path, *MACHINE, "--json")[1]
    assert " s at 512 tokens of prompt" in text
    assert list(json.loads(text.splitlines()[-1])["first_token_s"]) == ["512"]


def test_bits_of_a_gguf_are_refused_as_a_run_refuses_them(tmp_path, capsys):
    model = tiny.tiny_model("llama", hidden_size=256, intermediate_size=256, head_dim=64)
    path = write_gguf(model, tmp_path / "model.gguf", GGMLQuantizationType.Q8_0)
    for bits in ("16", "4"):
        code, text, error = plan(capsys, "--target", path, "--bits", bits, *MACHINE)
        assert (code, text) == (1, "")
        assert "is already quantized (GGUF): leave out --bits" in error
    assert plan(capsys, "--target", path, *MACHINE)[0] == 0


def test_a_machine_without_a_name_is_none(described):
    chosen = resolve({"target": str(described["Llama 3 8B"])}, {}, {})
    with pytest.raises(ValueError, match="no GPU ''"):
        outlook(chosen, Elsewhere.read("", "64GB", None), offline=True, look=draw_up)


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
        (["--gpu", "4090", "--device", "cpu"], 2, "--device cpu"),
        (["--gpu", "none", "--device", "cuda"], 2, "--device cuda"),
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


def described_with(folder, **changes):
    """A directory with nothing but the config of a small llama and `changes`."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**tiny.tiny_config("llama").to_dict(), **changes}))
    return folder


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "already quantized (awq)"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "already quantized (mxfp4)"),
        ({"model_type": "qwen3_next"}, "linear_attention"),
        ({"model_type": "mamba"}, "cannot verify a token tree"),
        ({"model_type": "gemma3n_text", "intermediate_size": [96] * 4}, "intermediate_size is [96"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
    ],
)
@pytest.mark.parametrize("bits", [[], ["--bits", "4"]])
def test_what_a_run_refuses_no_plan_promises(tmp_path, capsys, changes, words, bits):
    folder = described_with(tmp_path / "model", **changes)
    code, text, refusal = plan(capsys, "--target", folder, *bits, *MACHINE)
    assert (code, text) == (1, "")
    assert words in refusal
    assert str(folder) in refusal
    assert refusal.count("\n") == 1
    assert main(["run", "hello", "--target", str(folder), *bits]) == 1
    assert refusal.strip() in capsys.readouterr().err


def test_what_the_authors_have_quantized_is_planned_so(tmp_path, capsys):
    config = shapes.known_config("Llama 3 70B").to_dict()
    fp8 = described_with(tmp_path / "fp8", **config, quantization_config={"quant_method": "fp8"})
    code, text, _ = plan(capsys, "--target", fp8, *MACHINE, "--ram", "128GB", "--resident", "0", "--json")
    assert (code, text.splitlines()[0]) == (0, f"target: {fp8}, fp8")
    report = json.loads(text.splitlines()[-1])
    assert report["streamed_bytes"] == pytest.approx((70.6e9 - 2 * 128256 * 8192), rel=0.01)
    assert not [lever for lever in report["levers"] if "--bits" in lever["command"]]
    code, _, error = plan(capsys, "--target", fp8, "--bits", "4", *MACHINE)
    assert code == 1
    assert "is already quantized (fp8): leave out --bits" in error


def test_experts_that_every_token_uses(tmp_path, capsys):
    config = tiny.tiny_config("mixtral", num_local_experts=4, num_experts_per_tok=4)
    code, text, _ = plan(capsys, "--target", described_with(tmp_path / "model", **config.to_dict()), *MACHINE)
    assert code == 0
    assert "experts: 4 of 4 per token, 4 for" in text
