"""Folder of a training: the settings that it was started with, the result that it left, and the work that it and the
stages before it left out for lack of minutes."""

import hashlib
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from typing import Any

from ...data import TokenShard
from ...data.answers.data_folder import read_stats
from ...data.store.token_store import repetitions
from ...export import TrainingRecord
from ...export.artifact import Artifact
from ...export.evaluation.results import EvaluationRun
from ...export.page import Figure
from ...export.report.evaluation_page import evaluation_page
from ...export.report.phrases import label
from ...modules import UserError
from ...modules.files.atomic_files import write_file
from ...modules.files.json_records import read_object, record_of, shortened
from ...modules.processes import Processes
from ...trainers import FitResult
from ...trainers.base import LEAST_STEPS
from ...trainers.fitting import quiet
from ...trainers.loggers import log_plots, logged
from ..reading.recipe_files import flat
from ..terminal import say
from .workspace import Workspace

RESULT_FILE, STATS_FILE, SETTINGS_FILE = "result.json", "stats.json", "settings.json"
REPETITIONS = 4  # Times that text is read, beyond which more of it is worth clearly more (arXiv:2305.16264, section 5)
RISING = 1.01  # Growth of the accepted length in the last quarter of a training from which it counts as still rising
DECISIVE = ("family", "drafter", "train", "batch")  # Recipe sections that decide what is trained


def refuse_other_run(workspace: Workspace) -> None:
    """Refuse a folder in which another recipe has trained; of more minutes a training goes on. Raises UserError."""
    file = workspace.training / SETTINGS_FILE
    if not file.is_file():
        return
    remedy = f"delete {workspace.training} to train anew"
    wanted = {name: workspace.decisive[name] for name in DECISIVE}
    former = read_object(file, remedy)
    if former.get("family") != wanted["family"]:
        raise UserError(f"{workspace.out} holds a run of family {former.get('family')}, and this recipe is of family "
                        f"{wanted['family']}; choose another --out")
    train = record_of(dict[str, Any], former.get("train"), f"the key train of {file}", remedy)
    before, now = train.get("max_minutes"), wanted["train"]["max_minutes"]
    kept = {name: former.get(name) for name in DECISIVE}
    if now is None or (before is not None and before <= now):
        kept["train"] = {**train, "max_minutes": now}
    old, new = dict(flat(kept)), dict(flat(wanted))
    for name in sorted({*old, *new}):
        if old.get(name) != new.get(name) and not isinstance(new.get(name, old.get(name)), Mapping):
            raise UserError(f"{workspace.training} was started with {name} {shortened(old.get(name))}, now it is "
                            f"{shortened(new.get(name))}; delete it to train anew, or choose another --out")


def check_settings(workspace: Workspace) -> None:
    """Write the settings of a training into its folder, so that another recipe or other data do not resume in it. Of
    several processes the first one writes. A training on this run's answers before they grew is set aside. Raises
    UserError if the folder was started with other data."""
    folder, data = workspace.training, workspace.manifest().hash
    if (folder / SETTINGS_FILE).is_file() and trained_on(folder) != data:
        if workspace.recipe.data is not None or Processes.launched().world > 1:
            raise UserError(f"{folder} was trained on other data than {workspace.data} holds; choose another --out, or "
                            "delete it to train anew")
        names = (f"{folder.name}-{number}" for number in count(1))
        aside = folder.rename(next(place for name in names if not (place := folder.with_name(name)).exists()))
        say(f"     the answers or their limits have changed: the former training is kept in {aside}, a new one starts")
    if not Processes.launched().rank:
        write_file(folder / SETTINGS_FILE, json.dumps(
            {**{name: workspace.decisive[name] for name in DECISIVE}, "data": data}, indent=2, sort_keys=True) + "\n")


def facts(workspace: Workspace) -> dict[str, Any]:
    """The recipe of a training, and hashes of what decided its weights, for a logger."""
    recipe = json.dumps(workspace.decisive, sort_keys=True)
    return {"recipe": workspace.settings, "hashes": {
        "target": workspace.target.identity.weights_hash, "data": workspace.manifest().hash,
        "recipe": hashlib.sha256(recipe.encode()).hexdigest()}}


def trained_on(folder: Path) -> str:
    """Hash of the data that a training was started on, which may have grown since."""
    file, remedy = folder / SETTINGS_FILE, f"delete {folder} to train anew"
    return record_of(str, read_object(file, remedy).get("data"), f"the key data of {file}", remedy)


def refuse_growth(workspace: Workspace, training: Path) -> None:
    """Refuse to let the data of a run grow where the training in a folder, which need not be there, was made on them as
    they are: it could not be resumed. Raises UserError with the limit that is higher than it was.

    Where minutes alone are higher, they grow all the same, and `check_settings` sets this run's own training aside."""
    found, raised = workspace.answered_data, workspace.raised_limits
    if found is None or not raised or not (training / SETTINGS_FILE).is_file() or trained_on(training) != found.hash:
        return
    if training == workspace.training and set(raised) == {"budget_minutes"}:
        return
    name, wanted = next(iter(raised.items()))
    raise UserError(f"{training} was trained on the answers in {workspace.data}, which would grow: distill.{name} was "
                    f"{found.recipe['distill'][name]} and is now {wanted}; go back to the former setting, or copy "
                    f"{workspace.data} into the folder of another --out and let it grow there")


def write_result(folder: Path, result: FitResult) -> list[Path]:
    """Write the result of a training; returns the files that later stages depend on."""
    content = {**asdict(result), "checkpoint": str(result.checkpoint.relative_to(folder))}
    # What the machine decides stays out of what later stages depend on.
    stats = {name: content.pop(name) for name in ("precision", "seconds", "data_wait", "peak_memory_bytes")}
    write_file(folder / STATS_FILE, json.dumps(stats, indent=2) + "\n")
    write_file(folder / RESULT_FILE, json.dumps(content, indent=2) + "\n")
    return [folder / RESULT_FILE, result.checkpoint]


def recorded(workspace: Workspace, result: FitResult) -> TrainingRecord:
    """The time of a training and its curve, with sentences on both."""
    time = (f"trained in {result.seconds:,.0f} s ({result.steps:,} steps); {result.data_wait:.1%} of that went by "
            "waiting for data")
    return TrainingRecord(time=time, outcome=outcome(workspace, result), best_step=result.step, curve=result.curve)


def outcome(workspace: Workspace, result: FitResult) -> str:
    """Sentences on the curve of a training, and on what would make its draft better."""
    config, curve, best = workspace.recipe.train, result.curve, result.accepted_length
    found = f"Best at step {result.step:,} of {result.steps:,}: {best:.2f} tokens per pass of held-out text"
    if config.start is not None:
        found += f", {curve[0].accepted_length:.2f} before this training"
        if not result.step:
            return f"{found}, which has not made the drafter of train.start better; lower train.lr, or take more data."
    # The last measurement before the last quarter, in which the learning rate falls to nearly nothing.
    earlier = [one for one in curve[1:] if 4 * one.step <= 3 * result.steps]
    if not earlier:
        return f"{found}; measured too seldom to say more (train.validate_every)."
    text = int(workspace.label_weights.sum())
    times = curve[-1].labels / max(1, text)
    seen = f"{text:,} tokens seen {times:.0f} times" if times >= 1.5 else f"{text:,} tokens, not seen twice"
    distill, answers = workspace.recipe.distill, "answers (distill.budget_tokens)"
    # Prompts may run out before the budget, also since rows were skipped.
    if distill.budget_tokens is None or (distill.budget_minutes is None and workspace.manifest().total(
            "train", "supervised") < distill.budget_tokens):
        # Of a small file most are held out by a recipe for a larger one.
        fewer = distill.validation_prompts > workspace.manifest().total("train", "rows")
        answers = "prompts, or a lower distill.validation_prompts," if fewer else "prompts"
    by_steps = config.max_steps is not None and result.steps >= config.max_steps
    longer = "steps (train.max_steps)" if by_steps else "minutes (train.max_minutes)"
    if result.step == curve[-1].step and best >= RISING * earlier[-1].accepted_length:
        more = f", and more {answers} too" if times > REPETITIONS else ""
        return f"Still rising at the end: more {longer} will help{more}. {found}, by {seen}."
    if times > REPETITIONS:
        return f"Short of data: {seen}; more {answers} will help. {found}."
    return f"{found}, by {seen}, and level by the end: more {longer} alone will hardly help."


def read_result(folder: Path) -> FitResult:
    """The result of a finished training. Raises UserError if it has not been run to its end."""
    files = [folder / name for name in (RESULT_FILE, STATS_FILE)]
    if not all(file.is_file() for file in files):
        raise UserError(f"{folder} holds no finished training; run draftsmith train with this recipe first")
    remedy = f"delete {RESULT_FILE}, and the same command makes it anew from the last checkpoint"
    content = {name: value for file in files for name, value in read_object(file, remedy).items()}
    found = record_of(FitResult, content, str(files[0]), remedy)
    return replace(found, checkpoint=folder / found.checkpoint)


def log_evaluation(workspace: Workspace, result: EvaluationRun, artifact: Artifact) -> None:
    """Hand what an evaluation has measured, and the plots of its report, to the logger of the training."""
    step = read_result(workspace.training).step
    try:
        with quiet(), logged(workspace.recipe.train.logger, workspace.training, facts(workspace)) as logger:
            if logger is not None:
                logger.log_metrics({re.sub(r"[^\w./ -]", "_", f"evaluation/{label(result, one)}/{name}"): value
                                    for one in result.evaluations for name in ("accepted_length", "speedup")
                                    if (value := getattr(one.overall, name)) is not None}, step)
                log_plots(logger, {f"report/{plot.name}": plot.pixels for block in evaluation_page(result, artifact)
                                   if isinstance(block, Figure) for plot in [block.draw()]}, step)
    except UserError as error:
        # An evaluation of an hour is not repeated for a service that fails.
        say(f"warning: {error}", file=sys.stderr)


def left_out(workspace: Workspace) -> tuple[str, ...]:
    """A sentence for each stage that left work out, and on loops that training does; empty where none did."""
    manifest, config, sentences = workspace.manifest(), workspace.recipe.train, list[str]()
    # By the settings of the run that distilled the answers, which may be another one.
    settings, found = manifest.recipe["distill"], manifest.total("train", "supervised")
    wanted, minutes = settings.get("budget_tokens"), settings.get("budget_minutes")
    if wanted is not None and minutes is not None and found < wanted:
        ran_out = manifest.recipe["prompts"].get("origin") == "own"
        if not ran_out:
            # The last prompt of a file may have ended distillation, and not the time.
            ran_out = read_stats(workspace.data).get("seconds", 0.0) >= 60 * minutes
        if ran_out:
            sentences.append(f"answers: {found:,} of {wanted:,} tokens were distilled; the rest did not fit into "
                             f"distill.budget_minutes {minutes:g}")
    asked, held = settings.get("validation_prompts", 0), manifest.total("validation", "prompts")
    if minutes is not None and held < asked:
        sentences.append(f"held-out answers: {held:,} of {asked:,} validation prompts were answered; the rest did not "
                         f"fit into distill.budget_minutes {minutes:g}")
    if manifest.skipped:
        sentences.append("prompts: rows were skipped, which data/skipped.jsonl lists: " + "; ".join(
            f"{count:,} × {kind}" for kind, count in manifest.skipped.items()))
    sentences += [f"prompts: the chat template leaves out the {part} of {count:,} rows"
                  for part, count in manifest.unwritten.items()]
    if manifest.repeated:
        sentences.append(f"prompts: {manifest.repeated:,} of {manifest.candidates:,} repeat others and were left out")
    if (full := manifest.total("train", "full")) > 0:
        sentences.append(f"training text: {full:,} of {manifest.total('train', 'prompts'):,} conversations end early "
                         "because the target's context does")
    repeated = [stop - first for record in manifest.split("train") for _, first, stop in repetitions(
        TokenShard.read(workspace.data / record.file, record.sha256))]
    if repeated:
        answers = manifest.total("train", "answers")
        sentences.append(f"training text: {len(repeated):,} of {answers:,} answers end in a loop, whose "
                         f"{sum(repeated):,} repeated tokens of {found:,} in all are not learned")
    steps = read_result(workspace.training).steps
    most, minutes = config.max_steps, config.max_minutes
    if minutes is not None and (steps <= LEAST_STEPS if most is None else steps < most):
        done = f"{steps:,} steps, the fewest" if most is None else f"{steps:,} of {most:,} steps"
        sentences.append(f"training: {done}; the rest did not fit into train.max_minutes {minutes:g}")
    return tuple(sentences)
