"""Cases that `make test` leaves to `make test-long`, where it runs some of a kind."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest

from .families import DRAFTERS, cases_of

FIRST_CASES = tuple(next(iter(cases_of(cls.family))) for cls in DRAFTERS)
"""The first case of each family."""


def others_long(cases: Iterable[str], kept: Collection[str] = FIRST_CASES) -> list[Any]:
    """Parameters of a test: those kept, and the others marked as long."""
    return [case if case in kept else pytest.param(case, marks=pytest.mark.long) for case in cases]
