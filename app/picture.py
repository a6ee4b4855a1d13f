"""Pictures for the curious, as SVG: the last token tree with what was accepted, and tokens per pass over an answer."""

from collections.abc import Callable, Sequence
from html import escape

import numpy as np

from specexec.tree import ROOT, TokenTree

_COLUMN, _ROW, _DENSE_ROW = 74, 17, 5
_MOST_LABELLED = 90  # leaves; beyond them only the accepted path is written out
_LABEL_LENGTH = 9


def tree_svg(tree: TokenTree, tokens: Sequence[int], text_of: Callable[[int], str]) -> str:
    """`tree`, left to right; the path that became `tokens` stands out, the token beyond it is the target's own."""
    if not len(tree):
        return "<p>Nothing was drafted in the last pass.</p>"
    children = _children(tree)
    places = _places(children, len(tree))
    path = tree.path(tokens)
    leaves = max(row for _, row in places.values()) + 1
    step = _ROW if leaves <= _MOST_LABELLED else _DENSE_ROW
    spot = {node: (16 + _COLUMN * depth, 18 + step * row) for node, (depth, row) in places.items()}
    parts = [
        _edge(spot[parent], spot[node], is_accepted=node in path)
        for parent, nodes in children.items()
        for node in nodes
    ]
    for node in sorted(range(len(tree)), key=lambda node: node in path):  # what is accepted is drawn over the rest
        is_accepted = node in path
        label = text_of(int(tree.tokens[node]))
        shown = label if is_accepted or step == _ROW else ""
        parts.append(_node(spot[node], label, shown, is_accepted=is_accepted, score=float(tree.scores[node])))
    parts.append(_node(spot[ROOT], "the text so far", "", is_accepted=True, score=0.0))
    bonus = ""
    if len(tokens) > len(path):
        bonus = f", then {escape(repr(text_of(tokens[-1])))} by the target itself"
    width = 24 + _COLUMN * (max(depth for depth, _ in places.values()) + 1)
    height = 30 + step * max(leaves - 1, 1)
    caption = f"{len(tree)} drafted, {len(path)} accepted{bonus}"
    return (
        f'<p>{caption}</p><div class="tree" tabindex="0" role="img" aria-label="{escape(caption)}">'
        f'<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}">{"".join(parts)}</svg></div>'
    )


def passes_svg(counts: Sequence[int]) -> str:
    """A bar per target pass of the answer, as high as the tokens that it gave."""
    if not counts:
        return ""
    top, width = max(counts), max(6 * len(counts), 120)
    bars = "".join(
        f'<rect x="{6 * at}" y="{60 - 60 * count / top:.1f}" width="5" height="{60 * count / top:.1f}">'
        f"<title>pass {at + 1}: {count}</title></rect>"
        for at, count in enumerate(counts)
    )
    caption = f"Tokens per pass: {np.mean(counts):.2f} on average, {top} at most, {len(counts)} passes"
    return (
        f'<p>{caption}</p><svg class="passes" role="img" aria-label="{caption}" width="100%" height="64" '
        f'preserveAspectRatio="none" viewBox="0 0 {width} 60">{bars}</svg>'
    )


def _children(tree: TokenTree) -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(tree.parents.tolist()):
        children.setdefault(parent, []).append(node)
    return children


def _places(children: dict[int, list[int]], num_nodes: int) -> dict[int, tuple[int, float]]:
    """Depth and row of every node: a leaf takes the next row, a parent the middle of its children's."""
    places: dict[int, tuple[int, float]] = {}
    rows, depths = 0, {ROOT: 0}
    order, stack = [], [ROOT]
    while stack:
        node = stack.pop()
        order.append(node)
        for child in reversed(children.get(node, [])):
            depths[child] = depths[node] + 1
            stack.append(child)
    for node in order:
        if node not in children:
            places[node] = (depths[node], rows)
            rows += 1
    for node in reversed(order):
        if node in children:
            own = [places[child][1] for child in children[node]]
            places[node] = (depths[node], (own[0] + own[-1]) / 2)
    assert len(places) == num_nodes + 1
    return places


def _edge(start: tuple[float, float], end: tuple[float, float], *, is_accepted: bool) -> str:
    (x, y), (to_x, to_y) = start, end
    kind = "accepted" if is_accepted else "drafted"
    middle = (x + to_x) / 2
    return f'<path class="{kind}" d="M{x} {y:.1f}C{middle} {y:.1f} {middle} {to_y:.1f} {to_x} {to_y:.1f}"/>'


def _node(at: tuple[float, float], label: str, shown: str, *, is_accepted: bool, score: float) -> str:
    x, y = at
    kind = "accepted" if is_accepted else "drafted"
    text = shown.replace("\n", "⏎").strip() or ("␣" if shown else "")
    text = text if len(text) <= _LABEL_LENGTH else text[: _LABEL_LENGTH - 1] + "…"
    title = f"<title>{escape(repr(label))}, p = {np.exp(score):.3g}</title>"
    written = f'<text class="{kind}" x="{x - 2}" y="{y - 5:.1f}">{escape(text)}</text>' if text else ""
    return f'<circle class="{kind}" cx="{x}" cy="{y:.1f}" r="{4 if is_accepted else 2.5}">{title}</circle>{written}'
