"""Where the bytes of units rest: in the checkpoint's own files, or in one arena of RAM."""

import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from offload.layout import BLOCK_BYTES, Extent, Unit, check_sums

# One request. The kernel splits it and keeps the parts in flight at once. Between requests the reader waits for its
# turn on cores that are busy computing: of 16 MB each they lose some 4 % to ones of 64 MB, of 4 MB some 8 %.
READ_BYTES = 64 << 20


@dataclass(frozen=True)
class Reading:
    """How a disk is read: `num_requests` at once, of `request_bytes` each."""

    num_requests: int = 1
    request_bytes: int = READ_BYTES


ONE_AT_A_TIME = Reading()


def anonymous(nbytes: int) -> torch.Tensor:
    """A page-aligned uint8 buffer of its own mapping: exact in size, given back when the last view goes."""
    memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):  # large pages take a fifth of the kernel's time at every O_DIRECT request
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)[:nbytes]


class WeightStore(Protocol):
    """Bytes at rest. `read_into` may be called from one thread at a time."""

    def read_into(self, unit: Unit, buffer: torch.Tensor, cancelled: Callable[[], bool]) -> bool:
        """Fills `buffer` (uint8, at least unit.slot_bytes) and tells whether it was filled or cancelled."""

    def close(self) -> None:
        """Gives files and memory back; may be called again."""


class FileStore:
    """Reads units straight from the files that hold them, past the page cache."""

    def __init__(self, files: Iterable[Path], reading: Reading = ONE_AT_A_TIME) -> None:
        self._reading = reading
        self._readers = ThreadPoolExecutor(reading.num_requests, "offload-reader") if reading.num_requests > 1 else None
        self._files: dict[Path, tuple[int, int, bool]] = {}
        self._checked: set[str] = set()
        try:
            for file in sorted(set(files)):
                self._files[file] = open_for_reading(file)
        except OSError:
            self.close()
            raise

    def read_into(self, unit: Unit, buffer: torch.Tensor, cancelled: Callable[[], bool]) -> bool:
        """Fills `buffer`; raises OSError naming the file when it has shrunk or the disk fails.

        The first time that a unit is read, ValueError if it is not what its checksums say.
        """
        memory = memoryview(buffer.numpy())
        if not self._read_pieces(_pieces(unit, self._reading.request_bytes), memory, cancelled):
            return False
        if unit.name not in self._checked:
            check_sums(unit, buffer)
            self._checked.add(unit.name)
        return True

    def close(self) -> None:
        """Closes every file."""
        if self._readers is not None:
            self._readers.shutdown()
        while self._files:
            os.close(self._files.popitem()[1][0])

    def _read_pieces(self, pieces: list[Extent], memory: memoryview, cancelled: Callable[[], bool]) -> bool:
        """Reads all `pieces`, as many at once as this store's way of reading says; nothing is under way at the end."""
        if self._readers is None:
            return all(self._read_piece(piece, memory, cancelled) for piece in pieces)
        failed = threading.Event()

        def read(piece: Extent) -> bool:
            try:
                return self._read_piece(piece, memory, lambda: failed.is_set() or cancelled())
            except Exception:
                failed.set()
                raise

        futures = [self._readers.submit(read, piece) for piece in pieces]
        wait(futures)
        results = [future.result() for future in futures]  # an error counts more than what it cut short
        return all(results)

    def _read_piece(self, piece: Extent, memory: memoryview, cancelled: Callable[[], bool]) -> bool:
        fd, size, direct = self._files[piece.file]
        end = min(piece.offset + piece.nbytes, size)
        position = piece.offset
        while position < end:
            if cancelled():
                return False
            start = piece.slot_offset + position - piece.offset
            got = self._read(piece.file, fd, memory[start : piece.slot_offset + piece.nbytes], position)
            if not direct:
                os.posix_fadvise(fd, position, got, os.POSIX_FADV_DONTNEED)
            position += got
            if position < end and position % BLOCK_BYTES:
                got -= position % BLOCK_BYTES  # go on from a whole block
                position -= position % BLOCK_BYTES
            if got <= 0:
                raise OSError(errno.EIO, f"file ends before byte {end:,}: it changed while in use", str(piece.file))
        return True

    @staticmethod
    def _read(file: Path, fd: int, memory: memoryview, position: int) -> int:
        try:
            return os.preadv(fd, [memory], position)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(file)) from error


class ArenaStore:
    """Holds `units` in RAM: one exact arena, pinned when the device is a GPU. Others come from `source` each time."""

    def __init__(
        self,
        units: Iterable[Unit],
        source: WeightStore,
        *,
        pinned: bool = False,
        report: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        self._source = source
        self._places: dict[str, tuple[int, int]] = {}
        units = list(units)
        self._arena = anonymous(sum(unit.slot_bytes for unit in units))
        self.pinned = pinned and pin(self._arena)
        start = 0
        for unit in units:
            self._places[unit.name] = (start, unit.slot_bytes)
            source.read_into(unit, self.bytes_of(unit), lambda: False)
            start += unit.slot_bytes
            report(unit.slot_bytes)

    def holds(self, unit: Unit) -> bool:
        """Whether the unit rests in the arena."""
        return unit.name in self._places

    def bytes_of(self, unit: Unit) -> torch.Tensor:
        """The unit's bytes where they rest."""
        return self._arena.narrow(0, *self._places[unit.name])

    def read_into(self, unit: Unit, buffer: torch.Tensor, cancelled: Callable[[], bool]) -> bool:
        """Copies the unit to `buffer`, or reads it there."""
        if not self.holds(unit):
            return self._source.read_into(unit, buffer, cancelled)
        resting = self.bytes_of(unit)
        for start in range(0, unit.slot_bytes, READ_BYTES):
            if cancelled():
                return False
            buffer[start : start + READ_BYTES][: unit.slot_bytes - start].copy_(resting[start : start + READ_BYTES])
        return True

    def close(self) -> None:
        """Drops the arena and closes the source."""
        self._source.close()
        if self.pinned:
            unpin(self._arena)
            self.pinned = False
        self._places.clear()
        self._arena = anonymous(0)


def sample_unit(file: Path, offset: int, nbytes: int) -> Unit:
    """Bytes of `file`, from a multiple of BLOCK_BYTES on, as a unit of nothing."""
    blocks = -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES
    return Unit(f"{file} at {offset}", (), (Extent(file, offset, blocks, 0),), frozenset(), 0, 0, ())


def _pieces(unit: Unit, most_bytes: int) -> list[Extent]:
    """The unit's extents cut into requests of at most `most_bytes`."""
    return [
        Extent(extent.file, extent.offset + at, min(most_bytes, extent.nbytes - at), extent.slot_offset + at)
        for extent in unit.extents
        for at in range(0, extent.nbytes, most_bytes)
    ]


def pin(buffer: torch.Tensor) -> bool:
    """Page-locks `buffer` in place, for torch's own pinned allocator rounds up to powers of two; False if refused."""
    return (
        torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0)
        == torch.cuda.cudart().cudaError.success
    )


def unpin(buffer: torch.Tensor) -> None:
    """Undoes `pin`, which has to happen before the memory goes."""
    torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())


def open_for_reading(file: Path) -> tuple[int, int, bool]:
    """Descriptor, size, and whether reads bypass the page cache, which tmpfs and some network mounts refuse."""
    try:
        fd = os.open(file, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return _sized(os.open(file, os.O_RDONLY | os.O_CLOEXEC), False)
    try:
        os.preadv(fd, [mmap.mmap(-1, BLOCK_BYTES)], 0)
    except OSError as error:
        os.close(fd)
        if error.errno != errno.EINVAL:
            raise
        return _sized(os.open(file, os.O_RDONLY | os.O_CLOEXEC), False)
    return _sized(fd, True)


def _sized(fd: int, direct: bool) -> tuple[int, int, bool]:
    return fd, os.fstat(fd).st_size, direct
