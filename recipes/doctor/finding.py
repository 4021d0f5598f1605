"""One finding of the doctor, and the words for a group of rows in which something is wrong."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

LEAST_SHARE = 0.03
"""Share of rows from which a fault counts: one in a tenth of the rows is found in 99 of a hundred samples of 64."""
SHOWN = 3
"""Rows of a group that are named."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The outcome of one check."""

    name: str
    """Name of the check."""
    figure: str
    """The measurement in words; empty where nothing could be measured."""
    verdict: str
    """Its meaning, or why it could not be measured."""
    remedy: str = ""
    """The change to make, with the key of the recipe; empty where nothing is wrong."""
    follows: str = ""
    """Names of faults that explain this one; empty where it stands for itself."""


def judged(name: str, figure: str, fine: str, *faults: tuple[object, str, str]) -> Finding:
    """The finding of a check of several faults: of each, whether it is there (true or not empty), its verdict and its
    remedy; `fine` is the verdict where none is."""
    there = [(verdict, remedy) for found, verdict, remedy in faults if found]
    return Finding(name=name, figure=figure, verdict="; ".join(verdict for verdict, _ in there) or fine,
                   remedy="; ".join(dict.fromkeys(remedy for _, remedy in there)))


def unchecked(name: str, reason: object) -> Finding:
    """A check that could not be made."""
    return Finding(name=name, figure="", verdict=f"not checked: {reason}")


def group(names: Sequence[str], rows: Iterable[int], least: float = LEAST_SHARE) -> str:
    """Words on some of the rows, "6 of 64 rows (train-00000:3, ...)"; empty where they are too few.

    A group has words of its own: in the mean over all rows, a fault in a tenth of them would vanish.
    """
    found = [names[row] for row in sorted(set(rows))]
    if not found or len(found) < least * len(names):
        return ""
    shown = ", ".join([*found[:SHOWN], *["..."] * (len(found) > SHOWN)])
    return f"{len(found)} of {len(names)} rows ({shown})"
