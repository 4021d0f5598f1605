"""Cases of a test that `make test` leaves to later tiers: of those marked as long `make test-long` runs the first two,
`make test-full` the others (`tests/conftest.py`)."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet
from support.families import CASES, DRAFTERS, cases_of

FIRST_CASES = tuple(next(iter(cases_of(cls.family))) for cls in DRAFTERS)  # The first case of each family
DRAFTING = tuple(name for name in CASES if name not in (
    "medusa-copy", "medusa-copy-reduced", "medusa-one-copy", "medusa-2-copy", "hydra-copy-reduced", "hydra-one-copy",
    "eagle-hass-reduced", "eagle-sampling", "eagle-partial", "eagle3-shared", "eagle3.1", "eagle3-norms",
    "eagle3-reduced", "falcon-official"))
"""Cases whose drafters keep and read states in ways of their own. The others differ from one of them in output rows,
norms and training, on which waits, memory, graphs and counts do not depend."""
TELLING = ("eagle3", "block-markov", "medusa-2", "hydra++", "medusa", "draft-lm")
"""Cases that come first where a mechanism is tried with few: tapped states, a cache and several steps; blocks whose
guesses are corrected one by one; a target that is trained too; heads that read each other's tokens."""


def others_long(cases: Iterable[Any], kept: Collection[Any] | None = None) -> list[Any]:
    """Parameters of a test: those kept, and the others marked as long, the most telling ones first."""
    listed = list(cases)
    kinds = [_kind(case) for case in listed]

    def rank(place: int) -> tuple[int, int]:
        # Every drafter once before any comes twice. Other cases stay in their order.
        drafter = kinds[place] if isinstance(kinds[place], str) and kinds[place] in CASES else None
        return (0 if drafter is None else kinds[:place].count(drafter),
                TELLING.index(drafter) if drafter in TELLING else len(TELLING))

    order = sorted(range(len(listed)), key=rank)
    now = [kinds[order[0]]] if kept is None else kept
    return [listed[place] if listed[place] in now or kinds[place] in now else _long(listed[place]) for place in order]


def some_long(cases: Iterable[Any], every: int, most: int | None = None) -> list[Any]:
    """The same with every n-th case kept, `most` of them at most."""
    listed = list(cases)
    return others_long(listed, listed[::every][:most])


def _kind(case: Any) -> Any:
    """The drafter that a tuple begins with, or the case itself."""
    first = case.values[0] if isinstance(case, ParameterSet) else case[0] if isinstance(case, tuple) and case else case
    return first if isinstance(first, str) and first in CASES else case


def _long(case: Any) -> Any:
    if isinstance(case, ParameterSet):
        return case._replace(marks=(*case.marks, pytest.mark.long))
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long)
