"""Checks of the draft: decoding against its training forward, taps, rotary base, context lengths, its own figures; and
of what is gained: training against held-out text, the ceiling of the tree, and the time of a pass.

Shapes: P places where a draft starts, K draft steps."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

import torch

from ...data.state_engines import BOUNDS, gap
from ...data.store.feature_shards import FINAL, tap
from ...data.store.token_store import TokenShard, learned_tokens
from ...export import TrainingRecord
from ...modules import (
    CostTable,
    DecodeSettings,
    Features,
    Request,
    StaticTree,
    Topology,
    answered_anew,
    decode,
    measure_cost,
)
from ...modules.decoding.recorders import StateRecorder
from ...modules.files.json_records import read_object, record_of
from ...modules.interfaces.proposer import SharesTargetRows
from ...modules.parts.decoder_block import OFFICIAL_ROPE_BASE, BlockConfig
from ...modules.parts.feature_drafter import FeatureDrafter, block_like
from ...modules.tuning.tree_search import UNROLLED, Acceptance, acceptance_of, held_out_acceptance, ranked_text
from .case import Case, DataSample, Finding, judged, spread, unchecked
from .target_checks import ROUNDED_STATES, in_words

PROMPTS, TOKENS = 8, 48  # Prompts that are answered, and the length of the answers
TRIED_ROWS = 16  # Rows on which other taps and rotary bases are tried
LEAST_DECODED = 0.95  # Least share of the accepted drafts that the training forward promises: equal but for rounding
LEAST_KEPT = 0.8  # Least share of the accepted drafts that training measured: its number format may be another
BETTER, MORE = 1.15, 0.1  # Factor and tokens by which other layers or another base must be better than the draft's
LONG, LEAST_LONG = 2, 0.7  # Context as a multiple of the longest trained one, and least share of acceptance left there
MOST_CONTEXT, LONG_ROWS = 2048, 4  # Longest context that is read for this check, and rows of each length
MOST_GAP = 0.25  # Largest share of the guesses of training text that held-out text may lack: more is learned by heart
LEAST_PERFECT = 1.1  # Least speed-up of a perfect draft that is worth one
NEAR_CEILING = 0.9  # Share of the guesses of a perfect draft from which the tree is the limit, and not the draft
MOST_DRAFTING = 0.5  # Largest share of a step's seconds in the draft: beyond it smaller gains more than better
SECONDS = 5.0  # Seconds for which steps are timed where the artifact has no timing of this machine


@dataclass(frozen=True)
class Texts:
    """Answers that the draft is measured on, with the target's states, one conversation each."""

    decoded: list[Features]  # Answers to hand-written prompts, decoded with the draft
    emitted: list[int]  # Tokens of each of their passes
    recorded: dict[str, torch.Tensor]  # States of the first of them, as the decoding passes had them
    held_out: list[Features]  # Held-out answers of the data; empty without
    topology: Topology  # The tree that decoded them

    @property
    def best(self) -> list[Features]:
        """Held-out answers, or those decoded here."""
        return self.held_out or self.decoded


@torch.no_grad()
def read_texts(case: Case, prompts: Sequence[Sequence[int]]) -> Texts:
    """Decode prompts with the draft, and read the held-out answers. Raises UserError if a shard is corrupted."""
    artifact, target, drafter = case.artifact, case.artifact.target, case.artifact.drafter
    topology = artifact.topology.prefix(artifact.tree_size if artifact.tree_size > 1 else artifact.topology.size)
    if drafter.unrolls is not None and topology.depth > UNROLLED:
        # The training forward says as many steps of an autoregressive draft.
        topology = Topology.chain(UNROLLED)
    requests = [Request(tuple(prompt), number, min(TOKENS, target.context_length - len(prompt) - topology.size))
                for number, prompt in enumerate(spread(prompts, PROMPTS))]
    # Early layers that the draft runs itself are not read again, so that no pass has all states.
    recorder = None if isinstance(drafter, SharesTargetRows) else StateRecorder(drafter.taps, target.dtype)
    found = decode(target, requests, DecodeSettings(batch_size=PROMPTS), drafter=drafter,
                   policy=StaticTree(topology), recorder=recorder).generations
    rows = [([*one.request.tokens, *one.tokens], [False] * len(one.request.tokens) + [True] * len(one.tokens))
            for one in found]
    decoded = [target.encode(Features.from_rows([row]), drafter.taps) for row in rows]
    states = {} if recorder is None else recorder.states(found)
    recorded = {FINAL: states[0].final_LD, **{tap(layer): one for layer, one in states[0].taps.items()}
                } if 0 in states else {}
    held_out = [] if case.data is None else held_out_rows(case, case.data)
    return Texts(decoded, [count for one in found for count in one.emitted], recorded, held_out, topology)


def held_out_rows(case: Case, data: DataSample) -> list[Features]:
    """Held-out greedy answers up to their repetitions, with the states of the target that verifies, as training
    measures on them. Raises UserError if a shard is corrupted."""
    shards = (TokenShard.read(data.folder / record.file, record.sha256) for record in data.manifest.split("validation"))
    rows = [row for shard in shards for row in greedy_rows(shard, shard.num_rows)]
    if case.artifact.adapter is not None:
        return list(answered_anew(case.artifact.target, rows))
    return [case.artifact.target.encode(row, case.artifact.drafter.taps) for row in rows]


def greedy_rows(shard: TokenShard, most: int) -> list[Features]:
    """At most so many greedy rows, spread over a shard, with what is learned of them; none where nothing is."""
    learned_T, places = learned_tokens(shard), (slice(*shard.span(row)) for row in spread(
        shard.answered_at(0.0), most))
    return [Features.from_rows([(shard.tokens_T[place].tolist(), learned_T[place].tolist())]) for place in places
            if bool(learned_T[place].any())]


def accepted(case: Case, rows: Sequence[Features], topology: Topology) -> Acceptance:
    """Acceptance of a static tree along answers, by the training forward."""
    text = ranked_text(case.artifact.drafter, rows, max(topology.ranks) + 1)
    return acceptance_of(text.walk(topology)[1], topology.depth)


def _target(case: Case, _: Texts) -> Finding:
    """The target that it was trained for."""
    trained, here, drafter = case.artifact.identity, case.target.identity, case.artifact.drafter
    if drafter.serves_all(drafter.describe()) and trained.tokens_hash in ("", here.tokens_hash):
        return judged("target of the draft", f"{in_words(trained)}; here {in_words(here)}",
                      "it reads tokens alone, and drafts for every target of its tokenizer and vocabulary")
    rounded = "quantised otherwise" if trained.quantization != here.quantization else "another target"
    return judged("target of the draft", f"{in_words(trained)}; here {in_words(here)}",
                  "it was trained for this target", (
                      trained.weights_hash != here.weights_hash, f"the draft was distilled from one that is {rounded}: "
                      "it has learned other answers and states", "give this command the target of the draft with "
                      "--target.name, or, if the one here is served, continue the draft for it: draftsmith run with "
                      "this target.name, target.adapter and target.quantization, train.start and --retarget"))


def _decoded(case: Case, texts: Texts) -> Finding:
    """Decoded acceptance against that of the training forward, by position."""
    forced, found = accepted(case, texts.decoded, texts.topology), acceptance_of(texts.emitted, texts.topology.depth)
    shown = "; ".join(f"{name} {one.accepted_length:.2f} tokens per pass, by position "
                      f"{' '.join(f'{share:.0%}' for share in one.by_position)}"
                      for name, one in (("decoded", found), ("training forward", forced)))
    return judged("decoding against training", shown, "decoding accepts what the training forward says",
                  (found.accepted_length - 1 < LEAST_DECODED * (forced.accepted_length - 1) - 0.01,
                   "drafts are accepted less than the training forward says: positions, caches or states differ",
                   "of a family outside the package, compare its expand and observe with its forward; otherwise set "
                   "target.dtype: float32 to see whether rounding does it"))


def _positions(case: Case, texts: Texts) -> Finding:
    """States of one row as decoding passes had them against those of the training forward, which has them at once."""
    if not texts.recorded:
        return unchecked("positions and taps", "the draft runs the target's first layers itself")
    # The prompt is read in one pass here as there.
    first = texts.decoded[0]
    start = int(first.supervised_BL[0].nonzero()[0])
    own = {FINAL: first.final()[0], **{tap(layer): states[0] for layer, states in first.taps.items()}}
    gaps = {name: gap(states_ND[start:], own[name][start:].to(states_ND)) for name, states_ND in texts.recorded.items()}
    bound, worst = BOUNDS.get(case.target.dtype, ROUNDED_STATES), max(gaps, key=lambda name: gaps[name])
    return judged("positions and taps", f"states of a decoded row differ by {gaps[worst]:.2g} of their length at most "
                  f"({worst}); rounding explains {bound:g}", "both read the same states at the same positions",
                  (not gaps[worst] <= bound, f"decoding reads other states {worst} than training",
                   "check drafter.taps, and report it: the target is not decoded as it is encoded"))


def _as_trained(case: Case, texts: Texts) -> Finding:
    """The accepted length that training measured on held-out answers, measured again."""
    name, origin = "draft as it was trained", case.artifact.provenance
    former = origin.get("acceptance", {}).get("accepted_length")
    if former is None or not texts.held_out:
        return unchecked(name, "no figure of its training, or no held-out answers")
    if case.data is None or case.data.manifest.hash != origin.get("data_manifest"):
        return unchecked(name, "it was trained on other data than these")
    found = held_out_acceptance(case.artifact.drafter, texts.held_out, case.recipe("train").get("validation_nodes", 16))
    return judged(name, f"{found.accepted_length:.2f} tokens per pass of held-out text; {former:.2f} in its training",
                  "it drafts as it did",
                  (found.accepted_length - 1 < LEAST_KEPT * (former - 1) - 0.01,
                   "it drafts worse than it did: it reads other states than in training, or its files were changed",
                   "see the checks of stored states, taps and rotary base; train again with drafter.taps and "
                   "drafter.rope_base as they are to be"))


def _taps(case: Case, texts: Texts) -> Finding:
    """Other layers in place of those that the draft reads: where they are better, it was trained with them."""
    drafter, target, taps = case.artifact.drafter, case.artifact.target, case.artifact.drafter.taps
    # Each layer, and all of them, one up or down: conventions of engines differ by one.
    moves = [tuple(layer + step * (place in (number, len(taps))) for number, layer in enumerate(taps))
             for place in range(len(taps) + (len(taps) > 1)) for step in (-1, 1)]
    moves = [one for one in moves if all(0 <= layer < target.num_layers for layer in one)]
    if not moves or isinstance(drafter, SharesTargetRows):
        return unchecked("taps", "the draft reads no layer that could be another")
    every = sorted({layer for one in (*moves, taps) for layer in one})
    near = [target.encode(row, every) for row in spread(texts.best, TRIED_ROWS)]
    found = {one: accepted(case, [replace(row, taps={layer: row.taps[other] for layer, other in zip(
        taps, one, strict=True)}) for row in near], texts.topology).accepted_length for one in (taps, *moves)}
    return _better("taps", found[taps], {f"layers {list(one)}": found[one] for one in moves},
                   f"set drafter.taps (of an import, --taps) to those layers in place of {list(taps)}")


def _rotary(case: Case, texts: Texts) -> Finding:
    """The rotary base against the recipe's, and others in place of it."""
    drafter, name, origin = case.artifact.drafter, "rotary base", case.artifact.provenance
    # The head in a target's files rotates as the target does.
    if not isinstance(drafter, FeatureDrafter) or not isinstance(drafter.block, BlockConfig):
        return unchecked(name, "the draft has no rotary embedding of its own")
    own, recipe = drafter.block.rope_base, case.recipe("drafter")
    remedy = "set drafter.rope_base (of an import, --rope_base) to it"
    # A draft that was continued has the settings of its start.
    if "rope_base" in recipe and "start" not in origin and (
            wanted := block_like(case.target, recipe["rope_base"]).rope_base) != own:
        return judged(name, f"{own:g}; by its recipe {wanted:g}", "", (
            True, "the draft rotates otherwise than its recipe and this target say", remedy))
    rows, found = spread(texts.best, TRIED_ROWS), dict[str, float]()
    parts: list[Any] = [part for part in drafter.modules() if isinstance(getattr(part, "config", None), BlockConfig)]
    former = [(part, part.config) for part in parts]
    for base in sorted({OFFICIAL_ROPE_BASE, block_like(case.target).rope_base} - {own}):
        try:
            for part, config in former:
                part.config = replace(config, rope_base=base, rope_scaling=None)
            found[f"base {base:g}"] = accepted(case, rows, texts.topology).accepted_length
        finally:
            for part, config in former:
                part.config = config
    return _better(name, accepted(case, rows, texts.topology).accepted_length, found, remedy)


def _better(name: str, own: float, others: dict[str, float], remedy: str) -> Finding:
    """A finding on what the draft reads, by the tokens per pass with its own and with others."""
    best = max(others, key=lambda words: others[words], default="")
    return judged(name, f"{own:.2f} tokens per pass" + (f"; {others[best]:.2f} with {best}" if best else ""),
                  "no other would be better", (
                      best and others[best] - 1 > BETTER * (own - 1) and others[best] > own + MORE,
                      f"the draft was trained with {best}, or nearer to it", remedy))


def _contexts(case: Case, texts: Texts) -> Finding:
    """Acceptance by position in the context, up to twice the lengths that training has seen."""
    name, target = "context lengths", case.artifact.target
    if case.data is None:
        return unchecked(name, "the lengths that the draft was trained on are not known")
    starts_S = case.data.shard.starts_S
    trained = int((starts_S[1:] - starts_S[:-1]).max())
    trained = min(trained, case.recipe("batch").get("row_length", trained))
    long = min(LONG * trained, MOST_CONTEXT, target.context_length - TOKENS - texts.topology.size)
    if long <= trained:
        return unchecked(name, f"the target's context, or {MOST_CONTEXT} tokens, ends before twice the trained length")
    # Rows one after another are a long conversation; what the target goes on with is its own.
    text, lengths = case.data.shard.tokens_T.tolist(), dict[int, float]()
    text *= LONG_ROWS * long // len(text) + 1
    for size in (trained // 2, long):
        requests = [Request(tuple(text[number * size : (number + 1) * size]), number, TOKENS)
                    for number in range(LONG_ROWS)]
        found = decode(target, requests, DecodeSettings(batch_size=LONG_ROWS, ignore_eos=True)).generations
        rows = [target.encode(Features.from_rows([([*one.request.tokens, *one.tokens], [False] * size + [
            True] * TOKENS)]), case.artifact.drafter.taps) for one in found]
        ranked = ranked_text(case.artifact.drafter, rows, max(texts.topology.ranks) + 1)
        lengths[size] = float(ranked.depths(texts.topology)[ranked.left_P > 0].double().mean())
    (short, near), (far, beyond) = lengths.items()
    return judged(name, f"{near:.2f} guesses accepted in a row after {short} tokens of context, {beyond:.2f} after "
                  f"{far}; trained on rows of up to {trained}", "acceptance holds beyond the trained lengths",
                  (near > 2 * MORE and beyond < LEAST_LONG * near, "drafts fail after longer contexts",
                   "train on longer rows: batch.row_length, longer conversations (prompts.path), "
                   "distill.max_new_tokens"))


DRAFT_CHECKS = (_target, _decoded, _positions, _as_trained, _taps, _rotary, _contexts)


@dataclass(frozen=True)
class Gains:
    """Timing and training of a draft."""

    cost: CostTable  # Seconds of its steps here
    size: int  # Nodes of the tree in use; of the whole tree where nothing is drafted
    training: TrainingRecord | None  # As the report of its run has it; None without one


def read_gains(case: Case, report: Path) -> Gains:
    """Timing, measured now where the artifact has none, and the training of the run's evaluation.json."""
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
