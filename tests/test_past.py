"""Texts of earlier runs: found again by the same tokenizer, bounded, private, and never half-trusted."""

import stat
from pathlib import Path

import numpy as np
import pytest
from tiny_tokenizer import SPECIALS, tiny_tokenizer

from app.past import MOST_TOKENS, keep_texts, recall_texts, suffix_drafter
from specexec.budget import Budget
from specexec.lm import as_ids

TOKENIZER = tiny_tokenizer()
TEXTS = [as_ids([5, 6, 7, 8]), as_ids([9]), as_ids([10, 11])]


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("SPECEXEC_CACHE", str(tmp_path))
    return tmp_path


def recalled() -> list[list[int]]:
    return [text.tolist() for text in recall_texts(TOKENIZER)]


def test_texts_come_back_for_the_same_tokenizer_only(cache: Path) -> None:
    assert recalled() == []
    keep_texts(TOKENIZER, TEXTS)
    assert recalled() == [[5, 6, 7, 8], [9], [10, 11]]
    assert recall_texts(tiny_tokenizer(["<x>", *SPECIALS])) == []
    (file,) = cache.rglob("*.bin")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    keep_texts(TOKENIZER, [])
    assert len(recalled()) == 3


def test_size_is_bounded_and_the_latest_stay() -> None:
    keep_texts(TOKENIZER, [np.full(MOST_TOKENS, 7), as_ids([8, 9])])
    first, last = recalled()
    assert len(first) + len(last) + 2 == MOST_TOKENS
    assert last == [8, 9]


@pytest.mark.parametrize("spoil", ["cut", "byte", "empty", "vocabulary"])
def test_a_spoilt_file_counts_as_none(cache: Path, spoil: str) -> None:
    keep_texts(TOKENIZER, [as_ids([5, 6, 10_000 if spoil == "vocabulary" else 7])])
    (file,) = cache.rglob("*.bin")
    content = bytearray(file.read_bytes())
    if spoil == "cut":
        content = content[:-4]
    if spoil == "byte":
        content[-6] ^= 1
    file.write_bytes(b"" if spoil == "empty" else content)
    assert recalled() == []
    keep_texts(TOKENIZER, TEXTS)
    assert len(recalled()) == 3


def test_a_cache_that_cannot_be_written_to_is_no_error(cache: Path) -> None:
    (cache / "texts").write_text("in the way")
    keep_texts(TOKENIZER, TEXTS)
    assert recalled() == []


def test_a_run_learns_from_the_one_before() -> None:
    passage = [20, 21, 22, 23, 24, 25, 26]
    for keeps, expected in ((True, []), (False, []), (True, passage[3:])):
        with suffix_drafter(TOKENIZER, keeps=keeps) as suffix:
            tree = suffix.propose(as_ids([40, *passage[:3]]), Budget(8, 9))
            assert tree.tokens.tolist()[:4] == expected
            suffix.propose(as_ids([40, *passage, 41]), Budget(8, 9))
    assert recalled()[-1] == [40, *passage, 41]


def test_what_an_error_ends_is_kept() -> None:
    def interrupted() -> None:
        with suffix_drafter(TOKENIZER, keeps=True) as suffix:
            suffix.propose(as_ids([1, 2, 3]), Budget(8, 9))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert recalled() == [[1, 2, 3]]
