"""Files that appear whole or not at all."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError


def replace_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a file beside `path` and put it in its place; nothing is left of one that failed.

    Raises OSError, in one line, whatever the writer makes of a full disk.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    place = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with explained(path):
            write(place)
        place.replace(path)
    finally:
        place.unlink(missing_ok=True)


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turns what torch and safetensors raise where a file cannot be written into an OSError that names `path`."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise OSError(f"{path} could not be written, which a full disk may be the cause of: {reason}") from error
