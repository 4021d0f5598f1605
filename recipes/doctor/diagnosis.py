"""All checks of a case, in order, and the text of their findings."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...modules.tuning.replay_acceptance import acceptance_of
from .case import Case
from .draft_checks import accepted, draft_findings, read_texts
from .finding import Finding, unchecked
from .target_checks import target_findings
from .text_checks import rendered, text_findings
from .time_checks import Gains, gain_findings, read_gains


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
                "acceptance_by_position": self.curves,
                "sample": [{"text": text, "supervised": learned} for text, learned in self.sample]}


def diagnose(case: Case, prompts: Sequence[Sequence[int]], report: Path) -> Diagnosis:
    """Run every check that the case allows; what it does not allow says why.

    Args:
        case: what is read.
        prompts: tokens of prompts that are answered, up to the answer.
        report: evaluation.json of its run; it need not be there.

    Raises:
        UserError: if a file of the data is corrupted.
    """
    findings = list[Finding]()
    if case.data is None:
        findings.append(unchecked("data", case.why_no_data))
    else:
        findings += [*text_findings(case, case.data), *target_findings(case, case.data)]
    texts = read_texts(case, prompts)
    gains = read_gains(case, report)
    findings += [*draft_findings(case, texts), *gain_findings(case, texts, gains)]
    curves = {"decoded": acceptance_of(texts.emitted, texts.topology.depth).by_position,
              "training forward": accepted(case, texts.decoded, texts.topology).by_position}
    return Diagnosis(findings=tuple(findings), sample=tuple(rendered(case, case.data)) if case.data else (),
                     curves=curves, gains=gains)


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
