"""The loop: propose, score, verify, emit. Prefill, plain and speculative decoding are this one path."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch

from specexec.budget import Budget, Pace, worth_verifying
from specexec.drafters import Drafter
from specexec.lm import CachedLM, as_ids, score_tree
from specexec.sampling import Sampler
from specexec.tree import ROOT, TokenTree, empty_tree
from specexec.verify import verify

LONGEST_TAIL = 1024  # a longer prompt is prefilled without a tree, whose mask would cover all of its rows squared


@dataclass(frozen=True)
class TokenLogprob:
    """What the target itself thought of a token: its log-probability before penalties, temperature and filters.

    top: the most probable tokens there with theirs, best first, as many as were asked for.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Step:
    """One target pass: what it emitted and what it cost.

    tokens: accepted guesses and one token of the target's own; a stop token, if emitted, is the last.
    tree: what was guessed; `accepted` of its nodes became tokens.
    finish: why nothing follows ("stop": a stop token; "length": max_tokens or the KV rows are used up), else None.
    logprobs: an entry per token where they were asked for.
    """

    tokens: tuple[int, ...]
    tree: TokenTree
    accepted: int
    draft_s: float
    verify_s: float
    finish: Literal["stop", "length"] | None
    logprobs: tuple[TokenLogprob, ...] = ()

    @property
    def drafted(self) -> int:
        return len(self.tree)


def generate(
    target: CachedLM,
    drafter: Drafter | None,
    prompt: Sequence[int],
    sampler: Sampler,
    *,
    budget: int | Pace,
    max_tokens: int,
    stop: frozenset[int] = frozenset(),
    walk: Callable[..., list[int]] = verify,
    num_logprobs: int | None = None,
) -> Iterator[Step]:
    """Continue `prompt` by at most `max_tokens` tokens, a target pass at a time.

    drafter: where guesses come from; None is plain decoding. The text is the same with any, for the same sampler seed.
    budget: the most nodes per tree, or a Pace that chooses it pass by pass from what passes cost and bring; fewer are
        drafted where the KV rows or `max_tokens` leave no room.
    walk: how guesses become tokens; only the baselines that sample their guesses need another (specexec.rejection).
    num_logprobs: None for no logprobs, else how many alternatives each token's entry names.
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
        spend = _spend(budget, target.max_rows - len(context), left - 1, sampler, len(context))
        tree = empty_tree()
        is_short = len(context) - target.num_reusable(context) <= LONGEST_TAIL
        if drafter is not None and spend.num_nodes > 0 and left > 1 and is_short:
            tree = worth_verifying(drafter.propose(context, spend), spend)
        drafted = time.perf_counter()
        logits = score_tree(target, context, tree)
        tokens = walk(tree, logits, sampler, context=context, stop=stop, limit=left)
        verified = time.perf_counter()
        left -= len(tokens)
        finish = "stop" if tokens[-1] in stop else None if left else "length"
        if isinstance(budget, Pace):
            draft_s, verify_s = drafted - started, verified - drafted
            if len(context) > len(prompt):
                budget.observe(rows=1 + len(tree), tokens=len(tokens), draft_s=draft_s, verify_s=verify_s)
            else:
                budget.observe_prefill(verify_s)
        path = tree.path(tokens)
        logprobs = () if num_logprobs is None else _logprobs(logits, path, tokens, num_logprobs)
        yield Step(tuple(tokens), tree, len(path), drafted - started, verified - drafted, finish, logprobs)
        if finish:
            return
        context = np.concatenate([context, as_ids(tokens)])


def _spend(budget: int | Pace, room: int, max_depth: int, sampler: Sampler, length: int) -> Budget:
    """What may be spent behind a context of `length` tokens."""
    temperature = sampler.params.temperature
    if isinstance(budget, Pace):
        spend = budget.budget(room, max_depth, temperature)
    else:
        spend = Budget(min(budget, room), max_depth, temperature)
    if not temperature:
        return spend
    return replace(spend, noise=lambda ahead, size: sampler.noise(length + ahead, size))


def _logprobs(
    logits: torch.Tensor, path: list[int], tokens: list[int], num_alternatives: int
) -> tuple[TokenLogprob, ...]:
    """An entry per token, from the row of `logits` [1 + N, V] that it was drawn from: that of the node before it."""
    rows = [node + 1 for node in (ROOT, *path)][: len(tokens)]
    scores = logits[rows].float().log_softmax(-1)
    best, ids = scores.topk(min(num_alternatives, scores.shape[-1]))
    drawn = scores[range(len(tokens)), tokens].tolist()
    tops = [tuple(zip(*pair, strict=True)) for pair in zip(ids.tolist(), best.tolist(), strict=True)]
    return tuple(TokenLogprob(*entry) for entry in zip(tokens, drawn, tops, strict=True))
