"""What people read: a table for the terminal, Markdown, and one HTML page with plots that needs no network."""

import json
from collections.abc import Iterator
from pathlib import Path
from textwrap import wrap

from .artifact import Artifact
from .files import write_file
from .page import page
from .results import Evaluation, EvaluationRun, Measures
from .wording import contention_note, how_measured, lossless_verdict, number, percent, times

JSON_NAME, MARKDOWN_NAME, HTML_NAME = "evaluation.json", "report.md", "report.html"
WIDTH = 100
"""Columns of the terminal table, and of the sentences below it."""
_HEADINGS = ("prompts", "tokens/pass", "tokens/s", "plain", "generate", "speed-up", "identical")


def write_report(out: Path, run: EvaluationRun, artifact: Artifact | None = None) -> dict[str, Path]:
    """Write evaluation.json, report.md and report.html to `out`; returns the paths by "json", "markdown", "html".

    Args:
        artifact: adds its tree and what was tuned to the page.

    Raises:
        UserError: if `out` cannot be written, or matplotlib is missing (the JSON and the Markdown are there then).
    """
    return {
        "json": write_file(out / JSON_NAME, json.dumps(run.to_dict(), indent=2, allow_nan=False) + "\n"),
        "markdown": write_file(out / MARKDOWN_NAME, markdown(run)),
        "html": write_file(out / HTML_NAME, page(run, artifact)),
    }


def terminal_table(run: EvaluationRun) -> str:
    """The main figures as plain text, `WIDTH` columns wide unless a name is long."""
    lines = []
    for evaluation in run.evaluations:
        rows = [("", *_HEADINGS), *((name, *_cells(measures)) for name, measures in _groups(evaluation))]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines += [f"{evaluation.name} for {evaluation.target}", ""]
        lines += ["  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in
                                                       zip(row[1:], widths[1:], strict=True))]) for row in rows]
        lines += ["", "accepted by position: " + _positions(evaluation.overall), *_trees(evaluation),
                  *wrap(lossless_verdict(run, evaluation), WIDTH), ""]
    if run.evaluations[0].contended:
        lines += wrap("CONTENDED. " + contention_note(run), WIDTH)
    return "\n".join(lines).rstrip() + "\n"


def markdown(run: EvaluationRun) -> str:
    """report.md."""
    lines = [f"# Drafts for {run.evaluations[0].target}", "", how_measured(run), ""]
    if run.evaluations[0].contended:
        lines += [f"**Contended.** {contention_note(run)}", ""]
    for evaluation in run.evaluations:
        lines += [f"## {evaluation.name}", "", lossless_verdict(run, evaluation), "",
                  "| | " + " | ".join(_HEADINGS) + " |", "|---" + "|--:" * len(_HEADINGS) + "|"]
        lines += [f"| {name} | " + " | ".join(_cells(measures)) + " |"
                  for name, measures in [*_groups(evaluation), *evaluation.by_category.items()]]
        lines += ["", "Accepted by position: " + _positions(evaluation.overall), "", *_trees(evaluation), "",
                  f"Drafting took {percent(evaluation.overall.draft_time_share)} of the time. "
                  f"{percent(evaluation.overall.repetition_rate)} of the answers repeat themselves (over 30 % repeated "
                  f"4-grams), {percent(evaluation.overall.truncation_rate)} reached the length limit.", ""]
    return "\n".join(lines)


def _trees(evaluation: Evaluation) -> list[str]:
    """A sentence for each prompt set on trees of other sizes."""
    return [f"tokens per pass on {name} prompts with a tree of " +
            ", ".join(f"{size} nodes {length:.2f}" for size, length in lengths.items())
            for name, lengths in evaluation.accepted_length_by_tree_size.items()]


def _groups(evaluation: Evaluation) -> Iterator[tuple[str, Measures]]:
    yield "all prompts", evaluation.overall
    if len(evaluation.by_prompt_set) > 1:
        yield from evaluation.by_prompt_set.items()


def _cells(measures: Measures) -> tuple[str, ...]:
    return (f"{measures.prompts}", f"{measures.accepted_length:.2f}", number(measures.tokens_per_second, 1),
            number(measures.plain_tokens_per_second, 1), number(measures.generate_tokens_per_second, 1),
            times(measures.speedup), f"{measures.lossless.identical}/{measures.lossless.prompts}")


def _positions(measures: Measures) -> str:
    return ", ".join(percent(share) for share in measures.acceptance_by_position) or "nothing was accepted"
