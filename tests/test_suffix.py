"""Suffix and graft: counts, trust, memory of earlier texts, and the union of two trees."""

import numpy as np
import pytest
from oracles import random_tree

from specexec.budget import Budget
from specexec.drafters.graft import GraftDrafter, best_of, paths_of
from specexec.drafters.suffix import SuffixDrafter
from specexec.lm import as_ids
from specexec.tree import ROOT, TokenTree, depths

PASSAGE = [21, 22, 23, 24, 25, 26, 27, 28]


def test_the_longest_match_is_followed() -> None:
    text = as_ids([3, *PASSAGE, 9, 24, 7, 7, 3, *PASSAGE[:4]])
    tree = SuffixDrafter().propose(text, Budget(8, 20))
    assert tree.tokens.tolist()[:4] == PASSAGE[4:]
    assert (np.diff(tree.scores) <= 0).all() and (tree.scores < 0).all()


def test_counts_decide_between_branches() -> None:
    text = as_ids([8, 5, 6, 10, 9, 5, 6, 11, 7, 5, 6, 10, 4, 5, 6])
    tree = SuffixDrafter().propose(text, Budget(2, 1))
    assert tree.tokens.tolist() == [10, 11]
    np.testing.assert_allclose(np.exp(tree.scores[0] - tree.scores[1]), 2, rtol=1e-5)


def test_an_earlier_text_is_remembered_and_forgotten_in_the_end() -> None:
    drafter = SuffixDrafter(memory=100)
    drafter.propose(as_ids([1, *PASSAGE]), Budget(8, 20))
    assert drafter.propose(as_ids([2, *PASSAGE[:3]]), Budget(8, 20)).tokens.tolist() == PASSAGE[3:]
    for start in range(200, 800, 50):
        drafter.propose(as_ids(range(start, start + 50)), Budget(8, 20))
    assert len(drafter.propose(as_ids([2, *PASSAGE[:3]]), Budget(8, 20))) == 0
    given = SuffixDrafter([as_ids(PASSAGE)])
    assert given.propose(as_ids([24]), Budget(9, 9)).tokens.tolist() == PASSAGE[4:]


def test_trust_follows_what_happened() -> None:
    rng = np.random.default_rng(0)
    loop = PASSAGE * 40
    drafter, scores = SuffixDrafter(), []
    for end in range(20, 200, 3):
        scores.append(drafter.propose(as_ids(loop[:end]), Budget(4, 9)).scores[0])
    assert scores[-1] > scores[0]
    drafter, noise = SuffixDrafter([as_ids(range(30))]), rng.integers(0, 30, 400).tolist()
    for end in range(20, 400, 3):
        drafter.propose(as_ids(noise[:end]), Budget(4, 9))
    assert len(drafter.propose(as_ids([*noise, 31, 32, *range(29)]), Budget(1, 1))) == 1
    fresh = SuffixDrafter([as_ids(range(30))])
    for context, expected in (([40, 3], 4), ([40, 3, 4], 5)):
        tired, trusting = (each.propose(as_ids(context), Budget(1, 1)) for each in (drafter, fresh))
        assert tired.tokens[0] == trusting.tokens[0] == expected
    assert tired.scores[0] <= trusting.scores[0]


def test_room_and_depth_are_kept() -> None:
    text = as_ids(np.random.default_rng(1).integers(0, 4, 300))
    for num_nodes in (1, 5, 40):
        for max_depth in (1, 3, 30):
            tree = SuffixDrafter().propose(text, Budget(num_nodes, max_depth))
            assert 0 < len(tree) <= num_nodes and depths(tree.parents).max() <= max_depth


@pytest.mark.parametrize("seed", range(8))
def test_a_graft_is_the_best_part_of_the_union(seed: int) -> None:
    first, second = random_tree(12, 14, seed), random_tree(15, 15, seed + 50)
    united = paths_of(first)
    for path, score in paths_of(second).items():
        united[path] = max(united.get(path, -np.inf), score)
    for num_nodes in (1, 6, 40):
        grafted = best_of(united, num_nodes)
        found = paths_of(grafted)
        assert len(found) == len(grafted) == min(num_nodes, len(united))  # no path twice
        assert all(united[path] == score for path, score in found.items())
        assert sorted(found.values()) == sorted(united.values())[-len(found) :]
        assert (grafted.parents < np.arange(len(grafted))).all()


class Fixed:
    """A drafter that always guesses the same tree."""

    layers = ()

    def __init__(self, tree: TokenTree) -> None:
        self._tree = tree

    def propose(self, context: np.ndarray, budget: Budget) -> TokenTree:
        return self._tree


def guesses(tokens: list[int], parents: list[int], probabilities: list[float]) -> Fixed:
    return Fixed(TokenTree(as_ids(tokens), as_ids(parents), np.log(np.array(probabilities, np.float32))))


def test_a_graft_asks_both() -> None:
    text = as_ids([*PASSAGE, *PASSAGE[:5]])
    tree = GraftDrafter(guesses([1, 2], [ROOT, ROOT], [0.5, 0.1]), SuffixDrafter()).propose(text, Budget(4, 9))
    assert {1, *PASSAGE[5:8]} == set(tree.tokens.tolist())


def test_repetition_goes_on_behind_what_the_model_guesses() -> None:
    text = as_ids([*PASSAGE, 90, *PASSAGE[:4], 91])  # nothing like its end has been seen before
    assert not len(SuffixDrafter().propose(text, Budget(12, 9)))
    model = guesses([7, *PASSAGE[:2]], [ROOT, ROOT, 1], [0.5, 0.4, 0.3])
    tree = GraftDrafter(model, SuffixDrafter()).propose(text, Budget(12, 9))
    found = paths_of(tree)
    assert tuple(PASSAGE[:6]) in found and (7,) in found
    np.testing.assert_allclose(found[tuple(PASSAGE[:2])], np.log(0.3), rtol=1e-6)
    assert found[tuple(PASSAGE[:3])] < found[tuple(PASSAGE[:2])]


def test_disputes_are_settled_by_how_earlier_ones_ended() -> None:
    model = guesses([5], [ROOT], [0.6])  # never what comes
    text, drafter, scores = PASSAGE * 12, GraftDrafter(model, SuffixDrafter()), []
    for end in range(20, 80, 2):
        tree = drafter.propose(as_ids(text[:end]), Budget(4, 9))
        scores.append(paths_of(tree)[(text[end],)])
    assert scores[0] < np.log(0.4) and scores[-1] > np.log(0.75)
    agreeing = GraftDrafter(guesses([text[20]], [ROOT], [0.6]), SuffixDrafter())
    assert paths_of(agreeing.propose(as_ids(text[:20]), Budget(4, 9)))[(text[20],)] > np.log(0.6)


def test_where_repetition_leads_it_is_not_asked_again() -> None:
    class Counting(SuffixDrafter):
        asked: list[list[int]] = []  # noqa: RUF012  (of the one instance below)

        def beyond(self, path: np.ndarray, budget: Budget) -> TokenTree:
            self.asked.append(path.tolist())
            return super().beyond(path, budget)

    text = as_ids([*PASSAGE, 90, *PASSAGE[:4]])
    model = guesses([*PASSAGE[4:6], 5], [ROOT, 0, ROOT], [0.5, 0.4, 0.1])
    GraftDrafter(model, suffix := Counting()).propose(text, Budget(12, 9))
    assert suffix.asked == [[5]]


@pytest.mark.parametrize("seed", range(4))
def test_a_graft_keeps_room_and_depth(seed: int) -> None:
    text = as_ids(np.random.default_rng(seed).integers(0, 5, 200))
    for num_nodes, max_depth in ((1, 4), (7, 4), (7, 30), (40, 4), (40, 30)):
        model = random_tree(4, 5, seed)
        tree = GraftDrafter(Fixed(model), SuffixDrafter()).propose(text, Budget(num_nodes, max_depth))
        assert 0 < len(tree) <= num_nodes and depths(tree.parents).max() <= max_depth
        assert (tree.parents < np.arange(len(tree))).all() and (np.diff(tree.scores) <= 0).all()
