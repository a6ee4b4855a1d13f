"""What benchmarks under a memory limit share: the cgroup, the raw disk rate, and a real model larger than the limit."""

import json
import os
import subprocess
import sys
from pathlib import Path

from widen import widen

from app.environment import cache_dir
from app.models import locate
from offload.hardware import measure_read_bps

DEMO = "HuggingFaceTB/SmolLM2-135M-Instruct"
CGROUP_V1 = Path("/sys/fs/cgroup/memory")
CGROUP_V2 = Path("/sys/fs/cgroup")


def widened_demo(factor: int) -> tuple[Path, Path]:
    """The demo checkpoint and its widened copy in the cache directory, made unless that was done before."""
    demo = locate(DEMO, offline=False)
    target = cache_dir() / f"benchmark-wide{factor}"
    if not target.is_dir():
        widen(demo, target, factor)
    return demo, target


def make_cgroup(limit_bytes: int) -> Path:
    """A memory cgroup of `limit_bytes`; SystemExit says how to make one where this process may not."""
    is_v1 = CGROUP_V1.is_dir()
    folder = (CGROUP_V1 if is_v1 else CGROUP_V2) / "specexec-benchmark"
    try:
        folder.mkdir(exist_ok=True)
        (folder / ("memory.limit_in_bytes" if is_v1 else "memory.max")).write_text(str(limit_bytes))
    except OSError as error:
        raise SystemExit(f"cannot make the cgroup {folder} ({error.strerror}): run as root, or under "
                         f"systemd-run --scope -p MemoryMax={limit_bytes} with --no-cgroup") from None  # fmt: skip
    return folder


def in_cgroup(folder: Path | None, script: str, arguments: list[str]) -> dict:
    """Runs `script` as a worker inside `folder` and returns the JSON object that it prints last."""

    def enter() -> None:
        if folder is not None:
            (folder / "cgroup.procs").write_text(str(os.getpid()))

    command = [sys.executable, script, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, preexec_fn=enter, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)} failed with exit code {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def raw_rate(target: Path) -> float:
    """O_DIRECT bytes per second over the whole checkpoint, after it has been dropped from the page cache.

    Pages that another process has read are not charged to the cgroup: a peer that maps files would have them free.
    """
    files = sorted(target.glob("*.safetensors"))
    for file in files:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return measure_read_bps(files, 2**40)
