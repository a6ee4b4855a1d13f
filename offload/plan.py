"""Which layers stay, which stream, and from where, under limits of memory: pure functions of sizes, without I/O."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from transformers import PretrainedConfig

from offload.layout import assign_slots

Tier = Literal["disk", "ram"]
EMBEDDING = "embedding"  # the one item that may lie on either side


class DoesNotFit(MemoryError):  # noqa: N818  (a verdict, and the word that users see)
    """Even the smallest workable plan needs more memory than there is.

    needed_bytes: at least, of the memory that is short; 0 where nobody counted.
    """

    def __init__(self, message: str, needed_bytes: int = 0) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes


class Sized(Protocol):
    """What a plan asks of a layer; `Unit` has it, and so has a layer of which nothing but the shape is known."""

    slot_bytes: int
    resident_bytes: int
    workspace_bytes: int
    signature: tuple


@dataclass(frozen=True)
class Placement:
    """One way to divide the layers into resident and streamed ones, in bytes.

    sizes, pass_bytes: of each streamed layer at rest, and what of it crosses the link in a pass: nothing where it has a
    slot to itself and is loaded once.
    """

    resident: tuple[int, ...]
    streamed: tuple[int, ...]
    num_slots: int
    items: tuple[tuple[str, int], ...]
    sizes: tuple[int, ...]
    pass_bytes: tuple[int, ...]

    @property
    def streamed_bytes(self) -> int:
        return sum(self.pass_bytes)

    @property
    def total_bytes(self) -> int:
        return sum(nbytes for _, nbytes in self.items)


@dataclass(frozen=True)
class Plan:
    """Where every layer goes, and every item of the memory that this takes, in bytes.

    items: of the compute device. host_items: of main memory, where the device has its own.
    tiers: where each streamed layer rests. streamed_bytes, ram_bytes: what crosses the link in a pass, and from RAM.
    """

    items: tuple[tuple[str, int], ...]
    host_items: tuple[tuple[str, int], ...]
    resident: tuple[int, ...]
    streamed: tuple[int, ...]
    tiers: tuple[Tier, ...]
    num_slots: int
    limit_bytes: int
    streamed_bytes: int
    ram_bytes: int

    @property
    def total_bytes(self) -> int:
        """Peak memory by this plan."""
        return sum(nbytes for _, nbytes in self.items)

    @property
    def tier(self) -> Tier:
        """Where the streamed layers rest: `ram` if all of them do."""
        return "ram" if self.tiers and "disk" not in self.tiers else "disk"

    @property
    def gathers_on_host(self) -> bool:
        """Whether the embedding rests in main memory, so that only its rows cross."""
        return EMBEDDING in dict(self.host_items)


def plan(
    layers: Sequence[Sized],
    *,
    fixed: Mapping[str, int],
    limit_bytes: int,
    num_slots: int = 2,
    resident: int | None = None,
    ram_bytes: int | None = None,
) -> Plan:
    """Keeps as many layers resident as fit beside `fixed` (named bytes: embeddings, draft, caches, base, margin, ...).

    `resident` asks for an exact number. `ram_bytes` is the main memory that streamed layers may rest in; None where the
    device computes in main memory itself. Raises DoesNotFit, ValueError for numbers that make no sense.
    """
    placements = place(layers, num_slots, resident)
    return fit(placements, fixed=fixed, limit_bytes=limit_bytes, ram_bytes=ram_bytes)


def place(layers: Sequence[Sized], num_slots: int = 2, resident: int | None = None) -> list[Placement]:
    """Every number of residents worth trying, spread evenly among the streamed layers so that the link works on."""
    if num_slots < 1:
        raise ValueError(f"at least one slot is needed to stream layers, not {num_slots}")
    if resident is not None and not 0 <= resident <= len(layers):
        raise ValueError(f"the model has {len(layers)} layers, so {resident} of them cannot be resident")
    counts = range(len(layers) + 1) if resident is None else (resident,)
    return [_placement(layers, frozenset(_spread(count, len(layers))), num_slots) for count in counts]


def fit(
    placements: Sequence[Placement],
    *,
    fixed: Mapping[str, int],
    limit_bytes: int,
    ram_bytes: int | None = None,
    on_host: Mapping[str, int] | None = None,
) -> Plan:
    """The placement that streams least among those that fit beside `fixed`; more memory never streams more.

    on_host: named bytes that main memory holds beside the streamed layers.
    """
    fixed_bytes = sum(fixed.values())
    fitting = [each for each in placements if fixed_bytes + each.total_bytes <= limit_bytes]
    if not fitting:
        raise _does_not_fit(fixed, placements, limit_bytes)
    best = min(fitting, key=lambda each: (each.streamed_bytes, len(each.streamed), each.total_bytes))
    tiers, host_items = _rest(best, ram_bytes, tuple((on_host or {}).items()))
    return Plan(
        (*fixed.items(), *best.items),
        host_items,
        best.resident,
        best.streamed,
        tiers,
        best.num_slots,
        limit_bytes,
        best.streamed_bytes,
        sum(nbytes for nbytes, tier in zip(best.pass_bytes, tiers, strict=True) if tier == "ram"),
    )


def shared_layers(placed: Placement | Plan) -> tuple[int, ...]:
    """Layers of a placed model that a copy of it uses as well: the resident ones, so that only streamed layers are held
    twice (as in SubSpec). Where nothing is streamed there are none: the copy would be the model itself.
    """
    return placed.resident if placed.streamed else ()


def beside_copy(placement: Placement, layer_bytes: Sequence[int]) -> Placement:
    """`placement` with the layers of a copy that drafts, of `layer_bytes` each; it shares what it can."""
    shared = frozenset(shared_layers(placement))
    copied = sum(nbytes for i, nbytes in enumerate(layer_bytes) if i not in shared)
    return replace(placement, items=(*placement.items, ("draft", copied)))


def kv_cache_bytes(config: PretrainedConfig, rows: int, dtype: torch.dtype) -> int:
    """Keys and values of `rows` positions in every layer; with latent attention (MLA) what both are made from."""
    text = config.get_text_config(decoder=True)
    if getattr(text, "kv_lora_rank", None):
        return text.num_hidden_layers * (text.kv_lora_rank + text.qk_rope_head_dim) * rows * dtype.itemsize
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 2 * text.num_hidden_layers * heads * head_size * rows * dtype.itemsize


def logits_bytes(config: PretrainedConfig, rows: int, dtype: torch.dtype) -> int:
    """Scores of the whole vocabulary at `rows` positions."""
    return config.get_text_config(decoder=True).vocab_size * rows * dtype.itemsize


def _placement(layers: Sequence[Sized], chosen: frozenset[int], num_slots: int) -> Placement:
    streamed = tuple(i for i in range(len(layers)) if i not in chosen)
    slots = assign_slots([layers[i] for i in streamed], num_slots)
    ring_bytes = sum(slots.slot_bytes) + sum(slots.workspace_bytes.values())
    scratch = max((layers[i].slot_bytes for i in chosen if layers[i].workspace_bytes), default=0)
    users = [0] * len(slots.slot_bytes)
    for slot in slots.slot_of:
        users[slot] += 1
    items = {
        "resident layers": sum(layers[i].resident_bytes for i in chosen),
        "slots": sum(slots.slot_bytes),
        "layer workspace": sum(slots.workspace_bytes.values()),
        "load buffer": max(0, scratch - ring_bytes),  # used before the ring is filled
    }
    return Placement(
        tuple(sorted(chosen)),
        streamed,
        num_slots,
        tuple(items.items()),
        tuple(layers[i].slot_bytes for i in streamed),
        tuple(layers[i].slot_bytes if users[slot] > 1 else 0 for i, slot in zip(streamed, slots.slot_of, strict=True)),
    )


def _rest(
    placement: Placement, ram_bytes: int | None, on_host: tuple[tuple[str, int], ...]
) -> tuple[tuple[Tier, ...], tuple[tuple[str, int], ...]]:
    """Tier of every streamed layer and what main memory holds: beside `on_host` as many layers as fit, spread among
    those on disk."""
    sizes, held_bytes = placement.sizes, sum(nbytes for _, nbytes in on_host)
    if ram_bytes is None:
        return ("disk",) * len(sizes), on_host
    if held_bytes + sum(sizes) <= ram_bytes:
        return ("ram",) * len(sizes), (*on_host, ("arena", sum(sizes))) if sizes else on_host
    staging = 2 * max(sizes, default=0)
    room = ram_bytes - held_bytes - staging
    if room < 0:
        beside = "".join(f" beside the {name} ({_gb(nbytes)})" for name, nbytes in on_host)
        raise DoesNotFit(
            f"{_gb(held_bytes + staging)} of main memory are needed at least to bring layers from the disk{beside}, the"
            f" limit is {_gb(ram_bytes)}: take more main memory (raise --ram-limit if it is set) or fewer --bits",
            held_bytes + staging,
        )
    moving = [i for i, nbytes in enumerate(placement.pass_bytes) if nbytes]  # the others are read once
    choices = ([moving[j] for j in _spread(count, len(moving))] for count in range(len(moving) + 1))
    held = {sum(sizes[i] for i in chosen): chosen for chosen in choices}
    most = max(nbytes for nbytes in held if nbytes <= room)
    chosen = frozenset(held[most])
    tiers = tuple("ram" if i in chosen else "disk" for i in range(len(sizes)))
    return tiers, (*on_host, ("arena", most), ("staging", staging))


def _spread(count: int, total: int) -> list[int]:
    return [(2 * i + 1) * total // (2 * count) for i in range(count)]


def _does_not_fit(fixed: Mapping[str, int], placements: Sequence[Placement], limit_bytes: int) -> DoesNotFit:
    smallest = min(placements, key=lambda each: each.total_bytes)
    items = [(name, nbytes) for name, nbytes in (*fixed.items(), *smallest.items) if nbytes]
    remedies = ["take more memory (raise the limit if it is set)"]
    if len(placements) == 1 and smallest.resident:  # that many were asked for
        remedies.append(f"keep fewer than {len(smallest.resident)} layers resident")
    if smallest.num_slots > 2 and smallest.streamed:
        remedies.append(f"take fewer than {smallest.num_slots} slots")
    remedies += ["shorten the context", "lower the budget"]
    if any(name.startswith("draft") for name, _ in items):
        remedies.append("take a smaller draft or none")
    needed_bytes = sum(nbytes for _, nbytes in items)
    return DoesNotFit(
        f"{_gb(needed_bytes)} are needed at least ({', '.join(f'{name} {_gb(nbytes)}' for name, nbytes in items)}),"
        f" the limit is {_gb(limit_bytes)}: {', '.join(remedies[:-1])} or {remedies[-1]}",
        needed_bytes,
    )


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB"
