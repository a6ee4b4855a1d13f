"""SPEED-Bench's metrics, exactly as its measurement code defines them, over logs of what each pass emitted and when.

A log is the list of chunks of one turn: how many tokens each target pass emitted. Definitions: Model-Optimizer's
specdec_bench (arXiv 2604.09557).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Request:
    """One question: its category and, per turn, the lengths of its chunks and the times around them.

    times[turn]: seconds at which the turn was submitted and at which each chunk arrived, one more than chunks.
    """

    category: str
    lengths: tuple[tuple[int, ...], ...]
    times: tuple[tuple[float, ...], ...]


def without_end(lengths: Sequence[int], *, ended: bool) -> tuple[int, ...]:
    """Chunk lengths without the end-of-text token of a turn that `ended` with one; a chunk of it alone is dropped."""
    if not ended or not lengths:
        return tuple(lengths)
    last = lengths[-1] - 1
    return (*lengths[:-1], last) if last else tuple(lengths[:-1])


def acceptance(requests: Mapping[str, Request]) -> dict[str, object]:
    """Acceptance lengths per request (over all chunks of all turns), per category and on average (over requests).

    Besides these the histogram of chunk lengths and, for each length k that occurs, Joint_Acceptance_Rate[k], the share
    of chunks at least that long, and Conditional_Acceptance_Rate[k], the same share of those that reached the length
    that occurs before it.
    """
    chunks = {name: [length for turn in request.lengths for length in turn] for name, request in requests.items()}
    chunks = {name: lengths for name, lengths in chunks.items() if lengths}
    by_request = {name: float(np.mean(lengths)) for name, lengths in chunks.items()}
    by_category: dict[str, list[float]] = {}
    for name, length in by_request.items():
        by_category.setdefault(requests[name].category, []).append(length)
    histogram = Counter(length for lengths in chunks.values() for length in lengths)
    joint = {k: sum(n for length, n in histogram.items() if length >= k) / histogram.total() for k in sorted(histogram)}
    before = [1.0, *joint.values()]
    return {
        "Request_AL": by_request,
        "Category_AL": {category: float(np.mean(lengths)) for category, lengths in by_category.items()},
        "Average_AL": float(np.mean(list(by_request.values()))) if by_request else 0.0,
        "Acceptance_Length_Histogram": dict(sorted(histogram.items())),
        "Joint_Acceptance_Rate": joint,
        "Conditional_Acceptance_Rate": {k: rate / last for (k, rate), last in zip(joint.items(), before, strict=False)},
    }


def timing(requests: Mapping[str, Request]) -> dict[str, object]:
    """Output TPS over the whole run; per turn E2E, TTFT and generation TPS; per chunk the step time."""
    turns = [
        (sum(lengths), times)
        for request in requests.values()
        for lengths, times in zip(request.lengths, request.times, strict=True)
        if len(times) > 1
    ]
    if not turns:
        return {}
    span = max(times[-1] for _, times in turns) - min(times[0] for _, times in turns)
    longer = [(tokens, times) for tokens, times in turns if len(times) > 2]
    return {
        "Output TPS": sum(tokens for tokens, _ in turns) / span,
        "E2E Request Time": _spread([times[-1] - times[0] for _, times in turns]),
        "TTFT Time": _spread([times[1] - times[0] for _, times in turns]),
        "Request Generation TPS": _spread([(tokens - 1) / (times[-1] - times[1]) for tokens, times in longer]),
        "Request Generation Step Time": _spread([step for _, times in turns for step in np.diff(times)]),
    }


def _spread(values: Sequence[float]) -> dict[str, str]:
    if not len(values):
        return {}
    array = np.asarray(values, float)
    figures = {"min": array.min(), "max": array.max(), "mean": array.mean(), "std": array.std()}
    figures |= {f"quantile_{q}": np.quantile(array, q) for q in (0.25, 0.5, 0.75)}
    return {name: f"{value:.4f}" for name, value in figures.items()}
