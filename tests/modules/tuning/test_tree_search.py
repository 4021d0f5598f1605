"""Tree search against brute force."""

from itertools import product
from math import prod

import pytest
import torch
from draftsmith.modules.tuning.tree_search import PathEstimate, search_tree
from references.trees import best_expected_length
from support.tree_shapes import paths


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 5, 6])
def test_search_equals_brute_force(nodes: int) -> None:
    generator = torch.Generator().manual_seed(nodes)
    table = torch.randint(0, 4, (200, 3), generator=generator).clamp(max=3)
    table[:80, 0] = 0
    probability = PathEstimate(table, 3)
    all_paths = [path for length in (1, 2, 3) for path in product(range(3), repeat=length)]
    tree, expected = search_tree(table, nodes, 3)
    assert tree.size == nodes
    every = {path: prod(probability.step(path[:depth]) for depth in range(1, len(path) + 1)) for path in all_paths}
    likely = dict(sorted(every.items(), key=lambda item: -item[1])[:14])
    assert expected[-1] == pytest.approx(best_expected_length(likely, nodes))
    assert expected[-1] == pytest.approx(1 + sum(every[path] for path in paths(tree)[1:]))


def test_without_shrinkage_the_expected_length_is_the_measured_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftsmith.modules.tuning.tree_search._SHRINKAGE", 1e-9)
    table = torch.randint(0, 4, (500, 2))
    tree, expected = search_tree(table, 6, 3)
    accepted = [sum(tuple(row[:depth]) in paths(tree) for depth in (1, 2)) for row in table.tolist()]
    assert expected[-1] == pytest.approx(1 + sum(accepted) / 500, abs=1e-6)


def test_prefixes_are_nested_and_lengths_grow() -> None:
    table = torch.randint(0, 6, (300, 3))
    tree, expected = search_tree(table, 20)
    assert list(expected) == sorted(expected)
    small, _ = search_tree(table, 7)
    assert tree.prefix(7) == small
