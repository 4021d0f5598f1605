"""The page of a diagnosis, in the style of the report."""

from functools import partial

from ...export.page import Block, Figure, Heading, Passage, Table, Text
from ...export.report import plots
from ...modules.decoding.token_text import visible
from .diagnosis import Diagnosis


def page(found: Diagnosis, title: str) -> list[Block]:
    """The whole page; the title names the draft and its target."""
    gains = found.gains
    drawn = [Figure(partial(plots.acceptance_by_position, found.curves), "Share of passes that accepted at least so "
                    "many guesses in a row, decoded and by the training forward on the same answers: one line if "
                    "equal."),
             Figure(partial(plots.cost_curve, gains.cost, gains.size, {}),
                    f"Time of a pass and of drafting by the nodes of the tree; {gains.size} are in use.")]
    if (training := gains.training) is not None:
        drawn.append(Figure(partial(plots.training_lengths, training.curve, training.best_step), training.outcome))
    shown: list[Block] = [Heading(title, 1), Text(f"{found.headline.capitalize()}.", "headline")]
    for one in found.faults:
        cause = f" Perhaps a consequence of {one.follows}: put that right first." if one.follows else ""
        # A verdict may be sentences of the report.
        shown.append(Text(f"{one.figure}.{cause}", "warn", f"{f'{one.name.capitalize()}: {one.verdict}'.rstrip('.')}.",
                          (f"Remedy: {one.remedy}.",)))
    shown += [Heading("Acceptance and time"), *drawn]
    for heading, measured in (("Nothing wrong", True), ("Not checked", False)):
        rows = [(one.name, one.figure, one.verdict) for one in found.findings
                if not one.remedy and bool(one.figure) is measured]
        shown += [Heading(heading), Table(("", "measured", "verdict"), rows, "words")] if rows else []
    if found.sample:
        pieces = [(visible(text), "guess" if learned else "", "") for text, learned in found.sample]
        shown += [Heading("The first training row"), Passage(pieces, note="Labels are marked.")]
    return shown
