"""Presets: TOML files that name a target, a draft and limits; those in `configs/` go by their names."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from app.environment import environment_preset, environment_settings
from app.settings import READERS, Resolved, resolve
from app.spelling import nearest

DEFAULT = "demo"
_TABLES = {"acceptance", "hardware"}  # files in `configs/` that are no presets
_ABOUT = ("why", "gpu", "ram")  # what a preset says that is no setting


@dataclass(frozen=True)
class Preset:
    """A preset's settings as the file has them, why one would choose it, and the machine that it is meant for."""

    name: str
    why: str
    settings: Mapping[str, Any]
    gpu: str | None = None
    ram: str | None = None


def load_preset(name_or_file: str) -> Preset:
    """Reads a built-in preset by name or any TOML file by path; ValueError for what is not a preset."""
    if not name_or_file.endswith(".toml"):
        names = preset_names()
        if name_or_file not in names:
            raise ValueError(f"no preset {name_or_file!r}{nearest(name_or_file, names)} (or give a .toml file)")
        return _parse(name_or_file, (files("configs") / f"{name_or_file}.toml").read_bytes())
    path = Path(name_or_file)
    if not path.is_file():
        raise FileNotFoundError(f"no preset file {name_or_file}")
    return _parse(path.stem, path.read_bytes())


def chosen_settings(preset: str | None, flags: Mapping[str, Any]) -> Resolved:
    """What flags, environment and preset say; the demo preset counts only where nothing names a target or engine."""
    environment = environment_settings(READERS)
    name = preset or environment_preset()
    if name is None and not {"target", "engine"} & {*flags, *environment}:
        name = DEFAULT
    if name is None:
        return resolve(flags, environment, {})
    return resolve(flags, environment, load_preset(name).settings, preset_name=name)


def preset_names() -> list[str]:
    """The built-in presets, sorted, 4 before 12."""
    names = {each.name.removesuffix(".toml") for each in files("configs").iterdir() if each.name.endswith(".toml")}
    return sorted(
        names - _TABLES,
        key=lambda name: [part.zfill(6) if part.isdigit() else part for part in re.split(r"(\d+)", name)],
    )


def _parse(name: str, content: bytes) -> Preset:
    try:
        table = tomllib.loads(content.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"preset {name} is not readable TOML: {error}") from None
    for key in table:
        if key not in READERS and key not in _ABOUT:
            raise ValueError(f"preset {name}: unknown key {key!r}{nearest(key, [*READERS, *_ABOUT])}")
    if "target" not in table:
        raise ValueError(f'preset {name} names no target: add target = "a directory, a Hub id or a .gguf file"')
    about = {key: str(table.pop(key)) for key in _ABOUT if key in table}
    return Preset(name, about.pop("why", ""), table, **about)
