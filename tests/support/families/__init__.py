"""The cases of every drafter family, for the tests that all families must pass.

Each family has a file here with its own `CASES`, named after the family; a family in `DRAFTERS` must have one.
"""

from importlib import import_module

from draftsmith.modules import DRAFTERS
from support.cases import IDS, Case, randomised

__all__ = ["CASES", "IDS", "Case", "cases_of", "randomised"]


def cases_of(family: str) -> dict[str, Case]:
    """The cases in a family's own file."""
    cases: dict[str, Case] = import_module(f"support.families.{family}").CASES
    return cases


CASES: dict[str, Case] = {name: case for cls in DRAFTERS for name, case in cases_of(cls.family).items()}
