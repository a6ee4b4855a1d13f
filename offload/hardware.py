"""What this machine has: memory that may be used, and the rate at which files can be read."""

import mmap
import os
import resource
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from offload.store import READ_BYTES, open_for_reading

_CGROUP = Path("/sys/fs/cgroup")
_SAMPLE_BUFFER_BYTES = (
    128 << 20
)  # as large as slots are: one that stays in a cache reads up to half faster than weights


@dataclass(frozen=True)
class Hardware:
    """The compute device and its memory, in bytes; for the CPU the smaller of the machine's and the cgroup's."""

    device: torch.device
    name: str
    total_bytes: int
    free_bytes: int
    base_bytes: int  # what this process already takes there
    ram_total_bytes: int
    ram_free_bytes: int
    has_bf16: bool


def probe(device: str | torch.device = "cpu") -> Hardware:
    """Facts of `device` as they are now; free memory leaves out what other programs use."""
    device = torch.device(device)
    memory = psutil.virtual_memory()
    process_bytes = psutil.Process().memory_info().rss
    ram_total, ram_free = memory.total, memory.available
    for limit, used in _cgroup_limits():
        ram_total = min(ram_total, limit)
        ram_free = min(ram_free, max(0, limit - used))
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        name, bf16 = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)[0] >= 8
        return Hardware(device, name, total, free, torch.cuda.memory_reserved(device), ram_total, ram_free, bf16)
    name = f"CPU, {torch.get_num_threads()} threads"
    return Hardware(device, name, ram_total, ram_free, process_bytes, ram_total, ram_free, True)


def peak_rss_bytes() -> int:
    """The most memory this process has held so far."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure_read_bps(files: Iterable[Path], most_bytes: int = 512 << 20) -> float:
    """Bytes per second of reading `files` in order, past the page cache, up to `most_bytes` of them."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    memory = memoryview(mmap.mmap(-1, _SAMPLE_BUFFER_BYTES, flags=flags))
    done, seconds = 0, 0.0
    for file in files:
        fd, size, _ = open_for_reading(file)
        try:
            end = min(size, most_bytes - done)
            start = time.perf_counter()
            for position in range(0, end, READ_BYTES):
                start_at = position % _SAMPLE_BUFFER_BYTES
                done += os.preadv(fd, [memory[start_at : start_at + READ_BYTES]], position)
            seconds += time.perf_counter() - start
        finally:
            os.close(fd)
    if not done:
        raise ValueError("no bytes to measure the read rate with")
    return done / seconds


def _cgroup_limits() -> list[tuple[int, int]]:
    """Limit and use, in bytes, of every memory cgroup above this process (versions 1 and 2)."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    limits: list[tuple[int, int]] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            limits += _walk_up(_CGROUP, path, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            limits += _walk_up(_CGROUP / "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes")
    return limits


def _walk_up(root: Path, path: str, limit_file: str, use_file: str) -> list[tuple[int, int]]:
    limits: list[tuple[int, int]] = []
    folder = root / path.lstrip("/")
    while folder.is_relative_to(root):
        try:
            limit = (folder / limit_file).read_text().strip()
            if limit != "max":
                limits.append((int(limit), int((folder / use_file).read_text()) - _reclaimable(folder)))
        except (OSError, ValueError):
            pass  # the root has no limit, and a container may not see its parents
        folder = folder.parent
    return limits


def _reclaimable(folder: Path) -> int:
    """File pages that the kernel drops before it lets a process run out."""
    fields = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    return int(fields.get("inactive_file", 0)) + int(fields.get("active_file", 0))
