"""The HTML page of an evaluation: one file, no script, nothing fetched from anywhere."""

from collections.abc import Mapping, Sequence
from html import escape
from string import Template
from typing import Any

from ..artifact import Artifact
from ..evaluation.results import Evaluation, EvaluationRun, Lossless, Measures
from ..report import plots
from .phrases import (
    CONFIDENCE_NOTE,
    CONFIDENCE_OF,
    INTERVALS_NOTE,
    confidence_note,
    contention_note,
    drafting_note,
    how_measured,
    identical,
    label,
    number,
    percent,
    prediction_note,
    span,
    steadiness,
    times,
    verdicts,
    where_measured,
)
from .tables import Table, confidence_table, in_detail, side_by_side

DRAWN_NODES = 24
"""Nodes of a tree that are drawn even if fewer are in use."""
_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
  :root { --ink: #1f2933; --muted: #5f6b7a; --line: #e4e8ed; --draft: #0f766e; --warn: #c2410c; }
  body { margin: 0; background: #f6f7f9; color: var(--ink);
         font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
  main { max-width: 1060px; margin: 0 auto; padding: 40px 24px 64px; }
  h1 { font-size: 30px; line-height: 1.2; margin: 0 0 6px; letter-spacing: -.01em; }
  h2 { font-size: 19px; margin: 44px 0 6px; }
  p { margin: 6px 0 14px; max-width: 80ch; }
  .muted, figcaption { color: var(--muted); font-size: 14px; }
  .cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(210px, 1fr)); gap: 14px;
           margin: 26px 0 8px; }
  .card, figure, .box { background: #fff; border: 1px solid var(--line); border-radius: 10px; }
  .card { padding: 16px 18px; }
  .card b { display: block; font-size: 32px; line-height: 1.15; font-weight: 650; font-variant-numeric: tabular-nums; }
  .card span { color: var(--muted); font-size: 14px; }
  .good b { color: var(--draft); } .bad b { color: var(--warn); }
  .box { padding: 14px 18px; border-left: 5px solid var(--draft); margin: 14px 0; }
  .box p { margin: 0; max-width: none; }
  .box.warn { border-left-color: var(--warn); }
  .pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr)); gap: 14px;
          margin-top: 12px; align-items: start; }
  figure { margin: 0; padding: 14px 16px 12px; }
  figure.wide { margin-top: 14px; }
  figure svg { width: 100%; height: auto; display: block; }
  figure svg text { font-family: inherit !important; }
  figcaption { margin-top: 6px; }
  .scroll { overflow-x: auto; }
  table { border-collapse: collapse; width: 100%; font-size: 14px; background: #fff; margin-top: 12px;
          font-variant-numeric: tabular-nums; border: 1px solid var(--line); }
  th, td { text-align: right; padding: 6px 7px; border-bottom: 1px solid var(--line); white-space: nowrap; }
  th { color: var(--muted); font-weight: 600; white-space: normal; vertical-align: bottom; line-height: 1.25; }
  th:first-child, td:first-child { text-align: left; }
  .range { display: block; font-style: normal; font-weight: 400; font-size: 12px; color: var(--muted); }
  .card .range { display: inline; font-size: 14px; margin-left: 8px; }
  .lead { margin: 22px 0 -16px; }
  tr.head td { background: #f6f7f9; color: var(--muted); font-weight: 600; }
  dl { display: grid; grid-template-columns: max-content 1fr; gap: 4px 18px; font-size: 14px; margin: 12px 0; }
  dt { color: var(--muted); } dd { margin: 0; overflow-wrap: anywhere; }
</style>
</head>
<body><main>
$body
</main></body>
</html>
""")


def page(run: EvaluationRun, artifact: Artifact | None) -> str:
    """The whole page; the cards show the first method at its first temperature and batch size."""
    firsts = run.at(temperature=run.temperatures[0], batch_size=run.batch_sizes[0])
    first = firsts[0]
    several = f"{len(firsts)} ways to draft for {first.target}"
    title = several if len(firsts) > 1 else f"{first.name.capitalize()} drafts for {first.target}"
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="muted">{escape(how_measured(run))}<br>{escape(where_measured(run))}</p>',
        _cards(run, first),
        _lossless_box(run),
        _contention_box(run, first),
        _figures(run, firsts, artifact),
        _comparison(run),
        *(_details(run, evaluation) for evaluation in firsts),
        _tree(artifact),
        _facts(run, artifact),
    ]
    return _PAGE.substitute(title=escape(title), body="\n".join(part for part in body if part))


def _cards(run: EvaluationRun, evaluation: Evaluation) -> str:
    measures, lossless = evaluation.overall, evaluation.overall.lossless
    faster = measures.speedup is not None and measures.speedup > 1
    speed = f"{number(measures.tokens_per_second, 1)} tokens/s, the faster baseline {number(_baseline(measures), 1)}"
    cards = [
        ("good", f"{measures.accepted_length:.2f}", measures.accepted_length_interval,
         "tokens per target pass, bonus included"),
        ("good" if faster else "", times(measures.speedup), measures.speedup_interval, speed),
        ("bad" if lossless.different else "good", identical(lossless), None,
         "answers identical to the target's own"),
        ("", percent(measures.draft_time_share), None, "of the time spent drafting"),
    ]
    items = (f'<div class="card {kind}"><b>{escape(value)}{_range(span(interval, 2))}</b><span>{escape(text)}</span>'
             "</div>" for kind, value, interval, text in cards)
    name = f'<p class="muted lead">{escape(label(run, evaluation))}</p>' if len(run.evaluations) > 1 else ""
    return f'{name}<div class="cards">{"".join(items)}</div>'


def _range(text: str) -> str:
    return f'<i class="range">{escape(text)}</i>' if text else ""


def _baseline(measures: Measures) -> float | None:
    speeds = (measures.plain_tokens_per_second, measures.generate_tokens_per_second)
    known = [speed for speed in speeds if speed is not None]
    return max(known, default=None)


def _lossless_box(run: EvaluationRun) -> str:
    found = Lossless.joined(evaluation.overall.lossless for evaluation in run.evaluations)
    changed = bool(found.different)
    heading = ("Drafting changed words." if changed else
               "Not a word changed." if found.identical == found.prompts else "Exact up to near-ties.")
    return (f'<div class="box{" warn" if changed else ""}"><p><b>{heading}</b> '
            f"{escape(' '.join(verdicts(run)))}</p></div>")


def _contention_box(run: EvaluationRun, evaluation: Evaluation) -> str:
    if not evaluation.contended:
        return ""
    return f'<div class="box warn"><p><b>Contended.</b> {escape(contention_note(run))}</p></div>'


def _comparison(run: EvaluationRun) -> str:
    if len(run.evaluations) < 2:
        return ""
    return (f"<h2>The methods side by side</h2>{_grid(side_by_side(run))}"
            f'<p class="muted">{escape(INTERVALS_NOTE)}</p>')


def _figures(run: EvaluationRun, firsts: Sequence[Evaluation], artifact: Artifact | None) -> str:
    drawn = [_acceptance(firsts), _confidence(firsts), _speed(run, firsts), _by_category(firsts), _by_temperature(run),
             _cost(artifact)]
    return ('<h2>How far the guesses reach, and what that is worth</h2>'
            f'<div class="pair">{"".join(drawn)}</div>{_tree_sizes(firsts)}')


def _acceptance(firsts: Sequence[Evaluation]) -> str:
    sets = firsts[0].by_prompt_set
    curves = ({one.name: one.overall.acceptance_by_position for one in firsts} if len(firsts) > 1 else
              {name: measures.acceptance_by_position for name, measures in sets.items()})
    return _figure(plots.acceptance_by_position(curves),
                   "A curve ends where the tree ends. Accepted length is one more than the sum of its points.")


def _confidence(firsts: Sequence[Evaluation]) -> str:
    """Of a token and of a path, or, where several methods know theirs, of each one's tokens."""
    known = [one for one in firsts if one.confidence]
    if not known:
        return ""
    shares = next(iter(known[0].confidence.values()))
    curves = ({CONFIDENCE_OF[name]: curve for name, curve in known[0].confidence.items()} if len(known) == 1 else
              {one.name: one.confidence["token"] for one in known})
    said = f"How sure the draft was, and how often the target agreed; bars of {known[0].name}. {CONFIDENCE_NOTE}"
    return _figure(plots.confidence(curves, shares), said)


def _speed(run: EvaluationRun, firsts: Sequence[Evaluation]) -> str:
    """Against the batch size where there are several, else of each method, else of each prompt set."""
    if firsts[0].overall.tokens_per_second is None:
        return ""
    said = "Whole answers, prompt included; every prompt was decoded in all ways, one after the other."
    if len(run.batch_sizes) > 1:
        rows = [_speeds(run.at(temperature=run.temperatures[0], batch_size=size)) for size in run.batch_sizes]
        lines = {name: [row[name] for row in rows] for name in rows[0]}
        drawn = plots.with_ranges(lines, "rows of the batch", [str(size) for size in run.batch_sizes],
                                  "tokens per second, all rows", "batches")
    elif len(firsts) > 1:
        drawn = plots.method_speeds(_speeds(firsts))
    else:
        drawn = plots.speeds({
            name: (m.tokens_per_second, m.plain_tokens_per_second or 0.0, m.generate_tokens_per_second or 0.0)
            for name, m in firsts[0].by_prompt_set.items() if m.tokens_per_second is not None
        })
    return _figure(drawn, said)


def _speeds(evaluations: Sequence[Evaluation]) -> dict[str, plots.Point]:
    """Tokens per second of each method and of the two ways without drafts, where they were timed."""
    first = evaluations[0].overall
    known = [(one.name, one.overall.tokens_per_second, one.overall.tokens_per_second_interval) for one in evaluations]
    plain, generate = plots.BASELINE_COLORS
    known += [(plain, first.plain_tokens_per_second, None), (generate, first.generate_tokens_per_second, None)]
    return {name: (speed, interval) for name, speed, interval in known if speed is not None}


def _by_category(firsts: Sequence[Evaluation]) -> str:
    if not firsts[0].by_category:
        return ""
    lengths = {one.name: {name: m.accepted_length for name, m in one.by_category.items()} for one in firsts}
    drawn = (plots.accepted_lengths(lengths) if len(firsts) > 1 else
             plots.accepted_length(lengths[firsts[0].name], firsts[0].overall.accepted_length))
    return _figure(drawn, "By category of the prompt.")


def _by_temperature(run: EvaluationRun) -> str:
    if len(run.temperatures) < 2:
        return ""
    lines = {name: [(one.overall.accepted_length, one.overall.accepted_length_interval)
                    for one in run.at(name=name, batch_size=run.batch_sizes[0])] for name in run.methods}
    drawn = plots.with_ranges(lines, "temperature", [f"{one:g}" for one in run.temperatures],
                              "tokens per target pass", "temperatures", least=1.0)
    return _figure(drawn, "At temperature 0 the target is greedy. Lines span the intervals.")


def _tree_sizes(firsts: Sequence[Evaluation]) -> str:
    """Accepted length of other tree sizes, exact, from replayed answers."""
    lines = [f"{escape(one.name)}, {escape(name)}: " + ", ".join(f"{size} nodes <b>{length:.2f}</b>"
                                                               for size, length in lengths.items())
             for one in firsts for name, lengths in one.accepted_length_by_tree_size.items()]
    return f"<p>Tokens per pass with larger trees: {'; '.join(lines)}.</p>" if lines else ""


def _figure(svg: str, caption: str, kind: str = "") -> str:
    return f'<figure class="{kind}">{svg}<figcaption>{escape(caption)}</figcaption></figure>'


def _details(run: EvaluationRun, evaluation: Evaluation) -> str:
    heading = "All figures" if len(run.evaluations) == 1 else label(run, evaluation)
    notes = [drafting_note(evaluation), prediction_note(evaluation), "" if len(run.evaluations) > 1 else INTERVALS_NOTE]
    table = confidence_table(evaluation)
    sure = f'<p class="muted">{escape(confidence_note(evaluation))}</p>{_grid(table)}' if table is not None else ""
    return (f"<h2>{escape(heading)}</h2>{_grid(in_detail(evaluation))}"
            f'<p class="muted">{escape(" ".join(note for note in notes if note))}</p>{sure}')


def _grid(table: Table) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in table.columns)
    rows = (f'<tr class="head"><td colspan="{len(table.columns)}">{escape(row[0].text)}</td></tr>' if len(row) == 1 else
            "<tr>" + "".join(f"<td>{escape(cell.text)}{_range(cell.interval)}</td>" for cell in row) + "</tr>"
            for row in table.rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _cost(artifact: Artifact | None) -> str:
    if artifact is None or artifact.tuning is None:
        return ""
    tuning = artifact.tuning
    curve = plots.cost_curve(tuning.cost.curve(), artifact.tree_size, tuning.expected_accepted_length)
    return _figure(curve, f"What a larger tree costs, measured on {tuning.device}, {tuning.dtype}. The vertical line "
                   f"is the size tuned here, {artifact.tree_size} nodes.")


def _tree(artifact: Artifact | None) -> str:
    if artifact is None:
        return ""
    topology, used = artifact.topology, artifact.tree_size
    drawn = topology.prefix(min(topology.size, max(used, DRAWN_NODES)))
    faint = "" if drawn.size == used else f" The {drawn.size - used} faint ones would be added next."
    said = (f"Each pass verifies {used} of {topology.size} nodes at once: the last token and {used - 1} guesses about "
            "the tokens after it." if used > 1 else
            "On this machine no tree pays: a pass over guesses costs more than it saves, so nothing is drafted.")
    return (
        f"<h2>The tree</h2><p>{said} Nodes are in best-first order, so the first ones always make the best smaller "
        "tree.</p>"
        + _figure(plots.tree(drawn, used), f"From left to right: one token further ahead.{faint}", "wide")
    )


def _facts(run: EvaluationRun, artifact: Artifact | None) -> str:
    header = run.header
    facts: dict[str, Any] = {
        "machine": header["machine"], "number format": header["dtype"], "threads": header["threads"],
        "versions": header["versions"], "settings": header["settings"], "prompts": header["prompt_sets"],
        "steadiness": f"{header['contention']['samples']} samples, at most {steadiness(run)} above the best",
    }
    if artifact is not None:
        facts |= {"target weights": artifact.identity.weights_hash}
        facts |= {name.replace("_", " "): artifact.provenance[name] for name in ("data_manifest",)
                  if name in artifact.provenance}
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(_plain(value))}</dd>" for name, value in facts.items())
    return f"<h2>How it was measured</h2><dl>{items}</dl>"


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{str(key).replace('_', ' ')} {_plain(item)}" for key, item in value.items()
                         if item is not None)
    return f"{value:.3g}" if isinstance(value, float) else str(value)
