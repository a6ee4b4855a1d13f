"""A checkpoint quantized once, unit by unit, into a pack: a directory that is a checkpoint like any other.

A pack is built in `NAME.partial` beside its final place and renamed when whole. A build that was broken off goes on
after the last file that is recorded in the manifest and still has its checksums.
"""

import errno
import json
import math
import os
import shutil
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from filelock import FileLock
from transformers import PreTrainedModel

from offload.checkpoint import Checkpoint, open_checkpoint, parse_header, read_header
from offload.layout import BLOCK_BYTES, Unit, raw_parts, typed
from offload.load import Outline, outline
from offload.manifest import Manifest, PackedFile, head_crc32, read_manifest, write_manifest
from offload.names import Recipe
from offload.quantize import Int8, Nf4
from offload.shape import is_quantized
from offload.store import FileStore, anonymous

_TOKENIZER_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
_NOT_COPIED = {"config.json", "generation_config.json", "model.safetensors.index.json", "pack.json"}
_MANIFEST_BYTES = 16 << 20  # two of them for a while, with many experts
_WEIGHTS = (torch.float32, torch.float16, torch.bfloat16)
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int8: "I8",
    torch.uint8: "U8",
}


@dataclass(frozen=True)
class _File:
    """A file to be: the unit whose tensors go there, which of them are quantized, its header and its size."""

    name: str
    unit: Unit
    quantized: frozenset[str]
    header: bytes
    nbytes: int


def encoding_for(bits: int) -> Nf4 | Int8:
    """NF4 with double quantization for 4 bits, int8 by rows for 8."""
    return {4: Nf4(), 8: Int8()}[bits]


def open_pack(
    source: Checkpoint,
    folder: Path,
    encoding: Nf4 | Int8,
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Checkpoint:
    """The pack of `source` at `folder`, made first if it is not there. `progress` is told source bytes done and in all.

    Raises ValueError for a source that is quantized already, for a pack that is stale or damaged, and OSError when the
    disk is full: what is done by then is kept for the next time.
    """
    if source.quantization is not None:
        raise ValueError(f"{source.path} is already quantized ({source.quantization}): leave out --bits")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / f".{folder.name}.lock"):
        if not folder.is_dir():
            _build(source, folder, encoding, progress)
    checkpoint, made = open_checkpoint(folder), read_manifest(folder)
    if made is None or made.encoding != encoding or made.source != _fingerprint(source):
        raise ValueError(f"{folder} was made from other files than {source.path} holds now: delete it to convert again")
    return checkpoint


def packed_outline(source: Checkpoint, encoding: Nf4 | Int8, *, dtype: torch.dtype | None = None) -> Outline:
    """Units and exact sizes of a pack that need not exist, from the source's headers alone."""
    files = _files(outline(source), encoding)
    entries = [entry for file in files for entry in parse_header(source.path / file.name, file.header[8:])]
    sums = PackedFile(0, {entry.name: 0 for entry in entries})
    manifest = replace(_manifest(source, encoding, files), files={"all": sums})
    joined = manifest.joined({entry.name: entry for entry in entries})
    return outline(replace(source, tensors=joined), dtype=dtype)


def _build(source: Checkpoint, folder: Path, encoding: Nf4 | Int8, progress: Callable[[int, int], None]) -> None:
    files = _files(outline(source), encoding)
    partial = folder.with_name(f"{folder.name}.partial")
    manifest = _resumed(source, partial, _manifest(source, encoding, files))
    total = sum(file.unit.slot_bytes for file in files)
    store = FileStore(entry.file for entry in source.tensors.values())
    try:
        while left := [file for file in files if file.name not in manifest.files]:
            progress(total - sum(file.unit.slot_bytes for file in left), total)
            _require_space(partial, left)
            try:
                written = _write(left[0], partial, store, encoding)
                manifest = replace(manifest, files={**manifest.files, left[0].name: written})
                write_manifest(partial, manifest)
            except OSError as error:
                if error.errno == errno.ENOSPC:
                    _require_space(partial, left)
                raise
    finally:
        store.close()
    partial.rename(folder)
    progress(total, total)


def _resumed(source: Checkpoint, partial: Path, wanted: Manifest) -> Manifest:
    """`wanted` with what an earlier build has left in `partial` and is whole; another build's leavings are removed."""
    try:
        found = read_manifest(partial)
    except ValueError:
        found = None
    if found is not None and replace(found, files={}) == wanted:
        return replace(
            wanted, files={name: file for name, file in found.files.items() if _is_whole(partial / name, file)}
        )
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    source.config.save_pretrained(partial)
    if source.generation_config is not None:
        source.generation_config.save_pretrained(partial)
    for file in (file for pattern in _TOKENIZER_FILES for file in source.path.glob(pattern)):
        if file.name not in _NOT_COPIED:
            shutil.copyfile(file, partial / file.name)
    small = {file.name: PackedFile(head_crc32(file)) for file in sorted(partial.iterdir())}
    write_manifest(partial, replace(wanted, files=small))
    return replace(wanted, files=small)


def _is_whole(file: Path, packed: PackedFile) -> bool:
    try:
        if head_crc32(file) != packed.head_crc32:
            return False
        entries = read_header(file) if packed.tensors else []
        with file.open("rb") as stream:
            for entry in entries:
                stream.seek(entry.offset)
                if zlib.crc32(stream.read(entry.nbytes)) != packed.tensors[entry.name]:
                    return False
    except (OSError, ValueError):
        return False
    return True


def _manifest(source: Checkpoint, encoding: Nf4 | Int8, files: Sequence[_File]) -> Manifest:
    """Of a pack that has no files yet."""
    quantized = {name for file in files for name in file.quantized}
    kept = tuple(sorted(set(source.tensors) - quantized))
    if isinstance(encoding, Nf4):
        return Manifest(_fingerprint(source), 4, encoding.blocksize, encoding.double_quant, kept)
    return Manifest(_fingerprint(source), 8, None, False, kept)


def _fingerprint(source: Checkpoint) -> dict[str, list[int]]:
    """Size, time of change and checksum of the header, of every file that holds weights, and of the config."""
    files = {source.path / "config.json", *(entry.file for entry in source.tensors.values())}
    status = {file: file.stat() for file in sorted(files)}
    return {file.name: [at.st_size, at.st_mtime_ns, head_crc32(file)] for file, at in status.items()}


def _files(parts: Outline, encoding: Nf4 | Int8) -> list[_File]:
    """One file per unit, as it will be."""
    files = []
    for k, unit in enumerate((*parts.rest, *parts.layers)):
        recipes = unit.recipes if unit in parts.layers else ()
        matrices = [recipe for recipe in recipes if _is_matrix(parts.model, recipe)]
        quantized = frozenset(entry.name for recipe in matrices for entry in recipe.sources)
        stored: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        for entry in (entry for recipe in unit.recipes for entry in recipe.sources):
            layout = encoding.layout(entry.shape) if entry.name in quantized else {"": (entry.dtype, entry.shape)}
            stored |= {f"{entry.name}{ending}": part for ending, part in layout.items()}
        header, nbytes = _header(stored)
        files.append(_File(f"unit-{k:05}.safetensors", unit, quantized, header, nbytes))
    return files


def _is_matrix(model: PreTrainedModel, recipe: Recipe) -> bool:
    """Whether all that a parameter is made from is to be quantized, and of a type that can be."""
    return all(e.dtype in _WEIGHTS and is_quantized(model, recipe.targets[0], e.shape) for e in recipe.sources)


def _header(stored: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> tuple[bytes, int]:
    """A safetensors header padded to whole blocks, wide types and large tensors first, and the size of its file."""
    fields: dict[str, dict] = {}
    position = 0
    sizes = {name: math.prod(shape) * dtype.itemsize for name, (dtype, shape) in stored.items()}
    for name, (dtype, shape) in sorted(
        stored.items(), key=lambda item: (-item[1][0].itemsize, -sizes[item[0]], item[0])
    ):
        end = position + sizes[name]
        fields[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % BLOCK_BYTES)
    return len(text).to_bytes(8, "little") + text, 8 + len(text) + position


def _write(file: _File, folder: Path, store: FileStore, encoding: Nf4 | Int8) -> PackedFile:
    """Reads the unit, quantizes what is to be quantized and writes the file, whole or not at all."""
    buffer = anonymous(file.unit.slot_bytes)
    store.read_into(file.unit, buffer, lambda: False)
    raw = raw_parts(file.unit, buffer)
    tensors: dict[str, torch.Tensor] = {}
    for entry in (entry for recipe in file.unit.recipes for entry in recipe.sources):
        stored = typed(raw[entry.name], entry)
        parts = encoding.encode(stored) if entry.name in file.quantized else {"": stored}
        tensors |= {f"{entry.name}{ending}": part for ending, part in parts.items()}
    sums: dict[str, int] = {}
    unfinished = folder / f".{file.name}"
    try:
        with unfinished.open("wb") as stream:
            stream.write(file.header)
            for entry in parse_header(unfinished, file.header[8:]):
                content = tensors[entry.name].contiguous().view(-1).view(torch.uint8).numpy()
                sums[entry.name] = zlib.crc32(content)
                stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        unfinished.rename(folder / file.name)
    finally:
        unfinished.unlink(missing_ok=True)
    return PackedFile(zlib.crc32(file.header), sums)


def _require_space(folder: Path, left: Sequence[_File]) -> None:
    """OSError with the amount that is missing, unless the files that are left fit on the disk."""
    needed = sum(file.nbytes for file in left) + _MANIFEST_BYTES
    if (free := shutil.disk_usage(folder).free) < needed:
        raise OSError(
            f"the disk of {folder} is full: {needed:,} bytes are needed for the pack, {free:,} are free,"
            f" {needed - free:,} are missing; what is done is kept, so free some and start again"
        )
