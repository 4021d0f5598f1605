"""Comparison of families under equal conditions: the same distilled tokens, training minutes and prompts, one table."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from ...data import DistillConfig, Manifest, PromptConfig, read_held_out
from ...export import EvaluateConfig, evaluate, write_report
from ...export.evaluation.timed_answers import REFERENCES
from ...export.report.family_comparison import write_standings
from ...modules import BASELINES, TargetConfig, UserError, load_target
from ...modules.config_checks import Positive
from ...modules.files.atomic_files import write_file
from ...modules.files.folders import sole_writer
from ...trainers import Precision
from ..chat_settings import AskedSets, TemplateConfig, read_sets
from ..reading.command_line import Command, Parsed, process_words, trust_words
from ..reading.recipe_files import read_recipe, recipe_path
from ..recipe import TreeConfig
from ..stages.records import STAGES_FILE, Stage, run_stages
from ..stages.training_folder import refuse_growth
from ..stages.workspace import Workspace, target_files
from ..terminal import call, say, stage_line
from .pipeline import COMMANDS as PIPELINE
from .pipeline import performed

# Sections that all rows have in common: a row's own recipe decides the rest.
SHARED = ("target", "template", "prompts", "distill", "tree", "evaluate")


@dataclass(frozen=True, kw_only=True)
class FamiliesArguments:
    """Arguments of `draftsmith families`: the rows, and what they share."""

    out: Path
    """Folder of the comparison: the data, a folder for each row, families.json, families.md, families.svg."""
    rows: tuple[str, ...]
    """Recipes (shipped ones by name, others by path) and training-free baselines by name, in the table's order."""
    minutes: Positive = 15.0
    """Training minutes of each row, validation not counted."""
    precision: Precision = "auto"
    """Arithmetic of each row's training, whatever its own recipe says: a faster one would learn from more tokens."""
    only: str | None = None
    """Train and measure this row alone; the table keeps what the others have."""
    target: TargetConfig = field(default_factory=TargetConfig)
    """The frozen language model."""
    template: TemplateConfig = field(default_factory=TemplateConfig)
    """Settings of its chat template."""
    prompts: PromptConfig = field(default_factory=PromptConfig)
    """Origin of the training prompts."""
    distill: DistillConfig = field(default_factory=DistillConfig)
    """Number and sampling of the target's answers."""
    tree: TreeConfig = field(default_factory=TreeConfig)
    """The draft tree."""
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    """Evaluation: decoded prompts and timing."""
    trust: bool = False
    """Import the classes that the rows' recipes name outside the package, which runs their code. Given on the command
    line, never in a recipe."""

    def __post_init__(self) -> None:
        if not self.rows or len(set(map(row_name, self.rows))) < len(self.rows):
            raise UserError(f"rows must be one or more different recipes or baselines, got {list(self.rows)}")
        if self.only is not None and self.only not in map(row_name, self.rows):
            raise UserError(f"only names {self.only!r}; choose one of {', '.join(map(row_name, self.rows))}")


def row_name(row: str) -> str:
    """A row's name in the table: that of its recipe file or of its baseline."""
    return Path(row).stem if row.endswith(".yaml") else row


def families(parsed: Parsed[FamiliesArguments]) -> None:
    """Every family is trained and measured under equal conditions, in one table; what is complete is skipped."""
    given = parsed.values
    recipes = {row_name(row): recipe_path(row) for row in given.rows if row not in BASELINES}
    wanted = [row_name(row) for row in given.rows if given.only in (None, row_name(row))]
    trust = trust_words(given)
    with TemporaryDirectory() as scratch, ExitStack() as stack:
        # Not yet in the rows' folders, in which another comparison may be at work.
        files = {name: compose(Path(scratch), name, recipes[name], parsed) for name in wanted if name in recipes}
        workspaces = [workspace_of(file, *trust) for file in files.values()]
        # All rows before any work: a misfit of the last one would else be reported after hours.
        for workspace in workspaces:
            workspace.check()
        # Any row's recipe will do: the sections that decide the data are the same for all rows.
        source = next(iter(files.values()), None) or next(
            (compose(Path(scratch), *row, parsed) for row in recipes.items()), None)
        states = [one for workspace in workspaces for one in workspace.wanted_states()]
        # The data that all rows train on, by the recipe of one of them, with the states that their trainings read.
        if source is None:
            stack.enter_context(sole_writer(given.out / STAGES_FILE, wait=False))
        else:
            shared = workspace_of(source, "--out", str(given.out), "--data", "null", *trust)
            for row in given.rows:
                refuse_growth(shared, given.out / row_name(row) / "train")
            if not stack.enter_context(performed(shared, ["distill"], states)):
                return
        for number, name in enumerate(wanted, 1):
            say(f"\n== row {number}/{len(wanted)}: {name}")
            if name in files:
                run_row(name, compose(given.out, name, recipes[name], parsed), trust)
            else:
                measure_baseline(name, parsed)
            written = write_standings(given.out, {row_name(row): given.out / row_name(row) for row in given.rows})
    say(f"\n{written.read_text(encoding='utf-8')}")


def compose(folder: Path, name: str, recipe: str, parsed: Parsed[FamiliesArguments]) -> Path:
    """Write the recipe of a row below a folder: its own family, drafter, training and batches; everything else as for
    all rows. Raises UserError if the recipe names no family."""
    content, given = read_recipe(recipe), parsed.values
    if "family" not in content:
        raise UserError(f"{recipe} names no family and cannot be a row; give a training recipe")
    if not isinstance(content.get("train") or {}, dict):
        raise UserError(f"{recipe}: train must be a section of keys and values, got {content['train']!r}; write it as "
                        "the shipped recipes do")
    limits = {"max_minutes": given.minutes, "max_steps": None, "precision": given.precision}
    content["train"] = {**(content.get("train") or {}), **limits}
    places = {"out": name, "data": "data", "references": REFERENCES}
    content |= {section: parsed.settings[section] for section in SHARED}
    content |= {key: str(given.out / place) for key, place in places.items()}
    return write_file(folder / name / "recipe.yaml", yaml.safe_dump(content, sort_keys=False))


def workspace_of(file: Path, *words: str) -> Workspace:
    """The workspace of a recipe file with some keys changed."""
    return Workspace(PIPELINE["run"].parse(["--config", str(file), *words]))


def run_row(name: str, file: Path, trust: Sequence[str]) -> None:
    """Train and measure one row in a process of its own: its peak of memory is its own, one that the system kills ends
    no other, and for several devices Lightning starts this very command again."""
    if code := call(process_words("run", str(file), trust)):
        raise UserError(f"the row {name} ended with exit code {code}; its message stands above, its recipe "
                        f"is {file}; correct that and start again, finished rows are kept")


def measure_baseline(name: str, parsed: Parsed[FamiliesArguments]) -> None:
    """Decode the same prompts with a drafter that needs no training."""
    given = parsed.values

    def evaluated() -> Sequence[Path]:
        target = load_target(given.target)
        config = replace(given.evaluate, baselines=(name,))
        sets, origins = AskedSets.of(config, read_held_out(given.out / "data")).questions(
            given.template.build(target), config, target.context_length)
        result = evaluate(target, [], sets, config, origins=origins, references=given.out / REFERENCES, say=stage_line)
        return list(write_report(given.out / name, result).values())

    stage = Stage(name="evaluate", title="held-out prompts are decoded", sections=("target", "template", "evaluate"),
                  work=evaluated, reads=target_files(given.target, given.template) | read_sets(given.evaluate))
    run_stages(given.out / name, parsed.settings, [stage], ["evaluate"], before=Manifest.load(given.out / "data").hash)


COMMANDS: dict[str, Command[Any]] = {
    "families": Command(name="families", arguments=FamiliesArguments, run=families, home="evaluate"),
}
