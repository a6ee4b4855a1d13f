"""What this machine has: memory that may be used, and the rates at which it reads, copies and computes."""

import math
import re
import resource
import statistics
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import torch
from torch import nn

from offload.entries import TensorEntry
from offload.gated import gated_mlp
from offload.layout import decode
from offload.prefill import GPU_ROWS, chunk_rows
from offload.product import linear
from offload.store import ONE_AT_A_TIME, FileStore, Reading, anonymous, pin, sample_unit, unpin

_CGROUP = Path("/sys/fs/cgroup")
_SAMPLE_BUFFER_BYTES = (
    128 << 20
)  # as large as slots are: one that stays in a cache reads up to half faster than weights
_STRETCH_BYTES = 32 << 20
_WORTHWHILE = 1.1
# The ways that are tried, the usual one first; a stretch is cut into at least as many requests as come at once.
READINGS = (ONE_AT_A_TIME, Reading(2, 16 << 20), Reading(4, 8 << 20), Reading(4, 4 << 20))
_PROBE_BYTES = 64 << 20
_PROBE_COPIES = 64
_WORTH_MEASURING = 0.1
_ALIGNED = 128  # inner sizes of models are multiples of it; others cost up to a third
_PROBE_S = 0.2
_NUM_COPIES = 8
_ACT = nn.SiLU()
# Norms, rotary embedding, attention, residuals and the Python around them: measured with 3 and 65 rows of 576 values on
# two AVX-512 cores.
CPU_LAYER_S = 1.1e-3
CPU_VALUE_S = 5.0e-8
CPU_VALUE_CORES = 2  # that the values were shared by
CPU_LINK_COST = 0.2  # two cores multiplied matrices 25 to 35 % slower while the disk was read at 1.4 GB/s
GPU_LAYER_S = 2.5e-4  # launching some fifteen kernels from Python


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
    has_bf16: bool  # as instructions: a CPU without them multiplies bf16 matrices up to ten times slower than fp32


@dataclass(frozen=True)
class Rates:
    """What bounds a pass. link: main memory to the device; disk: files to main memory; memory: the device's own.

    flops: of dense matrices in the compute type. layer_s, value_s: what a layer costs beside its matrices, and for each
    value of a hidden state. decode_bps: quantized bytes, the bytes made of them and those read again together; None
    where only memory bounds it. link_cost: seconds of computing lost in each second that the link runs, where both
    share one memory. chunk_rows: tokens for which packed matrices are decoded once (offload.prefill).
    """

    link_bps: float
    disk_bps: float
    flops: float
    memory_bps: float
    layer_s: float
    value_s: float = 0.0
    decode_bps: float | None = None
    link_cost: float = 0.0
    chunk_rows: int = GPU_ROWS


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
    bf16 = any(on is True for feature, on in torch.cpu.get_capabilities().items() if feature.endswith("bf16"))
    free = min(ram_free, max(0, ram_total - process_bytes))  # a cgroup is not charged for libraries others have read
    return Hardware(device, name, ram_total, free, process_bytes, ram_total, ram_free, bf16)


def release_unused() -> None:
    """Gives memory that torch keeps for later back to the GPU; without effect where there is none."""
    torch.cuda.empty_cache()


def is_recording(device: torch.device) -> bool:
    """Whether passes on `device` are being recorded as a CUDA graph at the moment, when nothing may wait for it."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def peak_rss_bytes() -> int:
    """The most memory this process has held so far."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure_read_bps(files: Iterable[Path], most_bytes: int = 512 << 20, *, reading: Reading = ONE_AT_A_TIME) -> float:
    """Bytes per second of reading `files` in order, past the page cache, up to `most_bytes` of them, as layers are."""
    times = _stretch_times(list(files), [reading], most_bytes, _SAMPLE_BUFFER_BYTES)[0]
    if not times:
        raise ValueError("no bytes to measure the read rate with")
    return sum(nbytes for nbytes, _ in times) / sum(seconds for _, seconds in times)


def measure_disk(files: Iterable[Path], most_bytes: int) -> tuple[float, Reading]:
    """The rate of reading `files` in the way that is fastest, in bytes per second, and this way."""
    files = list(files)
    reading = measure_reading(files)
    return measure_read_bps(files, most_bytes, reading=reading), reading


def measure_reading(files: Iterable[Path], most_bytes: int = 384 << 20) -> Reading:
    """The way of reading `files` that is fastest on their disk: one request at a time, unless more gain a tenth.

    The ways take turns, so that a disk whose rate changes meanwhile favours none; their medians are compared.
    """
    files = list(files)
    if sum(file.stat().st_size for file in files) < most_bytes:
        return READINGS[0]  # whatever is gained by it lasts no longer than the measurement
    found = _stretch_times(files, READINGS, most_bytes, _STRETCH_BYTES)
    rates = [statistics.median(nbytes / seconds for nbytes, seconds in times) for times in found]
    best = max(range(len(rates)), key=rates.__getitem__)
    return READINGS[best if rates[best] > _WORTHWHILE * rates[0] else 0]


def _stretch_times(
    files: list[Path], readings: Sequence[Reading], most_bytes: int, stretch_bytes: int
) -> list[list[tuple[int, float]]]:
    """Bytes and seconds of each stretch of `files` by the way in which it was read; the ways take turns."""
    buffer = anonymous(_SAMPLE_BUFFER_BYTES)  # of large pages, as slots are: small ones halve the rate of a fast disk
    buffer.zero_()
    places: list[tuple[Path, int, int]] = []
    for file in files:
        size = min(file.stat().st_size, most_bytes)
        most_bytes -= size
        places += [(file, at, min(stretch_bytes, size - at)) for at in range(0, size, stretch_bytes)]
    times: list[list[tuple[int, float]]] = [[] for _ in readings]
    with ExitStack() as opened:
        sampled = {file for file, _, _ in places}  # of hundreds of files each way of reading opens these only
        stores = [opened.enter_context(closing(FileStore(sampled, reading))) for reading in readings]
        for i, (file, at, nbytes) in enumerate(places):
            unit = sample_unit(file, at, nbytes)
            start = time.perf_counter()
            stores[i % len(stores)].read_into(unit, buffer[i * stretch_bytes % _SAMPLE_BUFFER_BYTES :], lambda: False)
            times[i % len(stores)].append((nbytes, time.perf_counter() - start))
    return times


def measure_rates(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, int], *, rows: int, disk_bps: float
) -> Rates:
    """Rates of this machine for `rows` tokens at once and MLPs of `shape` (inner, hidden), in half a second."""
    hidden = shape[1]
    widest = _PROBE_BYTES // (3 * hidden * dtype.itemsize)
    inner = min(shape[0], max(_ALIGNED, widest - widest % _ALIGNED))
    copies = min(_PROBE_COPIES, max(1, _PROBE_BYTES // (3 * inner * hidden * dtype.itemsize)))
    weights = torch.ones(copies, 3, inner, hidden, dtype=dtype, device=device)  # more than caches hold, as in a pass
    alone = _mlp_s(weights, 1)
    most = chunk_rows(device)
    rows = -(-rows // -(-rows // most))  # of one chunk, as a pass cuts them
    together = max(alone, _mlp_s(weights, rows))
    flops, memory_bps = 2 * rows * weights[0].numel() / together, weights[0].nbytes / alone
    if device.type == "cpu":
        return Rates(
            math.inf,
            disk_bps,
            flops,
            memory_bps,
            CPU_LAYER_S,
            CPU_VALUE_S,
            link_cost=CPU_LINK_COST,
            chunk_rows=most,
        )
    return Rates(_copy_bps(device), disk_bps, flops, memory_bps, GPU_LAYER_S)


def _mlp_s(weights: torch.Tensor, rows: int) -> float:
    """The median of seconds that `rows` tokens take through one gated MLP of `weights` [copies, 3, inner, hidden]."""
    tokens = torch.ones(rows, weights.shape[-1], dtype=weights.dtype, device=weights.device)
    times: list[float] = []
    until = time.perf_counter() + _PROBE_S
    while len(times) < 2 or time.perf_counter() < until:
        _wait_for(weights.device)
        start = time.perf_counter()
        for gate, up, down in weights:
            gated_mlp(
                tokens,
                len(gate),
                gate=partial(linear, weight=gate),
                up=partial(linear, weight=up),
                down=partial(linear, weight=down.view(weights.shape[-1], -1)),
                act=_ACT,
            )
        _wait_for(weights.device)
        times.append((time.perf_counter() - start) / len(weights))
    return statistics.median(times[1:])  # the first one warms up


def measure_decode_bps(entries: Sequence[TensorEntry], dtype: torch.dtype, device: torch.device) -> float:
    """Rate of making values of the packed `entries`, which need not be read, and of one token's product with them.

    Their bytes, those made and those read again count together. Formats differ by a factor, shapes by a tenth or two,
    and layers mix them: one entry of each kind is measured, of kinds that are a tenth of all bytes or more.
    """
    kinds: dict[str, list[TensorEntry]] = {}
    for entry in entries:
        kinds.setdefault(f"{entry.encoding!r} {entry.dtype} {entry.shape}", []).append(entry)
    sizes = {kind: sum(_decoding_bytes(entry, dtype) for entry in same) for kind, same in kinds.items()}
    least = min(_WORTH_MEASURING * sum(sizes.values()), max(sizes.values()))
    total, seconds = 0, 0.0
    for kind, (entry, *_) in kinds.items():
        if sizes[kind] >= least:
            seconds += sizes[kind] / _decoding_bytes(entry, dtype) * _decoding_s(entry, dtype, device)
            total += sizes[kind]
    return total / seconds


def _decoding_bytes(entry: TensorEntry, dtype: torch.dtype) -> int:
    return sum(part.nbytes for part in entry.parts) + 2 * entry.num_values * dtype.itemsize


def _decoding_s(entry: TensorEntry, dtype: torch.dtype, device: torch.device) -> float:
    """The median of seconds that decoding and multiplying one of several `entry`s takes: more than caches hold."""
    count = min(_PROBE_COPIES, max(1, _PROBE_BYTES // sum(part.nbytes for part in entry.parts)))
    # One block by part, which is given back whole: many small ones would stay on the heap.
    parts = {part.name: torch.zeros(count, part.nbytes, dtype=torch.uint8, device=device) for part in entry.parts}
    copies = [{name: blocks[i] for name, blocks in parts.items()} for i in range(count)]
    made = torch.empty(entry.shape, dtype=dtype, device=device)  # what a cache still holds of it counts, as in a pass
    weight, token = made.view(-1, entry.shape[-1]), torch.ones(1, entry.shape[-1], dtype=dtype, device=device)
    times: list[float] = []
    until = time.perf_counter() + _PROBE_S
    while len(times) < 2 or time.perf_counter() < until:
        _wait_for(device)
        start = time.perf_counter()
        for raw in copies:
            decode(entry, raw, made)
            linear(token, weight)
        _wait_for(device)
        times.append((time.perf_counter() - start) / len(copies))
    return statistics.median(times[1:])


@dataclass(frozen=True)
class Pinning:
    """How much of the asked-for host memory could be page-locked."""

    asked_bytes: int
    pinned_bytes: int


def measure_pinning(most_bytes: int = 4 << 30) -> Pinning:
    """Pins and releases up to `most_bytes`, or half of the free memory, a quarter of it at a time."""
    asked = min(most_bytes, probe().ram_free_bytes // 2) // 4 * 4
    held: list[torch.Tensor] = []
    try:
        while len(held) < 4:
            buffer = anonymous(asked // 4)
            if not pin(buffer):
                break
            held.append(buffer)
        return Pinning(asked, sum(buffer.nbytes for buffer in held))
    finally:
        for buffer in held:
            unpin(buffer)


def driver_version() -> str | None:
    """The NVIDIA driver's version, or None where none is loaded."""
    try:
        first = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except (OSError, IndexError):
        return None
    found = re.search(r"\d+\.\d+(\.\d+)?", first)
    return found[0] if found else None


def _copy_bps(device: torch.device) -> float:
    source = anonymous(_PROBE_BYTES)
    is_pinned = pin(source)
    try:
        target = source.to(device)
        _wait_for(device)
        start = time.perf_counter()
        for _ in range(_NUM_COPIES):
            target.copy_(source, non_blocking=True)
        _wait_for(device)
        return _NUM_COPIES * source.nbytes / (time.perf_counter() - start)
    finally:
        if is_pinned:
            unpin(source)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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
