"""From settings to a running session: find the model, plan its memory, load target and draft."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from app.baselines import baseline
from app.draft import (
    DRAFT_BITS,
    DraftModel,
    attention_for,
    external_drafts,
    make_drafter,
    model_draft,
    plain_draft,
    positions,
    self_drafts,
)
from app.environment import environment_engine_key
from app.forecast import decide, device_limit, idle_limits, ram_room
from app.learned import recall, remember
from app.learned_draft import LearnedDraft, learned_draft
from app.machines import Machine, this_machine
from app.models import locate
from app.pacing import measured_pace
from app.past import suffix_drafter
from app.progress import Progress
from app.remote import RemoteSession, connect
from app.session import Session, stop_ids_of
from app.settings import (
    DRAFT_KINDS,
    OF_A_DRAFT_MODEL,
    Resolved,
    Settings,
    flag_name,
    guesses_repetitions,
    idle_settings,
    named_model,
    with_generation_config,
)
from app.target import load_tokenizer, open_target
from app.treecheck import honours_trees
from offload.checkpoint import Checkpoint, open_checkpoint
from offload.hardware import Hardware, Rates, measure_disk, probe, release_unused
from offload.heap import steady_heap
from offload.load import Loaded, Outline, load_model, outline
from offload.plan import Plan, shared_layers
from offload.predict import BUDGETS, Choice, Draft
from offload.shape import Shape, shape_of
from offload.store import Reading
from specexec.acceptance import Acceptance
from specexec.budget import Pace
from specexec.drafters.chain import ChainDrafter
from specexec.drafters.graft import GraftDrafter
from specexec.lm import CachedLM
from specexec.sampling import SamplingParams
from specexec.verify import verify

_DEFAULT_CTX = 4096
LINK_SAMPLE_BYTES = 256 << 20
PROBE_NODES = 64  # that rates are measured for where no budget is given


@dataclass(frozen=True)
class Running:
    """A session and what a status line needs to know of it; of another server's, nothing but settings is known."""

    session: Session | RemoteSession
    chosen: Resolved
    checkpoint: Checkpoint | None = None
    choice: Choice | None = None
    shape: Shape | None = None
    rates: Rates | None = None
    raw_link_bps: float | None = None
    count_streamed: Callable[[], int] = lambda: 0  # bytes so far

    @property
    def plan(self) -> Plan | None:
        """Where the target's layers are."""
        return self.choice.plan if self.choice else None

    @property
    def pass_bytes(self) -> int:
        """What a pass streams."""
        return self.plan.streamed_bytes if self.plan else 0

    @property
    def limit_bytes(self) -> int | None:
        """What the memory of the compute device was planned for."""
        return self.plan.limit_bytes if self.plan else None

    @property
    def draft(self) -> str | None:
        """The kind of draft, or the model that drafts."""
        return self.choice.draft.kind if self.choice else None

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
def open_session(
    chosen: Resolved, *, offline: bool, note: Callable[[str], None], method: str | None = None
) -> Iterator[Running]:
    """Opens what the settings ask for and closes it again. `note` is told in a line what was decided for the user.

    method: one of BASELINES that is to use the settings' draft model, for comparison.
    Raises OSError, ValueError or DoesNotFit, each in one line.
    """
    if chosen.settings.engine:
        yield _remote(chosen, note)
        return
    steady_heap()
    gc.collect()  # hooks lead from layers back to their session: without this a closed one still counts as taken,
    release_unused()  # and what torch keeps of it, too
    checkpoint = open_target(chosen.settings, offline=offline)
    chosen = with_generation_config(chosen, checkpoint.generation_config, note)
    for line in idle_settings(chosen):
        note(line)
    settings = chosen.settings
    target = _outlined(checkpoint, settings)
    named = _named_drafts(chosen, target, offline=offline, note=note)
    machine, reading = _measured(target, settings)
    for line in idle_limits(machine.hardware, settings.device_limit, settings.ram_limit):
        note(line)
    choice, draft = _chosen(settings, target, named, machine)
    kind, budget, chosen_plan = choice.draft.kind, choice.budget, choice.plan
    if settings.draft == "auto" and kind == "ngram" and chosen_plan.streamed_bytes:
        note("draft: n-grams of the context, for a copy of the target is too large (--draft MODEL takes a small one)")
    model = draft if isinstance(draft, DraftModel) else None
    if model is not None:
        model.at_rest()  # before the target takes the memory
    with ExitStack() as opened:
        loaded = opened.enter_context(_loaded(target, chosen_plan, machine.hardware, reading))
        draft_loaded = opened.enter_context(model.load(loaded, machine.hardware)) if model else None
        rows = target.ctx + budget  # of the KV caches: the context and one tree

        def count_streamed() -> int:
            return loaded.streamer.streamed_bytes if loaded.streamer else 0

        vocab_size = max(target.tokenizer.get_vocab().values()) + 1
        lm = CachedLM(loaded.model, rows, vocab_size=vocab_size)
        acceptance = Acceptance()
        if draft is not None:
            num_shared = len(shared_layers(chosen_plan)) if model and model.is_self else 0
            drafting = f"{model.checkpoint.path} {model.storage} {num_shared}" if model else str(draft.directory)
            pair = f"{checkpoint.path} {drafting} {target.dtype} {draft.dtype}"
            acceptance = recall(pair)
            opened.callback(lambda: remember(pair, acceptance))
        draft_lm = model.behind(draft_loaded, lm, budget, note=note, shares_rows=method is None) if model else None
        keeps, repeats = settings.past == "on", guesses_repetitions(kind)
        suffix = opened.enter_context(suffix_drafter(target.tokenizer, keeps=keeps)) if repeats else None
        drafter, walk = make_drafter(kind, draft_lm, acceptance=acceptance, suffix=suffix), verify
        if isinstance(draft, LearnedDraft):
            learned = draft.drafter(lm, acceptance)
            drafter = learned if suffix is None else GraftDrafter(learned, suffix)
        if method is not None:
            drafter, walk = baseline(method, draft_lm, budget)
        if drafter is not None and method != "chain" and not honours_trees(lm):
            if walk is not verify:
                raise ValueError(f"{method} needs tree masks, which this version of transformers does not honour here")
            note("draft: chains only, since this version of transformers does not honour tree masks for this model")
            drafter = ChainDrafter(drafter)
        pace = settings.budget or Pace(budget)
        if not settings.budget and draft_lm is not None and suffix is None and not chosen_plan.streamed_bytes:
            pace = measured_pace(budget, lm, draft_lm, acceptance, settings.temp)
        session = Session(
            lm,
            drafter,
            target.tokenizer,
            ctx=target.ctx,
            budget=pace,
            stop_ids=stop_ids_of(target.tokenizer, checkpoint.config.get_text_config(), checkpoint.generation_config),
            count_streamed=count_streamed,
            walk=walk,
            note=note,
        )
        rate = machine.rates.link_bps if chosen_plan.tier == "ram" else machine.rates.disk_bps
        raw_link_bps = rate if chosen_plan.streamed_bytes else None
        yield Running(session, chosen, checkpoint, choice, target.shape, machine.rates, raw_link_bps, count_streamed)


def _remote(chosen: Resolved, note: Callable[[str], None]) -> Running:
    settings = chosen.settings
    session = connect(settings.engine, settings.target, environment_engine_key())
    for line in (f"engine: {session.model} at {settings.engine}", *idle_settings(chosen)):
        note(line)
    return Running(session, replace(chosen, settings=replace(settings, target=session.model)))


def _outlined(checkpoint: Checkpoint, settings: Settings) -> _Target:
    tokenizer = load_tokenizer(checkpoint.path)
    ctx = context_length(settings.ctx, checkpoint.config)
    device = device_name(settings.device)
    dtype = compute_dtype(settings.dtype, probe(device))
    parts = outline(checkpoint, dtype=dtype, attn_implementation=attention_for(checkpoint))
    return _Target(checkpoint, parts, shape_of(parts, dtype), tokenizer, device, dtype, ctx)


def _named_drafts(
    chosen: Resolved, target: _Target, *, offline: bool, note: Callable[[str], None]
) -> Sequence[DraftModel | LearnedDraft]:
    """What the settings name, in each way that it can be held."""
    settings = chosen.settings
    if settings.draft in DRAFT_KINDS:
        return []
    directory, own = (locate(name, offline=offline) for name in (named_model(settings.draft), settings.target))
    vocab_size = target.shape.text.vocab_size
    if learned := learned_draft(directory, own, vocab_size=vocab_size, dtype=target.dtype):
        for key in OF_A_DRAFT_MODEL:
            if chosen.origins.get(key) == "flag":
                raise ValueError(f"{flag_name(key)} has no effect on {settings.draft}, a learned draft: leave it out")
        return [learned]
    return external_drafts(
        directory,
        target.tokenizer,
        getattr(torch, settings.draft_dtype) if settings.draft_dtype else target.dtype,
        is_nf4=settings.draft_bits == DRAFT_BITS,
        ctx=target.ctx,
        draft_ctx=settings.draft_ctx,
        note=note,
    )


def _measured(target: _Target, settings: Settings) -> tuple[Machine, Reading]:
    files = sorted({part.file for entry in target.checkpoint.tensors.values() for part in entry.parts})
    disk_bps, reading = measure_disk(files, LINK_SAMPLE_BYTES)
    rows = (settings.budget or PROBE_NODES) + 1
    return this_machine(target.device, target.shape, rows=rows, disk_bps=disk_bps), reading


def _chosen(
    settings: Settings, target: _Target, named: Sequence[DraftModel | LearnedDraft], machine: Machine
) -> tuple[Choice, DraftModel | LearnedDraft | None]:
    """Draft, budget and plan together, and the model that drafts."""
    kind, rival = ("self", "ngram") if settings.draft == "auto" else (settings.draft, None)
    models = named
    if kind in ("self", "graft"):
        source = open_checkpoint(locate(settings.target, offline=True)) if settings.bits == 8 else None
        models = self_drafts(target.checkpoint, target.outline, target.dtype, source=source)
    if rival is not None:
        models = [model for model in models if model.has_room]
    drafts = [(_draft(kind, model, machine), model) for model in models]
    if rival is not None or not models:
        drafts.append((plain_draft(rival or kind), None))
    choice = decide(
        target.shape,
        [draft for draft, _ in drafts],
        machine,
        ctx=target.ctx,
        budgets=(settings.budget,) if settings.budget else BUDGETS,
        slots=settings.slots,
        resident=settings.resident,
        limit_bytes=device_limit(machine.hardware, settings.device_limit, settings.ram_limit),
        ram_bytes=ram_room(machine.hardware, settings.ram_limit),
    )
    return choice, next(model for draft, model in drafts if draft is choice.draft)


def _draft(kind: str, model: DraftModel | LearnedDraft, machine: Machine) -> Draft:
    if isinstance(model, LearnedDraft):
        return model.planned(kind)
    shape = model.shape
    decode_bps = machine.decoding_rate(shape)
    return model_draft(kind, shape, is_self=model.is_self, window=model.window, decode_bps=decode_bps)


def _loaded(target: _Target, chosen_plan: Plan, hardware: Hardware, reading: Reading) -> Loaded:
    with Progress("load") as progress:
        return load_model(
            target.checkpoint,
            chosen_plan,
            device=hardware.device,
            dtype=target.dtype,
            attn_implementation=attention_for(target.checkpoint),
            progress=progress,
            reading=reading,
        )


def context_length(asked: int | None, config: PretrainedConfig) -> int:
    """`asked`, or what most conversations fit into; ValueError if the model knows fewer positions."""
    most = positions(config)
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
