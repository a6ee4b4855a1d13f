"""Flag > environment > preset > generation_config > default, and every value checked in one line."""

from types import SimpleNamespace

import pytest

from app.environment import environment_settings
from app.presets import chosen_settings
from app.settings import READERS, Settings, idle_settings, resolve, with_generation_config
from app.sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("8GB", 8 * 10**9), ("900 MB", 900 * 10**6), ("1.5GiB", 3 * 2**29), ("2k", 2000), ("77", 77), (".5gb", 5 * 10**8)],
)
def test_sizes_are_read(text, num_bytes):
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "8 apples", "0", "1e9", "nan"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="a size"):
        parse_size(text)


@pytest.mark.parametrize(("num_bytes", "text"), [(5, "5 B"), (999_600, "1 MB"), (1_061_000_000, "1.06 GB")])
def test_sizes_are_shown(num_bytes, text):
    assert format_size(num_bytes) == text


def test_first_source_wins_and_is_remembered():
    resolved = resolve(
        {"budget": "1"}, {"budget": "2", "ctx": "100"}, {"budget": 3, "ctx": 4, "slots": 5}, preset_name="mine"
    )
    assert (resolved.settings.budget, resolved.settings.ctx, resolved.settings.slots) == (1, 100, 5)
    assert resolved.origins == {"budget": "flag", "ctx": "environment", "slots": "preset mine"}
    assert "ctx = 100 (environment)" in resolved.lines()
    assert "seed = 0 (default)" in resolved.lines()


def test_every_setting_has_a_reader_and_a_default():
    assert set(READERS) == set(vars(Settings()))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temp", "-0.1"),
        ("temp", "nan"),
        ("temp", "inf"),
        ("top_p", "0"),
        ("top_p", "1.01"),
        ("top_k", "-1"),
        ("top_k", "2.5"),
        ("min_p", "1"),
        ("repeat_penalty", "0"),
        ("presence_penalty", "2.1"),
        ("frequency_penalty", "x"),
        ("max_tokens", "0"),
        ("min_tokens", "-1"),
        ("budget", "0"),
        ("slots", "0"),
        ("ctx", "1"),
        ("seed", "-1"),
        ("draft_bits", "8"),
        ("draft", "graft:"),
        ("draft", "graft:self"),
        ("dtype", "int8"),
        ("device", "tpu"),
        ("device_limit", "much"),
        ("stop", [""]),
        ("budget", True),
    ],
)
def test_wrong_values_name_the_flag(key, value):
    with pytest.raises(ValueError, match=f"^--{key.replace('_', '-')} must be ") as raised:
        resolve({key: value}, {}, {})
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "flags",
    [
        {"draft_bits": "4"},
        {"draft_bits": "16", "draft": "self"},
        {"draft_bits": "4", "draft": "ngram"},
        {"top_p": "0.9", "temp": "0"},
        {"top_k": "40", "temp": "0"},
    ],
)
def test_flags_without_effect_are_refused(flags):
    with pytest.raises(ValueError, match="needs a draft model|no effect"):
        resolve(flags, {}, {})


def test_generation_config_fills_what_nothing_else_set():
    config = SimpleNamespace(do_sample=True, temperature=0.6, top_p=0.95, top_k=None, repetition_penalty=1.1)
    filled = with_generation_config(resolve({"top_p": "0.5"}, {}, {}), config)
    assert (filled.settings.temp, filled.settings.top_p, filled.settings.repeat_penalty) == (0.6, 0.5, 1.1)
    assert filled.origins["temp"] == "generation_config"


def test_generation_config_of_a_greedy_model_changes_nothing():
    resolved = resolve({}, {}, {})
    assert with_generation_config(resolved, SimpleNamespace(do_sample=False, temperature=0.6)) is resolved
    assert with_generation_config(resolved, None) is resolved


def test_environment_reaches_the_settings(monkeypatch):
    monkeypatch.setenv("SPECEXEC_TOP_K", "7")
    monkeypatch.setenv("SPECEXEC_TARGET", "some/model")
    resolved = chosen_settings(None, {})
    assert (resolved.settings.top_k, resolved.settings.target, resolved.preset) == (7, "some/model", None)


def test_unknown_variable_names_the_nearest(monkeypatch):
    monkeypatch.setenv("SPECEXEC_BUDGETS", "7")
    with pytest.raises(ValueError, match="SPECEXEC_BUDGETS; did you mean SPECEXEC_BUDGET"):
        environment_settings(READERS)


@pytest.mark.parametrize("key", ["top_p", "top_k", "min_p"])
def test_what_is_drawn_from_matters_only_where_something_is_drawn(key):
    preset = {"target": "a/b", key: "0.5" if key != "top_k" else "5"}
    (line,) = idle_settings(resolve({}, {}, preset, preset_name="x"))
    assert line == f"{key} (preset x) has no effect at temperature 0 (greedy)"
    assert idle_settings(resolve({"temp": "0.5"}, {}, preset, preset_name="x")) == []
    config = SimpleNamespace(do_sample=True, temperature=0.7, top_p=0.9, top_k=20, min_p=0.1)
    assert idle_settings(with_generation_config(resolve({}, {}, {}), config)) == []
    assert idle_settings(with_generation_config(resolve({"temp": "0"}, {}, {}), config)) == []
    assert idle_settings(resolve({}, {}, {"target": "a/b"}, preset_name="x")) == []
