"""Flag > environment > preset > generation_config > default, and every value checked in one line."""

from types import SimpleNamespace

import pytest

from app.environment import environment_settings
from app.presets import chosen_settings
from app.settings import READERS, Settings, idle_settings, resolve, with_generation_config
from app.sizes import format_size, parse_size
from specexec.sampling import SamplingParams


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("8GB", 8 * 10**9), ("900 MB", 900 * 10**6), ("1.5GiB", 3 * 2**29), ("2k", 2000), ("77", 77), (".5gb", 5 * 10**8)],
)
def test_sizes_are_read(text, num_bytes):
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "8 apples", "0", "1e9", "nan", "9" * 400, "9" * 300 + "TB"])
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
        ("temp", "1e-39"),
        ("top_p", "0"),
        ("top_p", "1.01"),
        ("top_k", "-1"),
        ("top_k", "2.5"),
        ("min_p", "1"),
        ("repeat_penalty", "0"),
        ("repeat_penalty", "1e-39"),
        ("repeat_penalty", "1e39"),
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
        ("stop", 5),
        ("stop", {"a": 1}),
        pytest.param("temp", 10**400, id="temp-huge"),
        ("budget", ""),
        ("budget", True),
    ],
)
def test_wrong_values_name_the_flag(key, value):
    with pytest.raises(ValueError, match=f"^--{key.replace('_', '-')} must be ") as raised:
        resolve({key: value}, {}, {})
    assert "\n" not in str(raised.value)
    assert not str(raised.value).endswith("not ")


@pytest.mark.parametrize(
    "flags",
    [
        {"draft_bits": "4"},
        {"draft_bits": "16", "draft": "self"},
        {"draft_bits": "4", "draft": "ngram"},
        {"draft_ctx": "64", "draft": "suffix"},
        {"draft_dtype": "bfloat16", "draft": "self"},
        {"draft_dtype": "bfloat16"},
        {"top_p": "0.9", "temp": "0"},
        {"top_k": "40", "temp": "0"},
    ],
)
def test_flags_without_effect_are_refused(flags):
    with pytest.raises(ValueError, match="needs a draft model|no effect"):
        resolve(flags, {}, {})


@pytest.mark.parametrize("draft", ["none", "self", "ngram", "auto", "some/model"])
def test_past_is_kept_only_for_drafts_that_repeat(draft):
    with pytest.raises(ValueError, match=f"--past on needs a draft that repeats: .*, not {draft}"):
        resolve({"draft": draft, "past": "on"}, {}, {})
    for other in (({"past": "off", "draft": draft}, {}), ({"draft": draft}, {"past": "on"})):
        assert resolve(*other, {}).settings.draft == draft  # true as it is; for whatever draft there is
    for repeats in ("suffix", "graft", "graft:some/model"):
        assert resolve({"draft": repeats, "past": "on"}, {}, {}).settings.past == "on"


def test_the_least_temperature_is_that_of_sampling():
    assert SamplingParams(temperature=resolve({"temp": "1e-6"}, {}, {}).settings.temp).temperature == 1e-6
    for refused in (lambda: SamplingParams(temperature=9e-7), lambda: resolve({"temp": "9e-7"}, {}, {})):
        with pytest.raises(ValueError, match="at least 1e-6, not 9e-0?7"):
            refused()


def test_generation_config_fills_what_nothing_else_set():
    config = SimpleNamespace(do_sample=True, temperature=0.6, top_p=0.95, top_k=None, repetition_penalty=1.1)
    filled = with_generation_config(resolve({"top_p": "0.5"}, {}, {}), config)
    assert (filled.settings.temp, filled.settings.top_p, filled.settings.repeat_penalty) == (0.6, 0.5, 1.1)
    assert filled.origins["temp"] == "generation_config"


@pytest.mark.parametrize(
    ("name", "value", "key"),
    [
        ("temperature", -1.0, "temp"),
        ("top_p", 0.0, "top_p"),
        ("top_p", 1.5, "top_p"),
        ("top_k", 50.5, "top_k"),
        ("top_k", -7, "top_k"),
        ("min_p", "much", "min_p"),
        ("repetition_penalty", 0, "repeat_penalty"),
    ],
)
def test_what_is_wrong_in_a_generation_config_is_ignored_and_said(name, value, key):
    notes = []
    config = SimpleNamespace(do_sample=True, **{"temperature": 0.6, name: value})
    filled = with_generation_config(resolve({}, {}, {}), config, notes.append)
    (line,) = notes
    assert line.startswith(f"{name} of the model's generation_config is ignored: it must be ")
    assert line.endswith("not " + str(value).removesuffix(".0"))
    assert getattr(filled.settings, key) == (1.0 if key == "temp" else getattr(Settings(), key))
    flag = {"temp": "0.5", "top_p": "0.5", "top_k": "5", "min_p": "0.5", "repeat_penalty": "1.5"}[key]
    with_generation_config(resolve({key: flag}, {}, {}), config, notes.append)
    assert len(notes) == 1, "what is set otherwise does not matter"


def test_a_generation_config_may_say_it_in_other_numbers():
    config = SimpleNamespace(do_sample=True, temperature=1, top_k=50.0, top_p=1)
    filled = with_generation_config(resolve({}, {}, {}), config, pytest.fail).settings
    assert (filled.temp, filled.top_k, filled.top_p) == (1.0, 50, 1.0) and type(filled.top_k) is int
    off = SimpleNamespace(do_sample=True, top_k=-1)
    assert with_generation_config(resolve({}, {}, {}), off, pytest.fail).settings.top_k == 0


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
