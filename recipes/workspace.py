"""The folder of a run: which stages are complete, and what they share while they work."""

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..data import ChatTemplate, Manifest
from ..data.datamodule import count_tokens
from ..modules import Target, Topology, UserError, load_target, policy_named
from ..modules.atomic_files import write_file
from ..modules.target.hf_folder import folder_digest
from ..modules.target.loading import sketch_target
from ..trainers import DraftModule
from .recipe import Recipe

STAGES_FILE = "stages.json"


class Workspace:
    """A run's folder and recipe. The target is loaded when a stage first asks for it."""

    def __init__(self, recipe: Recipe, settings: dict[str, Any]) -> None:
        self.recipe, self.settings, self.out = recipe, settings, recipe.out
        self.data = recipe.data or self.out / "data"
        self.training, self.artifact = self.out / "train", self.out / "artifact"

    @cached_property
    def target(self) -> Target:
        """The target of the recipe."""
        print(f"     loading the target {self.recipe.target.name}", flush=True)
        return load_target(self.recipe.target)

    @cached_property
    def template(self) -> ChatTemplate:
        """Its chat template with the recipe's settings."""
        return self.recipe.template.build(self.target)

    @cached_property
    def token_counts(self) -> Tensor:
        """How often each token of the vocabulary is a label in the data, [V]."""
        return count_tokens(self.data)

    @cached_property
    def decisive(self) -> dict[str, Any]:
        """The settings that decide what stages leave.

        A limit of the batches that is not set decides nothing. Where a draft begins with the model in a folder, that
        model decides: another one may have been put there since.
        """
        found, folder = {**self.settings}, beginning(self.settings)
        if "batch" in found:
            found["batch"] = {name: value for name, value in found["batch"].items() if value is not None}
        if folder is not None:
            found["model"] = {**found["model"], "model_in_folder": folder_digest(folder)}
        return found

    def manifest(self) -> Manifest:
        """The manifest of finished data.

        Raises:
            UserError: if distillation has not been run to its end.
        """
        if self.recipe.data is not None and not self.recipe.data.is_dir():
            raise UserError(f"data names {self.recipe.data}, which is no folder; give the data folder of a finished "
                            "run, or leave it out to distil")
        if not (self.data / "manifest.json").is_file() or not (manifest := Manifest.load(self.data)).complete:
            raise UserError(f"{self.data} holds no complete data; run draftsmith distill with this recipe first")
        return manifest

    def borrowed(self) -> str:
        """What stands for data that another run distilled: it, and what it is read with.

        Raises:
            UserError: if the data is not complete.
        """
        read_with = [self.settings[name] for name in ("target", "template")]
        return json.dumps([self.manifest().hash, *read_with], sort_keys=True)

    def require_same_source(self) -> None:
        """Refuse data of another target or another chat template. Raises UserError."""
        manifest = self.manifest()
        manifest.target.require_same(self.target.identity)
        if manifest.template_hash != self.template.hash:
            raise UserError(f"the data in {self.data} was rendered with another chat template or other settings of it; "
                            "set template as the run that distilled it did, or leave data out to distil anew")

    def rehearse(self) -> None:
        """Build the module beside the target's shape alone: what does not fit is told before hours of work.

        Raises:
            UserError: as `sketched` does.
        """
        sketched(self.recipe, sketch_target(self.recipe.target))

    def module(self) -> DraftModule:
        """A fresh LightningModule of the recipe's family, its drafter not built yet."""
        family: Callable[..., DraftModule] = self.recipe.model
        return family(self.target, token_counts=self.token_counts)


def beginning(settings: dict[str, Any]) -> Path | None:
    """The folder whose model the recipe's draft begins with; None where it begins otherwise, or nothing is trained."""
    given = settings.get("model")
    for name in ("init_args", "config", "drafter", "folder"):
        given = given.get(name) if isinstance(given, dict) else None
    return None if given is None else Path(given)


def sketched(recipe: Recipe, target: Target) -> DraftModule:
    """The recipe's module with its drafter, beside the sketch of a target (`sketch_target`): shapes without values.

    Raises:
        UserError: if the family or its settings do not fit the target, rows or the tree have no room for its guesses,
            a policy asks for more than the family answers, or states are to be stored that training changes.
    """
    family: Callable[..., DraftModule] = recipe.model
    module = family(target, token_counts=torch.ones(target.vocab_size))
    module.configure_model()
    if module.changes_target and recipe.batch.source != "tokens":
        raise UserError(f"batch.source is {recipe.batch.source!r}, but {type(module).__name__} trains the target, "
                        "whose states change with every step; set batch.source: tokens")
    steps, length = module.drafter.trained_steps, recipe.batch.row_length
    if length < steps + 2:
        raise UserError(f"{steps} draft steps need rows of at least {steps + 2} tokens, but batch.row_length is "
                        f"{length}; raise it, or train fewer steps")
    reach, nodes = module.drafter.reach, recipe.tree.max_nodes
    if reach is not None and reach >= nodes:
        raise UserError(f"a tree of tree.max_nodes {nodes} is at most {nodes - 1} tokens deep, but this drafter "
                        f"guesses {reach}; raise tree.max_nodes to at least {reach + 1}, or guess fewer tokens")
    widest = Topology.from_paths([(), *((rank,) for rank in range(nodes - 1))])
    for name in recipe.evaluate.policies:
        policy_named(name, widest, module.drafter)
    return module


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A step of a run whose output is kept."""

    name: str
    """Its name in the list of finished stages."""
    title: str
    """What it does, for people."""
    sections: tuple[str, ...]
    """Recipe sections that decide its output, besides the stages before it."""
    work: Callable[[Workspace], Sequence[Path]]
    """Does it, resuming what it finds half done; returns the files that stand for its whole output."""


def run_stages(workspace: Workspace, stages: Sequence[Stage], chosen: Sequence[str], before: str = "") -> None:
    """Run the chosen stages in order, passing over those whose output is complete.

    A stage is complete when it ended with the same recipe sections after the same earlier stages and its files are
    still the ones that it wrote.

    Args:
        before: what stands for anything that was done elsewhere before the first stage.
    """
    finished = read_finished(workspace.out)
    for number, stage in enumerate(stages, 1):
        key = stage_key(stage, workspace.decisive, before)
        label = f"[{number}/{len(stages)}] {stage.title}"
        record = finished.get(stage.name)
        if record is None or record["key"] != key or not intact(workspace.out, record["files"]):
            if stage.name in chosen:
                record = perform(stage, workspace, label, key)
                finished = {**finished, stage.name: record}
                content = json.dumps(finished, indent=2, sort_keys=True) + "\n"
                write_file(workspace.out / STAGES_FILE, content)
        elif stage.name in chosen:
            print(f"{label}: already complete, skipped", flush=True)
        before = json.dumps(record["files"], sort_keys=True) if record else ""


def perform(stage: Stage, workspace: Workspace, label: str, key: str) -> dict[str, Any]:
    """Do a stage and return what is recorded about it."""
    print(label, flush=True)
    began = time.monotonic()
    files = {os.path.relpath(file, workspace.out): sha256(file) for file in stage.work(workspace)}
    print(f"     done in {time.monotonic() - began:.0f} s", flush=True)
    return {"key": key, "files": files}


def stage_key(stage: Stage, settings: dict[str, Any], before: str) -> str:
    """Hash of what decides a stage's output."""
    sections = {section: settings[section] for section in stage.sections}
    return hashlib.sha256(json.dumps([stage.name, sections, before], sort_keys=True).encode()).hexdigest()


def read_finished(out: Path) -> dict[str, Any]:
    """Finished stages by name; none when the run is new.

    Raises:
        UserError: if the file is damaged.
    """
    file = out / STAGES_FILE
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{file} is damaged ({error}); delete it, finished work is found again") from error
    if not isinstance(content, dict):
        raise UserError(f"{file} is damaged (no JSON object); delete it, finished work is found again")
    return content


def intact(out: Path, files: dict[str, str]) -> bool:
    """Whether all recorded files are there with the recorded content."""
    return all((out / name).is_file() and sha256(out / name) == digest for name, digest in files.items())


def sha256(file: Path) -> str:
    """Hex digest of a file's bytes."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
