"""A draft that is named by a directory or an id, as plans count it: no weight is read."""

from collections.abc import Callable

import torch

from app.blueprint import Blueprint
from app.draft import DRAFT_BITS, model_draft, window_for
from app.learned_draft import learned_draft
from app.machines import Machine
from app.models import is_cached, locate
from app.settings import Settings, named_model
from app.target import load_tokenizer
from app.translation import translation
from offload.predict import Draft


def named_drafts(
    settings: Settings,
    target: Blueprint,
    machine: Machine,
    dtype: torch.dtype,
    *,
    ctx: int,
    look: Callable[[str], Blueprint],
) -> list[Draft]:
    """The learned draft or the draft model that `settings` name, counted as a run counts it once it is loaded, in each
    way that it can be held.

    ctx: the target's. look: makes a blueprint of a name. Raises FileNotFoundError, ValueError or ConnectionError in one
    line.
    """
    name, vocab_size = named_model(settings.draft), target.config.get_text_config().vocab_size
    if is_cached(name):
        learned = learned_draft(locate(name, offline=True), target.path, vocab_size=vocab_size, dtype=dtype)
        if learned is not None:
            return [learned.planned(settings.draft)]
    model = look(name)
    dtype = getattr(torch, settings.draft_dtype) if settings.draft_dtype else dtype
    shapes = model.copies(16, dtype) if settings.draft_bits == DRAFT_BITS else [model.shape(16, dtype)]
    is_translated = _is_translated(target, model)
    window = window_for(model.config, ctx, settings.draft_ctx, is_translated=is_translated)
    return [
        model_draft(settings.draft, shape, window=window, decode_bps=machine.decoding_rate(shape)) for shape in shapes
    ]


def _is_translated(target: Blueprint, draft: Blueprint) -> bool:
    """Whether the draft's ids mean something else than the target's; of models that are not here, it is hoped not."""
    if target.path is None or draft.path is None:
        return False
    tokenizers = load_tokenizer(target.path), load_tokenizer(draft.path)
    return translation(*tokenizers, draft.config.get_text_config().vocab_size) is not None
