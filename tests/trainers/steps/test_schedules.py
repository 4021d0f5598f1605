"""The learning-rate schedule."""

import math

import pytest
from draftsmith.trainers.steps.optimizers import time_leads, warmup_cosine


def test_warm_up_is_linear_and_starts_above_zero() -> None:
    factor = warmup_cosine(4, 20)
    assert [factor(step) for step in range(5)] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


def test_the_cosine_is_half_way_down_in_the_middle_and_falls_towards_zero() -> None:
    factor = warmup_cosine(10, 110)
    assert factor(60) == pytest.approx(0.5)
    assert 0 < factor(109) < 0.001
    values = [factor(step) for step in range(10, 110)]
    assert values == sorted(values, reverse=True)


@pytest.mark.parametrize(("warmup", "steps"), [(0, 5), (5, 5), (10, 5), (0, 1)])
def test_odd_lengths_stay_within_bounds(warmup: int, steps: int) -> None:
    values = [warmup_cosine(warmup, steps)(step) for step in range(steps + 2)]
    assert all(math.isfinite(value) and 0 <= value <= 1 for value in values)
    assert values[0] > 0


def test_the_rate_follows_time_when_it_is_further_on_than_steps() -> None:
    spent = [0.0]
    factor = warmup_cosine(10, 110, lambda: spent[0])
    assert factor(35) == pytest.approx(warmup_cosine(10, 110)(35))
    spent[0] = 0.5
    assert factor(35) == pytest.approx(0.5)
    assert factor(85) == pytest.approx(warmup_cosine(10, 110)(85)), "the steps are further on"
    assert factor(4) == pytest.approx(0.25), "half risen, half fallen"
    spent[0] = 1.3
    assert factor(35) == factor(4) == 0.0


def test_a_run_that_its_steps_end_does_not_depend_on_the_clock() -> None:
    """The first steps are slow: their time is ahead of them, though the steps will end the run."""
    for step, spent in ((0, 0.04), (1, 0.05), (40, 0.3), (100, 0.9)):
        assert warmup_cosine(10, 110, lambda spent=spent: spent)(step) == warmup_cosine(10, 110)(step)
    assert time_leads(100, 10, 0.16)
    assert not time_leads(100, 10, 0.15)
    assert time_leads(None, 10, 0.0)
