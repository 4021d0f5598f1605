"""The Kolmogorov-Smirnov test of sampled tokens against the target's distribution, by their positions in it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

UNLIKELY = 1e-3
"""p-value below which sampled answers are in doubt."""
_UNLIKELY_DISTANCE = 1.9495
"""Scaled distance of that p-value."""
_TERMS = 100
"""Terms of the limit distribution's series."""


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """The check of sampled tokens against the target's distribution, by a Kolmogorov-Smirnov test."""

    tokens: int
    """Sampled tokens."""
    distance: float
    """Largest difference between the share of tokens up to some likelihood and the probability that the target gives
    them."""
    p_value: float
    """Probability of a distance as large by chance."""
    visible: float
    """The distance that would have had a p-value of 0.001."""

    @property
    def differs(self) -> bool:
        """True where chance does not explain the distance."""
        return self.p_value < UNLIKELY


def distribution_of(found: Sequence[float]) -> Distribution | None:
    """The Kolmogorov-Smirnov test of positions against the uniform distribution; None where there are none."""
    if not found:
        return None
    ordered_N, count = np.sort(np.asarray(found)), len(found)
    steps_N = np.arange(count + 1) / count
    distance = float(max((steps_N[1:] - ordered_N).max(), (ordered_N - steps_N[:-1]).max()))
    return Distribution(tokens=count, distance=distance, p_value=p_value(distance, count),
                        visible=visible_distance(count))


def p_value(distance: float, count: int) -> float:
    """Probability of a distance at least as large by chance: Kolmogorov's limit, corrected for small samples
    (Stephens, 1970)."""
    scaled = distance * (math.sqrt(count) + 0.12 + 0.11 / math.sqrt(count))
    if scaled < 0.2:
        return 1.0
    terms = ((-1.0) ** (k - 1) * 2 * math.exp(-2 * (k * scaled) ** 2) for k in range(1, _TERMS))
    return min(1.0, max(0.0, sum(terms)))


def visible_distance(count: int) -> float:
    """The smallest distance whose p-value is at most UNLIKELY."""
    return _UNLIKELY_DISTANCE / (math.sqrt(count) + 0.12 + 0.11 / math.sqrt(count))
