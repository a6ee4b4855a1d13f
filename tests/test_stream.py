"""The ring: order, back-pressure, faults, interruptions, and what is left when it ends."""

import gc
import threading
import time
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.layout import Extent, Unit
from offload.stream import HostLink, LayerStreamer

NBYTES = 4096


class FakeStore:
    """Unit k is the byte k; `fail` and `pause` act on single units."""

    def __init__(self):
        self.reads = []
        self.fail = set()
        self.pause = {}
        self.closed = 0

    def read_into(self, unit, buffer, cancelled):
        k = int(unit.name)
        self.reads.append(k)
        buffer[: NBYTES // 2] = k
        while k in self.pause and not self.pause[k].wait(0.001):
            if cancelled():
                return False
        if k in self.fail:
            raise OSError(5, "Input/output error", "shard.safetensors")
        buffer[NBYTES // 2 :] = k
        return True

    def close(self):
        self.closed += 1


class Ring:
    """A streamer over a fake store whose slots can be looked into."""

    def __init__(self, slot_of):
        self.store = FakeStore()
        units = [Unit(str(k), (), (Extent(None, 0, NBYTES, 0),), frozenset(), 0, 0, ()) for k in range(len(slot_of))]
        self.buffers = [torch.full((NBYTES,), 255, dtype=torch.uint8) for _ in range(max(slot_of) + 1)]
        self.slot_of = slot_of
        link = HostLink(self.store, units, [self.buffers[slot] for slot in slot_of])
        self.streamer = LayerStreamer(units, slot_of, link)

    def use(self, k):
        self.streamer.acquire(k)
        assert self.buffers[self.slot_of[k]].tolist() == [k] * NBYTES
        time.sleep(0.0005)
        assert self.buffers[self.slot_of[k]].tolist() == [k] * NBYTES  # no load overtook the compute
        self.streamer.release(k)

    def use_all(self):
        for k in range(len(self.slot_of)):
            self.use(k)


@pytest.fixture
def make_ring():
    rings = []

    def make(slot_of):
        rings.append(Ring(slot_of))
        return rings[-1]

    yield make
    for ring in rings:
        ring.streamer.close()
        assert ring.store.closed == 1


def settle(condition):
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert condition()


LAYOUTS = [(0,), (0, 0), (0, 0, 0), (0, 1), (0, 1, 0), (0, 1, 0, 1), (0, 1, 2, 0, 1), (0, 1, 2, 1, 2, 1), (0, 1, 1, 2)]


@pytest.mark.parametrize("slot_of", LAYOUTS)
def test_every_unit_is_whole_while_it_is_held(make_ring, slot_of):
    ring = make_ring(slot_of)
    for _ in range(4):
        ring.use_all()
    assert ring.streamer.passes == 4
    assert ring.streamer.streamed_bytes == len(ring.store.reads) * NBYTES


def test_ring_refills_for_the_next_pass_and_goes_no_further(make_ring):
    ring = make_ring((0, 1, 0, 1))
    settle(lambda: ring.store.reads == [0, 1])
    ring.use_all()
    settle(lambda: ring.store.reads == [0, 1, 2, 3, 0, 1])
    time.sleep(0.02)
    assert len(ring.store.reads) == 6


def test_what_is_in_its_slot_already_is_not_read_again(make_ring):
    ring = make_ring((0, 1, 2, 1, 2))
    for _ in range(3):
        ring.use_all()
    assert ring.store.reads.count(0) == 1


@pytest.mark.parametrize("slot_of", LAYOUTS)
def test_interrupted_pass_leaves_the_next_one_right(make_ring, slot_of):
    ring = make_ring(slot_of)
    for stop in range(len(slot_of)):
        for k in range(stop):
            ring.use(k)
        ring.streamer.acquire(stop)  # broken off before its release
        ring.use_all()
        ring.use(stop)  # alone, and out of turn
        ring.use_all()


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(LAYOUTS), st.lists(st.integers(0, 5), max_size=15))
def test_any_order_of_calls(slot_of, calls):
    ring = Ring(slot_of)
    for k in calls:
        ring.use(k % len(slot_of))
    ring.streamer.close()


def test_interrupt_while_a_read_is_under_way(make_ring):
    ring = make_ring((0, 1, 0, 1))
    ring.store.pause[2] = threading.Event()
    ring.use(0)
    settle(lambda: ring.store.reads[-1] == 2)
    ring.use(3)  # cancels the read of 2, half of which is in slot 0
    ring.store.pause.clear()
    ring.use_all()


def test_error_reaches_the_caller_in_one_line_and_passes(make_ring):
    ring = make_ring((0, 1, 0, 1))
    ring.store.fail.add(2)
    for _ in range(2):
        ring.use(0)
        ring.use(1)
        with pytest.raises(OSError, match=r"shard\.safetensors") as caught:
            ring.use(2)
        assert "\n" not in str(caught.value)
    ring.store.fail.clear()
    ring.use_all()
    ring.use_all()


def test_error_while_nobody_waits_is_tried_again(make_ring):
    ring = make_ring((0, 0))
    ring.store.fail.add(1)
    ring.use(0)
    settle(lambda: ring.streamer._ring.error is not None)
    ring.store.fail.clear()
    ring.use(1)
    ring.use_all()


def test_unforeseen_error_is_an_os_error_too(make_ring):
    ring = make_ring((0, 0))
    ring.store.pause[1] = None  # breaks the fake store itself
    ring.use(0)
    with pytest.raises(OSError, match="NoneType"):
        ring.use(1)


class SlowOnceAwaited:
    """The rest of a read: 50 ms from when somebody waits for it."""

    def __init__(self):
        self.is_awaited = threading.Event()

    def wait(self, timeout):
        assert self.is_awaited.wait(60)
        time.sleep(0.05)
        return True


def test_waiting_is_counted(make_ring, monkeypatch):
    start = time.perf_counter()
    ring, rest = make_ring((0, 0)), SlowOnceAwaited()
    ring.store.pause[1] = rest
    ring.use(0)
    settle(lambda: ring.store.reads == [0, 1])  # so that nobody but this thread begins to wait from here on
    condition = ring.streamer._ring.condition
    wait_for = condition.wait_for
    monkeypatch.setattr(condition, "wait_for", lambda predicate: rest.is_awaited.set() or wait_for(predicate))
    ring.use(1)
    assert 0.05 <= ring.streamer.wait_s < time.perf_counter() - start
    assert ring.streamer.read_s >= 0.05


def test_closed_streamer_says_so(make_ring):
    ring = make_ring((0, 1))
    ring.use_all()
    ring.streamer.close()
    ring.streamer.close()
    with pytest.raises(RuntimeError, match="closed"):
        ring.streamer.acquire(0)


def test_close_ends_a_read_under_way(make_ring):
    ring = make_ring((0, 1))
    ring.store.pause.update({0: threading.Event(), 1: threading.Event()})
    ring.streamer.close()
    assert ring.store.closed == 1


def test_collected_streamer_leaves_no_thread():
    threads = set(threading.enumerate())
    ring = Ring((0, 1))
    store, alive = ring.store, weakref.ref(ring.streamer)
    assert len(set(threading.enumerate()) - threads) == 1
    del ring
    gc.collect()
    assert alive() is None
    assert set(threading.enumerate()) <= threads
    assert store.closed == 1
