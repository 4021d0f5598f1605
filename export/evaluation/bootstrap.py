"""Bootstrap confidence intervals: how much a figure would vary with other prompts of the same kind.

Prompts are drawn again with replacement, the figure is computed anew from those drawn, and the interval holds the
middle 95 % (the percentile method; Efron and Tibshirani 1993, chapter 13). The draws depend only on the seed and the
number of prompts, so that all figures and all methods of an evaluation are drawn together: paired.

Shapes: R draws, N prompts.
"""

from collections.abc import Callable
from functools import cache

import numpy as np
from numpy.typing import NDArray

Interval = tuple[float, float]
"""Lower and upper end."""
Draws = NDArray[np.intp]
Counts = NDArray[np.int_]
Floats = NDArray[np.float64]
RESAMPLES = 1000
CONFIDENCE = 0.95


def interval(count: int, figure: Callable[[Draws], Floats], seed: int) -> Interval | None:
    """The interval of a figure over `count` prompts; None with fewer than two, which cannot be resampled.

    Args:
        count: prompts, or groups of prompts that were decoded together.
        figure: maps the indices of the prompts in each draw, [R, N], to the figure of each draw, [R].
        seed: of the draws.
    """
    if count < 2:
        return None
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(figure(draws(count, seed)), [tail, 100 - tail])
    return float(low), float(high)


@cache
def draws(count: int, seed: int) -> Draws:
    """`RESAMPLES` draws of `count` indices from 0 to count - 1, with replacement, [R, N]."""
    return np.random.default_rng([seed % 2**63, count]).integers(count, size=(RESAMPLES, count))
