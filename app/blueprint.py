"""What is known of a model before any weight is fetched: its config, and headers where they are at hand."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PretrainedConfig

from app import hub
from app.draft import attention_for
from app.models import is_cached, locate
from offload.checkpoint import Checkpoint, open_checkpoint
from offload.load import Outline, outline
from offload.pack import encoding_for, packed_outline
from offload.shape import Anatomy, Shape, anatomy, rounded_shape_of, shape_of, sketch

_STORED = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


@dataclass(frozen=True, eq=False)
class Blueprint:
    """A model as its config, the type of its stored weights if that is known, and its checkpoint if that is here."""

    name: str
    config: PretrainedConfig
    stored: torch.dtype | None
    checkpoint: Checkpoint | None

    def shape(self, bits: int, dtype: torch.dtype) -> Shape:
        """Sizes for computing in `dtype` from weights in `bits`; exact where the checkpoint's headers are here."""
        return _shape(self, bits, dtype)

    def plain(self, dtype: torch.dtype) -> Shape:
        """Sizes of the model held in `dtype` itself, whatever its files hold."""
        return sketch(_anatomy(self), dtype=dtype)

    def rounded(self, bits: int, dtype: torch.dtype) -> Shape:
        """Sizes of a copy with other values: numbers held as they are stored, codes decoded to `dtype`."""
        if self.checkpoint is not None:
            return rounded_shape_of(_outline(self, bits, dtype), dtype)
        return self.plain(dtype) if bits != 16 else self.shape(16, dtype)

    def describe(self, bits: int) -> str:
        """How its weights are stored, in words."""
        quantization = self.checkpoint.quantization if self.checkpoint else None
        return quantization or f"{bits} bits"

    @property
    def is_packed(self) -> bool:
        """Whether its files hold few bits already."""
        return self.checkpoint is not None and self.checkpoint.quantization is not None

    @property
    def path(self) -> Path | None:
        """Where its files are, if they are here."""
        return self.checkpoint.path if self.checkpoint else None

    @property
    def files(self) -> list[Path]:
        """Files to measure the disk with."""
        return (
            sorted({part.file for each in self.checkpoint.tensors.values() for part in each.parts})
            if self.checkpoint
            else []
        )


@cache
def _shape(blueprint: Blueprint, bits: int, dtype: torch.dtype) -> Shape:
    if blueprint.checkpoint is None:
        return sketch(_anatomy(blueprint), bits=bits, dtype=dtype, stored=blueprint.stored)
    return shape_of(_outline(blueprint, bits, dtype), dtype)


@cache
def _outline(blueprint: Blueprint, bits: int, dtype: torch.dtype) -> Outline:
    """Of the checkpoint's headers, as they are or as they will be once it is packed."""
    checkpoint = blueprint.checkpoint
    if bits == 16:
        return outline(checkpoint, dtype=dtype, attn_implementation=attention_for(checkpoint))
    if checkpoint.quantization is not None:
        raise ValueError(f"{blueprint.name} is already quantized ({checkpoint.quantization}): leave out --bits")
    return packed_outline(checkpoint, encoding_for(bits), dtype=dtype)


@cache
def _anatomy(blueprint: Blueprint) -> Anatomy:
    return anatomy(blueprint.config)


def draw_up(name: str, *, offline: bool) -> Blueprint:
    """The blueprint of a directory (of which config.json is enough), a .gguf file or a Hub id.

    Raises FileNotFoundError, ValueError or ConnectionError in one line.
    """
    path = Path(name).expanduser()
    if path.is_dir() and not any(path.glob("*.safetensors")):
        return Blueprint(name, _config_of(path), None, None)
    if offline and not is_cached(name) and (folder := hub.known_config(name)):
        return Blueprint(name, _config_of(folder), None, None)
    if path.exists() or offline or is_cached(name) or "/" not in name:
        checkpoint = open_checkpoint(locate(name, offline=offline))
        return Blueprint(name, checkpoint.config, checkpoint.dtype, checkpoint)
    folder, stored = hub.describe(name)
    return Blueprint(name, _config_of(folder), _STORED.get(stored), None)


def glimpse(name: str, *, offline: bool) -> Blueprint:
    """The blueprint from the config alone, where no more is at hand: one small request at most; errors as `draw_up`."""
    if is_cached(name):
        return draw_up(name, offline=True)
    folder = hub.known_config(name) if offline else hub.fetch_config(name)
    if folder is None:
        raise ConnectionError(f"nothing is known of {name} here, and this run is offline")
    return Blueprint(name, _config_of(folder), None, None)


def _config_of(folder: Path) -> PretrainedConfig:
    file = folder / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{folder} has neither config.json nor *.safetensors, so it is no model directory")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config(decoder=True)
    except (ValueError, KeyError, TypeError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"{file} is not a model that transformers knows: {reason}") from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"{file}: transformers has no causal language model of type {config.model_type!r}")
    return config
