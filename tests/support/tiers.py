"""In which tier a case runs: `make test` tries a mechanism with one case, `make test-long` with two more, and
`make test-full` with all others."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet

from .families import CASES, DRAFTERS, cases_of

FIRST_CASES = tuple(next(iter(cases_of(cls.family))) for cls in DRAFTERS)
"""The first case of each family."""
DRAFTING = tuple(name for name in CASES if name not in (
    "medusa-copy", "medusa-copy-reduced", "medusa-one-copy", "medusa-2-copy", "hydra-copy-reduced", "hydra-one-copy",
    "eagle-hass-reduced", "eagle-sampling", "eagle-partial", "eagle3-shared", "eagle3.1", "eagle3-norms",
    "eagle3-reduced", "falcon-official"))
"""Cases whose drafters keep and read states in ways of their own. The others differ from one of them in output rows,
norms and training, on which waits, memory, graphs and counts do not depend."""
TELLING = ("eagle3", "block-markov", "medusa-2", "hydra++", "medusa", "draft-lm")
"""Cases that come first where a mechanism is tried with few: tapped states, a cache and several steps; blocks whose
guesses are corrected one by one; a target that is trained too; heads that read each other's tokens."""
LATER = 2
"""Cases of a kind that `make test-long` runs."""


def others_long(cases: Iterable[Any], kept: Collection[Any] | None = None) -> list[Any]:
    """Parameters of a test, each in its tier: those kept for `make test`, the next two for `make test-long`.

    Args:
        cases: all of them. Tuples that begin with a drafter's case belong together.
        kept: cases, or drafters' cases that tuples begin with; None keeps the most telling one.
    """
    listed, kinds = list(cases), list[Any]()
    for case in listed:
        if (kind := _kind(case)) not in kinds:
            kinds.append(kind)
    kinds.sort(key=lambda kind: TELLING.index(kind) if isinstance(kind, str) and kind in TELLING else len(TELLING))
    now = kinds[:1] if kept is None else kept
    left = [case for case in listed if case not in now and _kind(case) not in now]
    long = [kind for kind in kinds if any(_kind(case) == kind for case in left)][:LATER]
    marks = {True: pytest.mark.long, False: pytest.mark.full}
    return [_marked(case, marks[_kind(case) in long]) if case in left else case for case in listed]


def some_long(cases: Iterable[Any], every: int, most: int | None = None) -> list[Any]:
    """The same with every n-th case kept, `most` of them at most."""
    listed = list(cases)
    return others_long(listed, listed[::every][:most])


def _kind(case: Any) -> Any:
    """The drafter's case that a case begins with, or the case itself."""
    first = case.values[0] if isinstance(case, ParameterSet) else case[0] if isinstance(case, tuple) and case else case
    return first if isinstance(first, str) and first in CASES else case


def _marked(case: Any, mark: pytest.MarkDecorator) -> Any:
    if isinstance(case, ParameterSet):
        return case._replace(marks=(*case.marks, mark))
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=mark)
