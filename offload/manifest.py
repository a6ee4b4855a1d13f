"""What a pack says of itself: what it was made from, how, and the checksum of every tensor."""

import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from offload.entries import TensorEntry
from offload.quantize import Int8, Nf4

FORMAT_VERSION = 1
_NAME = "pack.json"


@dataclass(frozen=True)
class PackedFile:
    """A file of the pack: checksum of what comes before its tensors (of all of it if it has none), and of each."""

    head_crc32: int
    tensors: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Manifest:
    """`source` maps each file that the pack was made from to size, time of change and checksum of its header."""

    source: Mapping[str, list[int]]
    bits: int
    blocksize: int | None
    double_quant: bool
    unquantized: tuple[str, ...] = ()
    files: Mapping[str, PackedFile] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    @property
    def encoding(self) -> Nf4 | Int8:
        """How its quantized tensors are stored."""
        return Int8() if self.blocksize is None else Nf4(self.blocksize, self.double_quant)

    def joined(self, tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
        """`tensors` as the files have them, with scales joined to what they scale and checksums known.

        ValueError for a tensor that is not of the pack.
        """
        sums = {name: crc32 for file in self.files.values() for name, crc32 in file.tensors.items()}
        if strange := sorted(tensors.keys() - sums.keys()):
            raise ValueError(f"{tensors[strange[0]].file} is in a pack but not of it: move it elsewhere")
        checked = {name: replace(entry, crc32=sums[name]) for name, entry in tensors.items()}
        endings = [ending for ending in self.encoding.layout((1, 2)) if ending]
        plain: dict[str, TensorEntry] = {}
        for name, entry in checked.items():
            if f"{name}{endings[0]}" in checked:
                scales = tuple(checked[f"{name}{ending}"] for ending in endings)
                shape = (*entry.shape[:-1], entry.shape[-1] * 8 // self.bits)
                plain[name] = replace(entry, encoding=self.encoding, scales=scales, shape=shape)
            elif not any(name.removesuffix(ending) in checked for ending in endings if name.endswith(ending)):
                plain[name] = entry
        return plain


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a pack, or None for a directory that is none; ValueError in one line."""
    file = folder / _NAME
    if not file.is_file():
        return None
    try:
        content = json.loads(file.read_text())
        fields = content["pack"]
        if content["crc32"] != _crc32_of(fields):
            raise ValueError("checksum")
        if fields["format_version"] != FORMAT_VERSION:
            raise ValueError(f"format {fields['format_version']}, and this version reads format {FORMAT_VERSION}")
        fields["files"] = {name: PackedFile(**each) for name, each in fields["files"].items()}
        manifest = Manifest(**{**fields, "unquantized": tuple(fields["unquantized"])})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is not a pack's manifest ({error}): delete {folder} to convert again") from error
    return manifest


def check_heads(folder: Path, manifest: Manifest) -> None:
    """ValueError or FileNotFoundError for a file that is missing or whose beginning is damaged."""
    for name, packed in manifest.files.items():
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder} lacks {name}: delete the folder to convert again")
        if head_crc32(folder / name) != packed.head_crc32:
            raise ValueError(f"{folder / name} is damaged (checksum): delete {folder} to convert again")


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Replaces the manifest at one stroke."""
    partial = folder / f".{_NAME}"
    fields = asdict(manifest)
    partial.write_text(json.dumps({"crc32": _crc32_of(fields), "pack": fields}, indent=1))
    partial.replace(folder / _NAME)


def _crc32_of(fields: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(fields, sort_keys=True).encode())


def head_crc32(file: Path) -> int:
    """Checksum of a safetensors file's header, or of the whole of any other file."""
    with file.open("rb") as stream:
        if file.suffix != ".safetensors":
            return zlib.crc32(stream.read())
        length = stream.read(8)
        return zlib.crc32(length + stream.read(min(int.from_bytes(length, "little"), file.stat().st_size)))
