"""Every family on equal terms: the same distilled tokens, the same training minutes, the same prompts, one table."""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from ..data import DistillConfig, PromptConfig
from ..export import EvaluateConfig, evaluate, write_report
from ..export.evaluation.reference_answers import REFERENCES
from ..export.report.family_comparison import write_standings
from ..modules import BASELINES, Target, TargetConfig, UserError
from ..modules.atomic_files import write_file
from ..trainers import DraftModule, Precision
from .chat_settings import TemplateConfig, prompt_sets
from .draft_writer import writer_digest
from .parsing import Command, Parsed, recipe_path
from .pipeline import COMMANDS as PIPELINE
from .pipeline import STAGES, held_out_sets
from .recipe import Recipe, TreeConfig
from .workspace import Stage, Workspace, run_stages

RECIPE_FILE = "recipe.yaml"
SHARED = ("target", "template", "prompts", "distill", "tree", "evaluate")
"""Sections that all rows have in common: a row's own recipe decides the rest."""
ENDLESS = 1_000_000
"""Optimizer steps that no row reaches: minutes end its training."""


@dataclass(frozen=True, kw_only=True)
class FamiliesArguments:
    """A row for each family."""

    out: Path
    """Folder of the comparison: the data, a folder for each row, families.json, families.md, families.svg."""
    rows: tuple[str, ...]
    """Recipes (shipped ones by name, others by path) and training-free baselines by name, in the table's order."""
    minutes: float = 15.0
    """Training minutes of each row, validation not counted."""
    precision: Precision = "auto"
    """Arithmetic of each row's training, whatever its own recipe says: what is faster would else learn from more."""
    only: str | None = None
    """Bring this row up to date alone; the table keeps what the others have."""
    target: TargetConfig = field(default_factory=TargetConfig)
    """The frozen language model."""
    template: TemplateConfig = field(default_factory=TemplateConfig)
    """Settings of its chat template."""
    prompts: PromptConfig = field(default_factory=PromptConfig)
    """Where training prompts come from."""
    distill: DistillConfig = field(default_factory=DistillConfig)
    """How much the target answers, and how."""
    tree: TreeConfig = field(default_factory=TreeConfig)
    """The draft tree."""
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    """What is decoded and what is timed."""

    def __post_init__(self) -> None:
        if not self.minutes > 0:
            raise UserError(f"minutes must be above 0, got {self.minutes}")
        if not self.rows or len(set(map(row_name, self.rows))) < len(self.rows):
            raise UserError(f"rows must be one or more different recipes or baselines, got {list(self.rows)}")
        if self.only is not None and self.only not in map(row_name, self.rows):
            raise UserError(f"only names {self.only!r}; choose one of {', '.join(map(row_name, self.rows))}")


def row_name(row: str) -> str:
    """A row's name in the table: that of its recipe file, or of its baseline."""
    return Path(row).stem if row.endswith(".yaml") else row


def families(parsed: Parsed[FamiliesArguments]) -> None:
    """Train and measure every family on equal terms and write one table; what is complete is skipped."""
    given = parsed.values
    recipes = {row_name(row): recipe_path(row) for row in given.rows if row not in BASELINES}
    wanted = [row_name(row) for row in given.rows if given.only in (None, row_name(row))]
    files = {name: compose(name, recipes[name], parsed) for name in wanted if name in recipes}
    for file in files.values():
        workspace_of(file).rehearse()
    # Whose recipe it is does not matter: what decides the data is the same for all rows.
    source = next(iter(files.values()), None) or next((compose(*row, parsed) for row in recipes.items()), None)
    distil_once(source, given.out)
    for number, name in enumerate(wanted, 1):
        print(f"\n== row {number}/{len(wanted)}: {name}", flush=True)
        if name in files:
            run_row(name, files[name])
        else:
            measure_baseline(name, parsed)
        written = write_standings(given.out, {row_name(row): given.out / row_name(row) for row in given.rows})
    print(f"\n{written.read_text(encoding='utf-8')}")


def compose(name: str, recipe: str, parsed: Parsed[FamiliesArguments]) -> Path:
    """Write the recipe of a row: its own family and batches, everything else as for all rows.

    Raises:
        UserError: if the recipe has no model section.
    """
    content = yaml.safe_load(Path(recipe).read_text(encoding="utf-8"))
    try:
        config = content["model"]["init_args"].setdefault("config", {})
    except (KeyError, TypeError) as error:
        raise UserError(f"{recipe} has no model.init_args and cannot be a row; give a training recipe") from error
    given = parsed.values
    config |= {"max_minutes": given.minutes, "max_steps": ENDLESS, "precision": given.precision}
    folder = given.out / name
    content |= {section: parsed.settings[section] for section in SHARED}
    content |= {"out": str(folder), "data": str(given.out / "data"), "references": str(given.out / REFERENCES)}
    return write_file(folder / RECIPE_FILE, yaml.safe_dump(content, sort_keys=False))


def distil_once(file: Path | None, out: Path) -> None:
    """The data that all rows train on, by the recipe of one of them."""
    if file is None:
        return
    workspace = workspace_of(file, "--out", str(out), "--data", "null")
    run_stages(workspace, STAGES, ["distill"], before=writer_digest(workspace))


def workspace_of(file: Path, *words: str) -> Workspace:
    """The folder and recipe of a recipe file with some keys changed."""
    recipe: Parsed[Recipe] = PIPELINE["run"].parse(["--config", str(file), *words])
    return Workspace(recipe.values, recipe.settings)


def run_row(name: str, file: Path) -> None:
    """Train and measure one row in a process of its own, so that its peak of memory is its own.

    Raises:
        UserError: if it does not end well.
    """
    done = subprocess.run([sys.executable, "-m", "draftsmith.recipes", "run", "--config", str(file)], check=False)
    if done.returncode:
        raise UserError(f"the row {name} ended with exit code {done.returncode}; its message stands above, its recipe "
                        f"is {file}")


def measure_baseline(name: str, parsed: Parsed[FamiliesArguments]) -> None:
    """Decode the same prompts with a drafter that needs no training."""
    given = parsed.values
    recipe = Recipe(out=given.out / name, model=_untrained, target=given.target, template=given.template,
                    evaluate=replace(given.evaluate, baselines=(name,)), data=given.out / "data",
                    references=given.out / REFERENCES)
    workspace = Workspace(recipe, parsed.settings)
    stage = Stage(name="evaluate", title="held-out prompts are decoded", sections=("target", "template", "evaluate"),
                  work=baseline_stage)
    run_stages(workspace, [stage], ["evaluate"], before=workspace.manifest().hash)


def baseline_stage(workspace: Workspace) -> Sequence[Path]:
    """Evaluate the baselines of the recipe alone."""
    sets = prompt_sets(workspace.template, held_out_sets(workspace))
    result = evaluate(workspace.target, [], sets, workspace.recipe.evaluate, references=workspace.recipe.references)
    return list(write_report(workspace.out, result).values())


def _untrained(_target: Target) -> DraftModule:
    raise RuntimeError("a row without training has no model")


COMMANDS: dict[str, Command[Any]] = {
    "families": Command(name="families", arguments=FamiliesArguments, run=families,
                        home=("evaluate", EvaluateConfig)),
}
