"""Bytes at rest: read past the page cache, where a file system lets us, and never silently short."""

import errno
import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from offload import store as store_module
from offload.checkpoint import TensorEntry
from offload.layout import Unit, _extents
from offload.store import ArenaStore, FileStore, Reading, anonymous, open_for_reading

SIZE = 9 << 20 | 777


def never():
    return False


@pytest.fixture(params=["disk", "tmpfs"])
def file(request, tmp_path):
    """A file of random bytes with an odd size; tmpfs may refuse O_DIRECT."""
    path = tmp_path / "bytes" if request.param == "disk" else Path(f"/dev/shm/specexec-test-{os.getpid()}")
    path.write_bytes(os.urandom(SIZE))
    yield path
    path.unlink(missing_ok=True)


def unit_of(file, *places):
    entries = [TensorEntry(f"{begin}", file, begin, end - begin, torch.uint8, (end - begin,)) for begin, end in places]
    return Unit("unit", (), _extents(entries), frozenset(), 0, 0, ())


def check(store, unit, file):
    buffer = anonymous(unit.slot_bytes)
    assert store.read_into(unit, buffer, never)
    content = file.read_bytes()
    for extent in unit.extents:
        wanted = content[extent.offset : extent.offset + extent.nbytes]
        assert buffer[extent.slot_offset :][: len(wanted)].numpy().tobytes() == wanted


def test_reads_what_the_file_holds_up_to_its_odd_end(file):
    store = FileStore([file])
    unit = unit_of(file, (10, 5000), (20_000, 6 << 20), (SIZE - 100, SIZE))
    check(store, unit, file)
    arena = ArenaStore([replace(unit, name="again")], store)
    assert (arena.holds(replace(unit, name="again")), arena.holds(unit)) == (True, False)
    check(arena, unit, file)
    arena.close()
    store = FileStore([file])
    arena = ArenaStore([unit, replace(unit, name="again")], store)
    store.close()
    check(arena, unit, file)
    arena.close()
    arena.close()


def test_refused_direct_reads_fall_back(file, monkeypatch):
    genuine = os.open

    def refuse(path, flags, *rest):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument", str(path))
        return genuine(path, flags, *rest)

    monkeypatch.setattr(store_module.os, "open", refuse)
    store = FileStore([file])
    check(store, unit_of(file, (0, SIZE)), file)
    store.close()


def test_direct_reads_refused_only_when_reading(tmp_path, monkeypatch):
    path = tmp_path / "bytes"
    path.write_bytes(bytes(5000))
    genuine = os.preadv
    monkeypatch.setattr(store_module.os, "preadv", lambda *_: (_ for _ in ()).throw(OSError(errno.EINVAL, "no")))
    descriptor, size, direct = open_for_reading(path)
    monkeypatch.setattr(store_module.os, "preadv", genuine)
    assert (size, direct) == (5000, False)
    os.close(descriptor)


def test_short_reads_are_continued(file, monkeypatch):
    genuine = os.preadv
    store = FileStore([file])
    monkeypatch.setattr(store_module.os, "preadv", lambda fd, into, at: genuine(fd, [into[0][:512_512]], at))
    check(store, unit_of(file, (3, SIZE)), file)
    store.close()


@pytest.mark.parametrize("left", [0, 4096, SIZE - 1])
def test_file_that_shrinks_is_named(file, left):
    store = FileStore([file])
    unit = unit_of(file, (0, SIZE))
    with file.open("r+b") as stream:
        stream.truncate(left)
    with pytest.raises(OSError, match=file.name):
        store.read_into(unit, anonymous(unit.slot_bytes), never)
    store.close()


def test_disk_error_names_the_file(file, monkeypatch):
    store = FileStore([file])

    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(store_module.os, "preadv", fail)
    unit = unit_of(file, (0, 100))
    with pytest.raises(OSError, match=file.name):
        store.read_into(unit, anonymous(unit.slot_bytes), never)
    store.close()


def test_cancelled_between_blocks(file):
    store = FileStore([file], Reading(1, 4 << 20))
    unit = unit_of(file, (0, SIZE))
    answers = iter([False, True])
    buffer = anonymous(unit.slot_bytes)
    assert not store.read_into(unit, buffer, lambda: next(answers))
    assert not buffer[4 << 20 :].any()
    store.close()


def test_missing_file_leaves_nothing_open(file):
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(FileNotFoundError, match="zz-nowhere"):
        FileStore([file, file.with_name("zz-nowhere")])
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.parametrize("reading", [Reading(2, 1 << 20), Reading(4, 4096), Reading(3)], ids=str)
def test_parallel_requests_read_the_same(file, monkeypatch, reading):
    genuine, under_way, most, both = os.preadv, [], [], threading.Barrier(2)

    def watched(fd, into, at):
        under_way.append(at)
        most.append(len(under_way))
        if len(most) <= 2:
            both.wait(60)  # the first two meet, however slowly threads start
        got = genuine(fd, [into[0][:512_512]], at)  # a short read
        under_way.remove(at)
        return got

    store = FileStore([file], reading)
    monkeypatch.setattr(store_module.os, "preadv", watched)
    unit = unit_of(file, (10, 5000), (20_000, 2 << 20), (SIZE - 100, SIZE))
    check(store, unit, file)
    assert 1 < max(most) <= reading.num_requests
    store.close()
    store.close()


def test_an_error_ends_all_requests_and_names_the_file(file, monkeypatch):
    genuine, calls = os.preadv, []

    def fail_once(fd, into, at):
        calls.append(at)
        if at == 2 * 65536:
            raise OSError(errno.EIO, "Input/output error")
        time.sleep(0.01)
        return genuine(fd, into, at)

    store = FileStore([file], Reading(2, 65536))
    unit = unit_of(file, (0, SIZE))
    monkeypatch.setattr(store_module.os, "preadv", fail_once)
    with pytest.raises(OSError, match=file.name):
        store.read_into(unit, anonymous(unit.slot_bytes), never)
    assert len(calls) < 72  # of 145: what is under way may go on for as long as the thread that failed is held up
    check(store, unit_of(file, (0, 100)), file)
    store.close()


def test_parallel_requests_are_cancelled(file):
    store = FileStore([file], Reading(4, 65536))
    unit, asked = unit_of(file, (0, SIZE)), []
    assert not store.read_into(unit, anonymous(unit.slot_bytes), lambda: bool(asked.append(1)) or len(asked) > 4)
    assert len(asked) >= 100  # every piece has seen it, and none is still under way
    store.close()
