"""From settings to a running session: find the model, plan its memory, load target and draft."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from app.draft import DraftModel, attention_for, external_draft, make_drafter, self_draft
from app.forecast import decide, device_limit, ram_room
from app.learned import recall, remember
from app.machines import Machine, curves, this_machine
from app.models import locate
from app.progress import Progress
from app.session import Session, stop_ids_of
from app.settings import DRAFT_KINDS, Resolved, Settings, with_generation_config
from app.target import load_tokenizer, open_target
from app.treecheck import honours_trees
from offload.checkpoint import Checkpoint
from offload.hardware import Hardware, measure_read_bps, probe
from offload.load import Loaded, Outline, load_model, outline
from offload.plan import Plan
from offload.predict import BUDGETS, Choice, Draft
from offload.shape import Shape, shape_of
from specexec.acceptance import Acceptance
from specexec.budget import Pace
from specexec.drafters.chain import ChainDrafter
from specexec.lm import CachedLM
from specexec.sampling import SamplingParams

_DEFAULT_CTX = 4096
_LINK_SAMPLE_BYTES = 256 << 20
_PROBE_ROWS = 64


@dataclass(frozen=True)
class Running:
    """A session and what a status line needs to know of it."""

    session: Session
    checkpoint: Checkpoint
    chosen: Resolved
    choice: Choice
    raw_link_bps: float | None
    count_streamed: Callable[[], int]  # bytes so far

    @property
    def plan(self) -> Plan:
        """Where the target's layers are."""
        return self.choice.plan

    @property
    def draft(self) -> str:
        """The kind of draft, or the model that drafts."""
        return self.choice.draft.kind

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
    shape: Shape
    tokenizer: PreTrainedTokenizerBase
    device: str
    dtype: torch.dtype
    ctx: int


@contextmanager
def open_session(chosen: Resolved, *, offline: bool, note: Callable[[str], None]) -> Iterator[Running]:
    """Opens what the settings ask for and closes it again. `note` is told in a line what was decided for the user.

    Raises FileNotFoundError, ValueError, ConnectionError or DoesNotFit, each in one line.
    """
    checkpoint = open_target(chosen.settings, offline=offline)
    chosen = with_generation_config(chosen, checkpoint.generation_config)
    settings = chosen.settings
    target = _outlined(checkpoint, settings)
    draft = _external_draft(settings, target, offline=offline)
    machine = _measured(target, settings)
    choice, draft = _chosen(settings, target, draft, machine)
    kind, budget, chosen_plan = choice.draft.kind, choice.budget, choice.plan
    if settings.draft == "auto" and kind == "ngram" and chosen_plan.streamed_bytes:
        note("draft: n-grams of the context, for a copy of the target is too large (--draft MODEL takes a small one)")
    with ExitStack() as opened:
        loaded = opened.enter_context(_loaded(target, chosen_plan, machine.hardware))
        draft_loaded = opened.enter_context(draft.load(loaded, machine.hardware)) if draft else None
        rows = target.ctx + budget  # of the KV caches: the context and one tree

        def count_streamed() -> int:
            return loaded.streamer.streamed_bytes if loaded.streamer else 0

        vocab_size = max(target.tokenizer.get_vocab().values()) + 1
        lm = CachedLM(loaded.model, rows, vocab_size=vocab_size)
        acceptance = Acceptance()
        if draft is not None:
            pair = f"{checkpoint.path} {draft.checkpoint.path} {draft.is_nf4} {target.dtype}"
            acceptance = recall(pair)
            opened.callback(lambda: remember(pair, acceptance))
        is_self = draft is not None and draft.is_self
        drafter = make_drafter(draft_loaded, kind, lm, is_self=is_self, acceptance=acceptance)
        if drafter is not None and not honours_trees(lm):
            note("draft: chains only, since this version of transformers does not honour tree masks for this model")
            drafter = ChainDrafter(drafter)
        session = Session(
            lm,
            drafter,
            target.tokenizer,
            ctx=target.ctx,
            budget=settings.budget or Pace(budget),
            stop_ids=stop_ids_of(target.tokenizer, checkpoint.config.get_text_config(), checkpoint.generation_config),
            count_streamed=count_streamed,
        )
        rate = machine.rates.link_bps if chosen_plan.tier == "ram" else machine.rates.disk_bps
        raw_link_bps = rate if chosen_plan.streamed else None
        yield Running(session, checkpoint, chosen, choice, raw_link_bps, count_streamed)


def _outlined(checkpoint: Checkpoint, settings: Settings) -> _Target:
    tokenizer = load_tokenizer(checkpoint.path)
    ctx = context_length(settings.ctx, checkpoint.config)
    device = device_name(settings.device)
    dtype = compute_dtype(settings.dtype, probe(device))
    parts = outline(checkpoint, dtype=dtype, attn_implementation=attention_for(checkpoint))
    return _Target(checkpoint, parts, shape_of(parts, dtype), tokenizer, device, dtype, ctx)


def _external_draft(settings: Settings, target: _Target, *, offline: bool) -> DraftModel | None:
    if settings.draft in DRAFT_KINDS:
        return None
    directory = locate(settings.draft, offline=offline)
    return external_draft(directory, target.tokenizer, target.dtype, is_nf4=settings.draft_bits == 4)


def _measured(target: _Target, settings: Settings) -> Machine:
    files = sorted({part.file for entry in target.checkpoint.tensors.values() for part in entry.parts})
    disk_bps = measure_read_bps(files, _LINK_SAMPLE_BYTES)
    return this_machine(target.device, target.shape, rows=(settings.budget or _PROBE_ROWS) + 1, disk_bps=disk_bps)


def _chosen(
    settings: Settings, target: _Target, external: DraftModel | None, machine: Machine
) -> tuple[Choice, DraftModel | None]:
    """Draft, budget and plan together, and the model that drafts."""
    own = self_draft(target.checkpoint, target.outline, target.dtype)
    models = {"auto": {"self": own, "ngram": None}, "self": {"self": own}, "graft": {"graft": own}}.get(
        settings.draft, {settings.draft: external}
    )
    drafts = [_draft(kind, model) for kind, model in models.items()]
    choice = decide(
        target.shape,
        drafts,
        machine,
        ctx=target.ctx,
        budgets=(settings.budget,) if settings.budget else BUDGETS,
        slots=settings.slots,
        resident=settings.resident,
        limit_bytes=device_limit(machine.hardware, settings.device_limit, settings.ram_limit),
        ram_bytes=ram_room(machine.hardware, settings.ram_limit),
    )
    return choice, models[choice.draft.kind]


def _draft(kind: str, model: DraftModel | None) -> Draft:
    if model is None:
        return Draft(kind, curves()[kind], None, lambda rows, batch: {})
    return Draft(
        kind, curves()["self" if model.is_self else "model"], shape_of(model.outline, model.dtype), model.memory
    )


def _loaded(target: _Target, chosen_plan: Plan, hardware: Hardware) -> Loaded:
    with Progress("load") as progress:
        return load_model(
            target.checkpoint,
            chosen_plan,
            device=hardware.device,
            dtype=target.dtype,
            attn_implementation=attention_for(target.checkpoint),
            progress=progress,
        )


def context_length(asked: int | None, config: PretrainedConfig) -> int:
    """`asked`, or what most conversations fit into; ValueError if the model knows fewer positions."""
    most = getattr(config.get_text_config(), "max_position_embeddings", None)
    if asked and most and asked > most:
        raise ValueError(f"--ctx {asked} is more than the {most} positions that the model knows: use --ctx {most}")
    return asked or min(_DEFAULT_CTX, most or _DEFAULT_CTX)


def device_name(asked: str) -> str:
    """`cuda` where there is a GPU and nothing else was asked for, else `cpu`; ValueError for a GPU that is missing."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    has_cuda = accelerator is not None and accelerator.type == "cuda"
    if asked == "cuda" and not has_cuda:
        raise ValueError("--device cuda needs a CUDA GPU and a torch built for it, and there is none: use --device cpu")
    return "cuda" if has_cuda and asked != "cpu" else "cpu"


def compute_dtype(asked: str | None, hardware: Hardware) -> torch.dtype:
    """`asked`, else bf16 where the device has it."""
    if asked:
        return getattr(torch, asked)
    if hardware.has_bf16:
        return torch.bfloat16
    return torch.float32 if hardware.device.type == "cpu" else torch.float16
