"""The heap's tree is the best of its size, whichever rows there are, and each slot learns from where the text went."""

import numpy as np
import pytest
import torch

from specexec.acceptance import Acceptance
from specexec.budget import Budget
from specexec.drafters.best_first import Proposal, Rows
from specexec.tree import ROOT

NUM_IDS = 4


def grown(seed: int, to_target: np.ndarray | None = None) -> tuple[Rows, dict[tuple[int, int], int], list[Acceptance]]:
    """Rows behind some nodes of the first two levels, by row and rank."""
    rng = np.random.default_rng(seed)
    acceptances = [Acceptance() for _ in range(3)]
    rows, below = Rows(acceptances, Budget(99, 9, 0.8), to_target), {}
    slots = [0]
    for place in ((0, 0), (0, 1), (0, 3), (1, 2), (2, 0)):
        below[place] = len(slots)
        slots.append(slots[place[0]] + 1)
    rows.add(torch.from_numpy(rng.normal(size=(1, NUM_IDS))), np.array(slots[:1]))
    rows.add(torch.from_numpy(rng.normal(size=(5, NUM_IDS))), np.array(slots[1:]))
    return rows, below, acceptances


def every_score(rows: Rows, below: dict[tuple[int, int], int], row: int = 0, above: float = 0.0) -> list[float]:
    found = []
    for rank, score in enumerate(rows.scores[row]):
        found.append(above + score)
        if (row, rank) in below:
            found += every_score(rows, below, below[row, rank], above + score)
    return found


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("num_nodes", [1, 5, 12, 24, 99])
def test_no_other_tree_of_its_size_is_more_probable(num_nodes: int, seed: int) -> None:
    rows, below, _ = grown(seed)
    best = rows.best(num_nodes, lambda row, rank: below.get((row, rank)))
    expected = sorted(every_score(rows, below), reverse=True)[:num_nodes]
    np.testing.assert_allclose(best.tree.scores, expected, atol=1e-6)
    assert len(best.tree) == min(num_nodes, 24) == len(set(zip(best.rows, best.ranks, strict=True)))
    for node, (parent, row, rank) in enumerate(zip(best.tree.parents.tolist(), best.rows, best.ranks, strict=True)):
        assert parent < node
        assert row == (0 if parent == ROOT else below[best.rows[parent], best.ranks[parent]])
        assert best.tree.tokens[node] == rows.tokens[row][rank]


def test_ids_become_the_target_s() -> None:
    ids = np.array([7, 11, 30, 31])
    plain, mapped = grown(0)[0], grown(0, ids)[0]
    for mine, theirs in zip(plain.tokens, mapped.tokens, strict=True):
        assert ids[mine].tolist() == theirs.tolist()


def test_slots_learn_as_far_as_the_text_followed_the_tree() -> None:
    rows, below, acceptances = grown(0)
    context = np.array([1, 2, 3])

    def look(row: int, rank: int) -> int | None:
        return below.get((row, rank))

    proposal = Proposal(context, rows, rows.best(24, look), look)
    first, second = rows.tokens[0][1], rows.tokens[2][0]
    before = [acceptance.to_data()["0.80"]["counts"] for acceptance in acceptances]
    proposal.learn(np.array([1, 2, 4, first]))
    assert before == [acceptance.to_data()["0.80"]["counts"] for acceptance in acceptances], "another text"
    proposal.learn(np.array([*context, first, second, NUM_IDS + 5, 9]))
    after = [acceptance.to_data()["0.80"]["counts"] for acceptance in acceptances]
    assert all(new[1] > old[1] for new, old in zip(after, before, strict=True))
    reach = [inside / total for inside, total in after]
    assert reach[2] < reach[0] == reach[1], "the third token was none of those guessed"
