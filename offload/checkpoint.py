"""A checkpoint as names, shapes and byte ranges: headers are read and checked, no weight is.

It is a directory of safetensors, quantized by its authors or not, a pack made of one, or a GGUF file.
"""

import json
import math
import os
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, GenerationConfig, PretrainedConfig

from offload.entries import TensorEntry
from offload.gguf import read_gguf
from offload.manifest import check_heads, read_manifest
from offload.prequantized import decodable, require_decodable

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
_SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
_SIZES_OF_SOME = ("intermediate_size", "num_key_value_heads", "head_dim")
_SCALE_BITS = 16


@dataclass(frozen=True)
class Description:
    """What a config.json tells: the language model's config, whether it `is_part` of a larger model, and how its
    authors have quantized it, in their own words (else: nothing)."""

    config: PretrainedConfig
    is_part: bool
    quantization: Mapping[str, Any]

    @property
    def method(self) -> str | None:
        """The name of that quantization, if there is one."""
        return str(self.quantization["quant_method"]) if self.quantization else None

    @property
    def bits(self) -> float | None:
        """What a quantized weight takes at rest, with its share of a scale per group; None where none is quantized."""
        if not self.quantization:
            return None
        groups = (self.quantization.get("config_groups") or {}).values()
        weights = next((group.get("weights") for group in groups), None) or {}
        group_size = weights.get("group_size") or 0
        return int(weights.get("num_bits", 8)) + (_SCALE_BITS / group_size if group_size > 0 else 0)


@dataclass(frozen=True)
class Checkpoint:
    """A directory or .gguf file that holds what its headers promise; `quantization` says how weights are packed."""

    path: Path
    config: PretrainedConfig
    generation_config: GenerationConfig | None
    tensors: Mapping[str, TensorEntry]
    quantization: str | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The floating type that most of the bytes have which are stored as they are; fp32 where none are."""
        sizes: dict[torch.dtype, int] = {}
        for entry in self.tensors.values():
            if entry.encoding is None and entry.dtype.is_floating_point:
                sizes[entry.dtype] = sizes.get(entry.dtype, 0) + entry.nbytes
        return max(sizes, key=sizes.__getitem__, default=torch.float32)

    @property
    def unquantized(self) -> list[str]:
        """What is stored as it is, in a checkpoint that has a `quantization`."""
        return sorted(entry.name for entry in self.tensors.values() if entry.encoding is None)


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Reads config and headers of a local directory or a .gguf file and checks them against the files.

    Raises FileNotFoundError or ValueError, each in one line that names the file at fault.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"no such model directory: {path}")
    if path.suffix == ".gguf":
        config, stored = read_gguf(path)
        _require_usable(path, config)
        return Checkpoint(path, config, None, stored, quantization="GGUF")
    if not path.is_dir():
        raise ValueError(f"{path} is not a directory; a checkpoint is a directory with config.json and *.safetensors")
    if (manifest := read_manifest(path)) is not None:
        check_heads(path, manifest)
    described = read_config(path)
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
    if described.is_part:
        tensors = _text_part(tensors)
    method = None
    if manifest is not None:
        method, tensors = f"{manifest.bits}-bit pack", manifest.joined(tensors)
    elif described.quantization:
        method, tensors = described.method, decodable(path, described.quantization, tensors)
    generation = GenerationConfig.from_pretrained(path) if (path / "generation_config.json").exists() else None
    return Checkpoint(path, described.config, generation, tensors, method)


def read_header(file: Path) -> list[TensorEntry]:
    """Entries of one safetensors file, in the order of their bytes; ValueError if header and file disagree."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(_MAX_HEADER_BYTES, size - 8):
            raise ValueError(
                f"{file} is not a whole safetensors file: {size:,} bytes, a header of {length:,} announced"
            )
        entries = parse_header(file, stream.read(length))
    position = 8 + length
    for entry in entries:
        if entry.offset != position:
            raise ValueError(f"{file}: {entry.name} starts at byte {entry.offset:,}, expected {position:,}")
        position += entry.nbytes
    if position != size:
        fault = "is cut short" if size < position else "has bytes that its header does not name"
        raise ValueError(f"{file} {fault}: expected {position:,} bytes, found {size:,}; fetch or convert it again")
    return entries


def parse_header(file: Path, text: bytes) -> list[TensorEntry]:
    """Entries that the header `text` of `file` announces, in the order of their bytes."""
    try:
        fields = json.loads(text)
        entries = [_entry(file, name, each, 8 + len(text)) for name, each in fields.items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} has an unreadable safetensors header: {error}") from error
    return sorted(entries, key=lambda entry: (entry.offset, entry.nbytes))


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


def read_config(path: Path) -> Description:
    """What the config.json in directory `path` tells, of a model that can be run.

    Raises FileNotFoundError or ValueError, each in one line that names the file at fault.
    """
    file = path / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{path} has no config.json, so it is no model directory")
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        text = config.get_text_config(decoder=True)
    except StrictDataclassError as error:  # its own first line names the field, the second what is wrong with it
        raise ValueError(f"{file} does not fit its model: {' '.join(str(error).split())}") from error
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"{file} is not a model that transformers knows: {reason}") from error
    found = getattr(config, "quantization_config", None) or getattr(text, "quantization_config", None) or {}
    quantization = found if isinstance(found, dict) else found.to_dict()
    if quantization:
        require_decodable(path, quantization)
        for each in (config, text):
            each.__dict__.pop("quantization_config", None)  # the model built from it is a plain one
    _require_usable(file, text)
    return Description(text, text is not config, quantization)


def _require_usable(file: Path, config: PretrainedConfig) -> None:
    """A causal model of layers that are alike in size, without recurrent state, which could not be branched along a
    token tree, nor cut back."""
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"{file}: transformers has no causal language model of type {config.model_type!r}")
    kinds = sorted(set(getattr(config, "layer_types", None) or ()) - _PLAIN_KV)
    if kinds or getattr(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], "_is_stateful", False):
        kind = ", ".join(kinds) or "recurrent"
        raise ValueError(
            f"{file}: {config.model_type} has {kind} layers, whose state cannot verify a token tree;"
            " use a model with full or sliding attention only"
        )
    try:
        sizes = {name: getattr(config, name, None) for name in (*_SIZES, *_SIZES_OF_SOME)}
    except RuntimeError as error:  # transformers' answer for a size that each layer has for itself
        raise ValueError(f"{file}: {str(error).partition('. ')[0]}; layers of one size are needed") from error
    for name, value in sizes.items():
        if (not isinstance(value, int) or value < 1) and not (value is None and name in _SIZES_OF_SOME):
            raise ValueError(f"{file}: {name} is {reprlib.repr(value)}; one number for all layers is needed, 1 or more")
