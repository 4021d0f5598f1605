"""Learning rates over a run."""

import math
from collections.abc import Callable


def warmup_cosine(
    warmup_steps: int, max_steps: int | None, time_spent: Callable[[], float] = lambda: 0.0
) -> Callable[[int], float]:
    """Factor of the peak learning rate for the optimizer step that comes after `step` finished ones.

    It rises in equal parts over the first `warmup_steps` steps, the first of which already learns, is 1 at the last of
    them, and falls along a half cosine towards zero, which it would reach just after the last step.

    Args:
        warmup_steps: steps of the rise.
        max_steps: steps of the run; None for a run that ends by time alone.
        time_spent: share of the run's time that is over, for runs that may end by time: the cosine follows whichever
            of steps and time is further on.
    """

    def factor(step: int) -> float:
        rise = (step + 1) / warmup_steps if step < warmup_steps else 1.0
        by_steps = 0.0 if max_steps is None else max(0.0, (step - warmup_steps) / max(1, max_steps - warmup_steps))
        progress = min(1.0, max(by_steps, time_spent()))
        return rise * 0.5 * (1.0 + math.cos(math.pi * progress))

    return factor


def stage_factor(progress: float, begin: float, end: float, *, rise: float, step: float) -> float:
    """Factor of the peak learning rate in one stage of a run: 0 outside of it, in it a straight rise and a half cosine.

    Args:
        progress: how far the run is before the optimizer step that asks, from 0 to 1.
        begin: progress at which the stage begins; its first step learns already.
        end: progress at which it ends, where the cosine reaches zero.
        rise: progress that the rise takes.
        step: progress of one optimizer step.
    """
    if not begin <= progress < end:
        return 0.0
    risen = min(1.0, (progress - begin + step) / rise) if rise else 1.0
    return risen * 0.5 * (1.0 + math.cos(math.pi * (progress - begin) / (end - begin)))
