"""Every setting, what it may be, and which of flag, environment, preset, model and default decided it."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace
from typing import Any

from app.sizes import parse_size
from app.spelling import nearest

DRAFT_KINDS = ("auto", "self", "ngram", "suffix", "graft", "none")  # anything else names a model
_GRAFTED = "graft:"  # before a model's name: repetitions guess, too

_PASSED_ON = {  # to the server that an engine is
    *("engine", "target", "temp", "top_p", "top_k", "min_p", "repeat_penalty", "presence_penalty", "frequency_penalty"),
    *("min_tokens", "seed", "max_tokens", "stop", "system"),
}

OF_A_DRAFT_MODEL = ("draft_bits", "draft_ctx", "draft_dtype")  # not of a learned draft, nor of one without weights

_DTYPES = ("bfloat16", "float16", "float32")

_CUTS = ("top_p", "top_k", "min_p")  # of what is drawn from, where anything is drawn

_OF_GENERATION = {  # what a model's generation_config calls them
    "temp": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repeat_penalty": "repetition_penalty",
}

Reader = Callable[[Any], Any]


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"a non-empty text, not {value!r}")
    return value


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(_text(each) for each in (value if isinstance(value, (list, tuple)) else [value]))


def _draft(value: Any) -> str:
    text = _text(value)
    if text.startswith(_GRAFTED) and named_model(text) in ("", *DRAFT_KINDS):
        raise ValueError(f"{_GRAFTED} and a model (graft alone takes a copy of the target), not {text!r}")
    return text


def _url(value: Any) -> str:
    if not str(value).startswith(("http://", "https://")):
        raise ValueError(f"an address such as http://localhost:8000/v1, not {value!r}")
    return str(value).rstrip("/")


def _size(value: Any) -> int:
    return parse_size(str(value))


def _choice(*names: str) -> Reader:
    def read(value: Any) -> str:
        if str(value) not in names:
            raise ValueError(f"{', '.join(names[:-1])} or {names[-1]}, not {str(value)!r}")
        return str(value)

    return read


def _number(kind: type, what: str, allowed: Callable[[Any], bool]) -> Reader:
    def read(value: Any) -> Any:
        try:
            number = kind(value) if isinstance(value, (str, int)) else value
        except (ValueError, OverflowError):
            number = None
        if isinstance(value, bool) or not isinstance(number, kind) or not allowed(number):
            raise ValueError(f"{what}, not {str(value) or repr(value)}")
        return number

    return read


def _at_least(low: int) -> Reader:
    return _number(int, f"a whole number of at least {low}", lambda n: n >= low)


def _auto_or(read: Reader) -> Reader:
    return lambda value: None if value == "auto" else read(value)


_penalty = _number(float, "between -2 and 2", lambda x: -2 <= x <= 2)

READERS: dict[str, Reader] = {
    "engine": _url,
    "target": _text,
    "bits": _number(int, "16, 8 or 4", lambda n: n in (16, 8, 4)),
    "draft": _draft,
    "draft_bits": _number(int, "16 or 4", lambda n: n in (16, 4)),
    "draft_ctx": _at_least(8),
    "draft_dtype": _choice(*_DTYPES),
    "past": _choice("on", "off"),
    "dtype": _choice(*_DTYPES),
    "ctx": _at_least(2),
    "budget": _auto_or(_at_least(1)),
    "device": _choice("auto", "cpu", "cuda"),
    "device_limit": _size,
    "ram_limit": _size,
    "slots": _at_least(1),
    "resident": _at_least(0),
    "temp": _number(float, "0 (greedy) or at least 1e-6", lambda x: x == 0 or 1e-6 <= x < math.inf),
    "top_p": _number(float, "above 0 and at most 1", lambda x: 0 < x <= 1),
    "top_k": _at_least(0),
    "min_p": _number(float, "from 0 to below 1", lambda x: 0 <= x < 1),
    "repeat_penalty": _number(float, "from 1e-6 to 1e6", lambda x: 1e-6 <= x <= 1e6),
    "presence_penalty": _penalty,
    "frequency_penalty": _penalty,
    "min_tokens": _at_least(0),
    "seed": _number(int, "a whole number from 0 to 2^63 - 1", lambda n: 0 <= n < 2**63),
    "max_tokens": _at_least(1),
    "stop": _texts,
    "system": _text,
}


@dataclass(frozen=True)
class Settings:
    """One run's settings; None stands for what the machine or the context makes of it.

    engine: the address of another server that answers instead of this program; `target` is the model's name there.
    """

    engine: str | None = None
    target: str | None = None
    bits: int | None = None
    draft: str = "auto"
    draft_bits: int | None = None
    draft_ctx: int | None = None
    draft_dtype: str | None = None
    past: str = "on"
    dtype: str | None = None
    ctx: int | None = None
    budget: int | None = None
    device: str = "auto"
    device_limit: int | None = None
    ram_limit: int | None = None
    slots: int = 2
    resident: int | None = None
    temp: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    seed: int = 0
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    system: str | None = None


@dataclass(frozen=True)
class Resolved:
    """Settings, what set each one that is not at its default, and the preset's name."""

    settings: Settings
    origins: Mapping[str, str]
    preset: str | None = None

    def lines(self) -> list[str]:
        """`name = value (origin)` for every setting."""
        values = {field.name: getattr(self.settings, field.name) for field in fields(Settings)}
        return [f"{name} = {value} ({self.origins.get(name, 'default')})" for name, value in values.items()]


def resolve(
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
    preset: Mapping[str, Any],
    *,
    preset_name: str | None = None,
) -> Resolved:
    """Merges the three, first wins; ValueError names the flag, variable or key whose value is wrong."""
    sources = [
        (preset, lambda key: f"preset {preset_name}: {key}", f"preset {preset_name}"),
        (environment, lambda key: f"SPECEXEC_{key.upper()}", "environment"),
        (flags, flag_name, "flag"),
    ]
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for source, label, origin in sources:
        for key, raw in source.items():
            if key not in READERS:
                raise ValueError(f"unknown setting {key!r}{nearest(key, READERS)}")
            try:
                values[key] = READERS[key](raw)
            except ValueError as error:
                raise ValueError(f"{label(key)} must be {error}") from None
            origins[key] = origin
    resolved = Resolved(Settings(**values), origins, preset_name)
    _refuse_idle(resolved)
    return resolved


def with_generation_config(
    resolved: Resolved, generation_config: Any, note: Callable[[str], None] = lambda line: None
) -> Resolved:
    """Fills sampling values that nothing else set from a model that asks to be sampled (`do_sample`).

    `note` is told in a line of each value that cannot be used: the model starts without it.
    """
    config = generation_config or SimpleNamespace()
    if not getattr(config, "do_sample", False):
        return resolved
    new: dict[str, Any] = {} if "temp" in resolved.origins else {"temp": 1.0}
    for key, name in _OF_GENERATION.items():
        value = getattr(config, name, None)
        if value is None or key in resolved.origins:
            continue
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # as JSON may have whole numbers
        try:
            new[key] = 0 if key == "top_k" and value == -1 else READERS[key](value)  # -1: off, to some programs
        except ValueError as error:
            note(f"{name} of the model's generation_config is ignored: it must be {error}")
    origins = {**resolved.origins, **dict.fromkeys(new, "generation_config")}
    return replace(resolved, settings=replace(resolved.settings, **new), origins=origins)


def idle_settings(resolved: Resolved) -> list[str]:
    """A line for each setting that was asked for and changes nothing, once the model has had its say."""
    if resolved.settings.temp > 0:
        return []
    asked = [key for key in _CUTS if resolved.origins.get(key, "generation_config") != "generation_config"]
    return [f"{key} ({resolved.origins[key]}) has no effect at temperature 0 (greedy)" for key in asked]


def named_model(draft: str) -> str:
    """The model that a draft which is none of DRAFT_KINDS names: MODEL, or graft:MODEL."""
    return draft.removeprefix(_GRAFTED)


def guesses_repetitions(draft: str) -> bool:
    """Whether a draft looks for repetitions in the texts: alone, or with a model beside it."""
    return draft in ("suffix", "graft") or draft.startswith(_GRAFTED)


def flag_name(key: str) -> str:
    """`top_p` -> `--top-p`."""
    return "--" + key.replace("_", "-")


def _refuse_idle(resolved: Resolved) -> None:
    """Refuses a flag that another setting leaves without effect."""
    settings, origins = resolved.settings, resolved.origins
    if settings.engine:
        for key, origin in origins.items():
            if origin == "flag" and key not in _PASSED_ON:
                raise ValueError(f"{flag_name(key)} has no effect with an --engine: the server there has its own")
    external = settings.draft not in DRAFT_KINDS
    if origins.get("draft_bits") == "flag" and not external and (settings.draft, settings.draft_bits) != ("self", 4):
        raise ValueError(
            f"--draft-bits {settings.draft_bits} needs a draft model: --draft ID or a directory, not {settings.draft}"
        )
    for key in ("draft_ctx", "draft_dtype"):
        if origins.get(key) == "flag" and not external:
            raise ValueError(f"{flag_name(key)} needs a draft model: --draft ID or a directory, not {settings.draft}")
    if origins.get("past") == "flag" and settings.past == "on" and not guesses_repetitions(settings.draft):
        raise ValueError(
            f"--past on needs a draft that repeats: --draft suffix, graft or graft:MODEL, not {settings.draft}"
        )
    if "temp" in origins and settings.temp == 0:
        for key in _CUTS:
            if origins.get(key) == "flag":
                raise ValueError(f"{flag_name(key)} has no effect at temperature 0 (greedy): add --temp 0.8 or so")
