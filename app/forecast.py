"""What a model would do on a machine: the choice among drafts worth trying, and the changes that would help most."""

import math
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch

from app.blueprint import Blueprint
from app.draft import model_draft, plain_draft
from app.machines import Machine, named_machine
from app.settings import READERS
from app.sizes import format_size, parse_size
from offload.hardware import Hardware
from offload.plan import DoesNotFit, place
from offload.predict import BUDGETS, Choice, Draft, choose
from offload.shape import Shape
from offload.working import working_bytes

_WORTH_TELLING = 1.05
_SOME_MODEL = "MODEL"
_GRAIN = 10**7  # bytes, of sizes in levers: they are printed as they are tried
_SHARE_OF_MAIN_MEMORY = 0.94  # of what is free: a cgroup counts page tables and stacks too, a process does not
_SHARE_OF_RAM = 0.9  # of what is free: the rest is for the process itself and for whatever else starts


@dataclass(frozen=True)
class Question:
    """A target, a draft (a kind, or the name of `draft_models`), the machine, and the limits to keep."""

    target: Blueprint
    draft: str
    draft_models: tuple[Draft, ...]
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
    """A change as flags, and what it is expected to bring: the factor of tokens per second, or None where it makes all
    fit."""

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
    """Bytes of the compute device that may be used: free memory counts, not total; on a CPU both limits hold.

    A limit only lowers what there is; see `idle_limits`.
    """
    on_cpu = hardware.device.type == "cpu"
    share = _SHARE_OF_MAIN_MEMORY if on_cpu else 1
    limits = [int(share * (hardware.free_bytes + hardware.base_bytes)), asked, ram_limit if on_cpu else None]
    return min(limit for limit in limits if limit)


def ram_room(hardware: Hardware, ram_limit: int | None) -> int | None:
    """Bytes of main memory that streamed layers may rest in, or None where the device has no memory of its own."""
    if hardware.device.type == "cpu":
        return None
    return min(ram_limit or int(_SHARE_OF_RAM * hardware.ram_free_bytes), hardware.ram_free_bytes)


def idle_limits(hardware: Hardware, asked: int | None, ram_limit: int | None) -> list[str]:
    """A line for each limit that is more than there is, so that it changes nothing."""
    room = device_limit(hardware, None, None)
    ram = room if hardware.device.type == "cpu" else hardware.ram_free_bytes
    return [
        f"{flag} {format_size(limit)} is more than there is: {format_size(there)} is taken"
        for flag, limit, there in (("--device-limit", asked, room), ("--ram-limit", ram_limit, ram))
        if limit and limit > there
    ]


def levers(question: Question, chosen: Choice | None) -> list[Lever]:
    """Changes that would help, the best first; where nothing fits (`chosen` is None), the mildest that makes it fit."""
    found: dict[str, Lever] = {}
    for flags, why in _changes(question, chosen):
        try:
            _, other = forecast(_changed(question, flags))
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
    if question.draft_models:
        return list(question.draft_models)
    if question.draft == _SOME_MODEL:
        full = question.target.plain(question.dtype)
        return [model_draft(_SOME_MODEL, _smaller(full, times)) for times in (10, 40)]
    kinds = ("self", "ngram") if question.draft == "auto" else (question.draft,)
    return [draft for kind in kinds for draft in _drafts_of_kind(kind, question)]


def _drafts_of_kind(kind: str, question: Question) -> list[Draft]:
    if kind not in ("self", "graft"):
        return [plain_draft(kind)]
    shapes, machine = question.target.copies(question.bits, question.dtype), question.machine
    return [model_draft(kind, shape, is_self=True, decode_bps=machine.decoding_rate(shape)) for shape in shapes]


def _changed(question: Question, flags: Mapping[str, str]) -> Question:
    """What the command with these flags asks: sizes as they are printed, everything else as it was."""
    changes: dict[str, Any] = {"draft_models": ()} if "draft" in flags else {}
    for flag, text in flags.items():
        if flag == "ram":
            machine = question.machine
            changes["machine"] = named_machine(machine.hardware.name, parse_size(text), machine.rates.disk_bps)
        else:
            key = flag.replace("-", "_")
            changes[key] = READERS[key](text)
    return replace(question, **changes)


def _changes(question: Question, chosen: Choice | None) -> Iterator[tuple[Mapping[str, str], str]]:
    """Flags to try, the mildest first, and why."""
    if question.draft not in ("auto", "none", "ngram"):
        yield {"draft": "ngram"}, "n-grams need no memory"
    if question.draft == "none":
        yield {"draft": "auto"}, "several tokens per pass"
    if question.budget:
        yield {"budget": "auto"}, "the tree that pays most"
    if question.slots > 2:
        yield {"slots": "2"}, "more never help"
    if (count := _most_residents(question)) is not None:
        yield {"resident": str(count)}, "as many layers as fit"
    for ctx in (2048, 1024, 512):
        if ctx < question.ctx:
            yield {"ctx": str(ctx)}, "smaller caches"
    for bits in (8, 4):
        if bits < question.bits and not question.target.is_packed:
            yield {"bits": str(bits)}, "fewer bytes to stream"
    yield from _more_memory(question, chosen)
    if question.draft in ("auto", "ngram"):
        yield (
            {"draft": _SOME_MODEL},
            "a small model of the target's family; a tenth or a fortieth of its size was assumed",
        )


def _most_residents(question: Question) -> int | None:
    """How many layers would stay if no number of them had been asked for."""
    if question.resident is None:
        return None
    try:
        return len(forecast(replace(question, resident=None))[1].plan.resident)
    except DoesNotFit:
        return None


def _more_memory(question: Question, chosen: Choice | None) -> Iterator[tuple[Mapping[str, str], str]]:
    """Higher limits where they bind; else, of a machine that is only thought of, more main memory."""
    hardware = question.machine.hardware
    on_cpu, lacks_ram = hardware.device.type == "cpu", chosen is None or "disk" in chosen.plan.tiers
    room = device_limit(hardware, None, None)
    ram = room if on_cpu else ram_room(hardware, None)
    limits = {"device-limit": question.device_limit, "ram-limit": question.ram_limit}
    if on_cpu:
        yield from _raised(limits, room)
    else:
        yield from _raised({"device-limit": question.device_limit}, room)
        if lacks_ram:
            yield from _raised({"ram-limit": question.ram_limit}, ram)
    if lacks_ram and question.machine.is_named and (question.ram_limit or ram) >= ram:
        stored_bytes = question.target.shape(question.bits, question.dtype).stored_bytes
        for size in _sizes(hardware.ram_total_bytes, _round_up(1.15 * stored_bytes + (4 << 30))):
            yield {"ram": _as_flag(size)}, "more main memory, so that less comes from the disk"


def _raised(limits: Mapping[str, int | None], most: int) -> Iterator[tuple[Mapping[str, str], str]]:
    """Limits of one memory, in steps up to `most`: at each step those that are lower."""
    given = {flag: limit for flag, limit in limits.items() if limit}
    for size in _sizes(min(given.values(), default=most), most):
        yield {flag: _as_flag(size) for flag, limit in given.items() if limit < size}, "more of what is free"


def _sizes(least: int, most: int) -> list[int]:
    """Bytes to try, above `least`, doubled up to `most`; rounded down, so that none is more than there is."""
    sizes = (most // part // _GRAIN * _GRAIN for part in (16, 8, 4, 2, 1))
    return [size for size in sizes if size > least]


def _as_flag(size: int) -> str:
    return f"{size / 10**9:g}GB"


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
