"""The number of nodes of trees by number of guesses: as many as pay."""

import pytest
from draftsmith.modules import CostCurve, choose_pass_nodes
from draftsmith.modules.policies.lookahead_trees import ahead_trees, tokens_per_pass

CHANCES = ((0.5, 0.2, 0.1), (0.35, 0.15, 0.05))


def curve(seconds: list[float]) -> CostCurve:
    """Passes of 1, 2, ... nodes of a tree, each node after the first with two virtual nodes."""
    return CostCurve(sizes=tuple(range(1, len(seconds) + 1)), pass_seconds=tuple(seconds),
                     draft_seconds=(0.0,) * len(seconds), context=10)


def test_the_largest_size_is_best_where_nodes_cost_nothing() -> None:
    choice = choose_pass_nodes(CHANCES, curve([1.0] * 8), 2)
    assert 18 < choice.size <= 24
    expected = tokens_per_pass(ahead_trees(CHANCES, choice.size))
    assert choice.expected_accepted_length == choice.predicted_speedup == pytest.approx(expected)


def test_no_size_is_best_where_every_node_costs_a_pass() -> None:
    assert choose_pass_nodes(CHANCES, curve([float(3 * size) for size in range(1, 9)]), 2).size == 1


def test_nodes_are_taken_as_long_as_they_are_free() -> None:
    """Up to four nodes with their virtual ones, twelve in all, cost what one does; then the time doubles."""
    choice = choose_pass_nodes(CHANCES, curve([1.0, 1.0, 1.0, 1.0, 2.0, 3.0]), 2)
    assert 9 <= choice.size <= 12
