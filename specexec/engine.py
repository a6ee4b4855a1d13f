"""The loop: propose, score, verify, emit. Prefill, plain and speculative decoding are this one path."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from specexec.budget import Budget
from specexec.drafters import Drafter
from specexec.lm import CachedLM, as_ids, score_tree
from specexec.sampling import Sampler
from specexec.tree import TokenTree, empty_tree
from specexec.verify import verify


@dataclass(frozen=True)
class Step:
    """One target pass: what it emitted and what it cost.

    tokens: accepted guesses and one token of the target's own; a stop token, if emitted, is the last.
    tree: what was guessed; `accepted` of its nodes became tokens.
    finish: why nothing follows ("stop": a stop token; "length": max_tokens or the KV rows are used up), else None.
    """

    tokens: tuple[int, ...]
    tree: TokenTree
    accepted: int
    draft_s: float
    verify_s: float
    finish: Literal["stop", "length"] | None

    @property
    def drafted(self) -> int:
        return len(self.tree)


def generate(
    target: CachedLM,
    drafter: Drafter | None,
    prompt: Sequence[int],
    sampler: Sampler,
    *,
    budget: int,
    max_tokens: int,
    stop: frozenset[int] = frozenset(),
) -> Iterator[Step]:
    """Continue `prompt` by at most `max_tokens` tokens, a target pass at a time.

    drafter: where guesses come from; None is plain decoding. The text is the same with any, for the same sampler seed.
    budget: the most nodes per tree; fewer are drafted where the KV rows or `max_tokens` leave no room.
    Raises ValueError for an empty prompt or one that leaves no row for an answer.
    """
    context = as_ids(prompt)
    if not 0 < len(context) < target.max_rows:
        raise ValueError(
            f"the prompt has {len(context)} tokens; it needs at least 1 and at most {target.max_rows - 1}: "
            "shorten it or raise --ctx"
        )
    left = min(max_tokens, target.max_rows - len(context))
    while left > 0:
        started = time.perf_counter()
        room = min(budget, target.max_rows - len(context))
        tree = empty_tree()
        if drafter is not None and room > 0 and left > 1:
            tree = drafter.propose(context, Budget(room, left - 1, sampler.params.temperature))
        drafted = time.perf_counter()
        logits = score_tree(target, context, tree)
        tokens = verify(tree, logits, sampler, context=context, stop=stop, limit=left)
        verified = time.perf_counter()
        left -= len(tokens)
        finish = "stop" if tokens[-1] in stop else None if left else "length"
        accepted = _num_guessed(tree, tokens)
        yield Step(tuple(tokens), tree, accepted, drafted - started, verified - drafted, finish)
        if finish:
            return
        context = np.concatenate([context, as_ids(tokens)])


def _num_guessed(tree: TokenTree, tokens: list[int]) -> int:
    node: int | None = -1
    for count, token in enumerate(tokens):
        node = tree.child(node, token)
        if node is None:
            return count
    return len(tokens)
