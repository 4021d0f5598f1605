"""All checks of a case, in order, and the text of their findings."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ...modules.tuning.tree_search import acceptance_of
from .case import Case
from .draft_checks import accepted, draft_findings, read_texts
from .finding import Finding
from .target_checks import target_findings
from .text_checks import rendered, text_findings
from .time_checks import Gains, gain_findings, read_gains

CONSEQUENCES = ("draft as it was trained", "context lengths", "training against held-out", "ceiling", "time of a pass")
"""Checks of what a draft reaches: wrong data, another target or wrong states lower that too."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The outcome of all checks."""

    findings: tuple[Finding, ...]
    """One for each check."""
    sample: tuple[tuple[str, bool], ...]
    """The first training row as pieces of text, each with its mask: True for labels; empty without data."""
    curves: dict[str, tuple[float, ...]]
    """Share of passes that accepted at least 1, 2, 3 ... guesses, decoded and by the training forward."""
    gains: Gains
    """Timing and training."""

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

    def to_dict(self) -> dict[str, Any]:
        """The JSON."""
        return {"headline": self.headline, "findings": [asdict(one) for one in self.findings],
                "acceptance_by_position": self.curves,
                "sample": [{"text": text, "supervised": learned} for text, learned in self.sample]}


def diagnose(case: Case, prompts: Sequence[Sequence[int]], report: Path,
             tell: Callable[[str], None] = lambda said: None) -> Diagnosis:
    """Run every check that the case allows; what it does not allow says why.

    Args:
        case: what is read.
        prompts: tokens of prompts that are answered, up to the answer.
        report: evaluation.json of its run; it need not be there.
        tell: takes a line on each check that has been made, and on what takes long.

    Raises:
        UserError: if a file of the data is corrupted.
    """
    findings = list[Finding]()

    def note(found: Iterator[Finding]) -> None:
        for one in found:
            findings.append(one)
            tell(f"checked: {one.name}")

    findings += [case.no_data] if case.no_data else []
    if case.data is not None:
        note(text_findings(case, case.data))
        note(target_findings(case, case.data))
    tell(f"answering {len(prompts)} prompts with the draft")
    texts = read_texts(case, prompts)
    gains = read_gains(case, report)
    note(draft_findings(case, texts))
    note(gain_findings(case, texts, gains))
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
