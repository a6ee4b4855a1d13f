"""Training recipes: TOML files in `configs/training/` by name, or any by path; every key is checked."""

import tomllib
import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from app.spelling import nearest
from specexec.training.recipe import Recipe


def load_recipe(name_or_file: str) -> Recipe:
    """Reads a built-in recipe by name or any TOML file by path; ValueError names the key that is wrong."""
    if name_or_file.endswith(".toml"):
        path = Path(name_or_file)
        if not path.is_file():
            raise FileNotFoundError(f"no recipe file {name_or_file}")
        content = path.read_bytes()
    else:
        names = recipe_names()
        if name_or_file not in names:
            raise ValueError(f"no recipe {name_or_file!r}{nearest(name_or_file, names)} (or give a .toml file)")
        content = (files("configs") / "training" / f"{name_or_file}.toml").read_bytes()
    try:
        table = tomllib.loads(content.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"recipe {name_or_file} is not readable TOML: {error}") from None
    return _read(Recipe, table, f"recipe {name_or_file}")


def recipe_names() -> list[str]:
    """The built-in recipes, sorted."""
    folder = files("configs") / "training"
    return sorted(each.name.removesuffix(".toml") for each in folder.iterdir() if each.name.endswith(".toml"))


def _read(kind: type, table: Mapping[str, Any], where: str) -> Any:
    """An instance of the dataclass `kind` from a table whose keys are its fields."""
    hints = get_type_hints(kind)
    for key in table:
        if key not in hints:
            raise ValueError(f"{where}: unknown key {key!r}{nearest(key, list(hints))}")
    lacking = [each.name for each in fields(kind) if each.name == "kind" and "kind" not in table]
    if lacking:
        raise ValueError(f"{where} does not say what to train: add kind = {' or '.join(get_args(hints['kind']))}")
    return kind(**{key: _value(hints[key], value, f"{where}: {key}") for key, value in table.items()})


def _value(hint: Any, value: Any, where: str) -> Any:
    """`value` as the annotation `hint` wants it; ValueError if it is of another kind."""
    if is_dataclass(hint):
        if not isinstance(value, dict):
            raise ValueError(f"{where} must be a table, not {value!r}")
        return _read(hint, value, where)
    if get_origin(hint) in (Union, types.UnionType):
        hint = next(each for each in get_args(hint) if each is not types.NoneType)
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise ValueError(f"{where} must be {' or '.join(map(str, get_args(hint)))}, not {value!r}")
        return value
    if get_origin(hint) is tuple:
        inner = get_args(hint)[0]
        if not isinstance(value, list):
            raise ValueError(f"{where} must be a list, not {value!r}")
        return tuple(_value(inner, each, where) for each in value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, hint) or (hint is not bool and isinstance(value, bool)):
        raise ValueError(f"{where} must be a {hint.__name__}, not {value!r}")
    return value
