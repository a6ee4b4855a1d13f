"""Trust in repetition: probabilities that come true, and an automatic budget that plain text does not pay for."""

import numpy as np
import pytest

from specexec.budget import Budget, Pace, worth_verifying
from specexec.drafters import Drafter
from specexec.drafters.ngram import NGramDrafter
from specexec.drafters.suffix import SuffixDrafter
from specexec.drafters.trust import Trust
from specexec.lm import as_ids
from specexec.tree import TokenTree

RNG = np.random.default_rng(0)
PLAIN = RNG.integers(0, 50, 420)  # single tokens recur all the time, and mean nothing
PASSAGE = RNG.integers(0, 5000, 200)
REPEATED = np.concatenate([PASSAGE, RNG.integers(0, 5000, 100), PASSAGE])
FIRST_NODES = 32 + 64  # of the two passes that find out what nodes cost


def chain(tokens: list[int]) -> TokenTree:
    count = len(tokens)
    return TokenTree(as_ids(tokens), np.arange(count) - 1, np.zeros(count, np.float32))


def test_what_followed_is_trusted_more_and_what_did_not_less() -> None:
    trust, context = Trust(), as_ids([1, 2, 3])
    before = trust.behind(2)[:3].tolist()
    assert before == pytest.approx([0.3, 0.5, 0.65])
    for _ in range(20):  # a match of two goes on for one token, and never for a second
        trust.remember(context, chain([7, 8, 9]), 2)
        assert trust.goes_on(np.append(context, [7, 5]))
    after = trust.behind(2)[:3]
    assert after[0] > 0.7 and after[1] < 0.2 and after[2] == pytest.approx(0.65)
    trust.remember(context, chain([7]), 2)
    assert not trust.goes_on(as_ids([4, 4, 4, 4]))
    assert trust.behind(2)[:2].tolist() == after[:2].tolist()


@pytest.mark.parametrize("drafter", [NGramDrafter(), SuffixDrafter()], ids=["ngram", "suffix"])
def test_scores_come_true(drafter: Drafter) -> None:
    """Over a text in which a passage recurs with one token in ten changed, no more is promised than is kept.

    It is somewhat less: the share of copies that go on alike and the trust in any of them both count the changes.
    """
    rng = np.random.default_rng(1)
    text = np.where(rng.random(3000) < 0.1, rng.integers(0, 5000, 3000), np.tile(PASSAGE[:60], 50))
    expected, accepted, end = 0.0, 0, 60
    while end < len(text):
        tree = drafter.propose(text[:end], Budget(6, 6))
        followed = len(tree.path(text[end:].tolist()))
        if end > 1000:  # when it has learned
            expected, accepted = expected + float(np.exp(tree.scores).sum()), accepted + followed
        end += 1 + followed
    assert 0.7 * accepted < expected < 1.02 * accepted
    assert accepted > 1000


@pytest.mark.parametrize("slope", [0.005, 0.05, 0.5])
@pytest.mark.parametrize("kind", [NGramDrafter, SuffixDrafter])
def test_plain_text_pays_for_the_trials_only(kind: type, slope: float) -> None:
    seconds = seconds_of(kind(), PLAIN, 20, slope)
    assert seconds <= 1.03 * 400 + slope * FIRST_NODES


@pytest.mark.parametrize("kind", [NGramDrafter, SuffixDrafter])
def test_repetition_pays(kind: type) -> None:
    assert seconds_of(kind(), REPEATED, 200, 0.05) < 0.45 * 300


def seconds_of(drafter: Drafter, text: np.ndarray, start: int, slope: float) -> float:
    """An automatic budget's time for the tokens from `start` on: a plain pass takes a second, a node `slope` more."""
    pace, end, total = Pace(64), start, 0.0
    while end < len(text):
        spend = pace.budget(64, len(text) - end - 1, 0.0)
        tree = chain([])
        if spend.num_nodes and spend.max_depth:
            tree = worth_verifying(drafter.propose(text[:end], spend), spend)
        tokens = min(1 + len(tree.path(text[end:].tolist())), len(text) - end)
        draft_s, verify_s = 0.002 if spend.num_nodes else 0.0, 1 + slope * len(tree)
        pace.observe(rows=1 + len(tree), tokens=tokens, draft_s=draft_s, verify_s=verify_s)
        total, end = total + draft_s + verify_s, end + tokens
    return total
