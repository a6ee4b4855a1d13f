"""The picture of a token tree: every node is there, the accepted path stands out, nothing in it can be markup."""

import xml.etree.ElementTree as ET

import numpy as np
import pytest

from app.picture import passes_svg, tree_svg
from specexec.tree import TokenTree, empty_tree


def random_tree(num_nodes, seed=0):
    """Parents before children; children of one node carry different tokens."""
    rng = np.random.default_rng(seed)
    parents = np.array([rng.integers(-1, node) if node else -1 for node in range(num_nodes)])
    return TokenTree(np.arange(num_nodes), parents, -rng.random(num_nodes).astype(np.float32))


def path_to(tree, node):
    path = []
    while node != -1:
        path.insert(0, node)
        node = int(tree.parents[node])
    return path


@pytest.mark.parametrize("num_nodes", [1, 64, 512])
def test_every_node_is_drawn_inside_and_the_accepted_path_stands_out(num_nodes):
    tree = random_tree(num_nodes)
    path = path_to(tree, num_nodes - 1)
    picture = ET.fromstring(f"<div>{tree_svg(tree, [*path, 9999], lambda token: f'<b>{token}')}</div>")
    assert picture.find("p").text.startswith(f"{num_nodes} drafted, {len(path)} accepted")
    svg = picture.find(".//svg")
    circles = svg.findall("circle")
    assert len(circles) == num_nodes + 1
    assert len(svg.findall("path")) == num_nodes
    assert len([each for each in circles if each.get("class") == "accepted"]) == len(path) + 1
    width, height = float(svg.get("width")), float(svg.get("height"))
    places = {(float(each.get("cx")), float(each.get("cy"))) for each in circles}
    assert len(places) == num_nodes + 1
    assert all(0 < x < width and 0 < y < height for x, y in places)


def test_no_tree_and_no_passes():
    assert "Nothing was drafted" in tree_svg(empty_tree(), [5], str)
    assert passes_svg([]) == ""
    assert passes_svg([1, 4, 2]).count("<rect") == 3
