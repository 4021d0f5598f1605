"""Learning rates over a run."""

import math
from collections.abc import Callable


def warmup_cosine(warmup_steps: int, max_steps: int) -> Callable[[int], float]:
    """Factor of the peak learning rate for the optimizer step that comes after `step` finished ones.

    It rises in equal parts over the first `warmup_steps` steps, the first of which already learns, is 1 at the last of
    them, and falls along a half cosine towards zero, which it would reach just after the last step.
    """

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        progress = (step - warmup_steps) / max(1, max_steps - warmup_steps)
        return 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))

    return factor
