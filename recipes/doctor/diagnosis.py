"""All checks of a case, in order, and the text of their findings."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...modules.tuning.tree_search import acceptance_of
from .case import Case, Finding, findings_of
from .draft_checks import DRAFT_CHECKS, accepted, read_texts
from .target_checks import TARGET_CHECKS
from .text_checks import TEXT_CHECKS, rendered
from .time_checks import GAIN_CHECKS, Gains, read_gains

CONSEQUENCES = ("draft as it was trained", "context lengths", "training against held-out", "ceiling", "time of a pass")
"""Checks of what a draft reaches: wrong data, another target or wrong states lower that too."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The outcome of all checks."""

    findings: tuple[Finding, ...]  # One for each check
    sample: tuple[tuple[str, bool], ...]  # The first training row as pieces of text, each with its mask: True: labels
    curves: dict[str, tuple[float, ...]]  # Decoded and by training: share of passes with at least 1, 2 ... guesses
    gains: Gains  # Timing and training

    @property
    def faults(self) -> list[Finding]:
        """Those that something is to be done about, causes first."""
        return sorted((one for one in self.findings if one.remedy), key=lambda one: bool(one.follows))

    @property
    def headline(self) -> str:
        """The outcome in a sentence."""
        checked = sum(bool(one.figure) for one in self.findings)
        names = ", ".join(one.name for one in self.faults)
        return (f"{len(self.faults)} of {checked} checks found something: {names}" if self.faults else
                f"none of {checked} checks found anything wrong")


def diagnose(case: Case, prompts: Sequence[Sequence[int]], report: Path,
             tell: Callable[[str], None] = lambda said: None) -> Diagnosis:
    """Run every check that the case allows; what it does not allow says why. The prompts, tokens up to the answer, are
    answered; the report, evaluation.json of its run, need not be there; `tell` takes a line on each check, and on what
    takes long. Raises UserError if a file of the data is corrupted."""
    findings = [case.no_data] if case.no_data else []

    def make(checks: Sequence[Callable[..., Finding | Iterable[Finding]]], *given: Any) -> None:
        for one in findings_of(checks, *given):
            findings.append(one)
            tell(f"checked: {one.name}")

    if case.data is not None:
        make((*TEXT_CHECKS, *TARGET_CHECKS), case, case.data)
    tell(f"answering {len(prompts)} prompts with the draft")
    texts, gains = read_texts(case, prompts), read_gains(case, report)
    make(DRAFT_CHECKS, case, texts)
    make(GAIN_CHECKS, case, texts, gains)
    causes = ", ".join(one.name for one in findings if one.remedy and one.name not in CONSEQUENCES)
    findings = [replace(one, follows=causes) if one.remedy and one.name in CONSEQUENCES else one for one in findings]
    curves = {"decoded": acceptance_of(texts.emitted, texts.topology.depth).by_position,
              "training forward": accepted(case, texts.decoded, texts.topology).by_position}
    return Diagnosis(findings=tuple(findings), sample=tuple(rendered(case, case.data)) if case.data else (),
                     curves=curves, gains=gains)


def lines(findings: Sequence[Finding]) -> list[str]:
    """Text for terminals: what is wrong first, each with its remedy, then what is not."""
    found = list[str]()
    for one in sorted(findings, key=lambda one: (not one.remedy, bool(one.follows), not one.figure)):
        mark = "✗" if one.remedy else "✓" if one.figure else "–"
        said = "; ".join(part for part in (one.figure, one.verdict) if part)
        found.append(f"{mark} {one.name}: {said}")
        if one.follows:
            found.append(f"    perhaps a consequence of {one.follows}: put that right first")
        if one.remedy:
            found.append(f"    → {one.remedy}")
    return found
