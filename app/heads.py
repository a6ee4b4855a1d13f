"""Reads a learned draft from its directory, recognises what it is and makes the drafter."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from offload.checkpoint import read_header
from specexec.acceptance import Acceptance
from specexec.drafters import Drafter
from specexec.drafters.dflash_layout import block_drafter, is_block_draft
from specexec.drafters.eagle3 import Eagle3Net, eagle3_drafter
from specexec.drafters.eagle3_layout import eagle3_layout
from specexec.drafters.layouts import Shapes, Sources, TargetShape, fill, has_any, on_meta
from specexec.drafters.mtp import MtpNet, mtp_drafter
from specexec.drafters.mtp_layout import mtp_layout, mtp_names
from specexec.lm import CachedLM


@dataclass(frozen=True)
class StoredHead:
    """A draft directory: its config.json, its tensors' shapes by name, and how to read one of them."""

    config: Mapping[str, Any]
    shapes: Shapes
    read: Callable[[str], torch.Tensor]


def open_head(
    directory: Path, target: CachedLM, *, acceptance: Acceptance | None = None, dtype: torch.dtype | None = None
) -> Drafter:
    """The drafter that `directory` holds for `target`, on the target's device.

    directory: of an EAGLE-3, DFlash, DSpark or speculators MTP draft, or the target's own checkpoint, whose MTP layers
        are then used.
    acceptance: what is known of the draft's scores, which goes on to learn. dtype: of the draft's weights; the target's
        where none is given.
    Raises FileNotFoundError or ValueError, in one line that begins with the directory.
    """
    stored = read_head(directory)
    try:
        return _BUILDERS[head_kind(stored)](stored, target, acceptance, dtype or target.model.dtype)
    except (ValueError, KeyError, TypeError) as error:
        reason = f"config.json lacks {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{directory}: {reason}") from error


def head_kind(stored: StoredHead) -> str:
    """One of "eagle3", "mtp" and "block" (DFlash and DSpark); ValueError for anything else."""
    names, told = stored.shapes, str(stored.config.get("speculators_model_type", ""))
    if told not in ("", "eagle3", "mtp", "dflash", "dspark"):
        raise ValueError(f"drafts of the kind {told!r} are not supported")
    if has_any(names, "pre_fc_norm_hidden", "eh_proj", "mtp_layers."):
        return "mtp"
    if is_block_draft(stored.config, names):
        return "block"
    if told == "eagle3" or has_any(names, "midlayer.") or _reads_pairs(stored.shapes):
        return "eagle3"
    raise ValueError("its tensors are not those of an EAGLE-3, MTP, DFlash or DSpark draft")


def read_head(directory: Path) -> StoredHead:
    """Config and names of a draft; no tensor is read. Raises FileNotFoundError or ValueError naming what is wrong."""
    if not (directory / "config.json").is_file():
        raise FileNotFoundError(f"{directory} has no config.json, so it is not a draft's directory")
    try:
        config = json.loads((directory / "config.json").read_text())
    except ValueError as error:
        raise ValueError(f"{directory / 'config.json'} is not JSON: {error}") from error
    if config.get("quantization_config"):
        raise ValueError(f"{directory}: the draft is quantized; only plain weights are supported")
    if files := sorted(directory.glob("*.safetensors")):
        entries = {entry.name: entry for file in files for entry in read_header(file)}

        def read(name: str) -> torch.Tensor:
            with safe_open(entries[name].file, framework="pt") as file:
                return file.get_tensor(name)

        return StoredHead(config, {name: entry.shape for name, entry in entries.items()}, read)
    if files := sorted(directory.glob("pytorch_model*.bin")):
        tensors: dict[str, torch.Tensor] = {}
        for file in files:
            tensors |= _unpickled(file)
        return StoredHead(config, {name: tuple(each.shape) for name, each in tensors.items()}, tensors.__getitem__)
    raise FileNotFoundError(f"{directory} has neither *.safetensors nor pytorch_model.bin")


def _unpickled(file: Path) -> dict[str, torch.Tensor]:
    try:
        tensors = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # what a damaged or foreign pickle raises is not specified
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"{file} is not a file of tensors only: {reason}") from error
    return {name: each for name, each in tensors.items() if isinstance(each, torch.Tensor)}


def _reads_pairs(shapes: Shapes) -> bool:
    """Whether the first layer attends over two hidden states side by side."""
    stem = "layers.0.self_attn."
    sizes = {name.removeprefix("model."): shape for name, shape in shapes.items()}
    query, output = (sizes.get(f"{stem}{name}_proj.weight", (0, 0)) for name in ("q", "o"))
    return query[1] == 2 * output[0] > 0


def _target_shape(target: CachedLM) -> TargetShape:
    config = target.model.config.get_text_config()
    return TargetShape(config.hidden_size, config.num_hidden_layers, config.vocab_size)


def _filled(net: torch.nn.Module, sources: Sources, stored: StoredHead, target: CachedLM, dtype: torch.dtype) -> None:
    fill(net, sources, stored.read, dtype)
    net.to(target.device)


def _eagle3(stored: StoredHead, target: CachedLM, acceptance: Acceptance | None, dtype: torch.dtype) -> Drafter:
    config, sources = eagle3_layout(stored.config, stored.shapes, _target_shape(target))
    net = on_meta(Eagle3Net, config)
    _filled(net, sources, stored, target, dtype)
    if "t2d" in stored.shapes and config.mapped:
        guessed = torch.arange(config.draft_vocab_size, device=target.device) + net.d2t
        if not torch.equal(stored.read("t2d").nonzero()[:, 0].to(target.device), guessed):
            raise ValueError("t2d and d2t of the draft name different tokens")
    return eagle3_drafter(net, target, acceptance=acceptance)


def _mtp(stored: StoredHead, target: CachedLM, acceptance: Acceptance | None, dtype: torch.dtype) -> Drafter:
    shape, shapes = _target_shape(target), stored.shapes
    if "speculators_model_type" not in stored.config:  # a whole checkpoint: the rest of it is the target's
        shapes = {name: shapes[name] for name in mtp_names(shapes, shape.num_layers)}
    config, sources = mtp_layout(stored.config, shapes, shape)
    net = on_meta(MtpNet, config)
    _filled(net, sources, stored, target, dtype)
    return mtp_drafter(net, target, acceptance=acceptance)


def _block(stored: StoredHead, target: CachedLM, acceptance: Acceptance | None, dtype: torch.dtype) -> Drafter:
    tensors = {name: stored.read(name) for name in stored.shapes}
    return block_drafter(stored.config, tensors, target, acceptance=acceptance, dtype=dtype)


_BUILDERS: dict[str, Callable[[StoredHead, CachedLM, Acceptance | None, torch.dtype], Drafter]] = {
    "eagle3": _eagle3,
    "mtp": _mtp,
    "block": _block,
}
