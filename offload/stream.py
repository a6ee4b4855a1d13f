"""The ring of slots: one thread loads streamed units in pass order while the model computes with those before them."""

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from offload.layout import Unit
from offload.store import ArenaStore, WeightStore, anonymous, pin, unpin


class Link(Protocol):
    """How unit k gets into its slot. `load` runs in the loader thread, the rest in the computing one."""

    def load(self, k: int, cancelled: Callable[[], bool]) -> bool: ...
    def before_compute(self, k: int) -> None: ...
    def after_compute(self, k: int) -> None: ...
    def close(self) -> None: ...


class HostLink:
    """The store writes straight into slots in host memory."""

    def __init__(self, store: WeightStore, units: Sequence[Unit], slots: Sequence[torch.Tensor]) -> None:
        self._store, self._units, self._slots = store, units, slots

    def load(self, k: int, cancelled: Callable[[], bool]) -> bool:
        """Reads unit k into its slot; False when cancelled on the way."""
        return self._store.read_into(self._units[k], self._slots[k], cancelled)

    def before_compute(self, k: int) -> None:
        """Nothing to wait for: the bytes are there when `load` returns."""

    def after_compute(self, k: int) -> None:
        """Nothing to mark: the host computes before it returns."""

    def close(self) -> None:
        """Closes the store."""
        self._store.close()


class CudaLink:
    """Slots on a GPU: the store fills pinned staging, a side stream copies, events order copy and compute both ways."""

    def __init__(self, store: WeightStore, units: Sequence[Unit], slots: Sequence[torch.Tensor]) -> None:
        self._store, self._units, self._slots = store, units, slots
        self._device = slots[0].device
        self._stream = torch.cuda.Stream(self._device)
        self._copied = [torch.cuda.Event() for _ in units]
        self._computed = {slot.data_ptr(): torch.cuda.Event() for slot in slots}
        arena = store if isinstance(store, ArenaStore) and store.pinned else None
        self._is_staged = [arena is None or not arena.holds(unit) for unit in units]
        sizes = [unit.slot_bytes for unit, is_staged in zip(units, self._is_staged, strict=True) if is_staged]
        self._staging = [anonymous(max(sizes)) for _ in range(2 if sizes else 0)]
        self._pinned = [buffer for buffer in self._staging if pin(buffer)]
        self._staged = [torch.cuda.Event() for _ in self._staging]
        self._turn = 0

    def load(self, k: int, cancelled: Callable[[], bool]) -> bool:
        """Enqueues the copy of unit k, which starts when the last layer that read its slot is done."""
        unit, slot = self._units[k], self._slots[k]
        if self._is_staged[k]:
            turn = self._turn
            self._staged[turn].synchronize()  # its last copy has left
            source = self._staging[turn]
            if not self._store.read_into(unit, source, cancelled):
                return False
            self._turn = 1 - turn
        else:
            source = self._store.bytes_of(unit)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._computed[slot.data_ptr()])
            slot[: unit.slot_bytes].copy_(source[: unit.slot_bytes], non_blocking=True)
            self._copied[k].record(self._stream)
            if self._is_staged[k]:
                self._staged[turn].record(self._stream)
        return True

    def before_compute(self, k: int) -> None:
        """The computing stream, not the host, waits for the copy."""
        torch.cuda.current_stream(self._device).wait_event(self._copied[k])

    def after_compute(self, k: int) -> None:
        """Marks where the slot may be overwritten."""
        self._computed[self._slots[k].data_ptr()].record(torch.cuda.current_stream(self._device))

    def close(self) -> None:
        """Waits for copies under way and closes the store."""
        self._stream.synchronize()
        while self._pinned:
            unpin(self._pinned.pop())
        self._store.close()


@dataclass
class _Ring:
    """What loader and computing thread share. Loads and uses are numbered on and on: number n is unit n % num_units."""

    link: Link
    slot_of: Sequence[int]
    lag: Sequence[int]  # how many loads back the slot of a unit was loaded before
    nbytes: Sequence[int]
    condition: threading.Condition = field(default_factory=threading.Condition)
    loaded: int = 0  # loads below this number are in their slots
    used: int = 0  # units below this number have been computed with
    cancel: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None
    closed: bool = False
    streamed_bytes: int = 0
    read_s: float = 0.0


class LayerStreamer:
    """Brings unit k to its slot before `acquire(k)` returns and takes the slot back at `release(k)`.

    Units are expected in order 0, 1, ... and then 0 again; anything else (a pass broken off, a layer called alone)
    restarts the ring there. `slot_of` names the slot of each unit, fixed for good: parameters are bound once.
    """

    def __init__(self, units: Sequence[Unit], slot_of: Sequence[int], link: Link) -> None:
        lag = [_lag(slot_of, k) for k in range(len(units))]
        self._ring = _Ring(link, slot_of, lag, [unit.slot_bytes for unit in units])
        self._held: int | None = None
        self._names = [unit.name for unit in units]
        self.wait_s = 0.0
        self.passes = 0
        thread = threading.Thread(target=_load_in_order, args=(self._ring,), name="offload-loader", daemon=True)
        thread.start()
        self._stop = weakref.finalize(self, _stop, self._ring, thread)

    @property
    def streamed_bytes(self) -> int:
        """Bytes that have come through the ring so far."""
        return self._ring.streamed_bytes

    @property
    def read_s(self) -> float:
        """Seconds that the loader has spent reading."""
        return self._ring.read_s

    def acquire(self, k: int) -> None:
        """Waits for unit k. A failed load is tried once more here, then raised as OSError."""
        ring = self._ring
        with ring.condition:
            if ring.closed:
                raise RuntimeError(f"{self._names[k]} was called after its model had been closed; load the model again")
            if self._held is not None or ring.used % len(self._names) != k or ring.error is not None:
                self._give_up_held()
                _restart(ring, k)
            start = time.perf_counter()
            ring.condition.wait_for(lambda: ring.loaded > ring.used or ring.error is not None)
            self.wait_s += time.perf_counter() - start
            if ring.loaded <= ring.used:
                raise OSError(f"cannot load {self._names[k]}: {ring.error}") from ring.error
            self._held = k
        ring.link.before_compute(k)

    def release(self, k: int) -> None:
        """Gives the slot of unit k to the loader; without effect if it is not held."""
        if self._held != k:
            return
        ring = self._ring
        ring.link.after_compute(k)
        with ring.condition:
            self._held = None
            ring.used += 1
            self.passes += k == len(self._names) - 1
            ring.condition.notify_all()

    def _give_up_held(self) -> None:
        """A layer that was broken off may still be computing on a GPU, so its slot is marked all the same."""
        if self._held is not None:
            self._ring.link.after_compute(self._held)
            self._held = None

    def close(self) -> None:
        """Joins the thread, which closes the link; may be called again, and is when the streamer is collected."""
        self._stop()


def _lag(slot_of: Sequence[int], k: int) -> int:
    return next(back for back in range(1, len(slot_of) + 1) if slot_of[k - back] == slot_of[k])


def _restart(ring: _Ring, k: int) -> None:
    ring.cancel.set()
    ring.cancel = threading.Event()
    ring.loaded = ring.used = k
    ring.error = None
    ring.condition.notify_all()


def _load_in_order(ring: _Ring) -> None:
    """The loader thread: each load starts when the unit before it in the same slot has been used."""
    holds: dict[int, int] = {}  # unit by slot, so that what is there already is not read again
    while True:
        with ring.condition:
            ring.condition.wait_for(lambda: ring.closed or (ring.error is None and _slot_is_free(ring)))
            if ring.closed:
                break
            k, cancel = ring.loaded % len(ring.slot_of), ring.cancel
        error = None if holds.get(ring.slot_of[k]) == k else _load(ring, k, cancel, holds)
        with ring.condition:
            if ring.cancel is cancel:
                ring.error = error
                ring.loaded += error is None
                ring.condition.notify_all()
    ring.link.close()


def _load(ring: _Ring, k: int, cancel: threading.Event, holds: dict[int, int]) -> Exception | None:
    holds.pop(ring.slot_of[k], None)
    start = time.perf_counter()
    try:
        if ring.link.load(k, cancel.is_set):
            holds[ring.slot_of[k]] = k
            ring.streamed_bytes += ring.nbytes[k]
    except Exception as error:  # the computing thread raises it, whatever it is
        return error
    finally:
        ring.read_s += time.perf_counter() - start
    return None


def _slot_is_free(ring: _Ring) -> bool:
    return ring.loaded - ring.lag[ring.loaded % len(ring.lag)] < ring.used


def _stop(ring: _Ring, thread: threading.Thread) -> None:
    with ring.condition:
        ring.closed = True
        ring.cancel.set()
        ring.condition.notify_all()
    if thread is not threading.current_thread():  # garbage may be collected in any thread
        thread.join()
