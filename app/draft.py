"""Which draft a run gets, what it costs and how it is loaded."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from app.machines import curves
from app.target import can_be_packed, load_tokenizer, packed
from app.translation import Translation, translation
from offload.checkpoint import Checkpoint, open_checkpoint
from offload.hardware import Hardware
from offload.load import Loaded, Outline, load_model, outline
from offload.pack import encoding_for, packed_outline
from offload.plan import Plan, plan
from offload.predict import Draft
from offload.quantize import nf4_matrices
from offload.replay import Replays
from offload.shape import Shape, rounded_shape_of, shape_of
from offload.working import draft_bytes
from specexec.acceptance import Acceptance
from specexec.copies import is_copy
from specexec.drafters import Drafter, DraftLM
from specexec.drafters.graft import GraftDrafter
from specexec.drafters.model import ModelDrafter
from specexec.drafters.ngram import NGramDrafter
from specexec.drafters.suffix import SuffixDrafter
from specexec.drafters.translate import TranslatedLM
from specexec.drafters.window import WindowedLM
from specexec.lm import CachedLM

DRAFT_BITS = 4
Storage = Literal["stored", "rounded", "packed"]


@dataclass(frozen=True)
class DraftModel:
    """A model that drafts: the target itself (`is_self`) or another one, as bytes to plan for and to load.

    checkpoint: where it comes from. outline: as it is held. storage: how that is.
    window: the most tokens of the text that it is shown; None for all. translation: where its tokenizer is another.
    """

    checkpoint: Checkpoint
    outline: Outline
    is_self: bool
    storage: Storage
    dtype: torch.dtype
    window: int | None = None
    translation: Translation | None = None

    @property
    def shape(self) -> Shape:
        """Its sizes as they are once it is loaded."""
        return (rounded_shape_of if self.storage == "rounded" else shape_of)(self.outline, self.dtype)

    def at_rest(self) -> Checkpoint:
        """What is loaded: of a packed draft its pack, which is made first if this is the first time."""
        if self.storage != "packed":
            return self.checkpoint
        return packed(self.checkpoint, DRAFT_BITS, f"quantize the draft to {DRAFT_BITS} bits")

    @property
    def has_room(self) -> bool:
        """Whether it can be put to rest: a pack takes its place in the cache."""
        nbytes = self.shape.stored_bytes
        return self.storage != "packed" or can_be_packed(self.checkpoint, DRAFT_BITS, nbytes)

    def behind(
        self, loaded: Loaded, target: CachedLM, budget: int, *, note: Callable[[str], None], shares_rows: bool = True
    ) -> DraftLM:
        """The loaded draft as what grows trees of up to `budget` nodes for `target`, in the target's ids."""
        vocab_size = target.vocab_size if self.translation is None else None
        max_rows = num_rows(self.checkpoint.config, self.window, target.max_rows, budget)
        sees_all = self.window is None and self.translation is None
        is_kin = self.is_self or (sees_all and is_copy(loaded.model, target.model))
        rows_of = target if is_kin and shares_rows else None
        own = CachedLM(loaded.model, max_rows, vocab_size=vocab_size, rows_of=rows_of)
        if own.device.type == "cuda":
            own.record_steps(Replays(own.device, note))
        lm: DraftLM = own
        if self.window is not None:
            lm = WindowedLM(lm, self.window)
        return (
            lm if self.translation is None else TranslatedLM(lm, self.translation.to_draft, self.translation.retokenize)
        )

    def load(self, target: Loaded, hardware: Hardware) -> Loaded:
        """The draft, all of it resident; one that is the target shares all of it that is resident (shared_layers)."""
        layers = self.outline.layers
        everything: Plan = plan(layers, fixed={}, limit_bytes=2**63, resident=len(layers))
        return load_model(
            self.at_rest(),
            everything,
            device=hardware.device,
            dtype=self.dtype,
            attn_implementation=attention_for(self.checkpoint),
            transform=nf4_matrices if self.storage == "rounded" else None,
            share=target if self.is_self else None,
        )


def model_draft(
    kind: str, shape: Shape, *, is_self: bool = False, window: int | None = None, decode_bps: float | None = None
) -> Draft:
    """A draft model as plans count it; a copy of the target (`is_self`) shares what it can.

    window: the most tokens of the text that it is shown; None for all. decode_bps: see Draft.
    """

    def memory(rows: int, batch: int) -> Mapping[str, int]:
        own_rows = num_rows(shape.config, window, rows, batch - 1)
        return draft_bytes(shape, rows=own_rows, batch=batch, is_copy=is_self)

    layer_bytes = tuple(layer.resident_bytes for layer in shape.layers) if is_self else ()
    return Draft(kind, curves()["self" if is_self else "model"], shape, memory, layer_bytes, decode_bps)


def plain_draft(kind: str) -> Draft:
    """A draft without a model: n-grams, repetitions, none."""
    return Draft(kind, curves()[kind], None, lambda rows, batch: {})


def num_rows(config: PretrainedConfig, window: int | None, rows: int, budget: int) -> int:
    """Of a draft's KV cache, where the target's has `rows` for its context and a tree of `budget` nodes."""
    return rows if window is None else min(window + budget, positions(config) or rows)


def self_drafts(
    checkpoint: Checkpoint, parts: Outline, dtype: torch.dtype, *, source: Checkpoint | None = None
) -> list[DraftModel]:
    """NF4 copies of the target, but for what the target keeps resident while it streams the rest.

    source: what `checkpoint` is a pack of, in more than the copy's bits.
    """
    rounded = DraftModel(checkpoint, parts, is_self=True, storage="rounded", dtype=dtype)
    return [rounded, *_packed(rounded, source or checkpoint)]


def _packed(rounded: DraftModel, source: Checkpoint) -> list[DraftModel]:
    """The same draft held in few bits, a quarter as large but slower: none where `source` has few bits already."""
    if source.quantization is not None or not source.path.is_dir():
        return []
    parts = packed_outline(source, encoding_for(DRAFT_BITS), dtype=rounded.dtype)
    return [replace(rounded, checkpoint=source, outline=parts, storage="packed")]


def external_drafts(
    directory: Path,
    tokenizer: PreTrainedTokenizerBase,
    dtype: torch.dtype,
    *,
    is_nf4: bool,
    ctx: int,
    draft_ctx: int | None,
    note: Callable[[str], None],
) -> list[DraftModel]:
    """Another model, of this tokenizer or one with enough tokens in common, in each way that it can be held; `note` is
    told how it will be used.

    ctx: the target's. draft_ctx: the most tokens of the text that it should see, None for as many as it can.
    Raises ValueError for a tokenizer that is too different or a draft_ctx beyond the positions that the draft knows.
    """
    checkpoint = open_checkpoint(directory)
    crossing = translation(tokenizer, load_tokenizer(directory), checkpoint.config.get_text_config().vocab_size)
    window = window_for(checkpoint.config, ctx, draft_ctx, is_translated=crossing is not None)
    if crossing is not None:
        total = len(crossing.to_draft)
        note(f"draft: another tokenizer; it can guess the {crossing.num_common} of {total} tokens that both have")
    if window is not None and window < ctx:
        note(f"draft: it sees the last {window} tokens only")
    parts = outline(checkpoint, dtype=dtype, attn_implementation=attention_for(checkpoint))
    storage: Storage = "rounded" if is_nf4 else "stored"
    model = DraftModel(checkpoint, parts, False, storage, dtype, window=window, translation=crossing)
    return [model, *_packed(model, checkpoint)] if is_nf4 else [model]


def positions(config: PretrainedConfig) -> int | None:
    """How many positions a model knows, or None if its config does not say."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def window_for(config: PretrainedConfig, ctx: int, asked: int | None, *, is_translated: bool) -> int | None:
    """The most tokens of a text of `ctx` to show a draft, a quarter of whose positions is kept for the tree; None for
    all. ValueError if more are asked for than it knows positions."""
    most = positions(config)
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
