"""The walk that turns scored guesses into tokens of the target's own distribution.

One token is drawn per step, from the target's distribution at the node reached so far, exactly as plain decoding draws
it. If a child guessed the token, its logits are already known and the walk goes on; if not, the pass has given its last
token. So the text depends on the target and the seed, never on the draft (SpecExec, arXiv 2406.02532).
"""

import numpy as np
import torch

from specexec.sampling import Sampler
from specexec.tree import ROOT, TokenTree


def verify(
    tree: TokenTree,
    logits: torch.Tensor,
    sampler: Sampler,
    *,
    context: np.ndarray,
    stop: frozenset[int],
    limit: int,
) -> list[int]:
    """Draw tokens (at least one, at most `limit`) until one was not guessed, or is in `stop`.

    logits: [1 + N, V], row 0 for the root and row 1 + i for node i.
    All tokens but the last were guessed; the last may have been (then it was cut by `stop` or `limit`).
    """
    path, node, emitted = context, ROOT, []
    while True:
        token = sampler(logits[node + 1], path)
        emitted.append(token)
        child = tree.child(node, token)
        if child is None or token in stop or len(emitted) == limit:
            return emitted
        node = child
        path = np.append(path, token)
