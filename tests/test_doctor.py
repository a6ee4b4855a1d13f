"""The command `doctor`: a line for each thing looked at, and a remedy for each that is wrong."""

import json
from pathlib import Path

import pytest

from app import doctor
from app.cli import main
from offload.hardware import Pinning


@pytest.fixture(autouse=True)
def _small_sample(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "_SAMPLE_BYTES", 4 << 20)
    monkeypatch.setenv("SPECEXEC_CACHE", str(tmp_path / "cache" / "not yet there"))


def test_a_whole_installation(capsys, tmp_path):
    assert main(["doctor", "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    report = json.loads(lines[-1])
    assert report["ok"]
    subjects = {each["subject"] for each in report["findings"]}
    assert {"torch", "bitsandbytes", "GPU", "NF4", "RAM", "cache", "disk", "O_DIRECT"} <= subjects
    assert len(lines) == len(report["findings"]) + 1
    assert all(line.startswith(("ok ", "warning ")) for line in lines[:-1])
    assert list(tmp_path.iterdir()) == []  # nothing is left behind


def test_a_library_that_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "_LIBRARIES", ("torch", "no-such-library"))
    assert main(["doctor"]) == 1
    assert "BROKEN  no-such-library: not installed; run `pip install no-such-library`" in capsys.readouterr().out


def test_little_room_and_a_slow_disk(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "_LITTLE_ROOM_BYTES", 1 << 60)
    monkeypatch.setattr(doctor, "_SLOW_BPS", 1e15)
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "set SPECEXEC_CACHE to a disk with more room" in text
    assert "warning disk: " in text


def test_a_cache_that_cannot_be_used(monkeypatch, capsys, tmp_path):
    (tmp_path / "file").touch()
    for place in (tmp_path / "file" / "cache", Path("/proc/nowhere")):
        monkeypatch.setenv("SPECEXEC_CACHE", str(place))
        assert main(["doctor"]) == 1
        (line,) = (line for line in capsys.readouterr().out.splitlines() if "cache" in line)
        assert line.startswith(f"BROKEN  cache: {place} cannot be used: ") and "set SPECEXEC_CACHE" in line


def test_a_check_that_fails_is_a_finding(monkeypatch, capsys):
    def broken(weight):
        raise RuntimeError("no kernel\nfor this machine")

    monkeypatch.setattr(doctor, "nf4_roundtrip", broken)
    assert main(["doctor"]) == 1
    assert "BROKEN  quantization: cannot be examined: no kernel for this machine" in capsys.readouterr().out


def test_memory_that_cannot_be_pinned():
    short = doctor._pinning(Pinning(4 << 30, 1 << 30))
    assert (short.state, "pageable" in short.remedy) == ("warning", True)
    assert doctor._pinning(Pinning(4 << 30, 4 << 30)).state == "ok"
