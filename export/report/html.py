"""The HTML page of an evaluation: one file, no script, nothing fetched from anywhere."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from ...modules import FASTEST, JOINED, STATIC
from ..artifact import Artifact
from ..evaluation.methods import EvaluateConfig
from ..evaluation.results import Evaluation, EvaluationRun, Lossless, TrainingRecord
from . import plots
from .headline import headline
from .page_style import PAGE, colours, themed
from .phrases import (
    COLUMNS_NOTE,
    INTERVALS_NOTE,
    LEFT_OUT,
    PARTS_NOTE,
    contention_note,
    drafting_note,
    how_measured,
    identical,
    label,
    number,
    of_what,
    percent,
    prediction_note,
    span,
    steadiness,
    threads,
    times,
    verdicts,
    where_measured,
)
from .tables import Table, in_detail, parts_table, side_by_side
from .written_answers import STYLE, written_answers

DRAWN_NODES = 24
"""Nodes of a tree that are drawn even if fewer are in use."""


def page(run: EvaluationRun, artifact: Artifact | None) -> str:
    """The whole page; the cards show the first method at its first temperature and batch size."""
    firsts = run.at(temperature=run.temperatures[0], batch_size=run.batch_sizes[0])
    first = firsts[0]
    several = f"{len(firsts)} drafting methods for {first.target}"
    title = several if len(firsts) > 1 else f"{first.name.capitalize()} drafts for {first.target}"
    circumstances = [how_measured(run), where_measured(run), *([run.training.time] if run.training else [])]
    comparison = ("" if len(run.evaluations) < 2 else
                  f"<h2>The methods side by side</h2>{_grid(side_by_side(run))}"
                  f'<p class="muted">{escape(COLUMNS_NOTE)} {escape(INTERVALS_NOTE)}</p>')
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="headline">{escape(headline(run))}</p>',
        f'<p class="muted">{"<br>".join(map(escape, circumstances))}</p>',
        _cards(run, first),
        *_boxes(run, first),
        written_answers(run.samples, first.name),
        _figures(run, firsts, artifact),
        comparison,
        *(_details(run, evaluation) for evaluation in firsts),
        _training(run.training),
        _tree(artifact),
        _facts(run, artifact),
    ]
    return PAGE.substitute(title=escape(title), colours=colours(), more=STYLE,
                           body="\n".join(part for part in body if part))


def _cards(run: EvaluationRun, evaluation: Evaluation) -> str:
    measures = evaluation.overall
    faster = measures.speedup is not None and measures.speedup > 1
    # The speed-up is over the faster baseline, so the card names that one's speed.
    baselines = [speed for speed in (measures.plain_tokens_per_second, measures.generate_tokens_per_second)
                 if speed is not None]
    said = (f"speed-up: {number(measures.tokens_per_second, 1)} tokens/s with drafts, "
            f"{number(max(baselines, default=None), 1)} without")
    cards = [
        ("good", f"{measures.accepted_length:.2f}", measures.accepted_length_interval,
         f"tokens per target pass, in {of_what(evaluation)}; 1 without drafts"),
        ("good" if faster else "", times(measures.speedup), measures.speedup_interval, said),
        ("bad" if evaluation.faulty else "good", identical(measures), None,
         "answers identical to the target's own" if measures.distribution is None else
         "answers by the target's own distribution"),
        ("", percent(measures.draft_time_share), None, "of the time goes into drafting, the rest into the target"),
    ]
    items = (f'<div class="card {kind}"><b>{escape(value)}{_range(span(interval, 2))}</b><span>{escape(text)}</span>'
             "</div>" for kind, value, interval, text in cards)
    name = f'<p class="muted lead">{escape(label(run, evaluation))}</p>' if len(run.evaluations) > 1 else ""
    return f'{name}<div class="cards">{"".join(items)}</div>'


def _range(text: str) -> str:
    return f'<i class="range">{escape(text)}</i>' if text else ""


def _boxes(run: EvaluationRun, first: Evaluation) -> list[str]:
    """The result of the comparison of answers, and the warnings that a reader must see before any figure."""
    found = Lossless.joined(evaluation.overall.lossless for evaluation in run.evaluations)
    # Sampled drafts can change the distribution although no answer was compared token by token.
    changed = any(evaluation.faulty for evaluation in run.evaluations)
    drafting = any(evaluation.overall.lossless.different or evaluation.biased for evaluation in run.evaluations)
    heading = ("Drafting changed words." if drafting else "The loop without drafts is wrong." if changed else
               "Drafts were sampled." if not found.prompts else
               "Not a word changed." if found.identical == found.prompts else "Not a word changed but for near-ties.")
    boxes = [f'<div class="box{" warn" if changed else ""}"><p><b>{heading}</b> '
             f"{escape(' '.join(verdicts(run)))}</p></div>"]
    if first.contended:
        boxes.append('<div class="box warn"><p><b>The speeds are not reliable.</b> '
                     f"{escape(contention_note(run))}</p></div>")
    if run.left_out:
        items = "".join(f"<li>{escape(sentence)}</li>" for sentence in run.left_out)
        boxes.append(f'<div class="box warn"><p><b>{LEFT_OUT}</b></p><ul>{items}</ul></div>')
    return boxes


def _figures(run: EvaluationRun, firsts: Sequence[Evaluation], artifact: Artifact | None) -> str:
    """The plots of acceptance and speed, in pairs; plots of what was not measured are left out."""
    first, several = firsts[0], len(firsts) > 1
    # One method leaves room for a line a prompt set; several would cross too often.
    curves = ({one.name: one.overall.acceptance_by_position for one in firsts} if several else
              {name: measures.acceptance_by_position for name, measures in first.by_prompt_set.items()})
    drawn = [_figure(plots.acceptance_by_position(curves),
                     "Share of target passes that accepted at least so many guesses in a row. The sum of the points "
                     "plus 1, the token that the target adds itself, is the number of tokens per pass.")]
    drawn.append(_speed(run, firsts))
    if first.by_category:
        lengths = {one.name: {name: m.accepted_length for name, m in one.by_category.items()} for one in firsts}
        drawn.append(_figure(plots.accepted_lengths(lengths) if several else
                             plots.accepted_length(lengths[first.name], first.overall.accepted_length),
                             "Tokens per target pass by category of the prompt."))
    if len(run.temperatures) > 1:
        # At one batch size: each has a tree of its own, and a line for every one of them would crowd the plot.
        lines = {name: [(one.overall.accepted_length, one.overall.accepted_length_interval)
                        for one in run.at(name=name, batch_size=run.batch_sizes[0])] for name in run.methods}
        drawn.append(_figure(plots.with_ranges(lines, "temperature", [f"{one:g}" for one in run.temperatures],
                                               "tokens per target pass", "temperatures", least=1.0),
                             "Tokens per target pass by sampling temperature; 0 is greedy. Vertical lines are 95 % "
                             "intervals."))
    if artifact is not None and artifact.tuning is not None:
        tuning = artifact.tuning
        alone = {one.nodes: (one.reported or one.chosen).accepted_length for one in tuning.trials(0.0, STATIC)}
        forms = "" if tuning.linear_layers is None else f"; {tuning.linear_layers.in_words}"
        drawn.append(_figure(plots.cost_curve(tuning.cost, artifact.tree_size, alone),
                             f"Time of one pass of the target by the number of tokens it checks, measured on "
                             f"{tuning.device}, {tuning.dtype}{forms}. Vertical line: the size chosen for the tree on "
                             f"this machine, {artifact.tree_size} nodes. Dashed: the speed-up over this loop without "
                             "drafts that is expected of the tree alone, without copies, by held-out answers; what was "
                             "measured stands in the tables."))
    return f'<h2>Accepted guesses and speed</h2><div class="pair">{"".join(drawn)}</div>'


def _speed(run: EvaluationRun, firsts: Sequence[Evaluation]) -> str:
    """Speeds by batch size where there are several, else by method, else by prompt set."""
    if firsts[0].overall.tokens_per_second is None:
        return ""
    said = ("Whole answers, reading the prompt included. Each timed prompt was decoded with drafts, by this project's "
            "loop without drafts and by transformers' generate, one after the other.")
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
    """Tokens per second of each method and of the two baselines without drafts, where they were timed."""
    first = evaluations[0].overall
    known = [(one.name, one.overall.tokens_per_second, one.overall.tokens_per_second_interval) for one in evaluations]
    plain, generate = plots.BASELINE_COLORS
    known += [(plain, first.plain_tokens_per_second, None), (generate, first.generate_tokens_per_second, None)]
    return {name: (speed, interval) for name, speed, interval in known if speed is not None}


def _figure(svg: str, caption: str, kind: str = "") -> str:
    return f'<figure class="{kind}">{themed(svg)}<figcaption>{escape(caption)}</figcaption></figure>'


def _details(run: EvaluationRun, evaluation: Evaluation) -> str:
    heading = "All figures" if len(run.evaluations) == 1 else label(run, evaluation)
    columns = "" if len(run.evaluations) > 1 else f"{COLUMNS_NOTE} {INTERVALS_NOTE}"
    notes = [columns, drafting_note(evaluation), prediction_note(evaluation)]
    parts = parts_table(run, evaluation)
    joined = f'<p class="muted">{escape(PARTS_NOTE)}</p>{_grid(parts)}' if parts is not None else ""
    return (f"<h2>{escape(heading)}</h2>{_grid(in_detail(run, evaluation))}"
            f'<p class="muted">{escape(" ".join(note for note in notes if note))}</p>{joined}')


def _training(training: TrainingRecord | None) -> str:
    """The curve of the draft's training, and the sentences that follow from it."""
    if training is None:
        return ""
    # Not every family has such an estimate.
    expected = ("" if training.curve[-1].expected_accepted_length is None else
                " Training text: what was expected of a chain, given the right tokens before each guess, mean since "
                "the measurement before. The two differ in height; compare their courses.")
    lengths = _figure(plots.training_lengths(training.curve, training.best_step),
                      "Held-out text: tokens per target pass, decoded with a tree searched for it, without copies."
                      f"{expected} Vertical line: the step whose weights the artifact has.")
    losses = _figure(plots.training_losses(training.curve),
                     "Training text: the loss, and the share of tokens that the first guess got right, means since "
                     "the measurement before.")
    return (f"<h2>The training of the draft</h2><p>{escape(training.outcome)}</p>"
            f'<div class="pair">{lengths}{losses}</div>')


def _grid(table: Table) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in table.columns)
    rows = (f'<tr class="head"><td colspan="{len(table.columns)}">{escape(row[0].text)}</td></tr>' if len(row) == 1 else
            "<tr>" + "".join(f"<td>{escape(cell.text)}{_range(cell.interval)}</td>" for cell in row) + "</tr>"
            for row in table.rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _tree(artifact: Artifact | None) -> str:
    if artifact is None:
        return ""
    topology, used = artifact.topology, artifact.tree_size
    # A tree in use may be tiny; some more nodes show the shape that the artifact holds.
    drawn = topology.prefix(min(topology.size, max(used, DRAWN_NODES)))
    faint = "" if drawn.size == used else f" The {drawn.size - used} faint nodes are not used on this machine."
    if drawn.size < topology.size:
        faint += f" {topology.size - drawn.size} more nodes of the artifact's tree are not drawn."
    copies = artifact.tuning.best(JOINED) if artifact.tuning is not None and artifact.fastest() == JOINED else None
    # The draft's own tree keeps its size next to copies: with them a pass has more nodes than this section draws.
    joined = (f" By default (the policy {FASTEST}) up to {copies.copied} tokens copied from the text stand next to a "
              f"tree of {copies.nodes} nodes, in passes of at most {copies.nodes + copies.copied} nodes."
              if copies is not None else "")
    said = (f"With the tree alone each pass of the target checks {used} tokens at once: the last token of the text, "
            f"called the root, and {used - 1} guesses about the tokens after it.{joined} The artifact holds "
            f"{topology.size} nodes, the best first, so that the first ones are the best smaller tree." if used > 1 else
            "On this machine no tree makes greedy decoding faster: checking guesses costs more time than it saves, so "
            "nothing is drafted.")
    return (
        f"<h2>The draft tree</h2><p>{escape(said)}</p>"
        + _figure(plots.tree(drawn, used), "Each step to the right is one token further ahead; colours give the rank "
                  f"of a guess among those of its node.{faint}", "wide")
    )


def _facts(run: EvaluationRun, artifact: Artifact | None) -> str:
    """The conditions as sentences; the JSON has each value under its key."""
    header, machine = run.header, run.header["machine"]
    facts = {
        "machine": f"{machine['processor']}, {machine['system']}, {threads(run)}; device {machine['device']}",
        "number format": header["dtype"],
        "linear layers": _linear_layers(header["linear_layers"]),
        "versions": ", ".join(f"{name} {text}" for name, text in header["versions"].items()),
        "settings": _settings(header),
        "prompts": " and ".join(f"{count:,} {name}" for name, count in header["prompt_sets"].items()),
        "steadiness": f"one pass of the target, repeated {header['contention']['samples']} times, took at most "
                      f"{steadiness(run)} longer than its fastest",
    }
    if artifact is not None:
        # These hashes tell two measurements of seemingly equal artifacts apart.
        facts["target weights"], origin = artifact.identity.weights_hash, artifact.provenance
        if "data_manifest" in origin:
            facts["data manifest"] = origin["data_manifest"]
        if found := origin.get("draft_vocabulary"):
            facts["draft vocabulary"] = (f"{found['tokens']:,} tokens, {found['held_out_coverage']:.1%} of those in "
                                         "held-out answers")
        if loops := origin.get("loops"):
            facts["loops"] = (f"{loops['answers']:,} held-out answers end in a loop, with "
                              f"{loops['accepted_length']:.2f} tokens per pass there" if loops["answers"] else
                              "no held-out answer ends in a loop")
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items())
    return f"<h2>Conditions of the measurement</h2><dl>{items}</dl>"


def _linear_layers(found: Mapping[str, Any]) -> str:
    """The forms of the linear layers, and the milliseconds by which they were chosen."""
    if (times := found["times"]) is None:
        return str(found["forms"])
    passes = "; ".join(f"{tokens} token{'s' * (tokens > 1)} {1000 * plain:.3g} ms plain, {1000 * packed:.3g} ms packed"
                       for tokens, plain, packed in zip(times["tokens"], times["plain"], times["packed"], strict=True))
    return f"{found['forms']}: all of them in one pass, in {times['dtype']}: {passes}"


def _settings(header: Mapping[str, Any]) -> str:
    """The settings of the evaluation in words; filters of sampling only where they are set."""
    found, usual = header["settings"], EvaluateConfig()
    filters = [f"{name} {found[name]:g}" for name in ("top_k", "top_p", "repetition_penalty")
               if found[name] != getattr(usual, name)]
    policies, baselines, sizes, degrees = (
        [found[name]] if isinstance(found[name], str | int | float) else list(found[name])
        for name in ("policies", "baselines", "batch_sizes", "temperatures"))
    drawn = " and ".join(f"at temperature {one:g}" if one else "greedy" for one in degrees)
    # Baselines have policies of their own: an evaluation of them alone has used none of these.
    by_policy = [f"the policy {' and '.join(policies)}"] if header["artifacts"].keys() - set(baselines) else []
    drafts = ", next to ".join([*by_policy, *([" and ".join(baselines)] if baselines else [])])
    limit = "all prompts" if found["limit"] is None else f"at most {found['limit']:,} prompts"
    minutes = "without a limit of time" if found["budget_minutes"] is None else f"{found['budget_minutes']:g} minutes"
    return (f"answers of at most {found['max_new_tokens']:,} tokens, {drawn}{''.join(f', {one}' for one in filters)}; "
            f"drafted by {drafts}; {limit} of each set; {header['timed_prompts']} prompts were timed in "
            f"batches of {' and '.join(map(str, sizes))}; {minutes}; {'with' if found['graphs'] else 'without'} CUDA "
            f"graphs, layers {'compiled' if found['compile'] else 'not compiled'}")
