"""Which draft a run gets, what it costs and how it is loaded."""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from app.target import load_tokenizer
from offload.checkpoint import Checkpoint, open_checkpoint
from offload.hardware import Hardware
from offload.load import Loaded, Outline, load_model, outline
from offload.plan import Plan, kv_cache_bytes, logits_bytes, plan
from offload.quantize import nf4_matrices
from specexec.acceptance import Acceptance
from specexec.drafters import Drafter
from specexec.drafters.graft import GraftDrafter
from specexec.drafters.model import ModelDrafter
from specexec.drafters.ngram import NGramDrafter
from specexec.drafters.suffix import SuffixDrafter
from specexec.lm import CachedLM


@dataclass(frozen=True)
class DraftModel:
    """A model that drafts: the target itself (`is_self`) or another one, as bytes to plan for and to load."""

    checkpoint: Checkpoint
    outline: Outline
    is_self: bool
    is_nf4: bool
    dtype: torch.dtype

    def memory(self, rows: int, batch: int) -> dict[str, int]:
        """What the draft adds to a plan, in bytes, for `rows` of KV cache and `batch` nodes scored at once."""
        config = self.checkpoint.config
        layers = self.outline.layers
        if self.is_nf4:  # held dequantized
            weights = sum(unit.plain_bytes for unit in layers)
        else:
            weights = sum(unit.resident_bytes for unit in layers) + self.outline.unpacked_bytes
        if not self.is_self:
            weights += sum(self.outline.rest_bytes.values())
        return {
            "draft": weights,
            "draft's KV cache": kv_cache_bytes(config, rows, self.dtype),
            "draft's logits": logits_bytes(config, batch, torch.float32),
        }

    def load(self, target: Loaded, hardware: Hardware) -> Loaded:
        """The draft, all of it resident; one that is the target shares its embedding and head."""
        layers = self.outline.layers
        everything: Plan = plan(layers, fixed={}, limit_bytes=2**63, resident=len(layers))
        return load_model(
            self.checkpoint,
            everything,
            device=hardware.device,
            dtype=self.dtype,
            attn_implementation=attention_for(self.checkpoint),
            transform=nf4_matrices if self.is_nf4 else None,
            share=target.model if self.is_self else None,
        )


def self_draft(checkpoint: Checkpoint, parts: Outline, dtype: torch.dtype) -> DraftModel:
    """An NF4 copy of the target."""
    return DraftModel(checkpoint, parts, is_self=True, is_nf4=True, dtype=dtype)


def external_draft(
    directory: Path, tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype, *, is_nf4: bool
) -> DraftModel:
    """Another model; ValueError unless its token ids mean what the target's mean."""
    require_same_tokens(tokenizer, load_tokenizer(directory))
    checkpoint = open_checkpoint(directory)
    parts = outline(checkpoint, dtype=dtype, attn_implementation=attention_for(checkpoint))
    return DraftModel(checkpoint, parts, is_self=False, is_nf4=is_nf4, dtype=dtype)


def require_same_tokens(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> None:
    """ValueError naming the first id that stands for different tokens; ids that only one of them has do no harm."""
    ours, theirs = _by_id(target), _by_id(draft)
    for number in sorted(ours.keys() & theirs.keys()):
        if ours[number] != theirs[number]:
            raise ValueError(
                f"the draft's tokenizer differs from the target's: id {number} is {theirs[number]!r} in the draft and "
                f"{ours[number]!r} in the target; take a draft of the same family, or --draft self or ngram"
            )


def attention_for(checkpoint: Checkpoint) -> str | None:
    """Soft-capped scores exist only in the library's eager attention; None leaves the choice to it."""
    capped = getattr(checkpoint.config.get_text_config(), "attn_logit_softcapping", None)
    return "eager" if capped else None


def make_drafter(
    loaded: Loaded | None, kind: str, target: CachedLM, *, is_self: bool, acceptance: Acceptance
) -> Drafter | None:
    """The drafter of a run: over a loaded draft model, from repetitions, from both, or none."""
    if loaded is not None:
        rows_of = target if is_self else None
        lm = CachedLM(loaded.model, target.max_rows, vocab_size=target.vocab_size, rows_of=rows_of)
        model = ModelDrafter(lm, acceptance=acceptance)
        return GraftDrafter(model, SuffixDrafter()) if kind == "graft" else model
    return {"ngram": NGramDrafter, "suffix": SuffixDrafter}.get(kind, lambda: None)()


def _by_id(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    return {number: token for token, number in tokenizer.get_vocab().items()}
