"""Checks of what is gained: training against held-out text, the ceiling of the tree, and the time of a pass.

Shapes: P places where a draft starts, K draft steps."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul
from pathlib import Path

from ...export import TrainingRecord
from ...modules import CostTable, Features, Topology, measure_cost
from ...modules.files.json_records import read_object, record_of
from ...modules.tuning.ranked_text import ranked_text
from .case import Case, Finding, judged, spread, unchecked
from .draft_checks import TRIED_ROWS, Texts, accepted, greedy_rows

MOST_GAP = 0.25  # Largest share of the guesses of training text that held-out text may lack: more is learned by heart
LEAST_PERFECT = 1.1  # Least speed-up of a perfect draft that is worth one
NEAR_CEILING = 0.9  # Share of the guesses of a perfect draft from which the tree is the limit, and not the draft
MOST_DRAFTING = 0.5  # Largest share of a step's seconds in the draft: beyond it smaller gains more than better
SECONDS = 5.0  # Seconds for which steps are timed where the artifact has no timing of this machine


@dataclass(frozen=True)
class Gains:
    """Timing and training of a draft."""

    cost: CostTable  # Seconds of its steps here
    size: int  # Nodes of the tree in use; of the whole tree where nothing is drafted
    training: TrainingRecord | None  # As the report of its run has it; None without one


def read_gains(case: Case, report: Path) -> Gains:
    """Timing, measured now where the artifact has none, and the training of the run's evaluation.json. Raises UserError
    if that file is damaged."""
    artifact = case.artifact
    size = artifact.tree_size if artifact.tree_size > 1 else artifact.topology.size
    cost = measure_cost(artifact.target, artifact.drafter, artifact.topology, repeats=2,
                        seconds=SECONDS) if artifact.tuning is None else artifact.tuning.cost
    remedy = "delete it and run draftsmith run again"
    found = read_object(report, remedy).get("training") if report.is_file() else None
    return Gains(cost, min(size, cost.largest),
                 None if found is None else record_of(TrainingRecord, found, str(report), remedy))


def expected_of_chain(case: Case, rows: Sequence[Features]) -> float:
    """Teacher-forced estimate of the tokens per pass of a chain with independent steps, as training reports it."""
    table_PK = ranked_text(case.artifact.drafter, rows, 1).ranks_PK
    chances_K: list[float] = (table_PK == 0).double().mean(0).tolist()
    return float(1 + sum(accumulate(chances_K, mul)))


def _training(case: Case, texts: Texts, gains: Gains) -> Finding:
    """Training text against held-out text by the same measure, and the curve: is data short, or training?"""
    name = "training against held-out"
    rows = [] if case.data is None else greedy_rows(case.data.shard, TRIED_ROWS)
    if not rows or not texts.held_out:
        return unchecked(name, "there is no training text or no held-out text here")
    rows = [case.artifact.target.encode(row, case.artifact.drafter.taps) for row in rows]
    seen, new = (expected_of_chain(case, spread(one, TRIED_ROWS)) for one in (rows, texts.held_out))
    figure = f"{seen:.2f} tokens per pass expected of a chain on training text, {new:.2f} on held-out text"
    gap, outcome = seen - new, ""
    # What is learned by heart falls about as one over the root of the data.
    hopes = [f"twice the data would bring about {new + gap * (1 - 2**-0.5):.2f} on held-out text"] if gap > 0 else []
    if (training := gains.training) is not None:
        outcome, curve = training.outcome, training.curve
        half = min(curve, key=lambda one: abs(2 * one.labels - curve[-1].labels))
        slope = max(0.0, curve[-1].accepted_length - half.accepted_length)
        hopes.append(f"twice the training, by the slope since its half, {curve[-1].accepted_length + slope:.2f} "
                     f"decoded, where it is {curve[-1].accepted_length:.2f}")
    short = gap > MOST_GAP * (seen - 1) and gap > 0.05
    rising = outcome.startswith("Still rising")
    learned = ["much of the training text is learned by heart"] * short + [outcome] * (bool(outcome) and not rising)
    return judged(name, "; ".join([figure, *hopes]), outcome or "held-out text is guessed as training text is",
                  (short or outcome.startswith("Short of data"), "; ".join(learned),
                   "raise distill.budget_tokens, or give more prompts (prompts.path)"),
                  (rising, outcome, "raise train.max_steps or train.max_minutes"))


def _time(case: Case, texts: Texts, gains: Gains) -> Iterator[Finding]:
    """The ceiling of the tree in tokens and in speed, and the parts of a step's time."""
    cost, size = gains.cost, gains.size
    topology = case.artifact.topology.prefix(size)
    text = ranked_text(case.artifact.drafter, texts.best, 1)
    # An oracle guesses every token; of a reduced vocabulary another check speaks.
    right = replace(text, ranks_PK=(~text.labelled_PK).long())

    def oracle(depth: int) -> float:
        _, emitted = right.walk(Topology.chain(depth))
        return sum(emitted) / max(1, len(emitted))

    ceiling, own = oracle(max(1, topology.depth)), accepted(case, texts.best, topology).accepted_length
    # Of its best number of guesses: the tree in use is as large as pays for this draft, which may be a bad one.
    perfect, best = max((cost.predict(oracle(depth), depth + 1), depth)
                        for depth in range(1, max(2, min(case.artifact.topology.depth + 1, cost.largest))))
    yield judged("ceiling", f"{own:.2f} tokens per pass of {size} nodes; {ceiling:.2f} if every guess were right; "
                 f"predicted speed-ups {cost.predict(own, size):.2f}, and {perfect:.2f} of {best} guesses that are all "
                 "right", "there is room for a better draft",
                 (perfect < LEAST_PERFECT, "even a perfect draft would hardly be faster on this machine",
                  "try target.dtype: fastest, target.pack: auto and fewer nodes (tree.used_nodes), or draft for a "
                  "larger target.name"),
                 (own - 1 > NEAR_CEILING * (ceiling - 1) and own > 1.5, "nearly every guess is accepted: the tree ends "
                  "too early", "raise tree.searched_nodes and tree.used_nodes, and the steps of the draft "
                  "(drafter.num_heads, drafter.steps or drafter.block_size)"))
    one, whole, draft = cost.pass_seconds(1), cost.pass_seconds(size), cost.draft_seconds(size)
    parts = {"a pass of one token": one, "checking the other nodes": max(0.0, whole - one), "drafting": draft}
    step = sum(parts.values())
    yield judged("time of a pass", f"{1000 * step:.1f} ms with {size} nodes: " + ", ".join(
        f"{seconds / step:.0%} {what}" for what, seconds in parts.items()), "the target takes most of it",
        (draft > MOST_DRAFTING * step, "drafting takes longer than the target",
         "choose a family with fewer steps (family), fewer drafter.num_layers or a smaller drafter.vocabulary_size, or "
         "lower tree.used_nodes"))


GAIN_CHECKS = (_training, _time)
