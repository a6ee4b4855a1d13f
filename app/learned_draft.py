"""A learned draft's directory as something to plan for and to draft with."""

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from app.heads import head_kind, open_head, read_head
from app.machines import curves
from offload.hardware import probe
from offload.predict import Draft
from specexec.acceptance import Acceptance
from specexec.drafters import Drafter
from specexec.drafters.mtp_layout import mtp_names
from specexec.lm import CachedLM

_BATCH = 32  # nodes that a head scores at once, where the budget is not larger than eight times that


@dataclass(frozen=True)
class LearnedDraft:
    """An EAGLE-3, MTP, DFlash or DSpark head in `directory`; shapes: of its tensors, by name."""

    directory: Path
    shapes: dict[str, tuple[int, ...]]
    vocab_size: int
    dtype: torch.dtype

    def memory(self, rows: int, batch: int) -> dict[str, int]:
        """What it adds to a plan, in bytes, for `rows` of the target's KV cache and `batch` nodes scored at once."""
        size, shapes = self.dtype.itemsize, self.shapes
        values = sum(math.prod(shape) for shape in shapes.values())
        if "d2t" in shapes and "lm_head.weight" not in shapes:
            values += shapes["d2t"][0] * self._hidden  # its rows of the target's head
        widths = [shape[0] for name, shape in shapes.items() if name.endswith(("k_proj.weight", "v_proj.weight"))]
        features = shapes["fc.weight"][1] if "fc.weight" in shapes else 2 * self._hidden
        return {
            "draft": values * size,
            "draft's KV cache": rows * sum(widths) * size,
            "draft's features": rows * features * size,
            "draft's logits": max(_BATCH, batch // 8) * self.vocab_size * torch.float32.itemsize,
        }

    def planned(self, kind: str) -> Draft:
        """As plans count it, under the name `kind`."""
        return Draft(kind, curves()["learned"], None, self.memory)

    def drafter(self, target: CachedLM, acceptance: Acceptance) -> Drafter:
        """Reads the weights; ValueError says what does not fit `target`.

        They are bf16 where the device multiplies that faster, whatever the target's are: guesses need not be exact.
        """
        dtype = torch.bfloat16 if probe(target.device).has_bf16 else target.model.dtype
        return open_head(self.directory, target, acceptance=acceptance, dtype=dtype)

    @property
    def _hidden(self) -> int:
        return max(shape[0] for name, shape in self.shapes.items() if name.endswith("norm.weight"))


def learned_draft(directory: Path, target: Path | None, *, vocab_size: int, dtype: torch.dtype) -> LearnedDraft | None:
    """What `directory` holds if it is a learned draft; of the `target`'s own files, if those are at hand, its MTP
    layers. None for anything else, which is left to those who read whole models."""
    try:
        stored = read_head(directory)
        kind = head_kind(stored)
    except (FileNotFoundError, ValueError):
        return None
    names = list(stored.shapes)
    if kind == "mtp" and "speculators_model_type" not in stored.config:
        if target is None or directory.resolve() != target.resolve():
            return None
        names = mtp_names(names, stored.config.get("num_hidden_layers", 0))
    return LearnedDraft(directory, {name: stored.shapes[name] for name in names}, vocab_size, dtype)
