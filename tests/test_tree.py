"""TokenTree and the functions over parents."""

import numpy as np
from oracles import chain, random_tree

from specexec.tree import ROOT, TokenTree, ancestors, best_chain, depths, empty_tree


def test_depths_and_ancestors_agree_with_walking_up() -> None:
    tree = random_tree(50, 320, seed=3)
    seen, deep = ancestors(tree.parents), depths(tree.parents)
    for node in range(len(tree)):
        path, at = set(), node
        while at != ROOT:
            path.add(at)
            at = int(tree.parents[at])
        assert set(np.flatnonzero(seen[node])) == path
        assert deep[node] == len(path)


def test_child_finds_only_own_children() -> None:
    tree = TokenTree(np.array([5, 6, 5, 7]), np.array([-1, -1, 0, 2]), np.zeros(4, np.float32))
    assert tree.child(ROOT, 5) == 0
    assert tree.child(0, 5) == 2
    assert tree.child(1, 5) is None
    assert tree.child(2, 7) == 3


def test_best_chain_follows_the_best_scored_children() -> None:
    tree = TokenTree(np.array([1, 2, 3, 4]), np.array([-1, -1, 1, 1]), np.array([-2, -1, -3, -1.5], np.float32))
    best = best_chain(tree)
    assert best.tokens.tolist() == [2, 4]
    assert best.parents.tolist() == [-1, 0]
    assert len(best_chain(empty_tree())) == 0
    assert best_chain(chain([4, 5, 6])).tokens.tolist() == [4, 5, 6]
