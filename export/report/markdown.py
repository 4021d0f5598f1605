"""Reports of an evaluation: a table for the terminal, Markdown, and one HTML page with plots that needs no network."""

import json
from pathlib import Path
from textwrap import wrap

from ...modules.files.atomic_files import write_file
from ..artifact import Artifact
from ..evaluation.results import Evaluation, EvaluationRun
from .headline import headline
from .html import page
from .phrases import (
    COLUMNS_NOTE,
    INTERVALS_NOTE,
    LEFT_OUT,
    PARTS_NOTE,
    contention_note,
    drafting_note,
    group_name,
    how_measured,
    identical,
    label,
    number,
    percent,
    prediction_note,
    times,
    verdicts,
    where_measured,
)
from .tables import Table, in_detail, parts_table, side_by_side

JSON_NAME, MARKDOWN_NAME, HTML_NAME = "evaluation.json", "report.md", "report.html"
WIDTH = 100
"""Columns of the terminal table, and of the sentences below it."""
_HEADINGS = ("answers", "tokens/pass", "tokens/s", "plain", "generate", "speed-up", "identical")
TERMINAL_NOTE = ("plain and generate: tokens/s without drafts, by this project's loop and by transformers; speed-up: "
                 "over the faster of the two")
"""Explanation of the columns of the terminal table."""


def write_report(out: Path, run: EvaluationRun, artifact: Artifact | None = None) -> dict[str, Path]:
    """Write evaluation.json, report.md and report.html to `out`; returns the paths by "json", "markdown", "html".

    Args:
        artifact: the artifact whose tree and tuning the page shows; None shows none.

    Raises:
        UserError: if `out` cannot be written, or matplotlib is missing (the JSON and the Markdown are written before).
    """
    # The figures first: a page that cannot be drawn must not cost a measurement of an hour.
    return {
        "json": write_file(out / JSON_NAME, json.dumps(run.to_dict(), indent=2, allow_nan=False) + "\n"),
        "markdown": write_file(out / MARKDOWN_NAME, markdown(run)),
        "html": write_file(out / HTML_NAME, page(run, artifact)),
    }


def terminal_table(run: EvaluationRun) -> str:
    """The main figures as plain text, `WIDTH` columns wide unless a name is long."""
    groups = [(label(run, evaluation), evaluation.overall) for evaluation in run.evaluations]
    # With several methods the prompt sets of each would bury the comparison; the written reports have them.
    if len(groups) == 1 and len(run.evaluations[0].by_prompt_set) > 1:
        groups += [(group_name(run, name), one) for name, one in run.evaluations[0].by_prompt_set.items()]
    rows = [("", *_HEADINGS)]
    rows += [(name, f"{one.prompts}", f"{one.accepted_length:.2f}", number(one.tokens_per_second, 1),
              number(one.plain_tokens_per_second, 1), number(one.generate_tokens_per_second, 1), times(one.speedup),
              identical(one)) for name, one in groups]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [f"Drafts for {run.evaluations[0].target}", *wrap(headline(run), WIDTH), ""]
    lines += ["  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in
                                                   zip(row[1:], widths[1:], strict=True))]) for row in rows]
    lines += ["", *wrap(f"{how_measured(run)}. {TERMINAL_NOTE}", WIDTH), ""]
    for evaluation in _firsts(run):
        lines += wrap(f"{evaluation.name}: {_positions(evaluation)}", WIDTH)
    lines += [line for text in ["", *verdicts(run)] for line in wrap(text, WIDTH) or [""]]
    if run.left_out:
        lines += ["", f"{LEFT_OUT}:", *(line for sentence in run.left_out for line in wrap(sentence, WIDTH))]
    if run.evaluations[0].contended:
        lines += ["", *wrap("WARNING. " + contention_note(run), WIDTH)]
    return "\n".join(lines).rstrip() + "\n"


def _firsts(run: EvaluationRun) -> tuple[Evaluation, ...]:
    """The evaluation of each method at the first temperature and batch size."""
    return run.at(temperature=run.temperatures[0], batch_size=run.batch_sizes[0])


def markdown(run: EvaluationRun) -> str:
    """Text of report.md."""
    # A reader who stops early has seen the result, the machine, and every reason to doubt the speeds.
    lines = [f"# Drafts for {run.evaluations[0].target}", "", f"**{headline(run)}**", "", how_measured(run), "",
             where_measured(run), "", *([f"{run.training.time}. {run.training.outcome}", ""] if run.training else [])]
    if run.evaluations[0].contended:
        lines += [f"**Warning.** {contention_note(run)}", ""]
    lines += [line for text in verdicts(run) for line in (text, "")]
    if run.left_out:
        lines += [f"## {LEFT_OUT}", "", *(f"- {sentence}" for sentence in run.left_out), ""]
    if len(run.evaluations) > 1:
        lines += ["## The methods side by side", "", *_pipes(side_by_side(run)), ""]
    lines += [COLUMNS_NOTE, "", INTERVALS_NOTE, ""]
    for evaluation in _firsts(run):
        lines += [f"## {label(run, evaluation)}", "", drafting_note(evaluation), ""]
        lines += [*_pipes(in_detail(run, evaluation)), "", f"{_positions(evaluation).capitalize()}.", ""]
        # An empty note would leave two blank lines, which Markdown tools report.
        if note := prediction_note(evaluation):
            lines += [note, ""]
        parts = parts_table(run, evaluation)
        lines += [] if parts is None else [PARTS_NOTE, "", *_pipes(parts), ""]
    return "\n".join(lines)


def _pipes(table: Table) -> list[str]:
    """A table in Markdown; intervals follow their figures."""
    lines = ["| " + " | ".join(table.columns) + " |", "|---" + "|--:" * (len(table.columns) - 1) + "|"]
    for row in table.rows:
        cells = [f"{cell.text} ({cell.interval})" if cell.interval else cell.text for cell in row]
        # Markdown cannot join cells of a row, so a heading among the rows fills the rest with empty ones.
        if len(row) == 1:
            cells = [f"*{cells[0]}*", *[""] * (len(table.columns) - 1)]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _positions(evaluation: Evaluation) -> str:
    if evaluation.nodes == 1:
        return "nothing was drafted"
    found = evaluation.overall.acceptance_by_position
    shares = [f"{percent(share)} at least {count}" for count, share in enumerate(found, 1)]
    return f"guesses that a pass accepted: {', '.join(shares)}" if shares else "no pass accepted a guess"
