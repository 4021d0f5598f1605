"""The cases of every drafter family, for the tests that all families must pass.

Each family has its own `CASES` in tests/families/<family>/cases.py; a family in `DRAFTERS` must have them.
"""

from importlib import import_module

from draftsmith.modules import DRAFTERS
from support.cases import IDS, Case, randomised

__all__ = ["CASES", "IDS", "Case", "cases_of", "randomised"]


def cases_of(family: str) -> dict[str, Case]:
    """The cases in a family's own file."""
    cases: dict[str, Case] = import_module(f"families.{family}.cases").CASES
    return cases


CASES: dict[str, Case] = {name: case for cls in DRAFTERS for name, case in cases_of(cls.family).items()}
