"""Course of a training: what it has learned between two measurements on held-out text, and what those measured."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...modules.tuning.replay_acceptance import MeasuredStep


@dataclass
class TrainingCurve:
    """The measured steps so far, and the figures of the optimizer steps after the last of them: a checkpoint holds all
    of it, so that a resumed run goes on with the very sums of the interrupted one."""

    steps: list[MeasuredStep] = field(default_factory=list)  # The measured steps, the untrained drafter's first
    labels: int = 0  # Labels that training has read, repeated ones again
    sums: dict[str, list[float]] = field(default_factory=dict)  # Sum and number of each since the last measurement

    def add(self, figures: Mapping[str, float], labels: float) -> None:
        """Count an optimizer step with its figures and its number of labels."""
        self.labels += round(labels)
        for name in ("loss", "head1/top1", "expected_accepted_length"):
            if name in figures:
                total, count = self.sums.get(name, (0.0, 0))
                self.sums[name] = [total + figures[name], count + 1]

    def measured(self, step: int, accepted_length: float) -> None:
        """Close the interval that ends with this step by what held-out text has accepted."""
        means = {name: total / count for name, (total, count) in self.sums.items()}
        self.steps.append(MeasuredStep(
            step=step, accepted_length=accepted_length, labels=self.labels, loss=means.get("loss"),
            accuracy=means.get("head1/top1"), expected_accepted_length=means.get("expected_accepted_length")))
        self.sums = {}
