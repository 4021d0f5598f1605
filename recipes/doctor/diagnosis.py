"""All checks of a case, in order, and the text of their findings."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .case import Case
from .finding import Finding, unchecked
from .target_checks import target_findings
from .text_checks import rendered, text_findings


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The outcome of all checks."""

    findings: tuple[Finding, ...]
    """One for each check."""
    sample: tuple[tuple[str, bool], ...]
    """The first training row as pieces of text, each with its mask: True for labels; empty without data."""

    @property
    def faults(self) -> list[Finding]:
        """Those that something is to be done about."""
        return [one for one in self.findings if one.remedy]

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
                "sample": [{"text": text, "supervised": learned} for text, learned in self.sample]}


def diagnose(case: Case) -> Diagnosis:
    """Run every check that the case allows; what it does not allow says why."""
    findings = list[Finding]()
    if case.data is None:
        findings.append(unchecked("data", case.why_no_data))
    else:
        findings += [*text_findings(case, case.data), *target_findings(case, case.data)]
    return Diagnosis(findings=tuple(findings), sample=tuple(rendered(case, case.data)) if case.data else ())


def lines(findings: Sequence[Finding]) -> list[str]:
    """Text for terminals: what is wrong first, each with its remedy, then what is not."""
    found = list[str]()
    for one in sorted(findings, key=lambda one: (not one.remedy, not one.figure)):
        mark = "✗" if one.remedy else "✓" if one.figure else "–"
        said = "; ".join(part for part in (one.figure, one.verdict) if part)
        found.append(f"{mark} {one.name}: {said}")
        if one.remedy:
            found.append(f"    → {one.remedy}")
    return found
