"""The command line: one line and the right exit code for all that can be wrong, text and figures for the rest."""

import inspect
import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from gguf import GGUFWriter
from tiny_tokenizer import word_tokenizer

from app.cli import command, main, serve

CALL = [sys.executable, "-c", "import sys; from app.cli import main; sys.exit(main())"]
TINY = ["--dtype", "float32", "--max-tokens", "12", "--ctx", "128", "--budget", "8"]


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("SPECEXEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))


def run_command(capsys, *arguments):
    code = main([*map(str, arguments)])
    return code, *capsys.readouterr()


def run(capsys, *arguments):
    return run_command(capsys, "run", *arguments)


def copy(source, destination):
    return shutil.copytree(source, destination)


def expect_error(outcome, code, *words):
    assert outcome[0] == code
    assert outcome[1] == ""
    line = outcome[2].strip()
    assert "\n" not in line
    assert line.startswith("specexec: ")
    for word in words:
        assert word in line


def test_help_is_quick_and_imports_nothing_heavy():
    heavy = "{'torch', 'transformers', 'gradio', 'numpy', 'huggingface_hub'}"
    script = (
        f"from app.cli import main; import sys; main(['run', '--help']); sys.exit(bool({heavy} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0
    assert "--device-limit" in done.stdout


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("specexec ")


def test_answer_status_line_and_json(chat_model, capsys):
    code, text, status = run(capsys, "the cat", "--target", chat_model, *TINY)
    assert code == 0
    assert text.endswith("\n")
    assert status.splitlines()[-1].startswith("12 tokens | ")  # a slow load has had its line before
    code, out, _ = run(capsys, "the cat", "--target", chat_model, *TINY, "--json", "--draft", "none")
    report = json.loads(out.splitlines()[-1])
    assert code == 0
    assert report["text"] + "\n" == text
    assert (report["tokens"], report["passes"], report["finish_reason"], report["seed"]) == (12, 12, "length", 0)
    expected = (
        "tokens_per_pass tokens_per_s s_per_pass draft_s verify_s streamed_bytes link_bps raw_link_bps peak_bytes"
    )
    assert {*expected.split(), "limit_bytes", "draft", "budget", "num_resident", "num_streamed"} <= set(report)


@pytest.mark.parametrize("draft", ["auto", "self", "ngram", "none"])
def test_sampled_text_is_the_same_with_every_draft(chat_model, capsys, draft):
    sampling = ["--temp", "0.8", "--top-p", "0.9", "--top-k", "40", "--repeat-penalty", "1.1", "--seed", "3"]
    texts = [
        run(capsys, "the cat", "--target", chat_model, *TINY, *sampling, "--draft", each)[1] for each in (draft, "none")
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("bits", ["16", "4"])
def test_another_model_drafts(chat_model, capsys, bits):
    options = ["--target", chat_model, *TINY, "--json"]
    report = json.loads(run(capsys, "the", *options, "--draft", chat_model, "--draft-bits", bits)[1])
    assert report["text"] == json.loads(run(capsys, "the", *options, "--draft", "none")[1])["text"]
    assert report["drafted"] > 0


def test_prompt_from_standard_input_and_raw(chat_model, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("the cat"))
    from_stdin = run(capsys, "--raw", "--target", chat_model, *TINY)
    assert from_stdin[:2] == run(capsys, "the cat", "--raw", "--target", chat_model, *TINY)[:2]


def test_verbose_tells_origins_and_memory(chat_model, capsys):
    _, _, status = run(capsys, "x", "--target", chat_model, *TINY, "--verbose")
    assert "budget = 8 (flag)" in status
    assert "KV cache" in status and "verdict: fits" in status


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["x", "--temp", "-1"], ["--temp must be 0 (greedy) or at least 1e-6, not -1"]),
        (["x", "--temp", "1", "--top-p", "1.5"], ["--top-p must be above 0 and at most 1, not 1.5"]),
        (["x", "--device-limit", "lots"], ["--device-limit"]),
        (["x", "--preset", "dmeo"], ["did you mean demo"]),
        (["", "--target", "x"], ["the prompt is empty"]),
        (["x", "--no-such-flag"], ["--no-such-flag"]),
        (["x", "--raw", "--system", "y"], ["--system"]),
        (["x", "--draft", "ngram", "--draft-bits", "4"], ["--draft-bits"]),
    ],
)
def test_wrong_usage(capsys, arguments, words):
    expect_error(run(capsys, *arguments), 2, *words)


@pytest.mark.parametrize("name", sorted(typer.main.get_command(command).commands))
def test_no_empty_value_is_dropped(capsys, name):
    """Of `--target "$UNSET"` the shell leaves an empty text; without it another model would answer."""
    needed = {"run": ["x"], "export": ["vllm"], "train": ["--recipe", "eagle3", "--out", "x"], "pull": [], "list": []}
    options = [each for each in typer.main.get_command(command).commands[name].params if each.name != "prompt"]
    flags = [each.opts[0] for each in options if not getattr(each, "is_flag", False) and each.opts[0].startswith("--")]
    assert ("--target" in flags) == (name not in ("doctor", "list", "pull"))
    for flag in flags:
        code, out, errors = run_command(capsys, name, *needed.get(name, ()), flag, "")
        assert (code, out) == (2, "") and flag in errors and errors.count("\n") == 1
    if name in ("bench", "pull"):
        assert run_command(capsys, name, "")[0] == 2


def test_presets_that_are_none(tmp_path, capsys):
    bad = tmp_path / "bad.toml"
    bad.write_text('target = "x"\nbugdet = 3')
    expect_error(run(capsys, "x", "--preset", bad), 2, "bugdet", "did you mean budget")
    bad.write_bytes(b"\xff\xfe")
    expect_error(run(capsys, "x", "--preset", bad), 2, "not readable TOML")
    expect_error(run(capsys, "x", "--preset", tmp_path / "none.toml"), 1, "none.toml")


def test_models_that_are_none(tmp_path, capsys):
    expect_error(run(capsys, "x", "--target", tmp_path / "nowhere"), 1, "nowhere")
    expect_error(run(capsys, "x", "--target", "some/model", "--offline"), 1, "specexec pull some/model")
    expect_error(run(capsys, "x", "--target", tmp_path), 1, str(tmp_path))
    (tmp_path / "weights.bin").touch()
    expect_error(run(capsys, "x", "--target", tmp_path / "weights.bin"), 1, "not a .gguf")


def test_damaged_checkpoints(chat_model, tmp_path, capsys):
    shard = sorted(chat_model.glob("*.safetensors"))[1].name
    missing = copy(chat_model, tmp_path / "missing")
    (missing / shard).unlink()
    expect_error(run(capsys, "x", "--target", missing), 1, shard)
    short = copy(chat_model, tmp_path / "short")
    (short / shard).write_bytes((short / shard).read_bytes()[:-100])
    expect_error(run(capsys, "x", "--target", short), 1, shard)
    lying = copy(chat_model, tmp_path / "lying")
    index = lying / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    name = next(key for key, file in content["weight_map"].items() if file != shard)
    content["weight_map"][name] = shard
    index.write_text(json.dumps(content))
    expect_error(run(capsys, "x", "--target", lying), 1, name)


def test_gguf_that_cannot_be_read(tmp_path, capsys):
    noise = tmp_path / "noise.gguf"
    noise.write_bytes(b"this is no model")
    expect_error(run(capsys, "x", "--target", noise), 1, "noise.gguf")
    strange = tmp_path / "strange.gguf"
    writer = GGUFWriter(strange, "betamax")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    expect_error(run(capsys, "x", "--target", strange), 1, "betamax")
    assert not list((tmp_path / "cache" / "models").glob("[!.]*"))


def test_a_draft_of_another_vocabulary_names_the_first_id(chat_model, tmp_path, capsys):
    other = copy(chat_model, tmp_path / "other")
    word_tokenizer().save_pretrained(other)
    expect_error(run(capsys, "x", "--target", chat_model, "--draft", other), 1, "id 0", "'<bos>'", "'<pad>'")


def test_limits_that_are_too_small(chat_model, capsys):
    expect_error(run(capsys, "x", "--target", chat_model, "--device-limit", "1MB"), 1, "needed", "raise the limit")
    expect_error(run(capsys, "x", "--target", chat_model, "--ram-limit", "1MB"), 1, "needed", "raise the limit")
    expect_error(run(capsys, "the cat " * 40, "--target", chat_model, "--ctx", "64"), 1, "64", "--ctx")
    expect_error(run(capsys, "x", "--target", chat_model, "--ctx", "9999"), 1, "512")


def test_a_cache_that_cannot_be_used_is_named(chat_model, tmp_path, capsys, monkeypatch):
    (tmp_path / "file").touch()
    for place in (tmp_path / "file" / "cache", Path("/proc/nowhere/cache")):
        monkeypatch.setenv("SPECEXEC_CACHE", str(place))
        expect_error(run(capsys, "x", "--target", chat_model, "--bits", "4"), 1, "set SPECEXEC_CACHE to a folder")
    code, _, errors = run(capsys, "x", "--preset", tmp_path / "none.toml")
    assert code == 1 and "SPECEXEC_CACHE" not in errors


def test_layers_that_stay_in_their_slots_have_no_link(chat_model, capsys):
    options = ["--target", chat_model, *TINY, "--resident", "2", "--json"]
    for slots, is_streamed in (("1", True), ("2", False)):
        _, out, status = run(capsys, "x", *options, "--slots", slots)
        report = json.loads(out)
        assert (report["num_streamed"], report["raw_link_bps"] is not None) == (2, is_streamed)
        assert ("| link " in status) == is_streamed


def test_layers_with_recurrent_state_are_refused_by_name(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    expect_error(run(capsys, "x", "--target", tmp_path), 1, "mamba")


def test_no_gpu_is_said(chat_model, capsys):
    import torch

    if torch.accelerator.is_available():
        pytest.skip("there is one")
    expect_error(run(capsys, "x", "--target", chat_model, "--device", "cuda"), 1, "--device cpu")


def test_debug_shows_the_traceback(tmp_path, capsys):
    code, _, errors = run(capsys, "x", "--target", tmp_path / "nowhere", "--debug")
    assert code == 1
    assert "Traceback" in errors


def test_interrupt_is_130(capsys, monkeypatch):
    monkeypatch.setattr("app.presets.chosen_settings", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    assert run(capsys, "x")[0] == 130


def test_a_library_that_leaves_keeps_its_code(monkeypatch):
    monkeypatch.setattr("app.presets.chosen_settings", lambda *_: sys.exit(3))
    with pytest.raises(SystemExit) as left:
        main(["run", "x"])
    assert left.value.code == 3


def test_closed_pipe_ends_quietly():
    process = subprocess.Popen([*CALL, "--version"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert (process.wait(), errors) == (0, b"")


def test_the_readme_asks_where_serve_listens():
    text = (Path(__file__).parent.parent / "README.md").read_text().partition("While `specexec serve` runs")[2]
    default = inspect.signature(serve).parameters["port"].default
    assert re.findall(r"127\.0\.0\.1:(\d+)/v1", text) == [str(default)] * 2
