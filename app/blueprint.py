"""What is known of a model before any weight is fetched: its config, and headers where they are at hand."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from transformers import PretrainedConfig

from app import hub
from app.draft import DRAFT_BITS, attention_for
from app.models import is_cached, locate
from offload.checkpoint import Checkpoint, open_checkpoint, read_config
from offload.load import Outline, outline
from offload.pack import encoding_for, packed_outline
from offload.shape import Anatomy, Shape, anatomy, rounded_shape_of, shape_of, sketch

_STORED = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


@dataclass(frozen=True, eq=False)
class Blueprint:
    """A model as its config, the type of its stored weights if that is known, and its checkpoint if that is here.

    quantization: how its files hold few bits already, by name, if they do; stored_bits: of each such weight, where
    no header tells.
    """

    name: str
    config: PretrainedConfig
    stored: torch.dtype | None
    checkpoint: Checkpoint | None
    quantization: str | None = None
    stored_bits: float | None = None

    def shape(self, bits: int, dtype: torch.dtype) -> Shape:
        """Sizes for computing in `dtype` from weights in `bits`; exact where the checkpoint's headers are here."""
        return _shape(self, bits, dtype)

    def plain(self, dtype: torch.dtype) -> Shape:
        """Sizes of the model held in `dtype` itself, whatever its files hold."""
        return sketch(_anatomy(self), dtype=dtype)

    def copies(self, bits: int, dtype: torch.dtype) -> list[Shape]:
        """Sizes of a copy with the values of DRAFT_BITS, of weights in `bits`, in each way that it can be held.

        Rounded: numbers as they are stored, codes decoded to `dtype`. Packed: where more bits are at hand.
        """
        rounded = self._rounded(bits, dtype)
        return [rounded] if self.is_packed or bits <= DRAFT_BITS else [rounded, self.shape(DRAFT_BITS, dtype)]

    def _rounded(self, bits: int, dtype: torch.dtype) -> Shape:
        if self.checkpoint is not None:
            return rounded_shape_of(_outline(self, bits, dtype), dtype)
        return self.plain(dtype) if bits != 16 or self.is_packed else self.shape(16, dtype)

    def describe(self, bits: int) -> str:
        """How its weights are stored, in words."""
        return self.quantization or f"{bits} bits"

    @property
    def is_packed(self) -> bool:
        """Whether its files hold few bits already."""
        return self.quantization is not None

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
    if bits != 16 and blueprint.is_packed:
        raise ValueError(f"{blueprint.name} is already quantized ({blueprint.quantization}): leave out --bits")
    if blueprint.checkpoint is None:
        stored, stored_bits = blueprint.stored, blueprint.stored_bits
        return sketch(_anatomy(blueprint), bits=bits, dtype=dtype, stored=stored, stored_bits=stored_bits)
    return shape_of(_outline(blueprint, bits, dtype), dtype)


@cache
def _outline(blueprint: Blueprint, bits: int, dtype: torch.dtype) -> Outline:
    """Of the checkpoint's headers, as they are or as they will be once it is packed."""
    checkpoint = blueprint.checkpoint
    if bits == 16:
        return outline(checkpoint, dtype=dtype, attn_implementation=attention_for(checkpoint))
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
        return _without_weights(name, path)
    if offline and not is_cached(name) and (folder := hub.known_config(name)):
        return _without_weights(name, folder)
    if path.exists() or offline or is_cached(name) or "/" not in name:
        checkpoint = open_checkpoint(locate(name, offline=offline))
        return Blueprint(name, checkpoint.config, checkpoint.dtype, checkpoint, checkpoint.quantization)
    folder, stored = hub.describe(name)
    return _without_weights(name, folder, _STORED.get(stored))


def glimpse(name: str, *, offline: bool) -> Blueprint:
    """The blueprint from the config alone, where no more is at hand: one small request at most; errors as `draw_up`."""
    if is_cached(name):
        return draw_up(name, offline=True)
    folder = hub.known_config(name) if offline else hub.fetch_config(name)
    if folder is None:
        raise ConnectionError(f"nothing is known of {name} here, and this run is offline")
    return _without_weights(name, folder)


def _without_weights(name: str, folder: Path, stored: torch.dtype | None = None) -> Blueprint:
    told = read_config(folder)
    return Blueprint(name, told.config, stored, None, told.method, told.bits)
