"""The pace: cost curves, the nodes that pay, and drafts that do not."""

import numpy as np
import pytest

from specexec.budget import Budget, CostCurve, Pace, worth_verifying
from specexec.tree import TokenTree


def curve(points: dict[int, float]) -> CostCurve:
    result = CostCurve()
    for rows, seconds in points.items():
        for _ in range(5):
            result.observe(rows, seconds)
    return result


def test_cost_is_interpolated_never_falls_and_goes_on_with_the_last_slope() -> None:
    rows = np.array([1, 8, 24, 64, 128])
    np.testing.assert_allclose(curve({8: 1.0, 64: 1.0, 16: 1.2})(rows), [1.0, 1.0, 1.1, 1.1, 1.1], atol=0.1)
    np.testing.assert_allclose(curve({32: 1.0, 40: 1.5})(np.array([16, 36, 80])), [0.55, 1.25, 4.0], atol=0.01)
    assert curve({8: 1.0})(rows).tolist() == [1.0] * 5
    assert (np.diff(curve({3: 5.0, 9: 1.0, 30: 4.0, 90: 3.0})(np.arange(1, 200))) >= 0).all()
    assert CostCurve()(rows).tolist() == [0] * 5


def flat_until(knee: int, slope: float):
    return lambda rows: 1.0 + slope * np.maximum(np.asarray(rows) - 1 - knee, 0)


def test_every_node_up_to_the_knee_and_beyond_it_those_that_pay() -> None:
    probabilities = np.array([0.9, 0.8, 0.3, 0.2, 0.15, 0.05, 0.01], np.float32)
    tree = TokenTree(np.arange(7), np.full(7, -1), np.log(probabilities))
    for knee, slope, expected in [(7, 1.0, 7), (3, 0.06, 4), (3, 0.08, 3), (0, 0.2, 2), (0, 1.0, 0), (0, 0.001, 7)]:
        budget = Budget(7, 9, rate=3.0, verify_s=flat_until(knee, slope))
        assert len(worth_verifying(tree, budget)) == expected, (knee, slope)
    assert len(worth_verifying(tree, Budget(7, 9))) == 7


def run(pace: Pace, passes: int, accepted, seconds, draft_s: float) -> tuple[float, float, list[int]]:
    """Tokens, seconds and nodes of passes whose trees bring accepted(nodes) and cost seconds(rows)."""
    tokens, spent, sizes = 0.0, 0.0, []
    for _ in range(passes):
        budget = pace.budget(10_000, 10_000, 0.0)
        nodes = budget.num_nodes
        gains = np.diff([accepted(n) for n in range(nodes + 1)])
        if nodes:
            nodes = len(worth_verifying(TokenTree(np.arange(nodes), np.full(nodes, -1), np.log(gains + 1e-12)), budget))
        cost_s = draft_s if budget.num_nodes else 0.0
        brought = 1 + accepted(nodes)
        pace.observe(rows=1 + nodes, tokens=brought, draft_s=cost_s, verify_s=float(seconds(1 + nodes)))
        tokens, spent = tokens + brought, spent + cost_s + float(seconds(1 + nodes))
        sizes.append(nodes)
    return tokens, spent, sizes


@pytest.mark.parametrize("knee", [0, 8, 100, 2000])
@pytest.mark.parametrize("slope", [0.002, 0.02, 0.2])
def test_the_pace_comes_close_to_the_best_fixed_budget(knee: int, slope: float) -> None:
    def accepted(nodes: int) -> float:
        return 1.5 * np.log1p(nodes / 1.6)

    seconds = flat_until(knee, slope)
    best = max((1 + accepted(n)) / (float(seconds(1 + n)) + 0.3) for n in range(1025))
    pace = Pace()
    run(pace, 40, accepted, seconds, 0.3)
    tokens, spent, _ = run(pace, 60, accepted, seconds, 0.3)
    assert tokens / spent >= 0.97 * best


def test_a_draft_that_does_not_pay_is_paused_and_tried_again() -> None:
    pace = Pace()
    _, spent, sizes = run(pace, 600, lambda nodes: 0.001 * nodes / 32, flat_until(5000, 0.0), 0.2)
    assert pace.is_paused or sizes[-1] == 0
    assert spent <= 1.03 * 600
    assert sum(1 for size in sizes if size) >= 8
    assert any(sizes[100:])


def test_a_draft_that_pays_is_never_paused() -> None:
    pace = Pace()
    _, _, sizes = run(pace, 200, lambda nodes: 1.6 * (1 - 0.9**nodes), flat_until(100, 0.1), 0.1)
    assert all(sizes) and not pace.is_paused


def test_a_slow_start_is_forgotten() -> None:
    pace = Pace()
    run(pace, 6, lambda nodes: 4 * (1 - 0.97**nodes), lambda rows: 8.0 + 0.2 * np.asarray(rows), 5.0)
    run(pace, 200, lambda nodes: 4 * (1 - 0.97**nodes), flat_until(500, 0.01), 0.3)
    tokens, spent, _ = run(pace, 60, lambda nodes: 4 * (1 - 0.97**nodes), flat_until(500, 0.01), 0.3)
    assert tokens / spent >= 0.95 * 5 / 1.3


def test_guessing_nothing_for_nothing_is_no_trial_and_paused_passes_are_counted() -> None:
    pace = Pace()
    for _ in range(50):  # a look-up that finds nothing, on a noisy clock
        pace.observe(rows=1, tokens=1, draft_s=1e-4, verify_s=1.0)
        pace.observe(rows=1, tokens=1, draft_s=1e-4, verify_s=1.2)
    assert not pace.is_paused and pace.num_paused == 0
    while not pace.is_paused:  # one that takes a tenth of a pass is paused, though it verifies nothing either
        pace.observe(rows=1, tokens=1, draft_s=0.1, verify_s=1.0)
    count = 0
    while pace.is_paused:
        assert pace.budget(64, 9, 0.0).num_nodes == 0
        pace.observe(rows=1, tokens=1, draft_s=0.0, verify_s=1.0)
        count += 1
    assert pace.num_paused == count >= 4


@pytest.mark.parametrize("draft_s", [0.3, 2.0, 4.0])
def test_trying_a_useless_draft_again_costs_little(draft_s: float) -> None:
    """However dear a trial is: a dear one is waited for longer."""
    pace = Pace()
    while not pace.is_paused:
        pace.observe(rows=33, tokens=1, draft_s=draft_s, verify_s=1.0)
    plain = lost = 0.0
    while plain < 300:
        is_trial = not pace.is_paused
        lost += draft_s if is_trial else 0.0
        plain += 1.0
        pace.observe(rows=33 if is_trial else 1, tokens=1, draft_s=draft_s if is_trial else 0.0, verify_s=1.0)
    assert lost < 0.02 * plain


@pytest.mark.parametrize(
    ("step_s", "chance", "passes"),
    [
        (0.9, 0.99, 540),  # 540 plain passes take a hundred times the six trials of a step each that may follow
        (2.0, 0.99, 1024),
        (0.1, 0.1, 60),
        (0.1, 0.5, 0),
        (0.5, 0.99, 0),
    ],
)
def test_a_draft_without_prospects_is_not_tried_at_once(step_s: float, chance: float, passes: int) -> None:
    pace = Pace(plain_s=1.0, step_s=step_s, chance=chance)
    count = 0
    while pace.is_paused:
        assert pace.budget(64, 9, 0.0).num_nodes == 0
        pace.observe(rows=1, tokens=1, draft_s=0.0, verify_s=1.0)
        count += 1
    assert count == passes
    assert pace.budget(64, 9, 0.0).num_nodes == 32
    assert pace.budget(64, 9, 0.0).rate == pytest.approx(1.0)


def test_plain_decoding_is_the_least_rate() -> None:
    """A streak of wrong guesses must not make further ones look worth their time."""
    pace = Pace()
    for _ in range(3):
        pace.observe(rows=33, tokens=1, draft_s=0.0, verify_s=1.3)
        pace.observe(rows=1, tokens=1, draft_s=0.0, verify_s=1.0)
    assert pace.budget(64, 9, 0.0).rate == pytest.approx(1.0)


def test_a_prefill_bounds_what_a_pass_takes() -> None:
    pace = Pace()
    assert pace.budget(64, 9, 0.0).rate == 0
    pace.observe_prefill(0.5)
    assert pace.budget(64, 9, 0.0) == Budget(32, 9, rate=2.0)
    pace.observe(rows=33, tokens=1, draft_s=0.0, verify_s=0.25)
    assert pace.budget(64, 9, 0.0).rate == pytest.approx(4.0)


def test_the_worse_a_draft_is_the_sooner_it_is_known() -> None:
    def drafted(draft_s: float) -> list[int]:
        """Passes with a draft that is always wrong before it is paused, at first and when it is tried again."""
        found = []
        pace = Pace()
        for _ in range(2):
            found.append(0)
            while not pace.is_paused:
                pace.observe(rows=1, tokens=1, draft_s=draft_s, verify_s=1.0)
                found[-1] += 1
            while pace.is_paused:
                pace.observe(rows=1, tokens=1, draft_s=0.0, verify_s=1.0)
        return found

    assert [drafted(each) for each in (0.05, 0.5, 9.0)] == [[6, 3], [5, 3], [1, 1]]
