"""The published guidelines for draft lengths, asked of a model on a machine: its regime, what each gives, which binds.

D is the number of guesses verified in one pass: for a tree, its nodes. Guideline 4 alone speaks of a chain, whose
guesses cost one pass of the draft each.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate

from app.machines import curves
from offload.hardware import Rates
from offload.plan import Plan, kv_cache_bytes
from offload.predict import Choice, Curve, knee, link_seconds
from offload.shape import Shape
from specexec.guidelines import (
    PUBLISHED_AL,
    PUBLISHED_LAYERS,
    PUBLISHED_LENGTH,
    Regime,
    Speeds,
    Work,
    attention_draft_length,
    best_mechanism,
    gemm_draft_length,
    independent_acceptance_length,
    latency_draft_length,
    pass_seconds,
    regime,
    tiled_draft_length,
)

_LONGEST_CHAIN = 64
_SMALLER = 0.1  # layers of a small model of the target's family, where none was named

_BINDING: dict[Regime, str] = {"link": "link", "memory": "gemm", "attention": "attention", "latency": "latency"}


@dataclass(frozen=True)
class Situation:
    """What the guidelines ask of a model, a machine and a draft; plain figures, so that a log can keep them.

    seconds: of a pass of one row, by what it would wait for if that were all. full_rows: where its matrices turn
    compute-bound. num_layers: the target's. layer_ratio: of the draft's to the target's, 0 for one without a model.
    link_nodes: nodes whose arithmetic the link hides, None where nothing streams.
    """

    regime: Regime
    seconds: Mapping[Regime, float]
    ctx: int
    budget: int
    full_rows: int
    group_size: int
    num_layers: int
    layer_ratio: float
    link_nodes: int | None

    @property
    def resident_share(self) -> float:
        """The part of a pass that is left if nothing streams. Own extension: a draft's layers take that much less."""
        return max(each for name, each in self.seconds.items() if name != "link") / max(self.seconds.values())

    @property
    def ratio(self) -> float:
        """What a guess costs, in passes of the target: the layer ratio, and where the target streams, in seconds."""
        return self.layer_ratio * self.resident_share


@dataclass(frozen=True)
class Advice:
    """The draft lengths by guideline: gemm (1), attention (2), tiles (3), latency (4), link (own); and which binds.

    mechanism: guideline 5's.
    """

    situation: Situation
    lengths: Mapping[str, int]
    binding: str
    mechanism: str

    def to_data(self) -> dict[str, object]:
        """As JSON's own types."""
        return {
            **asdict(self.situation),
            "draft_length": dict(self.lengths),
            "binding": self.binding,
            "binding_draft_length": self.lengths[self.binding],
            "mechanism": self.mechanism,
        }


def situation(shape: Shape, choice: Choice, rates: Rates, ctx: int) -> Situation:
    """Where a target of this shape stands at `ctx` tokens of context, with what was chosen for it."""
    plan, text, draft = choice.plan, shape.text, choice.draft.shape
    work, speeds = _work(shape, plan, rates, ctx), _speeds(plan, rates)
    total, used = shape.experts or (1, 1)
    full_rows = speeds.flops / work.weight_flops * work.weight_bytes / speeds.memory_bps * total / used
    return Situation(
        regime(work, speeds),
        pass_seconds(work, speeds),
        ctx,
        choice.budget,
        round(full_rows),
        text.num_attention_heads // (getattr(text, "num_key_value_heads", None) or text.num_attention_heads),
        len(shape.layers),
        len(draft.layers) / len(shape.layers) if draft else 0.0,
        knee(shape, plan, rates) if plan.streamed_bytes else None,
    )


def advise(where: Situation, lengths: Sequence[float]) -> Advice:
    """What each guideline gives; `lengths[d]` is the AL of a draft of length d, guessed or measured."""
    given = {
        "gemm": gemm_draft_length(1, where.full_rows),
        "attention": attention_draft_length(where.group_size),
        "tiles": tiled_draft_length(where.budget, where.group_size),
        "latency": latency_draft_length(lengths, where.ratio),
    }
    if where.link_nodes is not None:
        given["link"] = where.link_nodes
    binding = _BINDING.get(where.regime, "gemm")  # compute-bound already: guideline 1 leaves no room
    if binding == "attention" and where.budget > given["attention"]:
        binding = "tiles"
    return Advice(where, given, binding, _mechanism(where))


def assumed_lengths(curve: Curve) -> list[float]:
    """AL by D of a chain whose guesses are all as good as the first one of this kind of draft is known to be."""
    return [independent_acceptance_length(_first_rate(curve), length) for length in range(_LONGEST_CHAIN + 1)]


def measured_lengths(joint_rates: Mapping[int, float]) -> list[float]:
    """AL by D of passes whose lengths reached k with `joint_rates[k]` (SPEED-Bench's): 1 + the sum over k from 2."""
    reached = [max(rate for k, rate in joint_rates.items() if k > d) for d in range(max(joint_rates, default=0))]
    return list(accumulate(reached)) or [1.0]


def advice_lines(advice: Advice) -> list[str]:
    """What was found, in words."""
    where, given = advice.situation, advice.lengths
    parts = ", ".join(f"{_WORDS[name]} {seconds:.2g} s" for name, seconds in where.seconds.items() if seconds)
    lines = [
        f"regime: {_BOUND[where.regime]} at {where.ctx} tokens of context (a pass of one row: {parts})",
        f"  guideline 1: D = {given['gemm']}, matrices are compute-bound from {where.full_rows} rows on",
        f"  guideline 2: D = {given['attention']}, attention's is 128 / {where.group_size} - 1",
        f"  guideline 3: D = {given['tiles']}, of a budget of {where.budget} what fills attention's tiles",
        f"  guideline 4: D = {given['latency']}, a chain's while it gains more than a guess costs"
        f" ({where.ratio:.2g} passes)",
        f"  guideline 5: {advice.mechanism} promises most at D = {PUBLISHED_LENGTH}",
    ]
    if "link" in given:
        lines.append(f"  own extension: D = {given['link']}, the link hides the arithmetic of so many nodes")
    return [*lines, f"  binding: {_NAMES[advice.binding]}, D = {given[advice.binding]}"]


_WORDS = {"link": "link", "memory": "weights", "attention": "KV cache", "latency": "launches", "compute": "arithmetic"}
_BOUND = {
    "link": "link-bound (own extension)",
    "memory": "memory-bound matrices",
    "attention": "attention-bound",
    "latency": "latency-bound",
    "compute": "compute-bound",
}
_NAMES = {
    "gemm": "guideline 1",
    "attention": "guideline 2",
    "tiles": "guideline 3",
    "latency": "guideline 4",
    "link": "own extension",
}


def _work(shape: Shape, plan: Plan, rates: Rates, ctx: int) -> Work:
    text = shape.text
    width = text.num_attention_heads * (getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
    dense_bytes = shape.num_used * shape.dtype.itemsize
    stored_bytes = sum(layer.slot_bytes for layer in shape.layers) * shape.num_used / shape.num_weights
    return Work(
        weight_flops=2 * shape.num_used,
        weight_bytes=dense_bytes + (stored_bytes + dense_bytes if shape.decoded_bytes else 0),
        streamed_bytes=plan.streamed_bytes,
        attention_flops=4 * width * ctx * len(shape.layers),
        kv_bytes=kv_cache_bytes(shape.config, ctx, shape.dtype),
        fixed_s=len(shape.layers) * rates.layer_s,
    )


def _speeds(plan: Plan, rates: Rates) -> Speeds:
    link_bps = plan.streamed_bytes / link_seconds(plan, rates) if plan.streamed_bytes else rates.link_bps
    return Speeds(rates.flops, rates.memory_bps, link_bps)


def _mechanism(where: Situation) -> str:
    """Guideline 5 over what is published of trained heads and what is known here of drafts that need no training."""
    share, known = where.resident_share, curves()
    heads = [(name, al, share * PUBLISHED_LAYERS[name] / where.num_layers) for name, al in PUBLISHED_AL.items()]
    chains = [
        (name, independent_acceptance_length(_first_rate(known[kind]), PUBLISHED_LENGTH), share * layers)
        for name, kind, layers in (("external", "model", where.layer_ratio or _SMALLER), ("suffix", "suffix", 0.0))
    ]
    return best_mechanism([*heads, *chains], PUBLISHED_LENGTH)


def _first_rate(curve: Curve) -> float:
    return min(curve.tokens_per_pass(1)[1] - 1, 1.0)
