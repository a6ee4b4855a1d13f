"""How a session's automatic budget begins: with what can be measured before the first answer."""

import time

import numpy as np

from specexec.acceptance import Acceptance
from specexec.budget import Pace
from specexec.drafters import DraftLM
from specexec.lm import CachedLM
from specexec.tree import ROOT

_ROUNDS = 3  # the first one of a model does work that no later one does


def measured_pace(most: int, target: CachedLM, draft: DraftLM, acceptance: Acceptance, temperature: float) -> Pace:
    """A pace of trees up to `most` nodes that knows what passes of the target and of the draft take.

    For a target with nothing to stream, next to which a draft may be slow; else a pass is not worth its seconds here.
    acceptance: what earlier sessions have learned of this draft.
    """
    plain_s, step_s = _step_seconds(target), _step_seconds(draft)
    return Pace(most, plain_s=plain_s, step_s=step_s, chance=acceptance.chance(temperature))


def _step_seconds(lm: DraftLM) -> float:
    """Of a pass over one row, the least of a few; the next context finds these rows of no use and drops them."""
    lm.prefill(np.zeros(1, np.int64))
    seconds, parent = [], ROOT
    for node in range(min(_ROUNDS, lm.num_free)):
        started = time.perf_counter()
        logits = lm.extend(np.zeros(1, np.int64), np.array([parent]))
        logits[0, 0].item()  # on a GPU nothing has happened before a value is asked for
        seconds.append(time.perf_counter() - started)
        parent = node
    return min(seconds)
