"""Tables of a report, as cells that Markdown and HTML format."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..evaluation.results import Evaluation, EvaluationRun, Measures
from .phrases import all_prompts, group_name, identical, number, percent, span, times

FIGURES = ("answers", "tokens per pass", "tokens/s", "plain tokens/s", "generate tokens/s", "speed-up", "identical")
"""Columns of every group of prompts."""


PREDICTED = ("predicted tokens per pass", "predicted speed-up")


@dataclass(frozen=True)
class Cell:
    """One figure, and its interval where it has one."""

    text: str
    interval: str = ""


@dataclass(frozen=True)
class Table:
    """Column headings (the first is empty), and rows as long; a row of one cell is a heading among them."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


def figures(measures: Measures) -> tuple[Cell, ...]:
    """The cells of a row under `FIGURES`."""
    return (
        Cell(f"{measures.prompts}"),
        Cell(f"{measures.accepted_length:.2f}", span(measures.accepted_length_interval, 2)),
        Cell(number(measures.tokens_per_second, 1), span(measures.tokens_per_second_interval, 1)),
        Cell(number(measures.plain_tokens_per_second, 1)),
        Cell(number(measures.generate_tokens_per_second, 1)),
        Cell(times(measures.speedup), span(measures.speedup_interval, 2)),
        Cell(identical(measures)),
    )


def side_by_side(run: EvaluationRun) -> Table:
    """Every method at every temperature and batch size; a condition that is the same in all rows has no column."""
    conditions: list[tuple[str, bool, Callable[[Evaluation], str]]] = [
        ("temperature", len(run.temperatures) > 1, lambda one: f"{one.temperature:g}"),
        ("batch", len(run.batch_sizes) > 1, lambda one: f"{one.batch_size}"),
        ("nodes per pass", True, lambda one: f"{one.nodes}"),
        ("of its own tree", any(one.partners for one in run.evaluations), lambda one: f"{one.tree_nodes}"),
    ]
    shown = [(name, text) for name, wanted, text in conditions if wanted]
    predicted = any(one.prediction is not None for one in run.evaluations)
    rows = [
        (Cell(one.name), *(Cell(text(one)) for _, text in shown), *figures(one.overall)[1:],
         *(predicted_cells(one) if predicted else []))
        for one in run.evaluations
    ]
    columns = ("", *(name for name, _ in shown), *FIGURES[1:], *(PREDICTED if predicted else []))
    return Table(columns, tuple(rows))


def predicted_cells(evaluation: Evaluation) -> list[Cell]:
    """The cells under `PREDICTED`, with 90 % intervals."""
    found = evaluation.prediction
    if found is None:
        return [Cell(""), Cell("")]
    return [Cell(f"{found.accepted_length:.2f}", span(found.interval, 2)),
            Cell(times(found.speedup), span(found.speedup_interval, 2))]


def in_detail(run: EvaluationRun, evaluation: Evaluation) -> Table:
    """One method on all prompts, and on each prompt set, category, turn and mode."""
    # All prompts first: the groups below have wide intervals, and invite to pick a lucky one.
    rows: list[tuple[Cell, ...]] = [(Cell(all_prompts(run)), *figures(evaluation.overall))]
    for heading, groups in groups_of(evaluation):
        rows.append((Cell(heading),))
        rows += [(Cell(group_name(run, name)), *figures(measures)) for name, measures in groups.items()]
    return Table(("", *FIGURES), tuple(rows))


def parts_table(run: EvaluationRun, evaluation: Evaluation) -> Table | None:
    """Shares of the accepted guesses by the drafter that made them, by kind of prompt; None with a single drafter."""
    names = tuple(evaluation.overall.guessed_by)
    if not names:
        return None

    rows: list[tuple[Cell, ...]] = []
    for heading, groups in [("", {all_prompts(run): evaluation.overall}), *groups_of(evaluation)]:
        rows += [(Cell(heading),)] if heading else []
        for name, measures in groups.items():
            total = sum(measures.guessed_by.values())
            # Of a group without accepted guesses no share is known, which is not 0 %.
            shares = [percent(measures.guessed_by.get(one, 0) / total) if total else "" for one in names]
            rows.append((Cell(group_name(run, name) if heading else name), Cell(f"{total:,}"), *map(Cell, shares)))
    return Table(("", "accepted guesses", *(f"from {name}" for name in names)), tuple(rows))


def groups_of(evaluation: Evaluation) -> Iterator[tuple[str, dict[str, Measures]]]:
    """Headings and groups of prompts; categories that hold the same prompts as a set of their name are left out."""
    sets = evaluation.by_prompt_set
    if len(sets) > 1:
        yield "prompt sets", sets
    # Otherwise a set whose file names it as the only category would have two equal rows.
    categories = {name: measures for name, measures in evaluation.by_category.items()
                  if name not in sets or sets[name].prompts != measures.prompts}
    if categories:
        yield "categories", categories
    if evaluation.by_turn:
        yield "turns", {f"turn {turn}": measures for turn, measures in evaluation.by_turn.items()}
    if evaluation.by_mode:
        yield "modes", evaluation.by_mode
