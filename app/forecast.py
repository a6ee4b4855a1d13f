"""What a model would do on a machine: the choice among drafts worth trying, and the changes that would help most."""

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace

import torch

from app.blueprint import Blueprint
from app.draft import model_draft, plain_draft
from app.machines import Machine
from app.sizes import format_size
from offload.hardware import Hardware
from offload.plan import DoesNotFit, place
from offload.predict import BUDGETS, Choice, Draft, choose
from offload.shape import Shape
from offload.working import working_bytes

_WORTH_TELLING = 1.05
_SOME_MODEL = "MODEL"
_SHARE_OF_MAIN_MEMORY = 0.94  # of what is free: a cgroup counts page tables and stacks too, a process does not
_SHARE_OF_RAM = 0.9  # of what is free: the rest is for the process itself and for whatever else starts


@dataclass(frozen=True)
class Question:
    """A target, a draft (a kind or the name of `draft_model`), the machine, and the limits to keep."""

    target: Blueprint
    draft: str
    draft_model: Draft | None
    machine: Machine
    ctx: int
    budget: int | None
    bits: int
    slots: int
    resident: int | None
    dtype: torch.dtype
    device_limit: int | None
    ram_limit: int | None


@dataclass(frozen=True)
class Lever:
    """A change and what it is expected to bring: the factor of tokens per second, or None where it makes all fit."""

    flags: Mapping[str, str]
    why: str
    gain: float | None


def forecast(question: Question) -> tuple[Shape, Choice]:
    """The target's shape and the best choice for it. Raises DoesNotFit."""
    target = question.target.shape(question.bits, question.dtype)
    hardware = question.machine.hardware
    budgets = (question.budget,) if question.budget else BUDGETS
    return target, decide(
        target,
        _drafts(question, target),
        question.machine,
        ctx=question.ctx,
        budgets=budgets,
        slots=question.slots,
        resident=question.resident,
        limit_bytes=device_limit(hardware, question.device_limit, question.ram_limit),
        ram_bytes=ram_room(hardware, question.ram_limit),
    )


def decide(
    target: Shape,
    drafts: Sequence[Draft],
    machine: Machine,
    *,
    ctx: int,
    budgets: Sequence[int],
    slots: int,
    resident: int | None,
    limit_bytes: int,
    ram_bytes: int | None,
) -> Choice:
    """What `run` and `plan` do alike: every item of memory, then draft, budget and residents together."""
    hardware = machine.hardware

    def fixed(draft: Draft, budget: int) -> Mapping[str, int]:
        return {
            "this process": hardware.base_bytes,
            **working_bytes(target, hardware.device, ctx=ctx, budget=budget),
            **draft.memory(ctx + budget, budget + 1),
        }

    return choose(
        target,
        place(target.layers, slots, resident),
        drafts,
        budgets=budgets,
        fixed=fixed,
        limit_bytes=limit_bytes,
        ram_bytes=ram_bytes,
        rates=machine.rates,
    )


def device_limit(hardware: Hardware, asked: int | None, ram_limit: int | None) -> int:
    """Bytes of the compute device that may be used: free memory counts, not total; on a CPU both limits hold."""
    on_cpu = hardware.device.type == "cpu"
    share = _SHARE_OF_MAIN_MEMORY if on_cpu else 1
    limits = [asked or int(share * (hardware.free_bytes + hardware.base_bytes))]
    if on_cpu and ram_limit:
        limits.append(ram_limit)
    return min(limits)


def ram_room(hardware: Hardware, ram_limit: int | None) -> int | None:
    """Bytes of main memory that streamed layers may rest in, or None where the device has no memory of its own."""
    if hardware.device.type == "cpu":
        return None
    return min(ram_limit or int(_SHARE_OF_RAM * hardware.ram_free_bytes), hardware.ram_free_bytes)


def levers(question: Question, chosen: Choice | None) -> list[Lever]:
    """Changes that would help, the best first; where nothing fits (`chosen` is None), the mildest that makes it fit."""
    found: dict[str, Lever] = {}
    for flags, why, changed in _changes(question, chosen):
        try:
            _, other = forecast(changed)
        except DoesNotFit:
            continue
        if chosen is None:
            return [Lever(flags, why, None)]
        gain = other.prediction.tokens_per_s[1] / chosen.prediction.tokens_per_s[1]
        flag = next(iter(flags))
        if gain >= max(_WORTH_TELLING, _WORTH_TELLING * (found[flag].gain or 0) if flag in found else 0):
            found[flag] = Lever(flags, why, gain)  # a stronger form of the same change has to be worth it
    return sorted(found.values(), key=lambda lever: -(lever.gain or 0))


def _drafts(question: Question, target: Shape) -> list[Draft]:
    if question.draft_model is not None:
        return [question.draft_model]
    if question.draft == _SOME_MODEL:
        full = question.target.plain(question.dtype)
        return [model_draft(_SOME_MODEL, _smaller(full, times)) for times in (10, 40)]
    kinds = ("self", "ngram") if question.draft == "auto" else (question.draft,)
    return [_own_draft(kind, question) if kind in ("self", "graft") else plain_draft(kind) for kind in kinds]


def _own_draft(kind: str, question: Question) -> Draft:
    return model_draft(kind, question.target.rounded(question.bits, question.dtype), is_self=True)


def _changes(question: Question, chosen: Choice | None) -> list[tuple[Mapping[str, str], str, Question]]:
    """Changes to try, the mildest first."""
    changes: list[tuple[Mapping[str, str], str, Question]] = []
    if question.draft not in ("auto", "none", "ngram"):
        changes.append(
            ({"draft": "ngram"}, "n-grams need no memory", replace(question, draft="ngram", draft_model=None))
        )
    if question.draft == "none":
        changes.append(({"draft": "auto"}, "several tokens per pass", replace(question, draft="auto")))
    if question.budget:
        changes.append(({"budget": "auto"}, "the tree that pays most", replace(question, budget=None)))
    for ctx in (2048, 1024, 512):
        if ctx < question.ctx:
            changes.append(({"ctx": str(ctx)}, "smaller caches", replace(question, ctx=ctx)))
    for bits in (8, 4):
        if bits < question.bits and not question.target.is_packed:
            changes.append(({"bits": str(bits)}, "fewer bytes to stream", replace(question, bits=bits)))
    hardware = question.machine.hardware
    if question.device_limit and question.device_limit < hardware.free_bytes + hardware.base_bytes:
        whole = hardware.free_bytes + hardware.base_bytes
        changes.append(
            (
                {"device-limit": format_size(whole).replace(" ", "")},
                "all that is free",
                replace(question, device_limit=whole),
            )
        )
    if hardware.device.type != "cpu" and (chosen is None or "disk" in chosen.plan.tiers):
        needed = _round_up(1.15 * question.target.shape(question.bits, question.dtype).stored_bytes + (4 << 30))
        ample = replace(hardware, ram_total_bytes=needed, ram_free_bytes=needed)
        changes.append(
            (
                {"ram": format_size(needed).replace(" ", "")},
                "with more main memory nothing comes from the disk",
                replace(question, machine=replace(question.machine, hardware=ample), ram_limit=None),
            )
        )
    if question.draft in ("auto", "ngram"):
        changes.append(
            (
                {"draft": _SOME_MODEL},
                "a small model of the target's family; a tenth or a fortieth of its size was assumed",
                replace(question, draft=_SOME_MODEL),
            )
        )
    return changes


def _smaller(shape: Shape, times: int) -> Shape:
    """About what a model of the same family is like that is so many times smaller: fewer layers, a narrower rest."""
    config = deepcopy(shape.config)
    layers = shape.layers[::times]
    config.num_hidden_layers = len(layers)
    part = len(layers) / len(shape.layers)
    return replace(
        shape,
        config=config,
        layers=layers,
        rest_bytes={name: round(nbytes * math.sqrt(part)) for name, nbytes in shape.rest_bytes.items()},
        num_weights=round(shape.num_weights * part),
        num_used=round(shape.num_used * part),
        experts=None,
    )


def _round_up(nbytes: float) -> int:
    return -(-int(nbytes) // 10**9) * 10**9
