"""Uniformity of sampled tokens: their positions in the target's distribution, and a Kolmogorov-Smirnov test of these.

Let p be the target's distribution after a text, x the token that was emitted there, and v a uniform number. If x was
drawn from p, the position u = (sum of p over the tokens likelier than x) + v p(x) is uniform on [0, 1], and independent
of all positions before it (Rosenblatt, 1952). So the positions of all tokens of all answers are one sample of the
uniform distribution if drafting is exact, and lie too low or too high where it prefers some tokens.

Shapes: T tokens of an answer, V vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

IMPOSSIBLE_PER_TOKEN = 1 / 10_000
"""More impossible tokens than this, and than one, are a fault: at the edge of a filter rounding may let one in."""
_UNLIKELY_DISTANCE = 1.9495  # Scaled distance of the p-value 0.001, below which sampled answers are in doubt
_TERMS = 100  # Terms of the limit distribution's series

ROUNDING = 2e-3
"""Distance by which half precision may move the positions at temperature 1; divided by the temperature below it. In
bfloat16 the positions of exact answers were about a third of it apart at temperatures from 0.03 to 0.1."""
GREATEST_ROUNDING = 0.03  # Its bound: what a token's rank can lose to rounding does not grow for ever


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """The check of sampled tokens against the target's distribution, by a Kolmogorov-Smirnov test."""

    tokens: int  # Sampled tokens
    distance: float
    """Largest difference between the share of tokens up to some likelihood and the probability that the target gives
    them."""
    p_value: float  # Probability of a distance as large by chance
    visible: float
    """The distance that would have been taken for a fault: its p-value is 0.001 or less, and rounding does not explain
    it."""
    impossible: int  # Tokens to which the target, with these filters, gives no probability

    @property
    def differs(self) -> bool:
        """True where neither chance nor rounding explains the distance, or impossible tokens were emitted."""
        return self.distance > self.visible or self.impossible > max(1.0, self.tokens * IMPOSSIBLE_PER_TOKEN)


def distribution_of(found: Sequence[float], rounding: float = 0.0) -> Distribution | None:
    """The Kolmogorov-Smirnov test of positions against the uniform distribution; None where there are none.

    Args:
        found: the positions; those above 1 are tokens without probability, and are counted apart.
        rounding: distance that the arithmetic explains.
    """
    if not found:
        return None
    every_N = np.asarray(found)
    ordered_N, count = np.sort(every_N.clip(max=1.0)), len(found)
    steps_N = np.arange(count + 1) / count
    distance = float(max((steps_N[1:] - ordered_N).max(), (ordered_N - steps_N[:-1]).max()))
    return Distribution(tokens=count, distance=distance, p_value=p_value(distance, count),
                        visible=max(rounding, visible_distance(count)), impossible=int((every_N > 1.0).sum()))


def p_value(distance: float, count: int) -> float:
    """Probability of a distance at least as large by chance: Kolmogorov's limit, corrected for small samples
    (Stephens, 1970)."""
    scaled = distance * (math.sqrt(count) + 0.12 + 0.11 / math.sqrt(count))
    # The series converges slowly there, and the probability is 1 to ten digits.
    if scaled < 0.2:
        return 1.0
    terms = ((-1.0) ** (k - 1) * 2 * math.exp(-2 * (k * scaled) ** 2) for k in range(1, _TERMS))
    return min(1.0, max(0.0, sum(terms)))


def visible_distance(count: int) -> float:
    """The smallest distance whose p-value is at most 0.001."""
    return _UNLIKELY_DISTANCE / (math.sqrt(count) + 0.12 + 0.11 / math.sqrt(count))


def rounding(dtype: torch.dtype, temperature: float) -> float:
    """The distance between distributions that the rounding of a number format explains; none in float32 and wider."""
    if dtype in (torch.float32, torch.float64) or temperature == 0:
        return 0.0
    return min(GREATEST_ROUNDING, ROUNDING / min(1.0, temperature))
