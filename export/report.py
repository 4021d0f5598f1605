"""What people read: a table for the terminal, Markdown, and one HTML page with plots that needs no network."""

from pathlib import Path

from .artifact import Artifact
from .results import EvaluationRun


def terminal_table(run: EvaluationRun) -> str:
    """The main figures as plain text, at most 100 columns wide."""
    raise NotImplementedError


def write_report(out: Path, run: EvaluationRun, artifact: Artifact | None = None) -> dict[str, Path]:
    """Write evaluation.json, report.md and report.html to `out`; returns the paths by "json", "markdown", "html"."""
    raise NotImplementedError
