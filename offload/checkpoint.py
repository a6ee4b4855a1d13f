"""A safetensors checkpoint as names, shapes and byte ranges: headers are read and checked, no weight is."""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, GenerationConfig, PretrainedConfig

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_PLAIN_KV = {"full_attention", "sliding_attention", "chunked_attention"}


@dataclass(frozen=True)
class TensorEntry:
    """One stored tensor: `nbytes` at byte `offset` of `file`."""

    name: str
    file: Path
    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Checkpoint:
    """A directory whose files hold what their headers promise."""

    path: Path
    config: PretrainedConfig
    generation_config: GenerationConfig | None
    tensors: Mapping[str, TensorEntry]

    @property
    def dtype(self) -> torch.dtype:
        """The floating type that most of the stored bytes have."""
        sizes: dict[torch.dtype, int] = {}
        for entry in self.tensors.values():
            if entry.dtype.is_floating_point:
                sizes[entry.dtype] = sizes.get(entry.dtype, 0) + entry.nbytes
        return max(sizes, key=sizes.__getitem__)


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Reads config and headers of a local directory and checks them against the files.

    Raises FileNotFoundError or ValueError, each in one line that names the file at fault.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"no such model directory: {path}")
    if not path.is_dir():
        raise ValueError(f"{path} is not a directory; a checkpoint is a directory with config.json and *.safetensors")
    config, is_composite = _read_config(path)
    tensors: dict[str, TensorEntry] = {}
    index = _read_index(path)
    for file in sorted(set(index.values())) if index else _shards_without_index(path):
        for entry in read_header(file):
            if entry.name in tensors:
                raise ValueError(f"{entry.name} is stored twice: in {tensors[entry.name].file} and in {file}")
            tensors[entry.name] = entry
    for name, file in index.items():
        if name not in tensors or tensors[name].file != file:
            raise ValueError(f"{path / _INDEX} says {name} is in {file.name}, which does not hold it")
    if is_composite:
        tensors = _text_part(tensors)
    generation = GenerationConfig.from_pretrained(path) if (path / "generation_config.json").exists() else None
    return Checkpoint(path, config, generation, tensors)


def read_header(file: Path) -> list[TensorEntry]:
    """Entries of one safetensors file, in the order of their bytes; ValueError if header and file disagree."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(_MAX_HEADER_BYTES, size - 8):
            raise ValueError(
                f"{file} is not a whole safetensors file: {size:,} bytes, a header of {length:,} announced"
            )
        try:
            header = json.loads(stream.read(length))
            entries = [
                _entry(file, name, fields, 8 + length) for name, fields in header.items() if name != "__metadata__"
            ]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{file} has an unreadable safetensors header: {error}") from error
    entries.sort(key=lambda entry: (entry.offset, entry.nbytes))
    position = 8 + length
    for entry in entries:
        if entry.offset != position:
            raise ValueError(f"{file}: {entry.name} starts at byte {entry.offset:,}, expected {position:,}")
        position += entry.nbytes
    if position != size:
        fault = "is cut short" if size < position else "has bytes that its header does not name"
        raise ValueError(f"{file} {fault}: expected {position:,} bytes, found {size:,}; fetch it again")
    return entries


def _entry(file: Path, name: str, fields: dict, data_start: int) -> TensorEntry:
    if fields["dtype"] not in _DTYPES:
        raise ValueError(f"{name} has the unsupported type {fields['dtype']}")
    dtype, shape = _DTYPES[fields["dtype"]], tuple(int(size) for size in fields["shape"])
    begin, end = (int(offset) for offset in fields["data_offsets"])
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{name} of shape {list(shape)} and type {fields['dtype']} does not fill {end - begin} bytes")
    return TensorEntry(name, file, data_start + begin, end - begin, dtype, shape)


def _read_index(path: Path) -> dict[str, Path]:
    if not (path / _INDEX).exists():
        return {}
    try:
        names = json.loads((path / _INDEX).read_text())["weight_map"]
        index = {name: path / shard for name, shard in names.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path / _INDEX} is not a checkpoint index: {error}") from error
    for shard in sorted(set(index.values())):
        if not shard.is_file():
            raise FileNotFoundError(f"{path / _INDEX} names {shard.name}, which is missing; fetch the checkpoint again")
    return index


def _shards_without_index(path: Path) -> list[Path]:
    if (path / _SINGLE).exists():
        return [path / _SINGLE]
    shards = sorted(path.glob("*.safetensors"))
    if not shards:
        raise FileNotFoundError(f"{path} holds no *.safetensors files")
    return shards


def _text_part(tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """The language model inside a model of several modalities, under the names that it would have alone."""
    own = "language_model."
    if not any(own in name for name in tensors):
        return dict(tensors)
    names = {name: name.replace(own, "", 1) for name in tensors if own in name or name.startswith("lm_head.")}
    return {short: replace(tensors[name], name=short) for name, short in names.items()}


def _read_config(path: Path) -> tuple[PretrainedConfig, bool]:
    """The language model's config, and whether it was a part of a larger one."""
    if not (path / "config.json").is_file():
        raise FileNotFoundError(f"{path} has no config.json, so it is not a checkpoint directory")
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (ValueError, KeyError, TypeError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"{path / 'config.json'} is not a model that transformers knows: {reason}") from error
    quantized = getattr(config, "quantization_config", None)
    if quantized:
        method = quantized.get("quant_method", "unknown") if isinstance(quantized, dict) else quantized.quant_method
        raise ValueError(f"{path} is already quantized ({method}); use the original 16-bit checkpoint instead")
    text = config.get_text_config(decoder=True)
    if type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"{path}: transformers has no causal language model of type {text.model_type!r}")
    _refuse_recurrent(path, text)
    return text, text is not config


def _refuse_recurrent(path: Path, config: PretrainedConfig) -> None:
    """A recurrent state cannot be branched along a token tree, nor cut back to the accepted tokens."""
    kinds = sorted(set(getattr(config, "layer_types", None) or ()) - _PLAIN_KV)
    if kinds or getattr(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], "_is_stateful", False):
        kind = ", ".join(kinds) or "recurrent"
        raise ValueError(
            f"{path}: {config.model_type} has {kind} layers, whose state cannot verify a token tree;"
            " use a model with full or sliding attention only"
        )
