"""Bootstrap intervals: right percentiles, paired, repeatable, and of the stated coverage."""

import numpy as np
import pytest
from draftsmith.modules.tuning.trials import DRAWS, draws, interval
from scipy import stats


def mean_interval(values_N: np.ndarray, seed: int = 0) -> tuple[float, float]:
    found = interval(len(values_N), lambda drawn_RN: values_N[drawn_RN].mean(1), 0.95, seed)
    assert found is not None
    return found


def test_it_agrees_with_scipy() -> None:
    values_N = np.random.default_rng(3).lognormal(size=60)
    expected = stats.bootstrap((values_N,), np.mean, n_resamples=20_000, method="percentile", rng=1).confidence_interval
    width = expected.high - expected.low
    assert mean_interval(values_N) == pytest.approx((expected.low, expected.high), abs=0.1 * width)


def test_it_equals_a_plain_loop() -> None:
    values = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0]
    means = sorted(sum(values[place] for place in draw) / len(values) for draw in draws(len(values), 7).tolist())
    assert mean_interval(np.array(values), 7) == pytest.approx(tuple(np.percentile(means, [2.5, 97.5])))
    assert len(means) == DRAWS


def test_its_coverage_is_about_the_stated_one() -> None:
    rng = np.random.default_rng(0)
    intervals = [mean_interval(rng.normal(size=40), seed) for seed in range(300)]
    held = sum(low <= 0 <= high for low, high in intervals)
    assert 270 <= held <= 298  # a percentile interval of 40 is a little too narrow


def test_draws_depend_on_the_seed_and_the_count_alone() -> None:
    assert (draws(5, 1) == draws.__wrapped__(5, 1)).all()
    assert not (draws(5, 1) == draws(5, 2)).all()
    assert draws(5, -1).shape == (DRAWS, 5)


def test_one_prompt_has_no_interval() -> None:
    assert interval(1, lambda drawn_RN: drawn_RN[:, 0].astype(float), 0.95) is None
    assert interval(0, lambda drawn_RN: drawn_RN[:, 0].astype(float), 0.95) is None
