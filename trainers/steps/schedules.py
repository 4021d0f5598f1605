"""Learning-rate schedules."""

import math
from collections.abc import Callable

LEAD = 0.05
"""Share by which a run's time must be ahead of its steps to take over from them. The first steps are slow, and a run
that its steps end must not depend on the clock."""


def time_leads(max_steps: int | None, step: int, time_spent: float) -> bool:
    """True where the progress of a run that may end by steps or by time is that of its time. `max_steps` is None for a
    run that ends by time alone; `time_spent`, the elapsed share, is 0 in one that ends by steps alone."""
    return max_steps is None or time_spent > step / max_steps + LEAD


def warmup_cosine(
    warmup_steps: int, max_steps: int | None, time_spent: Callable[[], float] = lambda: 0.0
) -> Callable[[int], float]:
    """Factor of the peak learning rate for the optimizer step after `step` finished ones: it rises linearly over the
    first `warmup_steps`, from above 0 at the first to 1 at the last of them, and falls along a half cosine towards
    zero, which it would reach just after the last step. In runs that may end by time the cosine follows the steps until
    the elapsed share `time_spent` is clearly ahead of them, see `time_leads`."""

    def factor(step: int) -> float:
        rise = (step + 1) / warmup_steps if step < warmup_steps else 1.0
        by_steps = 0.0 if max_steps is None else max(0.0, (step - warmup_steps) / max(1, max_steps - warmup_steps))
        # Read once: the clock of a run goes on between two looks.
        spent = time_spent()
        progress = min(1.0, max(by_steps, spent) if time_leads(max_steps, step, spent) else by_steps)
        return rise * 0.5 * (1.0 + math.cos(math.pi * progress))

    return factor


def stage_factor(progress: float, start: float, end: float, *, rise: float, step: float) -> float:
    """Factor of the peak learning rate in one stage of a run: a linear `rise` and a half cosine that reaches zero at
    `end`; 0 outside the stage, above 0 in its first step. All are progress from 0 to 1: `step` that of one optimizer
    step, `progress` that before it."""
    if not start <= progress < end:
        return 0.0
    risen = min(1.0, (progress - start + step) / rise) if rise else 1.0
    return risen * 0.5 * (1.0 + math.cos(math.pi * (progress - start) / (end - start)))
