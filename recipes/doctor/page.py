"""The HTML page of a diagnosis, in the style of the report: one file, no script, nothing fetched from anywhere."""

from collections.abc import Sequence
from html import escape

from ...export.report import plots
from ...export.report.page_style import PAGE, colours, themed
from ...modules.decoding.token_text import visible
from .case import Finding
from .diagnosis import Diagnosis

STYLE = """  .checks td { white-space: normal; text-align: left; vertical-align: top; line-height: 1.4; }
  .checks td:first-child { white-space: nowrap; font-weight: 600; } .checks th { text-align: left; }
  .row { white-space: pre-wrap; overflow-wrap: anywhere; font: 14px/1.6 ui-monospace, monospace;
         background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 14px 18px; }
  .row mark { background: var(--guess); color: inherit; border-radius: 3px; }
"""


def page(found: Diagnosis, title: str) -> str:
    """The whole page; the title names the draft and its target."""
    # A verdict may be sentences of the report.
    said = [(f"{one.name.capitalize()}: {one.verdict}".rstrip("."), one) for one in found.faults]
    boxes = [f'<div class="box warn"><p><b>{escape(verdict)}.</b> {escape(one.figure)}. '
             + (f"Perhaps a consequence of {escape(one.follows)}: put that right first. " if one.follows else "")
             + f"<b>Remedy:</b> {escape(one.remedy)}.</p></div>" for verdict, one in said]
    fine, unchecked = ([one for one in found.findings if not one.remedy and bool(one.figure) is figure]
                       for figure in (True, False))
    drawn = [_figure(plots.acceptance_by_position(found.curves), "Share of passes that accepted at least so many "
                     "guesses in a row, decoded and by the training forward on the same answers: one line if equal."),
             _figure(plots.cost_curve(found.gains.cost, found.gains.size, {}),
                     f"Time of a pass and of drafting by the nodes of the tree; {found.gains.size} are in use.")]
    if (training := found.gains.training) is not None:
        drawn.append(_figure(plots.training_lengths(training.curve, training.best_step), training.outcome))
    row = "".join(f"<mark>{escape(visible(text))}</mark>" if learned else escape(visible(text))
                  for text, learned in found.sample)
    body = [f"<h1>{escape(title)}</h1>", f'<p class="headline">{escape(found.headline.capitalize())}.</p>', *boxes,
            f'<h2>Acceptance and time</h2><div class="pair">{"".join(drawn)}</div>',
            _table("Nothing wrong", fine), _table("Not checked", unchecked),
            f'<h2>The first training row</h2><p class="muted">Labels are marked.</p><div class="row">{row}</div>'
            if row else ""]
    return PAGE.substitute(title=escape(title), colours=colours(), more=STYLE, body="\n".join(body))


def _figure(svg: str, caption: str) -> str:
    return f"<figure>{themed(svg)}<figcaption>{escape(caption)}</figcaption></figure>"


def _table(heading: str, findings: Sequence[Finding]) -> str:
    rows = "".join(f"<tr><td>{escape(one.name)}</td><td>{escape(one.figure)}</td><td>{escape(one.verdict)}</td></tr>"
                   for one in findings)
    head = "<tr><th></th><th>measured</th><th>verdict</th></tr>"
    return (f'<h2>{heading}</h2><div class="scroll"><table class="checks"><thead>{head}</thead><tbody>{rows}</tbody>'
            "</table></div>" if findings else "")
