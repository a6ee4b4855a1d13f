"""What a proposal may spend, and the pace that finds out as it runs how much spending pays.

Tokens per second is the goal: something that takes `t` seconds pays if it brings more than rate x t expected tokens,
where `rate` is what has been reached so far. The rate that this rule leads to is the best one (Dinkelbach's method for
ratios). Everything here follows from measured seconds; none of it can change the text.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from specexec.guidelines import independent_acceptance_length, speedup
from specexec.tree import TokenTree

_FIRST_NODES = 32
_LEARNING = 0.25
_MEMORY = 0.9
_TRIAL = 6  # drafted passes before a draft is judged by the full measure; one that is much too bad is known earlier
_RETRIAL = 3  # the same for one that has been paused before
_PAUSE, _LONGER, _LONGEST = 4, 4, 1024  # passes without a draft that did not pay, and by what this grows each time
_LOSS = 0.01  # of the time that passes without a draft take: what it may cost to try one again and again
_PROMISING = 1.1  # at best, of plain decoding's rate: less is not worth finding out at once
_LONGEST_CHAIN = 32  # guesses, that this is judged by
_WIDE = 1.3  # a larger ratio of neighbouring row counts is a gap in what is known
_STALE = 150  # measurements, after which one that was not renewed is forgotten
_WORTH = 0.99  # of plain decoding's rate: a draft that costs nothing must not be paused for the noise of the clock
_FREE = 0.01  # of a pass: what takes less has cost nothing
_LEAST = 0.1  # of a measured pass, whatever its slope says: something is always paid


@dataclass(frozen=True)
class Budget:
    """The room that one proposal has.

    num_nodes: the most nodes that the target will score in its pass (the root not counted).
    max_depth: the longest path that can still be emitted; deeper nodes would be wasted.
    temperature: the target's sampling temperature, 0 for greedy: it decides what a draft's scores are worth.
    rate: tokens per second so far; drafting that brings less than this is not worth its time. 0: time does not matter.
    verify_s: seconds that the target's pass takes for a number of rows (root and nodes), where rate matters.
    noise: what the sampler will add to the log-scores of the token drawn `ahead` tokens from now (0: the next), as
        noise(ahead, size): float64 [size], by token (see specexec.sampling). None where it adds nothing.
    """

    num_nodes: int
    max_depth: int
    temperature: float = 0.0
    rate: float = 0.0
    verify_s: Callable[[np.ndarray], np.ndarray] | None = None
    noise: Callable[[int, int], np.ndarray] | None = None

    def values(self, scores: np.ndarray) -> np.ndarray:
        """Tokens expected of the first 0, 1, ... N nodes, less what the target could have done in the time they take.

        scores: float [N], log-probabilities that the nodes are accepted.
        """
        values = np.concatenate([[0.0], np.cumsum(np.exp(scores, dtype=np.float64))])
        if self.verify_s is None:
            return values
        seconds = self.verify_s(np.arange(1, len(values) + 1))
        return values - self.rate * (seconds - seconds[0])

    def price(self, count: int) -> float:
        """Tokens that the target could have done in the time that one more than `count` nodes takes."""
        if self.verify_s is None:
            return 0.0
        without, with_it = self.verify_s(np.array([count + 1, count + 2]))
        return self.rate * float(with_it - without)


def worth_verifying(tree: TokenTree, budget: Budget) -> TokenTree:
    """The part of `tree`, whose nodes stand best first, that pays for the target's time."""
    if budget.verify_s is None:
        return tree
    count = int(budget.values(tree.scores).argmax())
    return TokenTree(tree.tokens[:count], tree.parents[:count], tree.scores[:count])


class CostCurve:
    """Seconds against rows, learned from single measurements; never falls with more rows.

    Between and beyond what was measured it assumes the least that a convex curve allows, since a pass costs max(link,
    compute): what looks cheap is tried, and then it is known. With one point only, cost is taken as flat.
    """

    def __init__(self) -> None:
        self._points: dict[int, tuple[float, float, int]] = {}  # by quarter octave of rows: rows, seconds, count
        self._seen: dict[int, int] = {}  # at which measurement each was measured last
        self._now = 0

    @property
    def most_rows(self) -> int:
        """The most rows measured so far."""
        return round(max((rows for rows, _, _ in self._points.values()), default=0))

    @property
    def least_s(self) -> float:
        """Seconds of the smallest pass measured."""
        return self._points[min(self._points)][1] if self._points else 0.0

    def observe(self, rows: int, seconds: float) -> None:
        """Learn that `rows` rows took `seconds`; what has not been measured for long is forgotten and may be tried."""
        octave = int(4 * np.log2(rows))
        self._now += 1
        self._seen[octave] = self._now
        for stale in [each for each, last in self._seen.items() if self._now - last > _STALE]:
            del self._seen[stale], self._points[stale]
        old_rows, old_seconds, count = self._points.get(octave, (0.0, 0.0, 0))
        share = max(_LEARNING, 1 / (count + 1))
        self._points[octave] = (
            old_rows + share * (rows - old_rows),
            old_seconds + share * (seconds - old_seconds),
            count + 1,
        )

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        """Seconds that each number of `rows` should take; 0 where nothing has been measured."""
        if not self._points:
            return np.zeros(len(rows))
        x, y, weights = np.array([self._points[octave] for octave in sorted(self._points)], float).T
        y = _rising(y, np.minimum(weights, 1 / _LEARNING))
        slopes = np.diff(y) / np.diff(x)
        first, last = (slopes[0], slopes[-1]) if len(slopes) else (0.0, 0.0)
        known = list(zip(x, y, strict=True))
        for i in np.flatnonzero(x[1:] > _WIDE * x[:-1]):
            before = slopes[i - 1] if i else 0.0
            bend = (x[i] * x[i + 1]) ** 0.5
            if i + 1 < len(slopes) and slopes[i + 1] > slopes[i] > before:  # where the neighbouring lines meet
                bend = x[i] + (y[i] - y[i + 1] + slopes[i + 1] * (x[i + 1] - x[i])) / (slopes[i + 1] - before)
            if before < slopes[i]:
                known.append((bend, y[i] + before * (bend - x[i])))
        known.append((0.0, max(y[0] - first * x[0], _LEAST * y[0])))
        x, y = np.array(sorted(known)).T
        return np.interp(rows, x, y) + np.maximum(rows - x[-1], 0) * last


class Pace:
    """Chooses each pass's budget from what passes have cost and brought: `--budget auto`.

    most: never more nodes than this. A draft that does not pay is paused (`is_paused`) and tried again later;
    `num_paused` passes have gone without it so far. One that guesses nothing in no time costs nothing: such passes are
    no trial of it.

    plain_s, step_s: seconds of a pass over one row and of a draft's step, if they have been measured before. chance:
    how probable a guess is accepted at best, as far as is known. If even so a draft cannot bring much, it is paused
    from the start: the first trial has to wait for as long as any other would.
    """

    def __init__(self, most: int = 1024, *, plain_s: float = 0.0, step_s: float = 0.0, chance: float = 1.0) -> None:
        self._most = most
        self._verify = CostCurve()
        self._sums = np.zeros(2)  # tokens and seconds of passes with a draft, fading
        self._tried = np.zeros(2)  # the same, of those only that verified guesses or took time to guess
        self._num_trials, self._trial = 0, _TRIAL
        self._pause, self._left = _PAUSE, 0
        self._prefill_s = 0.0
        self.num_paused = 0
        if plain_s:
            self._verify.observe(1, plain_s)
            if _best_speedup(chance, step_s / plain_s) < _PROMISING:
                self._left = min(int(_TRIAL * step_s / (_LOSS * plain_s)), _LONGEST)

    @property
    def is_paused(self) -> bool:
        """Whether drafting has been switched off for the time being because it cost more than it brought."""
        return self._left > 0

    def budget(self, room: int, max_depth: int, temperature: float) -> Budget:
        """What the next proposal may spend; no nodes at all while drafting is paused."""
        if self.is_paused:
            return Budget(0, max_depth, temperature)
        if not self._verify.most_rows:  # a pass takes no longer than the prefill did, so that this rate is to be had
            rate = 1 / self._prefill_s if self._prefill_s else 0.0
            return Budget(min(room, self._most, _FIRST_NODES), max_depth, temperature, rate)
        tokens, seconds = self._sums
        plain = 1 / self._verify.least_s  # always to be had, too
        rate = max(float(tokens / seconds), plain) if seconds else plain
        tried = max(2 * self._verify.most_rows, _FIRST_NODES)  # at most a doubling, so that a knee is met gently
        return Budget(min(room, self._most, tried), max_depth, temperature, rate, self._verify)

    def observe_prefill(self, seconds: float) -> None:
        """Learn what the pass over a prompt has taken; more is not to be learned from it."""
        self._prefill_s = seconds

    def observe(self, *, rows: int, tokens: int, draft_s: float, verify_s: float) -> None:
        """Learn what a pass over `rows` rows (root and nodes) has cost and brought, other than a prefill."""
        self._verify.observe(rows, verify_s)
        if self.is_paused:
            self._left -= 1
            self.num_paused += 1
            return
        cost = tokens, draft_s + verify_s
        self._sums = self._sums * _MEMORY + cost
        if rows == 1 and draft_s < _FREE * verify_s:
            return
        self._num_trials += 1
        self._tried = self._tried * _MEMORY + cost
        worth = self._tried[0] / self._tried[1] * self._verify.least_s  # plain decoding: one token in that time
        if worth < _WORTH * min(1.0, self._num_trials / self._trial):
            lost_s = self._tried[1] - self._tried[0] * self._verify.least_s
            amends = int(lost_s / (_LOSS * self._verify.least_s))
            self._left, self._pause = min(max(self._pause, amends), _LONGEST), min(_LONGER * self._pause, _LONGEST)
            self._num_trials, self._trial = 0, _RETRIAL
            self._sums, self._tried = np.zeros(2), np.zeros(2)
        elif self._num_trials > 4 * _TRIAL:
            self._pause, self._trial = _PAUSE, _TRIAL


def _best_speedup(chance: float, ratio: float) -> float:
    """The most that a draft can bring by guideline 4, if a step takes `ratio` of a pass and verifying takes nothing."""
    lengths = range(1, _LONGEST_CHAIN + 1)
    return max(speedup(independent_acceptance_length(chance, length), ratio, length) for length in lengths)


def _rising(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The closest sequence that never falls (least squares, by pooling neighbours that violate it)."""
    pools: list[list[float]] = []  # mean, weight, length
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        pools.append([value, weight, 1])
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            mean, weight, length = pools.pop()
            last = pools[-1]
            last[0] = (last[0] * last[1] + mean * weight) / (last[1] + weight)
            last[1] += weight
            last[2] += length
    return np.repeat([mean for mean, _, _ in pools], [int(length) for _, _, length in pools])
