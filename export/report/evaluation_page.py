"""The report of an evaluation: one page for Markdown and HTML, and a short one for the terminal."""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Any

from ...modules import FASTEST, JOINED, STATIC
from ...modules.decoding.requests import visible
from ...modules.files.atomic_files import write_file
from ..artifact import Artifact
from ..evaluation.methods import EvaluateConfig
from ..evaluation.results import Evaluation, EvaluationRun, Lossless, Measures, SampleAnswer, TrainingRecord
from ..model_card import counted_in_words
from ..page import Block, Cell, Figure, Heading, Passage, Table, Text, as_html, as_markdown, as_text
from . import phrases, plots
from .phrases import group_name, identical, label, number, percent, span, times

JSON_NAME, MARKDOWN_NAME, HTML_NAME = "evaluation.json", "report.md", "report.html"
FIGURES = ("answers", "tokens/pass", "tokens/s", "plain", "generate", "speed-up", "identical")  # Columns of a group
PREDICTED = ("predicted tokens/pass", "predicted speed-up")
DRAWN_NODES = 24  # Nodes of a tree that are drawn even if fewer are in use
LONGEST_PROMPT, MOST_GUESSES = 400, 4  # Characters of a question, and rejected guesses of one token, that are shown


def write_report(out: Path, run: EvaluationRun, artifact: Artifact | None = None) -> dict[str, Path]:
    """Write evaluation.json, report.md and report.html to `out`, with the tree and the tuning of an artifact; returns
    the paths by "json", "markdown", "html". Raises UserError if `out` cannot be written, or matplotlib is missing (the
    JSON and the Markdown are written before)."""
    page = evaluation_page(run, artifact)
    # The figures first: a page that cannot be drawn must not cost a measurement of an hour.
    return {
        "json": write_file(out / JSON_NAME, json.dumps(run.to_dict(), indent=2, allow_nan=False) + "\n"),
        "markdown": write_file(out / MARKDOWN_NAME, as_markdown(page)),
        "html": write_file(out / HTML_NAME, as_html(page))}


def terminal_table(run: EvaluationRun) -> str:
    """The main figures as plain text."""
    groups = [(label(run, evaluation), evaluation.overall) for evaluation in run.evaluations]
    # With several methods the prompt sets of each would bury the comparison; the written reports have them.
    if len(groups) == 1 and len(run.evaluations[0].by_prompt_set) > 1:
        groups += [(group_name(run, name), one) for name, one in run.evaluations[0].by_prompt_set.items()]
    firsts = run.at(temperature=run.temperatures[0], batch_size=run.batch_sizes[0])
    return as_text([
        Heading(f"Drafts for {firsts[0].target}", 1), Text(phrases.headline(run)),
        side_by_side(run) if run.header.get("drafts") else
        Table(("", *FIGURES), [(name, *figures(measures)) for name, measures in groups]),
        *map(Text, run.differences),
        Text(f"{phrases.how_measured(run)}. plain and generate: tokens/s without drafts, by this project's loop and by "
             "transformers; speed-up: over the faster of the two"),
        *(Text(f"{one.name}: {phrases.positions_note(one)}") for one in firsts), *boxes(run)])


def evaluation_page(run: EvaluationRun, artifact: Artifact | None) -> list[Block]:
    """The whole page; the cards show the first method at its first temperature and batch size."""
    # A reader who stops early has seen the result, the machine, and every reason to doubt the speeds.
    firsts = run.at(temperature=run.temperatures[0], batch_size=run.batch_sizes[0])
    first, several = firsts[0], len(run.evaluations) > 1
    target = first.target + (" with its adapter" if artifact is not None and artifact.identity.adapter else "")
    title = (f"{len(firsts)} drafting methods for {target}" if len(firsts) > 1 else
             f"{first.name.capitalize()} drafts for {target}")
    trained = [run.training.time] if run.training else []
    page = [Heading(title, 1), Text(phrases.headline(run), "headline"),
            *(Text(said, "muted") for said in (phrases.how_measured(run), phrases.where_measured(run), *trained)),
            *cards(run, first), *boxes(run), *written(run.samples, first.name),
            Heading("Accepted guesses and speed"), *drawn(run, firsts, artifact)]
    if several:
        page += [Heading("The methods side by side"), side_by_side(run), Text("", items=run.differences),
                 Text(phrases.COLUMNS_NOTE, "muted")]
    for one in firsts:
        page += [Heading(label(run, one) if several else "All figures"), in_detail(run, one),
                 *(Text(note, "muted") for note in (
                     "" if several else phrases.COLUMNS_NOTE, phrases.drafting_note(one),
                     f"{phrases.positions_note(one).capitalize()}.", phrases.prediction_note(one)) if note)]
        if parts := parts_table(run, one):
            page += [Text(phrases.PARTS_NOTE, "muted"), parts]
    if run.training is not None:
        page += [Heading("The training of the draft"), Text(run.training.outcome), *training_plots(run.training)]
    return [*page, *(tree_section(artifact) if artifact else []), *facts(run, artifact)]


def cards(run: EvaluationRun, evaluation: Evaluation) -> list[Block]:
    """The four figures of a method that matter most, with the method's name where there are several."""
    measures, joined = evaluation.overall, f" with {both}" if (both := phrases.partners(evaluation)) else ""
    # The speed-up is over the faster baseline, so the card names that one's speed.
    baselines = [speed for speed in (measures.plain_tokens_per_second, measures.generate_tokens_per_second)
                 if speed is not None]
    rows = [
        (Cell(f"{measures.accepted_length:.2f}", span(measures.accepted_length_interval, 2), "good"),
         f"tokens per target pass, in passes of at most {evaluation.nodes} nodes{joined}; 1 without drafts"),
        (Cell(times(measures.speedup), span(measures.speedup_interval, 2),
              "good" if measures.speedup is not None and measures.speedup > 1 else ""),
         f"speed-up: {number(measures.tokens_per_second, 1)} tokens/s with drafts, "
         f"{number(max(baselines, default=None), 1)} without"),
        (Cell(identical(measures), tone="bad" if evaluation.faulty or evaluation.lossy else "good"),
         f"answers that the LOSSY rule {evaluation.lossy} left as they are" if evaluation.lossy else
         "answers identical to the target's own" if measures.distribution is None else
         "answers by the target's own distribution"),
        (Cell(percent(measures.draft_time_share)), "of the time goes into drafting, the rest into the target")]
    name = [Text(label(run, evaluation), "lead")] if len(run.evaluations) > 1 else []
    return [*name, Table(("figure", "meaning"), rows, "cards")]


def boxes(run: EvaluationRun) -> list[Text]:
    """The result of the comparison of answers, and the warnings that a reader must see before any figure."""
    found = Lossless.joined(evaluation.overall.lossless for evaluation in run.evaluations)
    # Sampled drafts can change the distribution although no answer was compared token by token.
    lossy = any(evaluation.lossy for evaluation in run.evaluations)
    changed = lossy or any(evaluation.faulty for evaluation in run.evaluations)
    drafting = any(evaluation.overall.lossless.different or evaluation.biased for evaluation in run.evaluations)
    lead = ("Answers are not the target's own." if lossy else
            "Drafting changed words." if drafting else "The loop without drafts is wrong." if changed else
            "Drafts were sampled." if not found.prompts else
            "Not a word changed." if found.identical == found.prompts else "Not a word changed but for near-ties.")
    shown = [Text(" ".join(phrases.verdicts(run)), "warn" if changed else "good", lead)]
    if run.evaluations[0].contended:
        shown.append(Text("The machine was busy with something else: repeating one pass of the target took up to "
                          f"{phrases.steadiness(run)} longer than its fastest. Do not rely on the speeds; measure "
                          "again when the machine is quiet. Tokens per pass and the comparison of answers are not "
                          "affected.", "warn", "The speeds are not reliable."))
    if run.left_out:
        shown.append(Text("", "warn", "What was left out:", run.left_out))
    return shown


def written(samples: Sequence[SampleAnswer], method: str) -> Iterator[Block]:
    """Sample answers, each token marked by its author; nothing without samples."""
    if not samples:
        return
    yield Heading("Who wrote the words")
    key = (("guessed", "guess", ""), (" by the draft and accepted · plain: written by the target itself · ", "", ""), (
        "dotted", "missed", ""), (": written by the target after it rejected a guess, which the pointer shows", "", ""))
    yield Passage(key, note=(
        "The same text as the target alone would write; the colours only show how it came about. Each pass of the "
        "target checks the draft's guesses, keeps those that are its own choice, and adds one token itself, so the "
        f"more green, the fewer passes. Answers of {method} with the most, the middle and the fewest tokens per pass:"))
    for sample in samples:
        # A long document as the question would push the answer off the screen.
        prompt = sample.prompt.strip()
        prompt = prompt if len(prompt) <= LONGEST_PROMPT else prompt[:LONGEST_PROMPT].rstrip() + " …"
        pieces = []
        for token in sample.tokens:
            listed = ", ".join(f"“{visible(guess, breaks=False)}”" for guess in token.rejected[:MOST_GUESSES])
            more = ", …" if len(token.rejected) > MOST_GUESSES else ""
            pieces.append((visible(token.text), "guess", "guessed by the draft and accepted") if token.guessed else
                          (visible(token.text), "missed", f"written by the target; the draft guessed {listed}{more}")
                          if listed else (visible(token.text), "", ""))
        # Special tokens, and bytes inside a character, have no text of their own.
        yield Passage([one for one in pieces if one[0]], note=f"{sample.prompt_set} prompt: {prompt}", heading=(
            f"{sample.rank.capitalize()}: {sample.accepted_length:.2f} tokens per pass, "
            f"{sum(one.guessed for one in sample.tokens)} of {len(sample.tokens)} tokens guessed"))


def drawn(run: EvaluationRun, firsts: Sequence[Evaluation], artifact: Artifact | None) -> Iterator[Figure]:
    """The plots of acceptance and speed; those of what was not measured are left out."""
    first, several, names = firsts[0], len(firsts) > 1, [one.name for one in firsts]
    # One method leaves room for a line a prompt set; several would cross too often.
    curves = {one.name: one.overall for one in firsts} if several else first.by_prompt_set
    shares = {name: one.acceptance_by_position for name, one in curves.items()}
    yield Figure(partial(plots.acceptance_by_position, shares), "Share of target passes that accepted at least so many "
                 "guesses in a row. The sum of the points plus 1, the token that the target adds itself, is the number "
                 "of tokens per pass.")
    if first.overall.tokens_per_second is not None:
        if len(run.batch_sizes) > 1:
            rows = [speeds({one.name: one.overall for one in run.at(temperature=run.temperatures[0], batch_size=size)})
                    for size in run.batch_sizes]
            draw = partial(plots.with_ranges, "batches", {name: [row[name] for row in rows] for name in rows[0]},
                           [str(size) for size in run.batch_sizes], xlabel="rows of the batch",
                           ylabel="tokens per second, all rows", ylim=(0, None))
        elif several:
            found = speeds({one.name: one.overall for one in firsts})
            draw = partial(plots.speeds, {name: {"": found[name]} for name in sorted(
                found, key=lambda name: -found[name][0])}, names)
        else:
            draw = partial(plots.speeds, {name: speeds({"with drafts": one}) for name, one in
                                          first.by_prompt_set.items() if one.tokens_per_second is not None},
                           ["with drafts"])
        yield Figure(draw, "Whole answers, reading the prompt included. Each timed prompt was decoded with drafts, by "
                     "this project's loop without drafts and by transformers' generate, one after the other.")
    if first.by_category:
        lengths = {one.name: {name: m.accepted_length for name, m in one.by_category.items()} for one in firsts}
        yield Figure(partial(plots.accepted_lengths, lengths, first.overall.accepted_length),
                     "Tokens per target pass by category of the prompt.")
    if len(run.temperatures) > 1:
        # At one batch size: each has a tree of its own, and a line for every one of them would crowd the plot.
        measured = {name: [(one.overall.accepted_length, one.overall.accepted_length_interval)
                           for one in run.at(name=name, batch_size=run.batch_sizes[0])] for name in run.methods}
        yield Figure(partial(plots.with_ranges, "temperatures", measured, [f"{one:g}" for one in run.temperatures],
                                       xlabel="temperature", ylabel="tokens per target pass", ylim=(1, None)),
                     "Tokens per target pass by sampling temperature; 0 is greedy. Vertical lines are 95 % intervals.")
    if artifact is not None and (tuning := artifact.tuning) is not None:
        alone = {one.nodes: (one.reported or one.chosen).accepted_length for one in tuning.trials(0.0, STATIC)}
        forms = "" if tuning.linear_layers is None else f"; {tuning.linear_layers.in_words}"
        yield Figure(partial(plots.cost_curve, tuning.cost, artifact.tree_size, alone),
                     f"Time of one pass of the target by the number of tokens it checks, measured on {tuning.device}, "
                     f"{tuning.dtype}{forms}. Vertical line: the size chosen for the tree on this machine, "
                     f"{artifact.tree_size} nodes. Dashed: the speed-up over this loop without drafts that is expected "
                     "of the tree alone, without copies, by held-out answers; what was measured stands in the tables.")


def speeds(drafted: Mapping[str, Measures]) -> dict[str, plots.Point]:
    """Tokens per second of each group and of the two baselines without drafts, where they were timed."""
    first = next(iter(drafted.values()))
    plain, generate = plots.BASELINE_COLORS
    known = [(name, one.tokens_per_second, one.tokens_per_second_interval) for name, one in drafted.items()]
    known += [(plain, first.plain_tokens_per_second, None), (generate, first.generate_tokens_per_second, None)]
    return {name: (speed, interval) for name, speed, interval in known if speed is not None}


def figures(measures: Measures) -> tuple[Cell, ...]:
    """The cells of a row under `FIGURES`."""
    return (Cell(f"{measures.prompts}"),
            Cell(f"{measures.accepted_length:.2f}", span(measures.accepted_length_interval, 2)),
            Cell(number(measures.tokens_per_second, 1), span(measures.tokens_per_second_interval, 1)),
            Cell(number(measures.plain_tokens_per_second, 1)), Cell(number(measures.generate_tokens_per_second, 1)),
            Cell(times(measures.speedup), span(measures.speedup_interval, 2)), Cell(identical(measures)))


def side_by_side(run: EvaluationRun) -> Table:
    """Every method at every temperature and batch size; a condition that is the same in all rows has no column."""
    drafts = run.header.get("drafts", {})
    columns = ("", "parameters", "licence", "temperature", "batch", "nodes per pass", "of its own tree", *FIGURES[1:],
               *PREDICTED)
    alone = {"parameters": not drafts, "licence": not drafts, "temperature": len(run.temperatures) == 1,
             "batch": len(run.batch_sizes) == 1, "of its own tree": not any(one.partners for one in run.evaluations),
             **dict.fromkeys(PREDICTED, all(one.prediction is None for one in run.evaluations))}
    rows = []
    for one in run.evaluations:
        predicted = ["", ""] if (found := one.prediction) is None else [
            Cell(f"{found.accepted_length:.2f}", span(found.interval, 2)),
            Cell(times(found.speedup), span(found.speedup_interval, 2))]
        own = drafts.get(one.name, {})
        rows.append([one.name, f"{own['parameters']:,}" if own else "", str(own.get("licence", "")),
                     f"{one.temperature:g}", f"{one.batch_size}", f"{one.nodes}", f"{one.tree_nodes}",
                     *figures(one.overall)[1:], *predicted])
    shown = [not alone.get(name) for name in columns]
    return Table([*compress(columns, shown)], [[*compress(row, shown)] for row in rows])


def in_detail(run: EvaluationRun, evaluation: Evaluation) -> Table:
    """One method on all prompts, and on each prompt set, category, turn and mode."""
    # All prompts first: the groups below have wide intervals, and invite to pick a lucky one.
    rows: list[Sequence[str | Cell]] = [(phrases.all_prompts(run), *figures(evaluation.overall))]
    for heading, groups in groups_of(evaluation):
        rows.append((heading,))
        rows += [(group_name(run, name), *figures(measures)) for name, measures in groups.items()]
    return Table(("", *FIGURES), rows)


def parts_table(run: EvaluationRun, evaluation: Evaluation) -> Table | None:
    """Shares of the accepted guesses by the drafter that made them, by kind of prompt; None with a single drafter."""
    names, rows = tuple(evaluation.overall.guessed_by), list[Sequence[str]]()
    for heading, groups in [("", {phrases.all_prompts(run): evaluation.overall}), *groups_of(evaluation)]:
        rows += [(heading,)] if heading else []
        for name, measures in groups.items():
            total = sum(measures.guessed_by.values())
            # Of a group without accepted guesses no share is known, which is not 0 %.
            shares = [percent(measures.guessed_by.get(one, 0) / total) if total else "" for one in names]
            rows.append((group_name(run, name) if heading else name, f"{total:,}", *shares))
    return Table(("", "accepted guesses", *(f"from {name}" for name in names)), rows) if names else None


def groups_of(evaluation: Evaluation) -> list[tuple[str, Mapping[str, Measures]]]:
    """Headings and groups of prompts; categories that hold the same prompts as a set of their name are left out."""
    sets = evaluation.by_prompt_set
    # Otherwise a set whose file names it as the only category would have two equal rows.
    categories = {name: measures for name, measures in evaluation.by_category.items()
                  if name not in sets or sets[name].prompts != measures.prompts}
    turns = {f"turn {turn}": measures for turn, measures in evaluation.by_turn.items()}
    found = {"prompt sets": sets if len(sets) > 1 else {}, "categories": categories, "turns": turns,
             "modes": evaluation.by_mode}
    return [(heading, groups) for heading, groups in found.items() if groups]


def training_plots(training: TrainingRecord) -> list[Figure]:
    """The curve of the draft's training."""
    # Not every family has such an estimate.
    expected = ("" if training.curve[-1].expected_accepted_length is None else
                " Training text: what was expected of a chain, given the right tokens before each guess, mean since "
                "the measurement before. The two differ in height; compare their courses.")
    return [Figure(partial(plots.training_lengths, training.curve, training.best_step),
                   "Held-out text: tokens per target pass, decoded with a tree searched for it, without copies."
                   f"{expected} Vertical line: the step whose weights the artifact has."),
            Figure(partial(plots.training_losses, training.curve),
                   "Training text: the loss, and the share of tokens that the first guess got right, means since the "
                   "measurement before.")]


def tree_section(artifact: Artifact) -> Iterator[Block]:
    """The tree of the artifact, as it is used on this machine."""
    topology, used = artifact.topology, artifact.tree_size
    copies = artifact.tuning.best(JOINED) if artifact.tuning is not None and artifact.fastest() == JOINED else None
    # The draft's own tree keeps its size next to copies: with them a pass has more nodes than this section draws.
    joined = (f" By default (the policy {FASTEST}) up to {copies.copied} tokens copied from the text stand next to a "
              f"tree of {copies.nodes} nodes, in passes of at most {copies.nodes + copies.copied} nodes."
              if copies is not None else "")
    yield Heading("The draft tree")
    yield Text(f"With the tree alone each pass of the target checks {used} tokens at once: the last token of the text, "
               f"called the root, and {used - 1} guesses about the tokens after it.{joined} The artifact holds "
               f"{topology.size} nodes, the best first, so that the first ones are the best smaller tree." if used > 1
               else "On this machine no tree makes greedy decoding faster: checking guesses costs more time than it "
               "saves, so nothing is drafted.")
    # A tree in use may be tiny; some more nodes show the shape that the artifact holds.
    shown = topology.prefix(min(topology.size, max(used, DRAWN_NODES)))
    faint = "" if shown.size == used else f" The {shown.size - used} faint nodes are not used on this machine."
    if shown.size < topology.size:
        faint += f" {topology.size - shown.size} more nodes of the artifact's tree are not drawn."
    yield Figure(partial(plots.tree, shown, used), "Each step to the right is one token further ahead; colours "
                 f"give the rank of a guess among those of its node.{faint}")


def facts(run: EvaluationRun, artifact: Artifact | None) -> list[Block]:
    """The conditions as sentences; the JSON has each value under its key."""
    header, machine = run.header, run.header["machine"]
    rows = [
        ("machine", f"{machine['processor']}, {machine['system']}, {phrases.threads(run)}; device {machine['device']}"),
        ("number format", header["dtype"]),
        ("linear layers", _linear_layers(header["linear_layers"])),
        ("versions", ", ".join(f"{name} {text}" for name, text in header["versions"].items())),
        ("settings", _settings(header)),
        ("prompts", " and ".join(f"{count:,} {name}" for name, count in header["prompt_sets"].items())),
        *((f"set {name}", counted_in_words(found)) for name, found in header.get("sets", {}).items()),
        ("steadiness", f"one pass of the target, repeated {header['contention']['samples']} times, took at most "
                       f"{phrases.steadiness(run)} longer than its fastest")]
    if artifact is not None:
        # These hashes tell two measurements of seemingly equal artifacts apart.
        origin = artifact.provenance
        rows.append(("target weights", artifact.identity.weights_hash))
        if artifact.shared:
            rows[-1] = ("distilled from", f"{artifact.identity.name} ({artifact.identity.weights_hash}), another "
                                          "target of the same tokenizer and vocabulary")
        if "data_manifest" in origin:
            rows.append(("data manifest", origin["data_manifest"]))
        if found := origin.get("draft_vocabulary"):
            rows.append(("draft vocabulary", f"{found['tokens']:,} tokens, {found['held_out_coverage']:.1%} of those "
                                             "in held-out answers"))
        if loops := origin.get("loops"):
            rows.append(("loops", f"{loops['answers']:,} held-out answers end in a loop, with "
                                  f"{loops['accepted_length']:.2f} tokens per pass there" if loops["answers"] else
                                  "no held-out answer ends in a loop"))
    return [Heading("Conditions of the measurement"), Table(("condition", ""), rows, "facts")]


def _linear_layers(found: Mapping[str, Any]) -> str:
    """The forms of the linear layers, and the milliseconds by which they were chosen."""
    if (times := found["times"]) is None:
        return str(found["forms"])
    passes = "; ".join(f"{tokens} token{'s' * (tokens > 1)} {1000 * plain:.3g} ms plain, {1000 * packed:.3g} ms packed"
                       for tokens, plain, packed in zip(times["tokens"], times["plain"], times["packed"], strict=True))
    return f"{found['forms']}: all of them in one pass, in {times['dtype']}: {passes}"


def _settings(header: Mapping[str, Any]) -> str:
    """The settings of the evaluation that `how_measured` leaves out; filters of sampling only where they are set."""
    found, usual = header["settings"], EvaluateConfig()
    filters = [f"; {name} {found[name]:g}" for name in ("top_k", "top_p", "repetition_penalty")
               if found[name] != getattr(usual, name)]
    policies, baselines = ([found[name]] if isinstance(found[name], str) else list(found[name])
                           for name in ("policies", "baselines"))
    # Baselines have policies of their own: an evaluation of them alone has used none of these.
    by_policy = [f"the policy {' and '.join(policies)}"] if header["artifacts"].keys() - set(baselines) else []
    drafts = ", next to ".join([*by_policy, *([" and ".join(baselines)] if baselines else [])])
    limit = "all prompts" if found["limit"] is None else f"at most {found['limit']:,} prompts"
    minutes = "without a limit of time" if found["budget_minutes"] is None else f"{found['budget_minutes']:g} min"
    return (f"drafted by {drafts}{''.join(filters)}; {limit} of each set; {minutes}; "
            f"{'with' if header['graphs'] else 'without'} CUDA graphs, layers "
            f"{'compiled' if found['compile'] else 'not compiled'}")
