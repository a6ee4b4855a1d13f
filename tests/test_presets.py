"""Presets: read, checked key by key, found by name or file."""

import pytest

from app.presets import chosen_settings, load_preset, preset_names


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
    with pytest.raises(ValueError, match=r"preset .*bad.toml: temp must be 0 \(greedy\) or more, not -1"):
        chosen_settings(write(tmp_path / "bad.toml", 'target = "a/b"\ntemp = -1'), {})


def test_unknown_names_and_missing_files():
    with pytest.raises(ValueError, match="no preset 'dmeo'; did you mean demo"):
        load_preset("dmeo")
    with pytest.raises(FileNotFoundError, match="no preset file"):
        load_preset("not/there.toml")
