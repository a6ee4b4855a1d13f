"""Which layers stay and which stream under a memory limit: a pure function of sizes, without I/O."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from transformers import PretrainedConfig

from offload.layout import Unit, assign_slots

Tier = Literal["disk", "ram"]


class DoesNotFit(MemoryError):  # noqa: N818  (a verdict, and the word that users see)
    """Even the smallest workable plan needs more memory than there is."""


@dataclass(frozen=True)
class Plan:
    """Where every layer goes, and every item of the memory that this takes on the compute device, in bytes."""

    items: tuple[tuple[str, int], ...]
    resident: tuple[int, ...]
    streamed: tuple[int, ...]
    num_slots: int
    tier: Tier
    limit_bytes: int
    streamed_bytes: int  # per pass

    @property
    def total_bytes(self) -> int:
        """Peak memory by this plan."""
        return sum(nbytes for _, nbytes in self.items)


def plan(
    layers: Sequence[Unit],
    *,
    fixed: Mapping[str, int],
    limit_bytes: int,
    num_slots: int = 2,
    resident: int | None = None,
    tier: Tier = "disk",
) -> Plan:
    """Keeps as many layers resident as fit beside `fixed` (named bytes: embeddings, draft, caches, base, margin, ...).

    Residents are spread evenly among the streamed layers, so that the link works while they compute. More memory never
    streams more. `resident` asks for an exact number. Raises DoesNotFit, ValueError for numbers that make no sense.
    """
    if num_slots < 1:
        raise ValueError(f"at least one slot is needed to stream layers, not {num_slots}")
    if resident is not None and not 0 <= resident <= len(layers):
        raise ValueError(f"the model has {len(layers)} layers, so {resident} of them cannot be resident")
    counts = range(len(layers) + 1) if resident is None else (resident,)
    choices = [frozenset(_spread(count, len(layers))) for count in counts]
    plans = [_plan_for(layers, chosen, fixed, limit_bytes, num_slots, tier) for chosen in choices]
    fitting = [candidate for candidate in plans if candidate.total_bytes <= limit_bytes]
    if not fitting:
        raise _does_not_fit(min(plans, key=lambda candidate: candidate.total_bytes))
    return min(
        fitting, key=lambda candidate: (candidate.streamed_bytes, candidate.total_bytes, len(candidate.streamed))
    )


def kv_cache_bytes(config: PretrainedConfig, rows: int, dtype: torch.dtype) -> int:
    """Keys and values of `rows` positions in every layer."""
    text = config.get_text_config(decoder=True)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 2 * text.num_hidden_layers * heads * head_size * rows * dtype.itemsize


def logits_bytes(config: PretrainedConfig, rows: int, dtype: torch.dtype) -> int:
    """Scores of the whole vocabulary at `rows` positions."""
    return config.get_text_config(decoder=True).vocab_size * rows * dtype.itemsize


def _plan_for(
    layers: Sequence[Unit],
    chosen: frozenset[int],
    fixed: Mapping[str, int],
    limit_bytes: int,
    num_slots: int,
    tier: Tier,
) -> Plan:
    streamed = tuple(i for i in range(len(layers)) if i not in chosen)
    slots = assign_slots([layers[i] for i in streamed], num_slots)
    ring_bytes = sum(slots.slot_bytes) + sum(slots.workspace_bytes.values())
    scratch = max((layers[i].slot_bytes for i in chosen if layers[i].workspace_bytes), default=0)
    items = {
        **fixed,
        "resident layers": sum(layers[i].resident_bytes for i in chosen),
        "slots": sum(slots.slot_bytes),
        "layer workspace": sum(slots.workspace_bytes.values()),
        "load buffer": max(0, scratch - ring_bytes),  # used before the ring is filled
    }
    return Plan(
        tuple(items.items()),
        tuple(sorted(chosen)),
        streamed,
        num_slots,
        tier,
        limit_bytes,
        # a layer that has a slot to itself is read once
        sum(
            layers[i].slot_bytes
            for i, slot in zip(streamed, slots.slot_of, strict=True)
            if slots.slot_of.count(slot) > 1
        ),
    )


def _spread(count: int, total: int) -> list[int]:
    return [(2 * i + 1) * total // (2 * count) for i in range(count)]


def _does_not_fit(smallest: Plan) -> DoesNotFit:
    needs = ", ".join(f"{name} {_gb(nbytes)}" for name, nbytes in smallest.items if nbytes)
    return DoesNotFit(
        f"{_gb(smallest.total_bytes)} are needed at least ({needs}), the limit is {_gb(smallest.limit_bytes)}:"
        " raise the limit, shorten the context, lower the budget or take a smaller draft or none"
    )


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB"
