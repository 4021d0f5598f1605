"""Course of an evaluation through its plan: what is decoded next, the minutes that are left, and the progress bar."""

import math
from collections import Counter
from typing import Any

from tqdm import tqdm

from .schedule import Entry, Schedule
from .work_plan import Kind, Ledger, WorkPlan

FIRST_SHARE = 0.5
"""Largest share of a budget for the first portion, whose costs are predicted and not yet measured."""
LATER_SHARE = 0.8
"""Share of the time left that is given to each later portion."""
CLOSING_SHARE = 0.2
"""Largest share of a budget that is kept for replays and sample answers."""
REFRESH_SECONDS = 1.0
"""Least time between two predictions on the way."""


class Course:
    """Deals out the questions of a schedule, all at once or as many as fit into a budget, and counts the work done.

    Args:
        plan: units of all work.
        ledger: units and seconds of the work done.
    """

    def __init__(self, plan: WorkPlan, ledger: Ledger) -> None:
        self.plan, self.ledger = plan, ledger
        limit = plan.config.budget_minutes
        self.budget = None if limit is None else 60 * limit
        """Seconds for the evaluation; None without a limit."""
        self.taken: list[Entry] = []
        """Questions that were dealt out."""
        self._rest = list(plan.schedule.bundles)
        self._bar: Any = tqdm(disable=True)
        self._shown = -math.inf
        self.predicted = self._ahead()
        """Predicted seconds of everything that fits, before the start."""

    def show(self, bar: Any) -> None:
        """Count on tqdm's progress bar; its unit is the work of one target pass over one token."""
        self._bar = bar
        self._refresh()

    def portion(self) -> Schedule | None:
        """The questions to decode next; None when all are decoded or no more fit. The first portion is never empty."""
        count = self._next()
        chosen = [entry for bundle in self._rest[:count] for entry in bundle]
        self._rest = self._rest[count:]
        self.taken += chosen
        self._refresh()
        return self.plan.schedule.only(chosen) if chosen else None

    def done(self, kind: Kind, entry: Entry) -> None:
        """Count one turn of a question."""
        units = self.plan.units(kind, entry)
        self.ledger.add(kind, units)
        self._bar.update(units)
        if self.ledger.elapsed - self._shown >= REFRESH_SECONDS:
            self._refresh()

    @property
    def units(self) -> int:
        """Units of everything that fits, those done included."""
        return max(self._units().total(), self.ledger.done)

    @property
    def late(self) -> bool:
        """True when the budget is spent."""
        return self.budget is not None and self.ledger.elapsed >= self.budget

    @property
    def complete(self) -> bool:
        """True when every question was dealt out."""
        return not self._rest

    def finish(self) -> None:
        """Let the bar end full: what did not fit is reported in words."""
        self._bar.total = self._bar.n
        self._bar.refresh()

    @property
    def fitting(self) -> list[Entry]:
        """The questions that are decoded by the costs known so far, those dealt out included."""
        found = self._rest[: max(self._fit(1.0), 0 if self.taken else self._least())]
        return [*self.taken, *(entry for bundle in found for entry in bundle)]

    def _next(self) -> int:
        """Number of bundles of the next portion."""
        if self.budget is None:
            return len(self._rest)
        first = not self.taken
        if not first and self._fit(1.0) == len(self._rest):
            return len(self._rest)
        count, batch = self._fit(FIRST_SHARE if first else LATER_SHARE), self.plan.config.untimed_batch_size
        if first:
            # One timed bundle of each set and one batch show what the other prompts will cost.
            return max(min(count, self._least() + batch), self._least())
        if count < batch:
            count = min(batch, self._fit(1.0))
        # Less than half a batch would cost nearly as much as a whole one.
        return count if 2 * count >= batch else 0

    def _least(self) -> int:
        """Number of bundles of the smallest first portion: one of each set."""
        return len({bundle[0].prompt_set for bundle in self._rest})

    def _fit(self, share: float) -> int:
        """Number of the following bundles that fit into a share of the time left."""
        if self.budget is None:
            return len(self._rest)
        closing = min(self.ledger.seconds(self.plan.closing(self.plan.schedule.entries)), CLOSING_SHARE * self.budget)
        underway = self.ledger.seconds(self.plan.of_entries(self.taken) - self.ledger.units)
        room, spent = share * (self.budget - self.ledger.elapsed - underway - closing), 0.0
        for count, bundle in enumerate(self._rest):
            spent += self.ledger.seconds(self.plan.of_entries(bundle))
            if spent > room:
                return count
        return len(self._rest)

    def _units(self) -> Counter[Kind]:
        """Units of all questions that fit, and of what follows them."""
        entries = self.fitting
        return self.plan.of_entries(entries) + self.plan.closing(entries)

    def _ahead(self) -> float:
        """Predicted seconds of what is still to do."""
        return self.ledger.seconds(self._units() - self.ledger.units)

    def _refresh(self) -> None:
        """Show the predicted minutes of the whole evaluation next to the bar."""
        self._shown = self.ledger.elapsed
        self._bar.total = self.units
        self._bar.set_postfix_str(f"{minutes(self.ledger.elapsed + self._ahead())} in all")


def opening(course: Course) -> str:
    """Sentences on what an evaluation measures and how long it will take, from what was measured before."""
    plan, config, fitting = course.plan, course.plan.config, course.fitting
    schedule = plan.schedule
    sets = ", ".join(f"{len(members)} {name}" for name, members in schedule.prompt_sets.items())
    drawn = " and ".join("greedy" if one == 0 else f"at temperature {one:g}" for one in config.degrees)
    names = ", ".join(plan.methods)
    timed = (f"; {len(schedule.timed)} of them are timed against decoding without drafts" if schedule.timed else
             "; nothing is timed")
    said = (f"{len(schedule.entries)} prompts ({sets}) are decoded with {names}: {schedule.answers} answers of at most "
            f"{config.max_new_tokens} tokens, {drawn}{timed}. By the costs measured here that takes")
    whole = minutes(course.ledger.seconds(plan.total))
    if len(fitting) == len(schedule.entries):
        return f"{said} {whole}"
    return (f"{said} {whole}; about {len(fitting)} of the prompts fit into evaluate.budget_minutes "
            f"{config.budget_minutes:g}")


def minutes(seconds: float) -> str:
    """A predicted time in words: seconds below a minute and a half, else minutes."""
    return f"about {seconds:.0f} s" if seconds < 90 else f"about {seconds / 60:.1f} minutes"
