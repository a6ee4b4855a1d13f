"""What the process environment says; the only module that reads it."""

import os
import sys
from collections.abc import Collection
from pathlib import Path

from app.spelling import nearest

PREFIX = "SPECEXEC_"
_OTHER = {"PRESET", "CACHE", "OFFLINE", "API_KEY", "ENGINE_KEY"}
_NO = {"", "0", "false", "no", "off"}


def environment_settings(keys: Collection[str]) -> dict[str, str]:
    """The SPECEXEC_* variables as {setting: text}; one that is not in `keys` is an error naming the nearest."""
    known = {key.upper() for key in keys} | _OTHER
    found = {name.removeprefix(PREFIX): value for name, value in os.environ.items() if name.startswith(PREFIX)}
    for name in found:
        if name not in known:
            raise ValueError(f"unknown environment variable {PREFIX}{name}{nearest(name, known, PREFIX)}")
    return {name.lower(): value for name, value in found.items() if name not in _OTHER}


def environment_preset() -> str | None:
    """The preset that SPECEXEC_PRESET names."""
    return os.environ.get(PREFIX + "PRESET") or None


def environment_api_key() -> str | None:
    """The key that SPECEXEC_API_KEY asks a server's clients for."""
    return os.environ.get(PREFIX + "API_KEY") or None


def environment_engine_key() -> str | None:
    """The key that SPECEXEC_ENGINE_KEY gives the server that --engine names."""
    return os.environ.get(PREFIX + "ENGINE_KEY") or None


def is_offline() -> bool:
    """Whether SPECEXEC_OFFLINE or HF_HUB_OFFLINE forbids the network."""
    return any(os.environ.get(name, "").lower() not in _NO for name in (PREFIX + "OFFLINE", "HF_HUB_OFFLINE"))


def cache_dir() -> Path:
    """$SPECEXEC_CACHE, else the platform's cache folder for specexec. Nothing is created."""
    if chosen := os.environ.get(PREFIX + "CACHE"):
        return Path(chosen).expanduser()
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "specexec"
    if sys.platform == "win32" and (base := os.environ.get("LOCALAPPDATA")):
        return Path(base) / "specexec" / "cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "specexec"
    return Path.home() / ".cache" / "specexec"


def child_environment(**changes: str) -> dict[str, str]:
    """This process's environment with `changes`, for a process that it starts."""
    return {**os.environ, **changes}
