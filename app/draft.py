"""Which draft a run gets, what it costs and how it is loaded."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from app.target import load_tokenizer
from app.translation import Translation, translation
from offload.checkpoint import Checkpoint, open_checkpoint
from offload.hardware import Hardware
from offload.load import Loaded, Outline, load_model, outline
from offload.plan import Plan, kv_cache_bytes, logits_bytes, plan
from offload.quantize import nf4_matrices
from specexec.acceptance import Acceptance
from specexec.drafters import Drafter, DraftLM
from specexec.drafters.graft import GraftDrafter
from specexec.drafters.model import ModelDrafter
from specexec.drafters.ngram import NGramDrafter
from specexec.drafters.suffix import SuffixDrafter
from specexec.drafters.translate import TranslatedLM
from specexec.drafters.window import WindowedLM
from specexec.lm import CachedLM


@dataclass(frozen=True)
class DraftModel:
    """A model that drafts: the target itself (`is_self`) or another one, as bytes to plan for and to load.

    window: the most tokens of the text that it is shown; None for all. translation: where its tokenizer is another.
    """

    checkpoint: Checkpoint
    outline: Outline
    is_self: bool
    is_nf4: bool
    dtype: torch.dtype
    window: int | None = None
    translation: Translation | None = None

    def memory(self, rows: int, batch: int) -> dict[str, int]:
        """What the draft adds to a plan, in bytes, for `rows` of KV cache and `batch` nodes scored at once."""
        config = self.checkpoint.config
        layers = self.outline.layers
        held = [unit.rounded_bytes if self.is_nf4 else unit.resident_bytes for unit in layers]
        weights = sum(held) + self.outline.unpacked_bytes
        if not self.is_self:
            weights += sum(self.outline.rest_bytes.values())
        return {
            "draft": weights,
            "draft's KV cache": kv_cache_bytes(config, self._num_rows(rows, batch - 1), self.dtype),
            "draft's logits": logits_bytes(config, batch, torch.float32),
        }

    def behind(self, loaded: Loaded, target: CachedLM, budget: int, *, shares_rows: bool = True) -> DraftLM:
        """The loaded draft as what grows trees of up to `budget` nodes for `target`, in the target's ids."""
        if self.is_self:
            rows_of = target if shares_rows else None
            return CachedLM(loaded.model, target.max_rows, vocab_size=target.vocab_size, rows_of=rows_of)
        vocab_size = target.vocab_size if self.translation is None else None
        lm: DraftLM = CachedLM(loaded.model, self._num_rows(target.max_rows, budget), vocab_size=vocab_size)
        if self.window is not None:
            lm = WindowedLM(lm, self.window)
        return (
            lm if self.translation is None else TranslatedLM(lm, self.translation.to_draft, self.translation.retokenize)
        )

    def _num_rows(self, rows: int, budget: int) -> int:
        """Of the draft's KV cache, where the target's has `rows` for its context and a tree of `budget` nodes."""
        if self.window is None:
            return rows
        return min(self.window + budget, positions(self.checkpoint) or rows)

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
    directory: Path,
    tokenizer: PreTrainedTokenizerBase,
    dtype: torch.dtype,
    *,
    is_nf4: bool,
    ctx: int,
    draft_ctx: int | None,
    note: Callable[[str], None],
) -> DraftModel:
    """Another model, of this tokenizer or one with enough tokens in common; `note` is told how it will be used.

    ctx: the target's. draft_ctx: the most tokens of the text that it should see, None for as many as it can.
    Raises ValueError for a tokenizer that is too different or a draft_ctx beyond the positions that the draft knows.
    """
    checkpoint = open_checkpoint(directory)
    crossing = translation(tokenizer, load_tokenizer(directory), checkpoint.config.get_text_config().vocab_size)
    window = _window(positions(checkpoint), ctx, draft_ctx, is_translated=crossing is not None)
    if crossing is not None:
        total = len(crossing.to_draft)
        note(f"draft: another tokenizer; it can guess the {crossing.num_common} of {total} tokens that both have")
    if window is not None and window < ctx:
        note(f"draft: it sees the last {window} tokens only")
    parts = outline(checkpoint, dtype=dtype, attn_implementation=attention_for(checkpoint))
    return DraftModel(checkpoint, parts, is_self=False, is_nf4=is_nf4, dtype=dtype, window=window, translation=crossing)


def positions(checkpoint: Checkpoint) -> int | None:
    """How many positions a model knows, or None if its config does not say."""
    return getattr(checkpoint.config.get_text_config(), "max_position_embeddings", None)


def _window(most: int | None, ctx: int, asked: int | None, *, is_translated: bool) -> int | None:
    """The most tokens to show a draft that knows `most` positions, a quarter of which is kept for the tree."""
    if asked and most and asked > most:
        raise ValueError(f"--draft-ctx {asked} is more than the {most} positions that the draft knows: use less")
    wanted = min(asked or ctx, ctx)
    if wanted == ctx and not is_translated and (most is None or most >= ctx):
        return None
    return wanted if most is None else min(wanted, most - most // 4)


def attention_for(checkpoint: Checkpoint) -> str | None:
    """Soft-capped scores exist only in the library's eager attention; None leaves the choice to it."""
    capped = getattr(checkpoint.config.get_text_config(), "attn_logit_softcapping", None)
    return "eager" if capped else None


def make_drafter(
    kind: str, lm: DraftLM | None, *, acceptance: Acceptance, suffix: SuffixDrafter | None
) -> Drafter | None:
    """The drafter of a run: over a draft model, from repetitions, from both, or none."""
    if lm is not None:
        model = ModelDrafter(lm, acceptance=acceptance)
        return GraftDrafter(model, suffix) if suffix is not None else model
    return NGramDrafter() if kind == "ngram" else suffix
