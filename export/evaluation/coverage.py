"""Coverage of an evaluation: the prompts that were planned and those that were measured, and what was left out."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from .course import Course
from .schedule import Entry, Schedule


def coverage(schedule: Schedule, course: Course) -> dict[str, Any]:
    """Entries of the header of an evaluation: numbers of prompts, and the minutes predicted and taken."""
    taken = course.taken
    replayed = max((course.ledger.answers[kind] for kind in course.plan.replays()), default=0)
    return {
        "prompt_sets": _sets(taken),
        "categories": _categories(taken),
        "timed_prompts": sum(entry.number in schedule.timed for entry in taken),
        "replayed_answers": replayed,
        "planned": {
            "prompt_sets": _sets(schedule.entries),
            "categories": _categories(schedule.entries),
            "timed_prompts": len(schedule.timed),
            "replayed_answers": sum(entry.question.turns for entry in course.plan.replayed(schedule.entries))
            if course.plan.replays() else 0,
        },
        "minutes": {"predicted": course.predicted / 60, "taken": course.ledger.elapsed / 60,
                    "budget": schedule.config.budget_minutes},
    }


def left_out(header: Mapping[str, Any]) -> tuple[str, ...]:
    """Sentences on what did not fit into the budget, from the header of an evaluation; empty where everything did."""
    planned, budget = header["planned"], header["minutes"]["budget"]
    rest = f"the rest did not fit into evaluate.budget_minutes {budget:g}" if budget is not None else ""
    found = []
    measured, wanted = (sum(one["prompt_sets"].values()) for one in (header, planned))
    if measured < wanted:
        sets = ", ".join(f"{header['prompt_sets'].get(name, 0)} of {count} {name}"
                         for name, count in planned["prompt_sets"].items())
        missing = [name for name in planned["categories"] if not header["categories"].get(name)]
        none = f"; none of the categories {', '.join(missing)}" if missing else ""
        found.append(f"evaluation: {measured} of {wanted} prompts were decoded ({sets}{none}); {rest}")
    if header["timed_prompts"] < planned["timed_prompts"]:
        found.append(f"evaluation: {header['timed_prompts']} of {planned['timed_prompts']} prompts were timed; {rest}")
    if header["replayed_answers"] < planned["replayed_answers"]:
        found.append(f"evaluation: {header['replayed_answers']} of {planned['replayed_answers']} answers were replayed "
                     f"through smaller and larger trees; {rest}")
    return tuple(found)


def _sets(entries: Iterable[Entry]) -> dict[str, int]:
    return dict(Counter(entry.prompt_set for entry in sorted(entries, key=lambda one: one.number)))


def _categories(entries: Iterable[Entry]) -> dict[str, int]:
    found = Counter(entry.question.category for entry in sorted(entries, key=lambda one: one.number))
    return {name: count for name, count in found.items() if name}
