"""Ranking of draft model shapes: weights, block efficiency, speed-up."""

import random

import pytest
from draftsmith.modules import DraftLM, DraftLMConfig, Target, UserError
from draftsmith.modules.tuning.draft_model_sizing import (
    Shape,
    best_length,
    block_efficiency,
    memory_bound_speedup,
    rank_shapes,
)

WIDE = Shape(layers=2, hidden=64, heads=4, kv_heads=2, intermediate=128, outputs=100)
DEEP = Shape(layers=8, hidden=32, heads=4, kv_heads=2, intermediate=64, outputs=100)
TARGET = Shape(layers=20, hidden=128, heads=4, kv_heads=2, intermediate=256, outputs=100)


def test_weights_are_those_of_the_model(tiny_target: Target) -> None:
    drafter = DraftLM.create(DraftLMConfig(num_layers=3, hidden_size=24, num_heads=2), tiny_target)
    shape = Shape(layers=3, hidden=24, heads=2, kv_heads=1, intermediate=48, outputs=100)
    read = sum(parameter.numel() for parameter in drafter.parameters()) - drafter.embedding_weight().numel()
    assert drafter.head is not None
    assert shape.weights == read


@pytest.mark.parametrize(("acceptance", "length"), [(0.6, 3), (0.9, 5), (0.2, 1)])
def test_block_efficiency_equals_a_simulation(acceptance: float, length: int) -> None:
    rng, total = random.Random(0), 0
    for _ in range(20_000):
        accepted = 0
        while accepted < length and rng.random() < acceptance:
            accepted += 1
        total += accepted + 1
    assert block_efficiency(acceptance, length) == pytest.approx(total / 20_000, rel=0.02)
    closed = (1 - acceptance ** (length + 1)) / (1 - acceptance)
    assert block_efficiency(acceptance, length) == pytest.approx(closed)


def test_the_papers_formula() -> None:
    # Three tokens drafted at a tenth of the target's time each, 2.6 tokens a pass: 2.6 / 1.3.
    assert memory_bound_speedup(2.6, 0.1 * 3) == pytest.approx(2.0)
    assert memory_bound_speedup(1.2, 0.0) == 1.2
    assert best_length(1.0, 0.1, longest=4) == (4, pytest.approx(5 / 1.4))
    assert best_length(0.3, 0.5) == (0, 1.0)


def test_shapes_are_ranked_by_bytes_or_by_time() -> None:
    assert [one.shape for one in rank_shapes([WIDE, DEEP], TARGET, lambda _: 0.6)] == [
        min(WIDE, DEEP, key=lambda shape: shape.weights), max(WIDE, DEEP, key=lambda shape: shape.weights)]
    # Measured, each layer costs what its weights do and a constant: the shallow one wins.
    timed = rank_shapes([DEEP, WIDE], TARGET, lambda _: 0.6, seconds=lambda shape: shape.layers * 1e-3,
                        target_seconds=20e-3)
    assert [one.shape for one in timed] == [WIDE, DEEP]
    assert timed[0].cost == pytest.approx(0.1)


def test_wrong_budgets_and_arguments_are_refused() -> None:
    small, large = sorted((WIDE, DEEP), key=lambda shape: shape.weights)
    found = rank_shapes([large, small], TARGET, lambda _: 0.6, budget=small.weights)
    assert [one.shape for one in found] == [small]
    with pytest.raises(UserError, match="no shape reads at most 10 weights; the smallest of 2 reads"):
        rank_shapes([WIDE, DEEP], TARGET, lambda _: 0.6, budget=10)
    with pytest.raises(ValueError, match="give both or neither"):
        rank_shapes([WIDE], TARGET, lambda _: 0.6, target_seconds=1.0)
    with pytest.raises(UserError, match="between 0 and 1"):
        block_efficiency(1.5, 3)
