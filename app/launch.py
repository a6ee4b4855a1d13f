"""From settings to a running session: find the model, plan its memory, load target and draft."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from app.draft import DraftModel, attention_for, external_draft, make_drafter, self_draft
from app.models import locate
from app.progress import Progress
from app.session import Session, stop_ids_of
from app.settings import DRAFT_KINDS, Resolved, Settings, with_generation_config
from offload.checkpoint import Checkpoint, open_checkpoint
from offload.hardware import Hardware, measure_read_bps, probe
from offload.load import Loaded, Outline, load_model, outline
from offload.plan import DoesNotFit, Plan, kv_cache_bytes, logits_bytes, plan
from specexec.lm import CachedLM
from specexec.sampling import SamplingParams

_DEFAULT_CTX = 4096
_LINK_SAMPLE_BYTES = 256 << 20
_SCRATCH_BYTES = 128 << 20  # kernels, packed weights and allocator slack that appear with the first pass


@dataclass(frozen=True)
class Running:
    """A session and what a status line needs to know of it."""

    session: Session
    chosen: Resolved
    draft: str
    plan: Plan
    raw_link_bps: float | None
    count_streamed: Callable[[], int]  # bytes so far

    @property
    def sampling(self) -> SamplingParams:
        """The settings' sampling part, in the algorithm's words."""
        settings = self.chosen.settings
        return SamplingParams(
            temperature=settings.temp,
            top_k=settings.top_k,
            top_p=settings.top_p,
            min_p=settings.min_p,
            repetition_penalty=settings.repeat_penalty,
            presence_penalty=settings.presence_penalty,
            frequency_penalty=settings.frequency_penalty,
            min_tokens=settings.min_tokens,
            seed=settings.seed,
        )


@dataclass(frozen=True)
class _Target:
    """What is known of the target before its weights are loaded."""

    checkpoint: Checkpoint
    outline: Outline
    tokenizer: PreTrainedTokenizerBase
    hardware: Hardware
    dtype: torch.dtype
    ctx: int
    rows: int  # of its KV cache: the context and one tree


@contextmanager
def open_session(chosen: Resolved, *, offline: bool, note: Callable[[str], None]) -> Iterator[Running]:
    """Opens what the settings ask for and closes it again. `note` is told in a line what was decided for the user.

    Raises FileNotFoundError, ValueError, ConnectionError or DoesNotFit, each in one line.
    """
    checkpoint = open_checkpoint(locate(chosen.settings.target, offline=offline))
    chosen = with_generation_config(chosen, checkpoint.generation_config)
    settings = chosen.settings
    target = _outlined(checkpoint, settings)
    draft = _external_draft(settings, target, offline=offline)
    kind, draft, chosen_plan = _planned(settings, target, draft, note)
    with ExitStack() as opened:
        raw_link_bps = None
        if chosen_plan.streamed:
            files = sorted({entry.file for entry in checkpoint.tensors.values()})
            raw_link_bps = measure_read_bps(files, _LINK_SAMPLE_BYTES)
        loaded = opened.enter_context(_loaded(target, chosen_plan))
        draft_loaded = opened.enter_context(draft.load(loaded, target.hardware)) if draft else None

        def count_streamed() -> int:
            return loaded.streamer.streamed_bytes if loaded.streamer else 0

        vocab_size = max(target.tokenizer.get_vocab().values()) + 1
        session = Session(
            CachedLM(loaded.model, target.rows, vocab_size=vocab_size),
            make_drafter(draft_loaded, kind, rows=target.rows, vocab_size=vocab_size),
            target.tokenizer,
            ctx=target.ctx,
            budget=settings.budget,
            stop_ids=stop_ids_of(target.tokenizer, checkpoint.config.get_text_config(), checkpoint.generation_config),
            count_streamed=count_streamed,
        )
        yield Running(session, chosen, kind, chosen_plan, raw_link_bps, count_streamed)


def _outlined(checkpoint: Checkpoint, settings: Settings) -> _Target:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint.path)
    ctx = _context_length(settings.ctx, checkpoint)
    device = _device(settings.device)
    dtype = _compute_dtype(settings.dtype, probe(device))
    parts = outline(checkpoint, dtype=dtype, attn_implementation=attention_for(checkpoint))
    # Probed once more: what the library has loaded by now is part of what this process takes.
    return _Target(checkpoint, parts, tokenizer, probe(device), dtype, ctx, ctx + settings.budget)


def _external_draft(settings: Settings, target: _Target, *, offline: bool) -> DraftModel | None:
    if settings.draft in DRAFT_KINDS:
        return None
    directory = locate(settings.draft, offline=offline)
    return external_draft(directory, target.tokenizer, target.dtype, is_nf4=settings.draft_bits == 4)


def _planned(
    settings: Settings, target: _Target, external: DraftModel | None, note: Callable[[str], None]
) -> tuple[str, DraftModel | None, Plan]:
    """The kind of draft, the model that drafts, and the plan. `auto` is `self` where that fits, else `ngram`."""
    own = self_draft(target.checkpoint, target.outline, target.dtype)
    if settings.draft != "auto":
        draft = own if settings.draft == "self" else external
        return settings.draft, draft, _plan(settings, target, draft)
    try:
        return "self", own, _plan(settings, target, own)
    except DoesNotFit:
        chosen_plan = _plan(settings, target, None)
    note("draft: n-grams of the context, since a copy of the target does not fit (--draft MODEL takes a small one)")
    return "ngram", None, chosen_plan


def _plan(settings: Settings, target: _Target, draft: DraftModel | None) -> Plan:
    hardware = target.hardware
    on_cpu = hardware.device.type == "cpu"
    limits = [settings.device_limit or hardware.free_bytes + hardware.base_bytes]
    if on_cpu and settings.ram_limit:  # there the two are one memory
        limits.append(settings.ram_limit)
    ram_bytes = min(settings.ram_limit or hardware.ram_free_bytes, hardware.ram_free_bytes)
    return plan(
        target.outline.layers,
        fixed=_fixed_bytes(settings, target, draft),
        limit_bytes=min(limits),
        num_slots=settings.slots,
        ram_bytes=None if on_cpu else ram_bytes,
    )


def _fixed_bytes(settings: Settings, target: _Target, draft: DraftModel | None) -> Mapping[str, int]:
    """Everything but layers and slots, in bytes by name."""
    config, num_scored = target.checkpoint.config, settings.budget + 1
    text = config.get_text_config()
    widest = text.hidden_size * 4 + getattr(text, "intermediate_size", text.hidden_size * 4) * 3
    return {
        "this process": target.hardware.base_bytes,
        "embedding, norm and head": sum(target.outline.rest_bytes.values()),
        "KV cache": kv_cache_bytes(config, target.rows, target.dtype),
        "logits": logits_bytes(config, num_scored, target.dtype),
        "activations and masks": target.rows * (widest + target.rows) * target.dtype.itemsize,
        "libraries' scratch": _SCRATCH_BYTES,
        **(draft.memory(target.rows, num_scored) if draft else {}),
    }


def _loaded(target: _Target, chosen_plan: Plan) -> Loaded:
    with Progress("load") as progress:
        return load_model(
            target.checkpoint,
            chosen_plan,
            device=target.hardware.device,
            dtype=target.dtype,
            attn_implementation=attention_for(target.checkpoint),
            progress=progress,
        )


def _context_length(asked: int | None, checkpoint: Checkpoint) -> int:
    most = getattr(checkpoint.config.get_text_config(), "max_position_embeddings", None)
    if asked and most and asked > most:
        raise ValueError(f"--ctx {asked} is more than the {most} positions that the model knows: use --ctx {most}")
    return asked or min(_DEFAULT_CTX, most or _DEFAULT_CTX)


def _device(asked: str) -> str:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    has_cuda = accelerator is not None and accelerator.type == "cuda"
    if asked == "cuda" and not has_cuda:
        raise ValueError("--device cuda needs a CUDA GPU and a torch built for it, and there is none: use --device cpu")
    return "cuda" if has_cuda and asked != "cpu" else "cpu"


def _compute_dtype(asked: str | None, hardware: Hardware) -> torch.dtype:
    if asked:
        return getattr(torch, asked)
    if hardware.has_bf16:
        return torch.bfloat16
    return torch.float32 if hardware.device.type == "cpu" else torch.float16
