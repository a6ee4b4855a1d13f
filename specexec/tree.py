"""A tree of guessed tokens as a struct of arrays; knows nothing of models."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

ROOT = -1  # the newest token of the context: the parent of the first guesses, not itself a node


@dataclass(frozen=True)
class TokenTree:
    """Guessed continuations of a context; parents come before their children.

    tokens:  int64 [N]
    parents: int64 [N], the index of each node's parent, or ROOT
    scores:  float32 [N], the draft's cumulative log-probability of the path that ends in the node
    """

    tokens: np.ndarray
    parents: np.ndarray
    scores: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    def child(self, node: int, token: int) -> int | None:
        """The child of `node` (or of ROOT) that carries `token`, or None."""
        found = np.flatnonzero((self.parents == node) & (self.tokens == token))
        return int(found[0]) if len(found) else None

    def path(self, tokens: Iterable[int]) -> list[int]:
        """The nodes that `tokens` pass through from the root, up to the first token that no child carries."""
        nodes: list[int] = []
        for token in tokens:
            node = self.child(nodes[-1] if nodes else ROOT, token)
            if node is None:
                break
            nodes.append(node)
        return nodes


def empty_tree() -> TokenTree:
    """The tree of plain decoding: only the root is scored."""
    return TokenTree(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.float32))


def depths(parents: np.ndarray, known: np.ndarray | None = None) -> np.ndarray:
    """Distance of each node from the root (children of the root: 1), int64 [N]; `known` has that of the first nodes."""
    result = _extended(known, (len(parents),), np.int64)
    for node in range(0 if known is None else len(known), len(parents)):
        parent = parents[node]
        result[node] = 1 if parent == ROOT else result[parent] + 1
    return result


def ancestors(parents: np.ndarray, known: np.ndarray | None = None) -> np.ndarray:
    """Which nodes lie on the path from the root to each node, itself included: bool [N, N]; `known`: as in depths."""
    result = _extended(known, (len(parents), len(parents)), bool)
    for node in range(0 if known is None else len(known), len(parents)):
        parent = parents[node]
        if parent != ROOT:
            result[node] = result[parent]
        result[node, node] = True
    return result


def _extended(known: np.ndarray | None, shape: tuple[int, ...], dtype: type) -> np.ndarray:
    result = np.zeros(shape, dtype)
    if known is not None:
        result[tuple(slice(size) for size in known.shape)] = known
    return result


def is_chain(parents: np.ndarray) -> bool:
    """Whether the nodes are one branch, in order (or there are none)."""
    return np.array_equal(parents, np.arange(len(parents)) - 1)


def best_chain(tree: TokenTree) -> TokenTree:
    """The path to the tree's deepest node along the best-scored children: for models that cannot verify a tree."""
    path, node = [], ROOT
    while len(children := np.flatnonzero(tree.parents == node)):
        node = int(children[np.argmax(tree.scores[children])])
        path.append(node)
    return TokenTree(tree.tokens[path], np.arange(len(path)) - 1, tree.scores[path])
