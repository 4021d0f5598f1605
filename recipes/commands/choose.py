"""The command `draftsmith choose`: which draft pays for a target on this device, by measured seconds and acceptance.

Candidates are artifacts that exist, or families that train for equal short times on the same few answers of the target.
Each has its lengths on held-out answers that chose nothing, and the seconds of steps on this device. Only what longer
training would bring is predicted."""

import json
import math
import shlex
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, get_args

from safetensors import safe_open

from ...data import DistillConfig, PromptConfig
from ...data.store.feature_store import in_words
from ...export import Artifact, EvaluateConfig, Method, Tuning, evaluate, load_artifact
from ...export.evaluation.timed_answers import REFERENCES
from ...export.layouts.parts.export_format import Engine
from ...export.layouts.registry import formats_of
from ...export.measured_files import Prediction, figures
from ...export.page import Block, Table, Text, as_markdown
from ...export.stored_drafter import WEIGHTS
from ...modules import (
    DEFAULT_NAME,
    JOINED,
    STATIC,
    Counted,
    Target,
    TargetConfig,
    Trial,
    UserError,
    load_target,
    measure_cost,
)
from ...modules.config_checks import Positive, Rows, Such
from ...modules.files.atomic_files import write_file
from ...modules.files.json_records import read_object
from ...modules.parts.causal_drafter import CausalDraft
from ...modules.target.loading.loading import device_named
from ...modules.tuning.trials import SIZES
from ...modules.verification.sampling import Temperatures
from ..chat_settings import ARTIFACT_TARGET, AskedSets, TemplateConfig, artifact_target, named_target, own_target
from ..reading.command_line import Command, Parsed, plain, trust_words
from ..reading.recipe_files import recipe_path
from ..recipe import TreeConfig
from ..stages.training_folder import RESULT_FILE, STATS_FILE
from ..terminal import say
from .compare_families import SHARED, FamiliesArguments, compose, families, row_name, workspace_of
from .memory_plan import plan_recipe

CANDIDATES = ("medusa", "hydra", "eagle", "eagle3", "fastdraft")
"""Recipes that are calibrated where neither these nor artifacts are named."""
LEAST_MINUTES = 0.25  # Fewest minutes in which one candidate can be calibrated, the target's answers included
# Shares of the minutes for the target's answers and for training; searching and timing trees takes the rest.
ANSWERING, TRAINING = 0.3, 0.45
# Accepted drafts are taken to near their limit by exp(-CURVE / sqrt(steps)), as those of five families did between a
# hundred steps and several thousand (tests/benchmarks/README.md); and the largest growth, in natural logs.
CURVE, MOST_GROWTH = 10.0, 1.2
ANSWER_TOKENS = 64  # Tokens of the answers that are predicted


@dataclass(frozen=True, kw_only=True)
class ChooseArguments:
    """Arguments of `draftsmith choose`."""

    out: Path
    """Folder of the table, choose.json, and of what is calibrated; the same command goes on there."""
    artifacts: tuple[Path, ...] = ()
    """Folders of artifacts that are candidates without any training."""
    rows: tuple[str, ...] = ()
    """Recipes to calibrate, shipped ones by name; without these and artifacts a heads', two features' and a model's."""
    minutes: Positive = 20.0
    """Minutes of the whole calibration; answers of the target and each row's training share them."""
    train_minutes: Positive = 60.0
    """Minutes of the training that is planned, for which acceptance is extrapolated."""
    batch_sizes: Annotated[tuple[Rows, ...], Such(len, "one or more whole numbers from 1 to 65,536")] = (1,)
    """Rows that will be decoded at once, [1,8]."""
    temperatures: Temperatures = (0.0,)
    """Sampling temperatures that will be used, up to 1."""
    engine: str | None = None
    """Take only drafts that this engine loads, such as vLLM, SGLang or llama.cpp; upper and lower case are alike."""
    memory_gib: float | None = None
    """Take only recipes whose training is planned to need at most so much memory."""
    target: TargetConfig = field(default_factory=own_target)
    """The target; that of the first artifact by default."""
    template: TemplateConfig = field(default_factory=TemplateConfig)
    """Settings of its chat template."""
    prompts: PromptConfig = field(default_factory=PromptConfig)
    """Origin of the calibration's prompts: give those of your application."""
    distill: DistillConfig = field(default_factory=DistillConfig)
    """Answers of the target."""
    tree: TreeConfig = field(default_factory=TreeConfig)
    """The draft tree."""
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    """With `prompts`, sets on which each draft's tree is decoded: predictions are then by what they accept there."""
    trust: bool = False
    """Import classes that recipes and artifacts name outside the package, which runs their code."""

    def __post_init__(self) -> None:
        if self.engine is not None and self.engine.lower() not in map(str.lower, get_args(Engine)):
            raise UserError(f"engine must be one of {', '.join(get_args(Engine))}, got {self.engine}; or leave it out")
        if len(self.calibrated) * LEAST_MINUTES > self.minutes:
            raise UserError(f"minutes {self.minutes:g} is shorter than calibrating {len(self.calibrated)} rows, which "
                            f"takes {len(self.calibrated) * LEAST_MINUTES:g} at least; give more, fewer --rows, or "
                            "--artifacts, which need no training")

    @property
    def calibrated(self) -> tuple[str, ...]:
        """The recipes to calibrate."""
        return self.rows or (() if self.artifacts else CANDIDATES)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A draft with its predicted figures."""

    name: str  # Recipe or folder
    predictions: dict[str, Prediction | None]  # By condition, "batch 1, temperature 0"; None: nothing is known of it
    parameters: int  # Trained parameters
    training: str  # Training that it takes, in words
    memory: str  # Planned memory of that training, in words
    engines: str  # Programs that load it; empty for none
    start: str  # Command to start with
    overlap: str = ""  # Gain of drafting on a device of its own, in words; empty where the draft reads states

    @property
    def score(self) -> float:
        """Geometric mean of the speed-ups; where drafting is slower it is left out, so that none is below 1."""
        return math.exp(sum(math.log(max(1.0, one.speedup if one else 1.0)) for one in self.predictions.values())
                        / len(self.predictions))


def choose_draft(parsed: Parsed[ChooseArguments]) -> None:
    """One recommendation for a target on this device, and the table after it: speed-ups, costs, engines, the start."""
    given, notes, found = parsed.values, list[str](), list[Candidate]()
    # A plan counts for a device elsewhere too; what is measured is this one.
    device_named(given.target.device)
    # Before anything is calibrated: a set may not be there.
    asked = None if given.evaluate.prompts is None else AskedSets.of(given.evaluate)
    if given.artifacts:
        target = artifact_target(given.artifacts[0], given.target)
        found += [of_artifact(folder, target, given, asked) for folder in given.artifacts]
    if given.calibrated:
        found += calibrated(given, asked, notes)
    found.sort(key=lambda one: -one.score)
    suited = [one for one in found if given.engine is None or given.engine.lower() in one.engines.lower()]
    notes += [f"{one.name} is left out: {given.engine} does not load it" for one in found if one not in suited]
    best = suited[0] if suited else None
    if best is None:
        advice = "none: no candidate fits the engine and the memory"
    elif best.score <= 1:
        advice = "none: plain decoding is faster here"
    else:
        # Sure is what lies above plain decoding with its whole interval, in some condition.
        sure = any(one and (one.speedup_interval or (0.0,))[0] > 1 for one in best.predictions.values())
        doubt = "" if sure else " (the interval includes plain decoding: calibrate for more minutes first)"
        advice = f"{best.name}: predicted {best.score:.2f} times as fast as plain decoding{doubt}; start: {best.start}"
    notes += [f"{one.name}: {one.overlap}" for one in found if one.overlap]
    page: list[Block] = [Text(advice), *Table.of([cells(one) for one in found]), *map(Text, [*notes, NOTE])]
    say(as_markdown(page).rstrip())
    records = [{**vars(one), "score": one.score, "predictions": {
        name: None if each is None else figures(each) for name, each in one.predictions.items()}} for one in found]
    chosen = None if best is None or best.score <= 1 else best.name
    write_file(given.out / "choose.json", json.dumps(
        {"recommendation": chosen, "advice": advice, "notes": notes, "candidates": records}, indent=2) + "\n")


NOTE = ("Tokens per pass and speed-ups are over this project's loop without drafts, with 90 % intervals over answers, "
        "seconds and the growth with longer training, or 95 % ones over the prompts of evaluate.prompts. Where "
        "drafting is slower it counts as plain decoding. Engines draft chains, and their passes cost otherwise.")


def cells(one: Candidate) -> dict[str, str]:
    """The cells of a candidate by the headings of their columns."""
    def cell(found: Prediction | None) -> str:
        if found is None:
            return "not known"
        spans = ["" if span is None else f" ({span[0]:.2f} to {span[1]:.2f})"
                 for span in (found.interval, found.speedup_interval)]
        return f"{found.accepted_length:.2f}{spans[0]}, {found.speedup:.2f}x{spans[1]}"

    return {"draft": one.name,
            **{f"tokens/pass and speed-up, {name}": cell(found) for name, found in one.predictions.items()},
            "parameters": f"{one.parameters:,}", "training": one.training, "memory": one.memory,
            "loaded by": one.engines or "no engine"}


def calibrated(given: ChooseArguments, asked: AskedSets | None, notes: list[str]) -> list[Candidate]:
    """Candidates that train now for equal short times on the same answers, as rows of `families`."""
    folder, name = given.out / "calibration", given.target.name
    if name == ARTIFACT_TARGET:
        name = named_target(given.artifacts[0], given.target).name if given.artifacts else DEFAULT_NAME
    # Decoding is not compared here: one prompt is enough, and trees are sized for answers of this length.
    comparison = FamiliesArguments(
        out=folder, rows=given.calibrated, minutes=TRAINING * given.minutes / len(given.calibrated),
        target=replace(given.target, name=name), template=given.template, prompts=given.prompts,
        distill=replace(given.distill, budget_minutes=ANSWERING * given.minutes), tree=given.tree,
        evaluate=EvaluateConfig(limit=1, speed_prompts=0, max_new_tokens=ANSWER_TOKENS), trust=given.trust)
    settings = {section: plain(asdict(getattr(comparison, section))) for section in SHARED}
    # No file may hold it: what the command line trusts is passed on by words.
    del settings["target"]["trust_remote_code"]
    whole, peaks = Parsed(values=comparison, settings=settings), dict[str, int]()
    for row in given.calibrated:
        file = compose(given.out / "planned", row_name(row), recipe_path(row), whole)
        peak = max(stage.peak for stage in plan_recipe(workspace_of(file, *trust_words(given)).recipe).stages)
        if given.memory_gib is None or peak <= given.memory_gib * 2**30:
            peaks[row] = peak
        else:
            notes.append(f"{row} is left out: its training needs {in_words(peak)}, more than memory_gib "
                         f"{given.memory_gib:g}")
    if not peaks:
        return []
    families(replace(whole, values=replace(comparison, rows=tuple(peaks))))
    target, found = load_target(replace(given.target, name=name)), []
    for row, peak in peaks.items():
        place = folder / row_name(row)
        result, stats = (read_object(place / "train" / file, "calibrate again") for file in (RESULT_FILE, STATS_FILE))
        growth = grown(result["steps"], stats["seconds"], given.train_minutes)
        candidate = of_artifact(place / "artifact", target, given, asked, growth)
        start = shlex.join(["draftsmith", "run", "--config", row, "--target.name", name, "--train.max_minutes",
                            f"{given.train_minutes:g}"])
        found.append(replace(candidate, name=row_name(row), start=start, memory=in_words(peak),
                             training=f"{given.train_minutes:g} min"))
    return found


def grown(steps: int, seconds: float, minutes: float) -> tuple[float, float]:
    """(factor of the accepted drafts of a pass, its relative error) of longer training after a short one.

    The fewer steps the short one took, the more is still to come; half of the growth is its 90 % uncertainty. Steps and
    seconds are those of the short one, minutes those of the longer one."""
    longer = max(1.0, 60 * minutes / max(1e-3, seconds))
    growth = min(MOST_GROWTH, CURVE * max(1, steps) ** -0.5 * (1 - longer**-0.5))
    return math.exp(growth), 0.5 * growth / 1.645


def of_artifact(folder: Path, target: Target, given: ChooseArguments, asked: AskedSets | None,
                growth: tuple[float, float] = (1.0, 0.0)) -> Candidate:
    """The figures of an artifact on this device, after the growth of `grown`."""
    artifact = load_artifact(folder, target, trust=given.trust)
    tuning = measured_here(artifact)
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        parameters = sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    most = artifact.topology.depth + 1
    predictions = {(rows, degree): predicted(tuning, rows, degree, growth, most)
                   for rows in given.batch_sizes for degree in given.temperatures}
    if asked is not None:
        config = replace(given.evaluate, batch_sizes=given.batch_sizes, temperatures=given.temperatures,
                         policies=(STATIC,), baselines=(), speed_prompts=0)
        sets, origins = asked.questions(given.template.build(target), config, target.context_length, [artifact.drafter])
        run = evaluate(artifact.target, [Method.of(artifact)], sets, config, origins=origins, say=say,
                       references=given.out / REFERENCES)
        for one in run.evaluations:
            measured = one.overall.accepted_length
            length, low, high = (min(most, 1 + (end - 1) * growth[0]) for end in (
                measured, *(one.overall.accepted_length_interval or (measured, measured))))
            predictions[one.batch_size, one.temperature] = Prediction(
                accepted_length=length, speedup=tuning.cost.predict(length, one.nodes, one.batch_size),
                interval=(low, high))
    return Candidate(
        name=str(folder), parameters=parameters, training="none", memory="-",
        predictions={f"batch {rows}, temperature {degree:g}": found for (rows, degree), found in predictions.items()},
        overlap=overlap(artifact, tuning),
        engines="; ".join(dict.fromkeys(one.read_by(artifact.drafter) for one in formats_of(artifact))),
        start=shlex.join(["draftsmith", "generate", "--artifact", str(folder), "--prompt", "TEXT"]))


def overlap(artifact: Artifact, tuning: Tuning) -> str:
    """The gain that is predicted of drafting while the target verifies, which drafts that read text alone can do."""
    chains = [one["unconditional"] for one in artifact.acceptance.get("measurements", ())
              if one["chain"] and one["group"] == "all" and one["temperature"] == 0]
    if not (isinstance(artifact.drafter, CausalDraft) and chains):
        return ""
    # Of the longest chain: tokens that were accepted, of those whose predecessors were.
    rates = max(chains, key=len)
    chance = sum(rates) / (1 + sum(rates[:-1]))
    ahead, gain = tuning.cost.overlapped(chance)
    return (f"drafting {ahead} tokens on a second device while the target verifies (PEARL) is predicted to be "
            f"{gain:.2f} times as fast as a chain that is drafted before, at {chance:.0%} acceptance of a token; no "
            "command does so yet")


def measured_here(artifact: Artifact) -> Tuning:
    """The artifact's tuning, with seconds of this device: stored ones where they are of it, otherwise measured now."""
    stored = artifact.tuning
    if stored is not None and stored.made_with(artifact.target):
        return stored
    cost = measure_cost(artifact.target, artifact.drafter, artifact.topology)
    if stored is not None:
        return replace(stored, cost=cost)
    # Of an imported artifact nothing is known but the seconds; of one made elsewhere without a tuning, estimates.
    lengths = artifact.provenance.get("expected_accepted_length", ())
    return Tuning.of(artifact.target, cost, tuple(
        Trial(policy=f"{STATIC}-{size}", chosen=Counted(accepted_length=lengths[size - 1], nodes=size))
        for size in SIZES if size <= len(lengths)))


def predicted(tuning: Tuning, rows: int, degree: float, growth: tuple[float, float], most: float) -> Prediction | None:
    """The prediction of the fastest size of the tree, or of copies next to it where these are faster: for as many rows
    at a temperature, after the growth of `grown`, with `most` tokens of the deepest path; None where no accepted length
    is known."""
    factor, error = growth

    def later(found: Counted, factor: float) -> Counted:
        return replace(found, accepted_length=max(1.0, min(most, 1 + (found.accepted_length - 1) * factor)))

    alone = [replace(one, chosen=later(one.chosen, factor), reported=one.reported and later(one.reported, factor))
             for one in tuning.trials(degree, STATIC)]
    grown_up = replace(tuning, greedy=tuple(alone), sampled=tuple(alone), used_nodes=None)
    found, copies = grown_up.prediction(STATIC, rows, degree), tuning.prediction(JOINED, rows, degree)
    if found is not None and found.interval is not None:
        # What longer training brings is not certain either.
        low, high = (max(1.0, min(most, 1 + (end - 1) * factor * math.exp(side * 1.645 * error)))
                     for end, side in zip(found.interval, (-1, 1), strict=True))
        found = replace(found, interval=(low, high))
    return found if found is None or copies is None or copies.speedup <= found.speedup else copies


COMMANDS: dict[str, Command[Any]] = {"choose": Command(name="choose", arguments=ChooseArguments, run=choose_draft)}
