"""What was learned of a pair of models is there in the next run, and a spoilt file does no harm."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from app.learned import recall, remember
from specexec.acceptance import Acceptance

LOGITS = np.array([2.0, 1.0, 0.0])


def test_a_pair_is_recalled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECEXEC_CACHE", str(tmp_path))
    remember("a", Acceptance())
    assert not list(tmp_path.rglob("*.json"))
    learned = recall("a")
    for _ in range(100):
        learned.observe(LOGITS, 2, 0.0)
    remember("a", learned)
    np.testing.assert_array_equal(recall("a").logprobs(LOGITS[None], 0.0), learned.logprobs(LOGITS[None], 0.0))
    np.testing.assert_array_equal(recall("b").logprobs(LOGITS[None], 0.0), Acceptance().logprobs(LOGITS[None], 0.0))
    (file,) = tmp_path.rglob("*.json")
    for spoilt in ("{", "[]", '{"0.00": {}}', '{"slots": []}', '{"slots": {"0": {"0.00": {}}}}'):
        file.write_text(spoilt)
        np.testing.assert_array_equal(recall("a").logprobs(LOGITS[None], 0.0), Acceptance().logprobs(LOGITS[None], 0.0))


def test_a_record_of_scores_without_the_target_s_noise_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECEXEC_CACHE", str(tmp_path))
    early = Acceptance()
    for _ in range(100):
        early.observe(LOGITS, 2, 0.8)
    folder = tmp_path / "acceptance"
    folder.mkdir()
    name = hashlib.sha256(b"a").hexdigest()[:24]  # as files were called when records were of such scores
    (folder / f"{name}.json").write_text(json.dumps(early.to_data()))
    assert recall("a").to_data() == {}
    remember("a", early)
    assert recall("a").to_data() == early.to_data()


def test_each_slot_of_a_block_is_recalled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECEXEC_CACHE", str(tmp_path))
    learned = Acceptance()
    for _ in range(100):
        learned.slot(3).observe(LOGITS, 2, 0.0)
    remember("a", learned)
    known, fresh = recall("a"), Acceptance().logprobs(LOGITS[None], 0.0)
    expected = learned.slot(3).logprobs(LOGITS[None], 0.0)
    np.testing.assert_array_equal(known.slot(3).logprobs(LOGITS[None], 0.0), expected)
    np.testing.assert_array_equal(known.slot(0).logprobs(LOGITS[None], 0.0), fresh)
    assert not np.array_equal(expected, fresh)


@pytest.mark.parametrize("place", [".", "acceptance"])
def test_a_file_where_the_folder_should_be_costs_the_memory_only(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    (cache / place).parent.mkdir(exist_ok=True)
    (cache / place).write_text("not a folder")
    monkeypatch.setenv("SPECEXEC_CACHE", str(cache))
    learned = recall("a")
    learned.observe(LOGITS, 2, 0.0)
    remember("a", learned)
    assert (cache / place).read_text() == "not a folder"
    assert recall("a").to_data() == {}
