"""Texts of earlier runs as token ids, in the cache directory, for the suffix draft: a bounded file per tokenizer.

A file begins with the digest of what follows; one that is cut short, changed or of another vocabulary counts as none.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from app.environment import cache_dir
from specexec.drafters.suffix import SuffixDrafter

MOST_TOKENS = 200_000
_BETWEEN = -1  # a token that ends a text
_DIGEST_BYTES = 32
_STORED = np.dtype("<i4")


@contextmanager
def suffix_drafter(tokenizer: PreTrainedTokenizerBase, *, keeps: bool) -> Iterator[SuffixDrafter]:
    """A suffix drafter; if it `keeps`, it knows the texts of earlier runs and leaves its own to later ones."""
    suffix = SuffixDrafter(recall_texts(tokenizer) if keeps else (), memory=MOST_TOKENS)
    try:
        yield suffix
    finally:
        if keeps:
            keep_texts(tokenizer, suffix.texts)


def recall_texts(tokenizer: PreTrainedTokenizerBase) -> list[np.ndarray]:
    """The texts kept for this tokenizer, the oldest first, each int64 [length]; none if the file cannot be trusted."""
    try:
        content = _file(tokenizer).read_bytes()
    except OSError:
        return []
    data = content[_DIGEST_BYTES:]
    if hashlib.sha256(data).digest() != content[:_DIGEST_BYTES] or len(data) % _STORED.itemsize:
        return []
    ids = np.frombuffer(data, _STORED).astype(np.int64)
    if len(ids) > MOST_TOKENS or (ids < _BETWEEN).any() or (ids > max(tokenizer.get_vocab().values())).any():
        return []
    return [text for text in np.split(ids[ids >= 0], _ends(ids)) if len(text)]


def keep_texts(tokenizer: PreTrainedTokenizerBase, texts: Iterable[np.ndarray]) -> None:
    """Keeps the end of `texts`, readable by their owner only; a cache that cannot be written to costs speed only."""
    ended = [np.append(text, _BETWEEN) for text in texts if len(text)]
    if not ended:
        return
    data = np.concatenate(ended)[-MOST_TOKENS:].astype(_STORED).tobytes()
    file = _file(tokenizer)
    partial = file.with_suffix(f".{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial.touch(mode=0o600)
        partial.write_bytes(hashlib.sha256(data).digest() + data)
        partial.replace(file)
    except OSError:
        with suppress(OSError):
            partial.unlink()


def _ends(ids: np.ndarray) -> np.ndarray:
    """Where each text ends, counted without what stands between them."""
    at = np.flatnonzero(ids == _BETWEEN)
    return at - np.arange(len(at))


def _file(tokenizer: PreTrainedTokenizerBase) -> Path:
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items(), key=lambda each: each[1]))
    return cache_dir() / "texts" / f"{hashlib.sha256(vocabulary.encode()).hexdigest()[:24]}.bin"
