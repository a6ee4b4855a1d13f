"""Seconds per pass and tokens per second of a plan, from sizes and rates alone; and the choice of draft and budget.

Knows nothing of tokens: how many a tree of some size brings is data that the caller gives.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from offload.hardware import Rates
from offload.plan import EMBEDDING, DoesNotFit, Placement, Plan, beside_copy, fit
from offload.shape import Shape

BUDGETS = (16, 32, 64, 128, 256, 512, 1024)
_GATHER_BPS = 2e9  # of rows that the CPU gathers and copies from pageable memory: assumed, on the low side


@dataclass(frozen=True)
class Curve:
    """What a kind of draft brings: by budget, tokens per pass (low, likely, high) and passes of the draft per tree."""

    tokens: Mapping[int, tuple[float, float, float]]
    steps: Mapping[int, float]
    source: str

    def tokens_per_pass(self, budget: int) -> tuple[float, float, float]:
        """Between two known budgets, straight over the logarithm; beyond the last nothing more is promised."""
        return tuple(_between({n: each[i] for n, each in self.tokens.items()}, budget) for i in range(3))

    def num_steps(self, budget: int) -> float:
        """How often the draft model runs for one tree."""
        return _between(self.steps, budget) if self.steps else 0.0


@dataclass(frozen=True)
class Draft:
    """A way to draft: its name, its model if it has one, and the bytes that it adds for `rows` and `batch` nodes.

    layer_bytes: of each layer of a copy of the target, which holds only those that it cannot share; else none.
    decode_bps: the rate at which its matrices are decoded, as Rates have it for the target's, where it was measured.
    """

    kind: str
    curve: Curve
    shape: Shape | None
    memory: Callable[[int, int], Mapping[str, int]]
    layer_bytes: tuple[int, ...] = ()
    decode_bps: float | None = None


@dataclass(frozen=True)
class Prediction:
    """Seconds of one round and what it brings. s_per_pass: the target's; the draft's are counted apart."""

    link_s: float
    compute_s: float
    s_per_pass: float
    draft_s: float
    tokens_per_pass: tuple[float, float, float]

    @property
    def tokens_per_s(self) -> tuple[float, float, float]:
        """Low, likely, high."""
        low, likely, high = (tokens / (self.s_per_pass + self.draft_s) for tokens in self.tokens_per_pass)
        return low, likely, high


@dataclass(frozen=True)
class Choice:
    """A plan with the draft and the budget that it is for, and what it should do."""

    plan: Plan
    draft: Draft
    budget: int
    prediction: Prediction


def choose(
    target: Shape,
    placements: Sequence[Placement],
    drafts: Sequence[Draft],
    *,
    budgets: Sequence[int],
    fixed: Callable[[Draft, int], Mapping[str, int]],
    limit_bytes: int,
    ram_bytes: int | None,
    rates: Rates,
) -> Choice:
    """The draft, the budget and the residents that together promise most tokens per second.

    `fixed(draft, budget)` names the bytes beside the layers. The embedding goes to main memory only where that promises
    more. Raises DoesNotFit if nothing fits: of all refusals the one that needs least.
    """
    choices: list[Choice] = []
    refusals: list[DoesNotFit] = []
    for draft in drafts:
        placed = [beside_copy(each, draft.layer_bytes) for each in placements] if draft.layer_bytes else placements
        for budget in budgets if draft.curve.tokens_per_pass(max(budgets))[1] > 1 else budgets[:1]:
            for items, on_host in _sides(target, draft, fixed(draft, budget), ram_bytes):
                try:
                    chosen = fit(placed, fixed=items, limit_bytes=limit_bytes, ram_bytes=ram_bytes, on_host=on_host)
                except DoesNotFit as error:
                    refusals.append(error)
                    continue
                choices.append(Choice(chosen, draft, budget, predict(target, chosen, draft, budget, rates)))
    if not choices:
        raise min(refusals, key=lambda each: each.needed_bytes)
    return max(choices, key=lambda each: (each.prediction.tokens_per_s[1], not each.plan.gathers_on_host))


def _sides(
    target: Shape, draft: Draft, items: Mapping[str, int], ram_bytes: int | None
) -> Iterator[tuple[Mapping[str, int], Mapping[str, int]]]:
    """Items of the device and of main memory: with the embedding there, where it can be, and with it on the device."""
    # The steps of a copy are recorded as CUDA graphs, in which nothing may wait for the host.
    if ram_bytes is not None and not target.is_tied and not draft.layer_bytes:
        staging = 2 * max(layer.slot_bytes for layer in target.layers)
        if items[EMBEDDING] + staging <= ram_bytes:
            yield {**items, EMBEDDING: 0}, {EMBEDDING: items[EMBEDDING]}
    yield items, {}


def predict(target: Shape, plan: Plan, draft: Draft, budget: int, rates: Rates) -> Prediction:
    """One round: the draft grows a tree of `budget` nodes while the slots refill, then the target scores it."""
    draft_s = _draft_s(draft, budget, rates)
    link_s = link_seconds(plan, rates)
    compute_s = compute_seconds(target, budget + 1, rates)
    slot_bytes = min(dict(plan.items)["slots"], plan.streamed_bytes)
    prefetched_s = min(draft_s, link_s * slot_bytes / plan.streamed_bytes) if plan.streamed_bytes else 0.0
    s_per_pass = max(link_s - prefetched_s, compute_s + rates.link_cost * link_s)
    s_per_pass += _gather_s(target, plan, budget + 1)
    return Prediction(link_s, compute_s, s_per_pass, draft_s, draft.curve.tokens_per_pass(budget))


def link_seconds(plan: Plan, rates: Rates) -> float:
    """What bringing the streamed layers takes: those in RAM at the link's rate, the others at the slower of the two."""
    from_disk = plan.streamed_bytes - plan.ram_bytes
    return plan.ram_bytes / rates.link_bps + from_disk / min(rates.disk_bps, rates.link_bps)


def compute_seconds(shape: Shape, num_tokens: int, rates: Rates) -> float:
    """What scoring `num_tokens` takes with all weights at hand: the larger of arithmetic and reading the weights.

    Quantized matrices are decoded first, for each chunk of tokens anew (for attention's, which are not, that is on the
    high side): read, written and read again in the compute type. Experts that no token chooses are not read.
    """
    arithmetic_s = 2 * shape.num_used * num_tokens / rates.flops
    share = _share_read(shape, num_tokens)
    stored_bytes = sum(layer.slot_bytes for layer in shape.layers)
    dense_bytes = shape.num_weights * shape.dtype.itemsize * share
    layers_s = len(shape.layers) * (rates.layer_s + num_tokens * shape.text.hidden_size * rates.value_s)
    read_s = dense_bytes / rates.memory_bps
    if not shape.decoded_bytes:
        return layers_s + max(arithmetic_s, read_s)
    chunks = -(-num_tokens // rates.chunk_rows)
    decode_s = (stored_bytes * share + 2 * dense_bytes) / (rates.decode_bps or rates.memory_bps)
    return layers_s + chunks * decode_s + max(arithmetic_s - chunks * read_s, 0)


def _share_read(shape: Shape, num_tokens: int) -> float:
    """The part of the weights that `num_tokens` tokens need: all of them, but for experts that none chooses."""
    total, used = shape.experts or (1, 1)
    if used >= total:
        return 1.0
    fused = (shape.num_weights - shape.num_used) * total / (total - used)
    return 1 - fused / shape.num_weights * (1 - shape.distinct_experts(num_tokens) / total)


def first_token_seconds(target: Shape, plan: Plan, draft: Draft, num_tokens: int, rates: Rates) -> float:
    """Prefill of `num_tokens`: the weights cross once, attention over all pairs of tokens is added."""
    compute_s = compute_seconds(target, num_tokens, rates) + _pairs_s(target, num_tokens, rates)
    own = max(link_seconds(plan, rates), compute_s) + _gather_s(target, plan, num_tokens)
    if draft.shape is None:
        return own
    return own + compute_seconds(draft.shape, num_tokens, _of(draft, rates)) + _pairs_s(draft.shape, num_tokens, rates)


def knee(target: Shape, plan: Plan, rates: Rates) -> int:
    """The number of nodes whose arithmetic takes as long as the link: N* = FLOPS x link seconds / (2 x weights)."""
    spare_s = link_seconds(plan, rates) - (compute_seconds(target, 1, rates) if target.decoded_bytes else 0.0)
    return max(1, int(spare_s * rates.flops / (2 * target.num_used)))


def _gather_s(target: Shape, plan: Plan, num_tokens: int) -> float:
    """What the embedding's rows take before the first layer can begin, where they come from main memory."""
    return num_tokens * target.text.hidden_size * target.dtype.itemsize / _GATHER_BPS if plan.gathers_on_host else 0.0


def _draft_s(draft: Draft, budget: int, rates: Rates) -> float:
    if draft.shape is None:
        return 0.0
    steps = draft.curve.num_steps(budget)
    return steps * compute_seconds(draft.shape, max(1, round(budget / max(steps, 1))), _of(draft, rates))


def _of(draft: Draft, rates: Rates) -> Rates:
    return replace(rates, decode_bps=draft.decode_bps) if draft.decode_bps else rates


def _pairs_s(shape: Shape, num_tokens: int, rates: Rates) -> float:
    text = shape.text
    width = text.num_attention_heads * (getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
    return 2 * width * text.num_hidden_layers * num_tokens**2 / rates.flops


def _between(points: Mapping[int, float], at: int) -> float:
    known = sorted(points)
    if at <= known[0] or at >= known[-1]:
        return points[known[0] if at <= known[0] else known[-1]]
    above = next(n for n in known if n >= at)
    below = known[known.index(above) - 1]
    part = math.log(at / below) / math.log(above / below)
    return points[below] + part * (points[above] - points[below])
