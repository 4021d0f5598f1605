"""Finished optimizer steps whose figures the host has not read: on an accelerator every read waits for all its work.

Shapes: K draft steps, C columns of sums.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ...modules.features import Features

READ_EVERY = 10
"""Optimizer steps on an accelerator between two reads of their figures; on a CPU each step's are read at once."""
Batches = tuple[tuple[int, Features], ...]
"""Micro-batches of a step with their numbers, without states."""


@dataclass(frozen=True, kw_only=True)
class FinishedStep:
    """An optimizer step whose figures are still to be read."""

    number: int
    """Number of the step, from 1."""
    sums_KC: Tensor
    """Sums of `metrics.COLUMNS` over all its micro-batches and processes."""
    weights: tuple[float, ...]
    """Weight of each draft step in the loss."""
    offsets: tuple[int, ...]
    """Distance in tokens to the token that each draft step predicts."""
    learning_rate: float
    """Of its update."""
    batches: Batches
    """Its micro-batches."""


class UnreadSteps:
    """The finished steps in their order."""

    def __init__(self) -> None:
        self.steps: list[FinishedStep] = []

    def add(self, step: FinishedStep) -> None:
        """Keep a step."""
        self.steps.append(step)

    @property
    def due(self) -> bool:
        """True once they are to be read."""
        return bool(self.steps) and (self.steps[0].sums_KC.device.type == "cpu" or len(self.steps) >= READ_EVERY)

    def read(self) -> Iterator[tuple[FinishedStep, Tensor]]:
        """(step, its sums on the host) of all of them, in one read; none of them is kept."""
        if not self.steps:
            return
        read, self.steps = self.steps, []
        yield from zip(read, torch.stack([step.sums_KC for step in read]).cpu(), strict=True)
