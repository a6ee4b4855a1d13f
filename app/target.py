"""The target that a run answers with: as its files have it, or quantized once into a pack in the cache directory."""

import hashlib
import shutil
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from app.environment import cache_dir
from app.models import locate
from app.progress import Progress
from app.settings import Settings
from offload.checkpoint import Checkpoint, open_checkpoint
from offload.pack import encoding_for, open_pack


def open_target(settings: Settings, *, offline: bool) -> Checkpoint:
    """Finds, fetches and, with `bits`, packs the target; ValueError for bits of what has few already."""
    source = open_checkpoint(locate(settings.target, offline=offline))
    if settings.bits is None:
        return source
    if source.quantization is not None:
        raise ValueError(f"{settings.target} is already quantized ({source.quantization}): leave out --bits")
    return source if settings.bits == 16 else packed(source, settings.bits, f"quantize to {settings.bits} bits")


def packed(source: Checkpoint, bits: int, what: str) -> Checkpoint:
    """The pack of `source` in the cache directory, made if it is not there; `what` says what that is, as it goes on."""
    with Progress(what) as progress:
        return open_pack(source, _folder(source.path, bits), encoding_for(bits), progress=progress)


def can_be_packed(source: Checkpoint, bits: int, nbytes: int) -> bool:
    """Whether the pack of `source`, of `nbytes`, is there already or would fit on the cache's disk."""
    folder = _folder(source.path, bits)
    place = next(each for each in folder.parents if each.is_dir())
    return folder.is_dir() or shutil.disk_usage(place).free > nbytes


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint directory or a .gguf file."""
    if path.suffix == ".gguf":
        return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    return AutoTokenizer.from_pretrained(path)


def _folder(source: Path, bits: int) -> Path:
    """A place of its own for each source: what is there now may be stale, but is never another model's."""
    place = hashlib.sha256(str(source.resolve()).encode()).hexdigest()[:12]
    return cache_dir() / "packs" / f"{source.resolve().name}-{bits}bit-{place}"
