"""The baselines' verification: accept a sampled guess with probability min(1, p / q), else draw from what is left of p.

Lossless for the draft's own samples (Leviathan et al., arXiv 2211.17192), in several rounds where a node has several
(SpecInfer, arXiv 2305.09781). It needs more random numbers than tokens, so unlike specexec.verify it gives another text
of the same distribution for another draft.
"""

import numpy as np
import torch

from specexec.drafters.sampled import SampledTree
from specexec.sampling import Sampler
from specexec.tree import ROOT


def verify_sampled(
    tree: SampledTree,
    logits: torch.Tensor,
    sampler: Sampler,
    *,
    context: np.ndarray,
    stop: frozenset[int],
    limit: int,
) -> list[int]:
    """Tokens of the target's distribution, at least one and at most `limit`; same interface as specexec.verify."""
    path, node, emitted = context, ROOT, []
    while True:
        child, token = _next(tree, node, sampler.probs(logits[node + 1], path), sampler)
        emitted.append(token)
        if child is None or token in stop or len(emitted) == limit:
            return emitted
        node = child
        path = np.append(path, token)


def _next(tree: SampledTree, node: int, probs: torch.Tensor, sampler: Sampler) -> tuple[int | None, int]:
    """The child that was accepted, if any, and the next token."""
    draws = tree.draws[node + 1] if len(tree) else ()
    proposal = torch.zeros_like(probs)
    if draws:
        row = tree.probs[node + 1].double()[: len(probs)]
        proposal[: len(row)] = row.to(probs.device)
    for child in draws:
        token = int(tree.tokens[child])
        if sampler.uniform() * float(proposal[token]) < float(probs[token]):
            return child, token
        left = (probs - proposal).clamp(min=0)
        total = float(left.sum())
        probs = left / total if total > 0 else probs  # nothing is left where p equals q but for rounding
    return None, sampler.pick(probs)
