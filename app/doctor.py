"""The command `doctor`: whether installation and machine are as they should be, and how to mend what is not."""

import json
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import torch

from app import __version__
from app.environment import cache_dir
from app.sizes import format_size
from offload.hardware import Hardware, Pinning, driver_version, measure_pinning, measure_read_bps, probe
from offload.quantize import nf4_roundtrip
from offload.store import open_for_reading

_LIBRARIES = ("torch", "transformers", "accelerate", "bitsandbytes", "safetensors", "huggingface_hub")
_SAMPLE_BYTES = 256 << 20
_LITTLE_ROOM_BYTES = 10 << 30
_SLOW_BPS = 500e6
_MARKS = {"ok": "ok      ", "warning": "warning ", "broken": "BROKEN  "}


@dataclass(frozen=True)
class Finding:
    """What was looked at, how it is, and how to mend it; "broken" is what nothing works without."""

    subject: str
    state: Literal["ok", "warning", "broken"]
    what: str
    remedy: str = ""


def examine(*, as_json: bool) -> int:
    """Prints a line for each finding; 0, or 1 if something that is needed is broken."""
    findings = [finding for check in (_versions, _device, _quantization, _memory, _cache) for finding in _told(check)]
    for each in findings:
        print(f"{_MARKS[each.state]}{each.subject}: {each.what}" + (f"; {each.remedy}" if each.remedy else ""))
    is_broken = any(each.state == "broken" for each in findings)
    if as_json:
        print(json.dumps({"ok": not is_broken, "findings": [asdict(each) for each in findings]}), flush=True)
    return int(is_broken)


def _told(check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """A check that cannot be carried out is a finding too."""
    try:
        yield from check()
    except (OSError, RuntimeError, ImportError, ValueError) as error:
        reason = " ".join(str(error).split())
        yield Finding(check.__name__.strip("_"), "broken", f"cannot be examined: {reason}", "install the package again")


def _versions() -> Iterator[Finding]:
    yield Finding("specexec", "ok", f"{__version__}, Python {platform.python_version()}, {platform.platform()}")
    for name in _LIBRARIES:
        try:
            yield Finding(name, "ok", version(name))
        except PackageNotFoundError:
            yield Finding(name, "broken", "not installed", f"run `pip install {name}`")


def _device() -> Iterator[Finding]:
    if not torch.accelerator.is_available():
        built = f"torch {torch.__version__} is built for CUDA {torch.version.cuda}" if torch.version.cuda else ""
        driver = driver_version()
        if driver and not built:
            remedy = "install a torch built for CUDA: see pytorch.org/get-started"
            yield Finding(
                "GPU", "warning", f"driver {driver} is there, but torch {torch.__version__} has no CUDA", remedy
            )
        elif built:
            yield Finding(
                "GPU", "warning", f"{built}, but finds no GPU", "install the NVIDIA driver, or use --device cpu"
            )
        else:
            yield Finding("GPU", "ok", "none, the CPU computes")
        return
    hardware = probe("cuda")
    free = f"{format_size(hardware.free_bytes)} free of {format_size(hardware.total_bytes)}"
    yield Finding("GPU", "ok", f"{hardware.name}, {free}, driver {driver_version()}, CUDA {torch.version.cuda}")
    if not hardware.has_bf16:
        yield Finding("bf16", "warning", "this GPU has none, so fp16 is computed in", "--dtype float32 if it overflows")
    yield _pinning(measure_pinning())


def _pinning(pinning: Pinning) -> Finding:
    what = f"{format_size(pinning.pinned_bytes)} of {format_size(pinning.asked_bytes)} could be pinned"
    if pinning.pinned_bytes == pinning.asked_bytes:
        return Finding("pinned memory", "ok", what)
    remedy = "copies from pageable memory reach about half of the link's rate; raise `ulimit -l`, under WSL its memory"
    return Finding("pinned memory", "warning", what, remedy)


def _quantization() -> Iterator[Finding]:
    weight = torch.linspace(-1, 1, 4096).view(64, 64)
    error = (nf4_roundtrip(weight) - weight).abs().max().item()
    if error < 0.2:
        yield Finding("NF4", "ok", "bitsandbytes quantizes and decodes on this machine")
    else:
        yield Finding("NF4", "broken", f"bitsandbytes is off by {error:.2g}", "install bitsandbytes again")


def _memory() -> Iterator[Finding]:
    hardware: Hardware = probe()
    what = f"{format_size(hardware.ram_free_bytes)} free of {format_size(hardware.ram_total_bytes)}"
    yield Finding("RAM", "ok", what + ", the limits of control groups counted")


def _cache() -> Iterator[Finding]:
    folder = cache_dir()
    try:
        present = next(each for each in (folder, *folder.parents) if each.exists())
        free = shutil.disk_usage(present).free
        disk = list(_disk(present, min(_SAMPLE_BYTES, free // 4)))
    except OSError as error:
        remedy = "set SPECEXEC_CACHE to a folder that can be written to, on a disk with free space"
        yield Finding("cache", "broken", f"{folder} cannot be used: {error.strerror or error}", remedy)
        return
    what = f"{folder}, {format_size(free)} free"
    if free < _LITTLE_ROOM_BYTES:
        yield Finding("cache", "warning", what, "set SPECEXEC_CACHE to a disk with more room for models")
    else:
        yield Finding("cache", "ok", what)
    yield from disk


def _disk(folder: Path, num_bytes: int) -> Iterator[Finding]:
    """Writes a file there, reads it past the page cache, and removes it."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".specexec-doctor-") as file:
        block = bytes(1 << 20)
        for _ in range(max(1, num_bytes >> 20)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())  # what is not written yet would be read from memory
        descriptor, _, is_direct = open_for_reading(Path(file.name))
        os.close(descriptor)
        rate = measure_read_bps([Path(file.name)], _SAMPLE_BYTES)
    if is_direct:
        yield Finding("O_DIRECT", "ok", "the cache's file system reads past the page cache")
    else:
        remedy = "reads go through the page cache, which costs memory and speed; another file system may do better"
        yield Finding("O_DIRECT", "warning", "the cache's file system refuses it", remedy)
    slow = "" if rate >= _SLOW_BPS else "models from there stream slowly; an NVMe drive reads 2 GB/s and more"
    yield Finding("disk", "warning" if slow else "ok", f"{rate / 1e9:.2f} GB/s", slow)
