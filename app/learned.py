"""What drafts' scores have turned out to be worth, kept in the cache directory for each pair of models."""

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path

from app.environment import cache_dir
from specexec.acceptance import Acceptance

_SCORES = "coupled"  # what the records are about: another kind of scores needs another name


def recall(pair: str) -> Acceptance:
    """What is known of a pair of models; a fresh record where nothing is, or nothing legible."""
    try:
        return Acceptance.from_data(json.loads(_file(pair).read_text()))
    except (OSError, ValueError):
        return Acceptance()


def remember(pair: str, acceptance: Acceptance) -> None:
    """Keeps what was learned of `pair`, if anything was; a cache that cannot be written to costs speed only."""
    data, file = acceptance.to_data(), _file(pair)
    if not data:
        return
    partial = file.with_suffix(f".{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(data))
        partial.replace(file)
    except OSError:
        with suppress(OSError):  # where a folder should be is a file, say
            partial.unlink(missing_ok=True)


def _file(pair: str) -> Path:
    return cache_dir() / "acceptance" / f"{hashlib.sha256(f'{_SCORES} {pair}'.encode()).hexdigest()[:24]}.json"
