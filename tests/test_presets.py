"""Presets: read, checked key by key, found by name or file."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import shapes

from app import hub, models
from app.cli import main
from app.presets import chosen_settings, load_preset, preset_names

ROOT = Path(__file__).parents[1]


def write(path, text):
    path.write_text(text)
    return str(path)


def test_every_built_in_preset_resolves_and_says_why():
    assert "demo" in preset_names()
    for name in preset_names():
        assert load_preset(name).why
        assert chosen_settings(name, {}).settings.target


def test_demo_is_used_unless_a_target_is_named():
    assert chosen_settings(None, {}).preset == "demo"
    assert chosen_settings(None, {"target": "else/where"}).settings.device_limit is None


def test_a_flag_overrides_a_preset_file(tmp_path):
    file = write(tmp_path / "mine.toml", 'target = "a/b"\nbudget = 8\ntemp = 1\n')
    chosen = chosen_settings(file, {"budget": "16"})
    assert (chosen.settings.budget, chosen.settings.temp, chosen.preset) == (16, 1.0, file)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('target = "a/b"\nbugdet = 8', "unknown key 'bugdet'; did you mean budget"),
        ("target = ", "not readable TOML"),
        ("budget = 8", "names no target"),
    ],
)
def test_what_is_no_preset_is_refused(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        load_preset(write(tmp_path / "bad.toml", text))


def test_a_wrong_value_names_preset_and_key(tmp_path):
    with pytest.raises(ValueError, match=r"preset .*bad.toml: temp must be 0 \(greedy\) or at least 1e-6, not -1"):
        chosen_settings(write(tmp_path / "bad.toml", 'target = "a/b"\ntemp = -1'), {})


def test_unknown_names_and_missing_files():
    with pytest.raises(ValueError, match="no preset 'dmeo'; did you mean demo"):
        load_preset("dmeo")
    with pytest.raises(FileNotFoundError, match="no preset file"):
        load_preset("not/there.toml")


@pytest.fixture
def configs_cached(monkeypatch, tmp_path):
    """A Hub cache that holds the configs of all models that presets name, and no weights."""
    monkeypatch.setenv("SPECEXEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    for name, shape in shapes.ON_THE_HUB.items():
        folder = tmp_path / "hub" / f"models--{name.replace('/', '--')}"
        snapshot = folder / "snapshots" / ("0" * 40)
        shapes.known_config(shape).save_pretrained(snapshot)
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text(snapshot.name)


@pytest.mark.parametrize("name", [name for name in preset_names() if load_preset(name).gpu])
def test_every_preset_fits_the_machine_it_names(configs_cached, capsys, name):
    preset = load_preset(name)
    machine = ["--gpu", preset.gpu, "--ram", preset.ram]
    assert main(["plan", "--preset", name, *machine, "--offline", "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["verdict"].startswith(("fits", "streams from RAM"))
    assert report["tiers"]["disk"] == 0
    assert report["total_bytes"] <= report["limit_bytes"]
    assert (report["draft"], report["bits"]) == (preset.settings["draft"], preset.settings["bits"])
    assert report["tokens_per_s"] > 5
    assert main(["plan", "--preset", name, *machine, "--draft", "none", "--offline", "--json"]) == 0
    alone = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["tokens_per_s"] > 1.5 * alone["tokens_per_s"]  # the draft is worth its memory


def test_presets_cover_the_machines_people_have():
    machines = [load_preset(name) for name in preset_names()]
    memory = {each.name.removeprefix("gpu-") for each in machines if each.name.startswith("gpu-")}
    assert memory == {"4gb", "8gb", "12gb", "16gb", "24gb", "32gb"}
    assert {"RTX 2080", "RTX 2080 Ti", "RTX 4090"} <= {each.gpu for each in machines}
    assert {each.ram for each in machines} - {None} == {"16GB", "32GB", "64GB"}


def test_list_gives_verdicts_without_weights_and_without_the_hub(configs_cached, capsys, monkeypatch):
    assert main(["list", "--offline", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["presets"]}
    assert list(rows) == preset_names()
    known = {"fits", "streams from RAM", "needs the disk", "does not fit"}
    assert {row["verdict"] for row in rows.values()} <= known
    assert all((row["tokens_per_s"] is None) == (row["verdict"] == "does not fit") for row in rows.values())
    assert any(row["tokens_per_s"] for row in rows.values())
    assert not any(row["cached"] for row in rows.values())
    assert (rows["rtx-4090"]["gpu"], rows["rtx-4090"]["ram"]) == ("RTX 4090", "64GB")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", "/nowhere")
    assert main(["list", "--offline"]) == 0
    out, status = capsys.readouterr()
    assert out.count("unknown without the Hub") == out.count("not cached") == len(rows)
    assert "specexec pull NAME" in status


def test_a_config_alone_is_no_cached_model(configs_cached):
    name = "Qwen/Qwen3-0.6B"
    assert hub.known_config(name) is not None
    assert hub.local_snapshot(name) is None
    assert not models.is_cached(name)
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (hub.known_config(name) / "model.safetensors.index.json").write_text(json.dumps(index))
    (hub.known_config(name) / "model-1.safetensors").touch()
    assert hub.local_snapshot(name) is None
    (hub.known_config(name) / "model-2.safetensors").touch()
    assert hub.local_snapshot(name) == hub.known_config(name)


def test_the_table_of_the_readme_is_what_its_command_prints():
    command = [sys.executable, ROOT / "benchmarks" / "presets_table.py"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
    assert printed.startswith("| preset |") and printed in (ROOT / "README.md").read_text()
