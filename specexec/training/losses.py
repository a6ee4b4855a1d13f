"""How far a draft's guesses are from the target's, row by row; rows are [n, Vd] logits over the draft's vocabulary."""

from collections.abc import Callable

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

_PART = 4096  # rows whose logits are held at once


def soft_cross_entropy(draft: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """-sum p_target log p_draft: [n]."""
    return -(target.softmax(-1) * draft.log_softmax(-1)).sum(-1)


def distance(draft: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """||p_draft - p_target||_1: [n]; half of it is how often a draw of the draft is rejected."""
    return (draft.softmax(-1) - target.softmax(-1)).abs().sum(-1)


def guess_loss(draft: torch.Tensor, target: torch.Tensor, labels: torch.Tensor, soft: float) -> torch.Tensor:
    """A mixture, `soft` of it against the target's distribution, the rest against its token: [n]."""
    if soft == 1:
        return soft_cross_entropy(draft, target)
    hard = F.cross_entropy(draft, labels, reduction="none")
    return hard if soft == 0 else soft * soft_cross_entropy(draft, target) + (1 - soft) * hard


def agreement(draft: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Whether both would say the same greedily: [n], 0 or 1."""
    return (draft.argmax(-1) == target.argmax(-1)).float()


def confidence_loss(confidence: torch.Tensor, gap: torch.Tensor) -> torch.Tensor:
    """Binary cross-entropy of acceptance logits [n] against 1 - gap / 2, `gap` being the distances [n]."""
    return F.binary_cross_entropy_with_logits(confidence, 1 - gap.detach() / 2, reduction="none")


def slot_weights(count: int, decay: float) -> torch.Tensor:
    """exp(-k / decay) for slots k = 0, 1, ..."""
    return torch.exp(-torch.arange(count) / decay)


def in_parts(compute: Callable[..., torch.Tensor], *rows: torch.Tensor) -> torch.Tensor:
    """The sum of compute(*part) over parts of `rows`, each [n, ...]: the logits of many rows never exist at once."""
    parts = list(zip(*(each.split(_PART) for each in rows), strict=True))
    if len(parts) == 1:
        return compute(*parts[0])
    return torch.stack([checkpoint(compute, *part, use_reentrant=False) for part in parts]).sum(0)
