"""The loss of some micro-batches before its division.

Shapes: K draft steps, C columns of sums.
"""

from typing import NamedTuple

from torch import Tensor


class BatchLoss(NamedTuple):
    """Summed loss and counts of one micro-batch or several; to be divided once the count is complete."""

    total: Tensor  # The weighted sum of losses, differentiable
    sums_KC: Tensor  # Sums of `metrics.COLUMNS`
    weights: tuple[float, ...]  # Weight of each draft step in the total
    offsets: tuple[int, ...]  # Distance in tokens from a position to the token that each draft step predicts
