"""Cases that `make test` leaves to `make test-long`, where it runs some of a kind."""

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


def others_long(cases: Iterable[Any], kept: Collection[Any] = FIRST_CASES) -> list[Any]:
    """Parameters of a test: those kept, and the others marked as long."""
    return [case if case in kept else _long(case) for case in cases]


def some_long(cases: Iterable[Any], every: int, most: int | None = None) -> list[Any]:
    """Parameters of a test: every n-th one, `most` of them at most, and the others marked as long."""
    return [case if place % every == 0 and (most is None or place // every < most) else _long(case)
            for place, case in enumerate(cases)]


def _long(case: Any) -> Any:
    if isinstance(case, ParameterSet):
        return case._replace(marks=(*case.marks, pytest.mark.long))
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long)
