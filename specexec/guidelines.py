"""How long a draft should be and where it should come from: published rules of thumb as functions of a model's shape.

The five guidelines are those of "Co-Designing AI Models Using Speculative Decoding for Faster LLM Inference" (NVIDIA,
2026-09-02). D is the number of drafted tokens per target pass, AL the tokens that a pass gives, its own included: from
1 to 1 + D. The part on offloading is this project's own and marked so.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

TILE_ROWS = 128  # rows at which matrix kernels are full: the blog's figure for attention

Regime = Literal["link", "memory", "attention", "latency", "compute"]


@dataclass(frozen=True)
class Mechanism:
    """A way to draft. is_serial: each drafted token waits for the one before. needs_training: before the first use."""

    name: str
    drafting: str
    memory: str
    training: str
    is_serial: bool
    needs_training: bool
    suits: str


MECHANISMS = (  # guideline 5 and table 1 of the blog
    Mechanism(
        "external",
        "D serial passes of a small model",
        "weights and a full KV cache",
        "1T-10T+ tokens from scratch, 100B-400B distilled, 10M-1B adapted",
        True,
        False,
        "low-latency processors; a target whose pass is slow",
    ),
    Mechanism(
        "eagle3",
        "D serial passes of one layer",
        "weights and a small KV cache",
        "1B-10B tokens",
        True,
        True,
        "where no better head exists: lower AL",
    ),
    Mechanism(
        "mtp",
        "D serial passes of one layer",
        "weights and a small KV cache",
        "part of pretraining",
        True,
        False,
        "larger models on GPUs",
    ),
    Mechanism(
        "dflash",
        "one pass of some five layers",
        "weights and a small KV cache",
        "1B-10B tokens",
        False,
        True,
        "smaller models, one request at a time",
    ),
    Mechanism(
        "dspark",
        "one pass of some five layers and a serial Markov head",
        "weights and a small KV cache",
        "1B-10B tokens",
        False,
        True,
        "smaller models, one request at a time",
    ),
    Mechanism("suffix", "one look-up", "none on the device", "none", False, False, "high repetition"),
)


PUBLISHED_LENGTH = 7
PUBLISHED_AL = {"eagle3": 2.39, "dflash": 3.07, "dspark": 3.64}  # at D = 7, MT-Bench, Qwen3-4B, T = 1: arXiv 2607.05147
PUBLISHED_LAYERS = {"eagle3": 1, "dflash": 5, "dspark": 5}  # of those heads


def gemm_draft_length(rows: int, full_rows: int) -> int:
    """Guideline 1: the D at which the linear layers' M(1 + D) rows turn compute-bound, given M = `rows`.

    `full_rows` are where they do (FLOP/s x bytes per weight / (2 x memory rate)). Unlike more requests at once, D adds
    no KV cache: D = 7 reaches the roof with an eighth of the batch.
    """
    return max(full_rows // rows - 1, 0)


def expert_rows(rows: int, draft_length: int, *, num_experts: int, num_used: int) -> float:
    """Guideline 1 for mixtures of experts: rows per expert, M(1 + D) k / E: the sparser, the longer D stays cheap."""
    return rows * (1 + draft_length) * num_used / num_experts


def attention_intensity(group_size: int, draft_length: int = 0) -> int:
    """Guideline 2: FLOP per element pair of decode attention, 2G(1 + D); G query heads share a KV head."""
    return 2 * group_size * (1 + draft_length)


def attention_draft_length(group_size: int) -> int:
    """Guideline 2: where attention dominates, start at D = 128 / G - 1; beyond it attention's time grows with D."""
    return max(TILE_ROWS // group_size - 1, 0)


def tiled_draft_length(draft_length: int, group_size: int) -> int:
    """Guideline 3: the largest D' <= D for which G(1 + D') is a multiple of 128; D itself up to 128 / G - 1."""
    length, start = draft_length, attention_draft_length(group_size)
    while length > start and group_size * (1 + length) % TILE_ROWS:
        length -= 1
    return length


def draft_overhead(ratio: float, draft_length: int, *, is_serial: bool = True) -> float:
    """Guideline 4: drafting time in target passes: rho D, or rho once for a parallel draft; rho is the layer ratio."""
    return ratio * draft_length if is_serial else ratio


def speedup(accepted_length: float, ratio: float, draft_length: int, *, is_serial: bool = True) -> float:
    """Guideline 4: AL / (1 + rho D) if verifying costs no more than a plain pass. ValueError for an impossible AL."""
    if not 1 <= accepted_length <= 1 + draft_length:
        raise ValueError(f"an acceptance length of {accepted_length} is not between 1 and 1 + {draft_length}")
    return accepted_length / (1 + draft_overhead(ratio, draft_length, is_serial=is_serial))


def latency_draft_length(lengths: Sequence[float], ratio: float, *, is_serial: bool = True) -> int:
    """Guideline 4: raise D while dAL / AL exceeds dO / (1 + O). `lengths[d]` is the AL that D = d gives."""
    length = 0
    while length + 1 < len(lengths):
        now, more = (draft_overhead(ratio, d, is_serial=is_serial) if d else 0.0 for d in (length, length + 1))
        if (lengths[length + 1] - lengths[length]) / lengths[length] <= (more - now) / (1 + now):
            break
        length += 1
    return length


def independent_acceptance_length(rate: float, draft_length: int) -> float:
    """AL of a chain whose every guess is right with probability `rate`: (1 - a^(D+1)) / (1 - a)."""
    return 1.0 + draft_length if rate == 1 else (1 - rate ** (draft_length + 1)) / (1 - rate)


def best_mechanism(candidates: Sequence[tuple[str, float, float]], draft_length: int) -> str:
    """Guideline 5: the mechanism of the highest speed-up among (name, AL, rho) at this D."""
    serial = {mechanism.name: mechanism.is_serial for mechanism in MECHANISMS}
    return max(candidates, key=lambda each: speedup(each[1], each[2], draft_length, is_serial=serial[each[0]]))[0]


# This project's own, for targets whose weights cross a link at every pass.


def offload_knee(flops: float, bytes_per_weight: float, link_bps: float) -> float:
    """Own extension: rows up to which a streamed pass costs no more than its bytes, FLOP/s x bytes / (2 x rate)."""
    return flops * bytes_per_weight / (2 * link_bps)


def expert_coverage(rows: float, *, num_experts: int, num_used: int) -> float:
    """Own extension: experts that `rows` independent tokens touch, E (1 - (1 - k/E)^N): what a MoE pass must stream."""
    return num_experts * (1 - (1 - num_used / num_experts) ** rows)


@dataclass(frozen=True)
class Work:
    """One target pass with one row, in the quantities that the guidelines compare.

    weight_flops: per row, 2 x active weights. weight_bytes: read from device memory; streamed_bytes: over the link.
    attention_flops and kv_bytes at this context. fixed_s: launches and other time that neither depends on.
    """

    weight_flops: float
    weight_bytes: float
    streamed_bytes: float
    attention_flops: float
    kv_bytes: float
    fixed_s: float = 0.0


@dataclass(frozen=True)
class Speeds:
    """A machine: FLOP/s, device memory and link in bytes per second."""

    flops: float
    memory_bps: float
    link_bps: float


def pass_seconds(work: Work, speeds: Speeds, rows: int = 1) -> dict[Regime, float]:
    """Seconds that a pass of `rows` rows would take for its link, weights, KV cache, fixed cost or arithmetic alone."""
    return {
        "link": work.streamed_bytes / speeds.link_bps,
        "memory": work.weight_bytes / speeds.memory_bps,
        "attention": work.kv_bytes / speeds.memory_bps,
        "latency": work.fixed_s,
        "compute": rows * (work.weight_flops + work.attention_flops) / speeds.flops,
    }


def regime(work: Work, speeds: Speeds, rows: int = 1) -> Regime:
    """What a pass of `rows` rows waits for: the largest of its link, weight, attention, fixed and compute seconds."""
    seconds = pass_seconds(work, speeds, rows)
    return max(seconds, key=lambda name: seconds[name])
