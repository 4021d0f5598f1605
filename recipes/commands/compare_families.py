"""Comparison of families under equal conditions: the same distilled tokens, training minutes and prompts, one table."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from ...data import DistillConfig, Manifest, PromptConfig, WantedStates
from ...export import EvaluateConfig, evaluate, write_report
from ...export.evaluation.reference_answers import REFERENCES
from ...export.report.family_comparison import write_standings
from ...modules import BASELINES, TargetConfig, UserError, load_target
from ...modules.files.atomic_files import write_file
from ...modules.files.folder_locks import sole_writer
from ...trainers import Precision
from ..chat_settings import TemplateConfig, prompt_sets
from ..reading.command_line import TRUST
from ..reading.parsing import Command, Parsed
from ..reading.recipe_files import read_recipe, recipe_path
from ..recipe import Recipe, TreeConfig
from ..stages.records import STAGES_FILE, Stage, run_stages
from ..stages.training_folder import refuse_growth
from ..stages.workspace import Workspace, target_files
from ..terminal.interruption import call
from ..terminal.terminal_text import say, stage_line
from .pipeline import COMMANDS as PIPELINE
from .pipeline import held_out_sets, performed

SHARED = ("target", "template", "prompts", "distill", "tree", "evaluate")
"""Sections that all rows have in common: a row's own recipe decides the rest."""


@dataclass(frozen=True, kw_only=True)
class FamiliesArguments:
    """Arguments of `draftsmith families`: the rows, and what they share."""

    out: Path
    """Folder of the comparison: the data, a folder for each row, families.json, families.md, families.svg."""
    rows: tuple[str, ...]
    """Recipes (shipped ones by name, others by path) and training-free baselines by name, in the table's order."""
    minutes: float = 15.0
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
        if not self.minutes > 0:
            raise UserError(f"minutes must be above 0, got {self.minutes}")
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
        trainings = [given.out / row_name(row) / "train" for row in given.rows]
        leads = stack.enter_context(distilled_once(source, given.out, trust, states, trainings))
        if not leads:
            return
        for number, name in enumerate(wanted, 1):
            say(f"\n== row {number}/{len(wanted)}: {name}")
            if name in files:
                run_row(name, compose(given.out, name, recipes[name], parsed), trust)
            else:
                measure_baseline(name, parsed)
            written = write_standings(given.out, {row_name(row): given.out / row_name(row) for row in given.rows})
    say(f"\n{written.read_text(encoding='utf-8')}")


def trust_words(given: FamiliesArguments) -> list[str]:
    """Words of the command line for the code that it trusts, which no recipe can hold."""
    return [f"--{TRUST}={str(given.trust).lower()}",
            f"--target.trust_remote_code={str(given.target.trust_remote_code).lower()}"]


def compose(folder: Path, name: str, recipe: str, parsed: Parsed[FamiliesArguments]) -> Path:
    """Write the recipe of a row below a folder: its own family, drafter, training and batches; everything else as for
    all rows.

    Raises:
        UserError: if the recipe names no family.
    """
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


@contextmanager
def distilled_once(file: Path | None, out: Path, trust: Sequence[str], states: Sequence[WantedStates],
                   trainings: Sequence[Path]) -> Iterator[bool]:
    """Context after the data that all rows train on were made, by the recipe of one of them, with the states that their
    trainings read; see `performed`.

    Raises:
        UserError: if they would grow, and one of the trainings was made on them as they are.
    """
    if file is None:
        with sole_writer(out / STAGES_FILE, wait=False):
            yield True
        return
    workspace = workspace_of(file, "--out", str(out), "--data", "null", *trust)
    for training in trainings:
        refuse_growth(workspace, training)
    with performed(workspace, ["distill"], states) as leads:
        yield leads


def workspace_of(file: Path, *words: str) -> Workspace:
    """The workspace of a recipe file with some keys changed."""
    recipe: Parsed[Recipe] = PIPELINE["run"].parse(["--config", str(file), *words])
    return Workspace(recipe.values, recipe.settings)


def run_row(name: str, file: Path, trust: Sequence[str]) -> None:
    """Train and measure one row in a process of its own: its peak of memory is its own, one that the system kills ends
    no other, and for several devices Lightning starts this very command again.

    Raises:
        UserError: if it does not end well.
    """
    # -P: the working folder, which may hold anybody's files, is not where this process imports from.
    code = call([sys.executable, "-P", "-m", "draftsmith.recipes", "run", "--config", str(file), *trust])
    if code:
        raise UserError(f"the row {name} ended with exit code {code}; its message stands above, its recipe "
                        f"is {file}; correct that and start again, finished rows are kept")


def measure_baseline(name: str, parsed: Parsed[FamiliesArguments]) -> None:
    """Decode the same prompts with a drafter that needs no training."""
    out = parsed.values.out
    stage = Stage(name="evaluate", title="held-out prompts are decoded", sections=("target", "template", "evaluate"),
                  work=partial(baseline_stage, name, parsed.values),
                  reads=target_files(parsed.values.target, parsed.values.template))
    run_stages(out / name, parsed.settings, [stage], ["evaluate"], before=Manifest.load(out / "data").hash)


def baseline_stage(name: str, given: FamiliesArguments) -> Sequence[Path]:
    """Evaluate one baseline alone."""
    target = load_target(given.target)
    sets = prompt_sets(given.template.build(target), held_out_sets(given.out / "data"))
    config = replace(given.evaluate, baselines=(name,))
    result = evaluate(target, [], sets, config, references=given.out / REFERENCES, say=stage_line)
    return list(write_report(given.out / name, result).values())


COMMANDS: dict[str, Command[Any]] = {
    "families": Command(name="families", arguments=FamiliesArguments, run=families,
                        home="evaluate"),
}
