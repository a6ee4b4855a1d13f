"""The command `plan`: facts, memory, verdict, speed and levers, for this machine or one that is not here."""

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from app.advice import Advice, advice_lines, advise, assumed_lengths, situation
from app.blueprint import Blueprint, draw_up, glimpse
from app.draft import positions
from app.environment import is_offline
from app.forecast import Lever, Question, forecast, idle_limits, levers
from app.launch import LINK_SAMPLE_BYTES, PROBE_NODES, compute_dtype, context_length, device_name
from app.machines import Machine, assumed_disk_bps, named_machine, this_machine
from app.named_draft import named_drafts
from app.settings import DRAFT_KINDS, OF_A_DRAFT_MODEL, Resolved
from app.sizes import format_size, parse_size
from offload.hardware import Hardware, measure_disk, probe
from offload.plan import DoesNotFit, Plan
from offload.predict import Choice, first_token_seconds, knee
from offload.shape import Shape

_PROMPTS = (1024, 8192)


@dataclass(frozen=True)
class Elsewhere:
    """A machine that is not this one, as far as it was described."""

    gpu: str | None
    ram_bytes: int | None
    disk_bps: float | None

    @classmethod
    def read(cls, gpu: str | None, ram: str | None, disk_rate: str | None, device: str | None = None) -> "Elsewhere":
        """Reads the flags; ValueError names the one that is wrong, or has no effect on a machine that is not here."""
        if ram is not None and gpu is None:
            raise ValueError("--ram belongs to a machine named by --gpu; for this one there is --ram-limit")
        if gpu is not None and device not in (None, "auto"):
            raise ValueError(f"--device {device} is about this machine: with --gpu leave it out (--gpu none for a CPU)")
        sizes = {"--ram": ram, "--disk-rate": disk_rate and disk_rate.removesuffix("/s")}
        read: dict[str, int | None] = {}
        for flag, text in sizes.items():
            try:
                read[flag] = None if text is None else parse_size(text)
            except ValueError as error:
                raise ValueError(f"{flag} must be {error}") from None
        return cls(gpu, read["--ram"], read["--disk-rate"])


def show_plan(chosen: Resolved, elsewhere: Elsewhere, given: Mapping[str, str], *, as_json: bool, offline: bool) -> int:
    """Prints the plan for what was asked; 0, or 1 where the model does not fit."""
    question = _question(chosen, elsewhere, offline=offline or is_offline())
    lines = [f"target: {question.target.name}, {question.target.describe(question.bits)}", *question.machine.facts]
    limits = idle_limits(question.machine.hardware, question.device_limit, question.ram_limit)
    lines += [f"note: {each}" for each in limits]
    try:
        shape, choice = forecast(question)
    except DoesNotFit as error:
        helpful = levers(question, None)
        lines += [f"verdict: does not fit: {error}"]
        lines += [f"smallest change: {_command(given, each)} ({each.why})" for each in helpful]
        report: dict[str, object] = {"verdict": "does not fit", "error": str(error)}
        report["levers"] = [_lever_entry(given, each) for each in helpful]
        code = 1
    else:
        helpful, advice = levers(question, choice), _advice(question, shape, choice)
        lines += memory_lines(choice.plan)
        lines += [f"verdict: {verdict(choice.plan)}", *_speed_lines(question, shape, choice)]
        lines += advice_lines(advice)
        lines += [f"lever: x{each.gain:.2g}  {_command(given, each)}  ({each.why})" for each in helpful]
        report = _report(question, shape, choice)
        report["levers"] = [_lever_entry(given, each) for each in helpful]
        report["guidelines"] = advice.to_data()
        code = 0
    print("\n".join([*lines, json.dumps(report)] if as_json else lines), flush=True)
    return code


def verdict_line(chosen: Resolved, *, offline: bool, in_place_of: Plan | None = None) -> str:
    """In one line, whether the model fits this machine and how fast it is expected to be; see `outlook`."""
    question = _question(chosen, Elsewhere(None, None, None), offline=offline or is_offline(), in_place_of=in_place_of)
    try:
        _, choice = forecast(question)
    except DoesNotFit as error:
        return f"does not fit: {error}"
    return f"{verdict(choice.plan)}; about {choice.prediction.tokens_per_s[1]:.2g} tokens/s expected"


def outlook(
    chosen: Resolved,
    elsewhere: Elsewhere,
    *,
    offline: bool,
    look: Callable[..., Blueprint] = glimpse,
    in_place_of: Plan | None = None,
) -> tuple[str, float | None]:
    """The first words of the verdict and the tokens per second to expect; `look` makes a blueprint of a name.

    in_place_of: what this process has loaded and would give back first.
    """
    try:
        _, choice = forecast(_question(chosen, elsewhere, offline=offline, look=look, in_place_of=in_place_of))
    except DoesNotFit:
        return "does not fit", None
    return verdict(choice.plan).partition(":")[0], choice.prediction.tokens_per_s[1]


def _question(
    chosen: Resolved,
    elsewhere: Elsewhere,
    *,
    offline: bool,
    look: Callable[..., Blueprint] = draw_up,
    in_place_of: Plan | None = None,
) -> Question:
    settings = chosen.settings
    if settings.target is None:
        raise ValueError("name a model with --target or --preset")
    target = look(settings.target, offline=offline)
    if settings.bits is not None and target.is_packed:
        raise ValueError(f"{target.name} is already quantized ({target.describe(settings.bits)}): leave out --bits")
    bits = settings.bits or 16
    if elsewhere.gpu is not None:
        machine = named_machine(elsewhere.gpu, elsewhere.ram_bytes, elsewhere.disk_bps)
        dtype = compute_dtype(settings.dtype, machine.hardware)
    else:
        device = device_name(settings.device)
        dtype = compute_dtype(settings.dtype, probe(device))
        nodes = settings.budget or PROBE_NODES
        machine = _measured(target, device, target.shape(bits, dtype), nodes, elsewhere.disk_bps)
        if in_place_of is not None:
            machine = replace(machine, hardware=_without(machine.hardware, in_place_of))
    ctx = context_length(settings.ctx, target.config)
    is_named = settings.draft not in DRAFT_KINDS
    return Question(
        target,
        settings.draft,
        tuple(named_drafts(settings, target, machine, dtype, ctx=ctx, look=partial(look, offline=offline)))
        if is_named
        else (),
        machine,
        ctx=ctx,
        budget=settings.budget,
        bits=bits,
        slots=settings.slots,
        resident=settings.resident,
        dtype=dtype,
        device_limit=settings.device_limit,
        ram_limit=settings.ram_limit,
    )


def _without(hardware: Hardware, loaded: Plan) -> Hardware:
    """`hardware` as it will be once this process has given back what it has `loaded`."""
    freed = max(0, hardware.base_bytes - dict(loaded.items)["this process"])
    ram = freed if hardware.device.type == "cpu" else sum(nbytes for _, nbytes in loaded.host_items)
    return replace(
        hardware,
        free_bytes=hardware.free_bytes + freed,
        base_bytes=hardware.base_bytes - freed,
        ram_free_bytes=hardware.ram_free_bytes + ram,
    )


def _measured(target: Blueprint, device: str, shape: Shape, nodes: int, disk_bps: float | None) -> Machine:
    said = "given" if disk_bps else "measured" if target.files else "assumed, for want of files to read (--disk-rate)"
    disk = disk_bps or (measure_disk(target.files, LINK_SAMPLE_BYTES)[0] if target.files else assumed_disk_bps())
    machine = this_machine(device, shape, rows=nodes + 1, disk_bps=disk)
    return replace(machine, facts=(*machine.facts, f"disk {disk / 1e9:.2f} GB/s ({said})"))


def memory_lines(plan: Plan) -> list[str]:
    """Every item of the device's memory and of main memory, a line each."""
    lines = [f"memory: {format_size(nbytes):>8}  {name}" for name, nbytes in plan.items if nbytes]
    lines.append(f"memory: {format_size(plan.total_bytes):>8}  in all, of {format_size(plan.limit_bytes)}")
    return lines + [f"RAM:    {format_size(nbytes):>8}  {name}" for name, nbytes in plan.host_items]


def verdict(plan: Plan) -> str:
    """Whether all of the model stays, and what crosses the link if not, in words."""
    if not plan.streamed_bytes:
        return "fits: all layers stay in memory, nothing needs to stream"
    layers = f"{len(plan.resident)} layers resident, {len(plan.streamed)} streamed,"
    amount = f"{layers} {format_size(plan.streamed_bytes)} per pass"
    if plan.tier == "ram":
        return f"streams from RAM: {amount}"
    in_ram = plan.tiers.count("ram")
    return f"needs the disk: {amount}" + (f", {in_ram} of the streamed layers rest in RAM" if in_ram else "")


def _speed_lines(question: Question, shape: Shape, choice: Choice) -> list[str]:
    plan, prediction, rates = choice.plan, choice.prediction, question.machine.rates
    nodes = choice.budget + 1
    low, likely, high = prediction.tokens_per_s
    fewest, mean, most = prediction.tokens_per_pass
    from_disk = plan.streamed_bytes - plan.ram_bytes
    terms = [
        f"{nbytes / 1e9:.3g} GB / {rate / 1e9:.3g} GB/s"
        for nbytes, rate in ((plan.ram_bytes, rates.link_bps), (from_disk, min(rates.disk_bps, rates.link_bps)))
        if nbytes
    ]
    decoding = f", then decoded to {str(shape.dtype).removeprefix('torch.')}" if shape.decoded_bytes else ""
    held = ", decoded at each step" if choice.draft.shape is not None and choice.draft.shape.decoded_bytes else ""
    lines = [
        f"speed: {likely:.2g} tokens/s ({low:.2g} to {high:.2g}) ="
        f" {mean:.1f} tokens per pass ({fewest:.1f} to {most:.1f})"
        f" / ({prediction.s_per_pass:.3g} s + {prediction.draft_s:.2g} s of drafting),"
        f" draft {choice.draft.kind}{held}, budget {choice.budget}",
        f"  s per pass = max(link {prediction.link_s:.3g} s = {' + '.join(terms) or 'nothing'}, compute"
        f" {prediction.compute_s:.3g} s: 2 x {shape.num_used / 1e9:.3g} G weights x {nodes} tokens"
        f" / {rates.flops / 1e12:.3g} TFLOPS and {shape.stored_bytes / 1e9:.3g} GB read at"
        f" {rates.memory_bps / 1e9:.3g} GB/s{decoding}); slots refill while drafting",
        f"  tokens per pass: {choice.draft.curve.source}",
    ]
    if plan.streamed_bytes:
        nodes_at_knee = knee(shape, plan, rates)
        bound = f"beyond {nodes_at_knee} nodes computing takes longer than the link"
        lines.append(f"  knee: {bound if nodes_at_knee > 1 else 'none, computing takes longer than the link anyway'}")
    if shape.experts is not None:
        total, used = shape.experts
        lines.append(
            f"  experts: {used} of {total} per token, {shape.distinct_experts(nodes):.0f} for {nodes} tokens;"
            " whole layers stream, so a smaller tree saves nothing on the link"
        )
    waits = [f"{_first_token(question, shape, choice, n):.2g} s at {n}" for n in _prompts(question)]
    return [*lines, f"first token: {', '.join(waits)} tokens of prompt"]


def _advice(question: Question, shape: Shape, choice: Choice) -> Advice:
    where = situation(shape, choice, question.machine.rates, question.ctx)
    return advise(where, assumed_lengths(choice.draft.curve))


def _first_token(question: Question, shape: Shape, choice: Choice, num_tokens: int) -> float:
    return first_token_seconds(shape, choice.plan, choice.draft, num_tokens, question.machine.rates)


def _prompts(question: Question) -> tuple[int, ...]:
    """1k and 8k, or as many tokens as the model knows positions; that `ctx` is less is no matter, for the plan hardly
    differs."""
    most = positions(question.target.config) or max(_PROMPTS)
    return tuple(n for n in _PROMPTS if n <= most) or (most,)


def _report(question: Question, shape: Shape, choice: Choice) -> dict[str, object]:
    plan, prediction = choice.plan, choice.prediction
    low, likely, high = prediction.tokens_per_s
    return {
        "verdict": verdict(plan),
        "target": question.target.name,
        "bits": question.bits,
        "draft": choice.draft.kind,
        "budget": choice.budget,
        "s_per_pass": prediction.s_per_pass,
        "link_s": prediction.link_s,
        "compute_s": prediction.compute_s,
        "draft_s": prediction.draft_s,
        "tokens_per_pass": prediction.tokens_per_pass[1],
        "tokens_per_s": likely,
        "tokens_per_s_range": [low, high],
        "first_token_s": {str(n): _first_token(question, shape, choice, n) for n in _prompts(question)},
        "num_resident": len(plan.resident),
        "num_streamed": len(plan.streamed),
        "tiers": {tier: plan.tiers.count(tier) for tier in ("ram", "disk")},
        "streamed_bytes": plan.streamed_bytes,
        "memory": dict(plan.items),
        "host_memory": dict(plan.host_items),
        "total_bytes": plan.total_bytes,
        "limit_bytes": plan.limit_bytes,
    }


def _command(given: Mapping[str, str], lever: Lever) -> str:
    kept = {key: value for key, value in given.items() if "draft" not in lever.flags or key not in OF_A_DRAFT_MODEL}
    flags = {key.replace("_", "-"): value for key, value in kept.items()} | dict(lever.flags)
    return " ".join(["specexec plan", *(f"--{key} {shlex.quote(value)}" for key, value in flags.items())])


def _lever_entry(given: Mapping[str, str], lever: Lever) -> dict[str, object]:
    return {"command": _command(given, lever), "why": lever.why, "gain": lever.gain}
