"""Folders in the cache directory that are whole or absent: built under a temporary name, renamed when done."""

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from app.environment import cache_dir

_PARTIAL = ".partial-"


def cached_folder(name: str) -> Path:
    """Where the folder `name` is, or will be once it has been built."""
    return cache_dir() / "models" / name


def build_once(name: str, build: Callable[[Path], None]) -> Path:
    """The folder `name`, which `build` fills the first time only. What a killed process has left is removed."""
    folder = cached_folder(name)
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / ".lock"):
        for leftover in folder.parent.glob(_PARTIAL + "*"):
            shutil.rmtree(leftover, ignore_errors=True)
        if folder.is_dir():  # another process has built it while this one waited
            return folder
        partial = Path(tempfile.mkdtemp(prefix=_PARTIAL, dir=folder.parent))
        try:
            content = partial / "content"
            content.mkdir()
            build(content)
            content.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder
