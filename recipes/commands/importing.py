"""The command `draftsmith import`: an artifact of a published checkpoint."""

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...export import ImportSettings, import_drafter, load_artifact, save_artifact
from ...export.artifact_files import ACCEPTANCE
from ...export.layouts.registry import EXPORT_FORMATS, IMPORTED, format_named
from ...modules import Drafter, StaticTree, TargetConfig, Topology, UserError, load_target
from ...modules.policies.registry import MOST
from ...modules.target.loading.hf_folder import own_folder
from ..chat_settings import ARTIFACT_TARGET, TemplateConfig, handwritten_prompts
from ..reading.parsing import Command, Parsed
from ..terminal.terminal_text import say
from .artifact_commands import EvaluateArguments, measure, own_target

TREE = ("give --tree N for a chain of N tokens, as engines draft (3 is usual), or the rank paths of its nodes as the "
        "official code of Medusa and EAGLE lists them, such as --tree '[[0],[1],[0,0]]'")
"""Remedy for a draft tree that is missing or none."""


@dataclass(frozen=True, kw_only=True)
class ImportFolders:
    """Folders of `draftsmith import`, and the target."""

    folder: Path | None = None
    """Folder of the checkpoint: its weights in safetensors files, and its configuration; with mtp the target's own by
    default."""
    format: str = field(metadata={"choices": IMPORTED})
    """Name of its layout."""
    out: Path
    """New or empty folder for the artifact."""
    target: TargetConfig = field(default_factory=own_target)
    """The target that the checkpoint was trained for, to be named."""


@dataclass(frozen=True, kw_only=True)
class ImportArguments(ImportSettings, ImportFolders):
    """Arguments of `draftsmith import`."""

    tree: int | tuple[tuple[int, ...], ...] | None = None
    """Draft tree, which no checkpoint holds: N for a chain of N tokens, or the rank paths of its nodes, each after the
    one that it extends: '[[0],[1],[0,0]]'. --policy drafts with others."""
    evaluate: bool = False
    """Measure the artifact as draftsmith evaluate does with its defaults, in the folder OUT-evaluation."""
    template: TemplateConfig = field(default_factory=TemplateConfig)
    """Settings of the target's chat template, for the prompts that are measured."""

    def __post_init__(self) -> None:
        chosen = format_named(self.format, IMPORTED)
        if self.folder is None and not chosen.in_target:
            raise UserError(f"import needs the folder of the checkpoint in the format {self.format}; give it with "
                            "--folder")
        for name in ImportSettings.__dataclass_fields__:
            value, takers = getattr(self, name), [one.name for one in EXPORT_FORMATS if name in one.opens]
            if value is not None and name not in chosen.opens:
                raise UserError(f"{name} {json.dumps(value)} is for the formats {' and '.join(takers)} alone; leave "
                                "it out")
        if self.target.name == ARTIFACT_TARGET:
            raise UserError(f"import needs the model that {self.folder or 'the head'} was trained for; give it with "
                            "--target.name")
        if self.tree is None:
            raise UserError(f"no checkpoint says with which tree it drafts; {TREE}")

    def topology(self, drafter: Drafter[Any]) -> Topology:
        """The draft tree of an imported drafter. Raises UserError for none, or one that is too deep for it."""
        count = self.tree if isinstance(self.tree, int) else len(self.tree or ())
        if not 1 <= count < MOST:
            raise UserError(f"tree must have 1 to {MOST - 1} nodes below its root, got {count}; {TREE}")
        paths = self.tree if isinstance(self.tree, tuple) else tuple((0,) * (depth + 1) for depth in range(count))
        try:
            found = Topology.from_paths(paths)
        except ValueError as error:
            raise UserError(f"tree is none: {error}; {TREE}") from error
        StaticTree(found).check(drafter)
        return found


def import_checkpoint(parsed: Parsed[ImportArguments]) -> None:
    """Make an artifact of a published checkpoint."""
    given, chosen = parsed.values, format_named(parsed.values.format)
    # Before a large target is loaded: a file that is missing or a pickle is refused at once.
    loaded, folder = None, given.folder
    if folder is None:
        # Which folder is a target's own is known when it is loaded.
        loaded = load_target(given.target)
        folder = own_folder(loaded)
    checkpoint = chosen.checkpoint(folder)
    known = {name: getattr(given, name) for name in chosen.opens if getattr(given, name) is not None}
    target = loaded or load_target(given.target)
    drafter = import_drafter(given.format, checkpoint, target, given)
    origin = {"imported": {**checkpoint.origin(given.format), **known}}
    save_artifact(given.out, drafter, target.identity, origin, given.topology(drafter))
    say(f"{given.out} holds the {drafter.family} drafter of {folder}; draftsmith generate, chat, evaluate and export "
        "take it like a trained one")
    if given.evaluate:
        report = given.out.with_name(f"{given.out.name}-evaluation")
        measure(EvaluateArguments(out=report, template=given.template), target,
                [given.out], [load_artifact(given.out, target)], {"handwritten": handwritten_prompts()})
        # The measured profile is the artifact's own.
        shutil.copyfile(report / ACCEPTANCE, given.out / ACCEPTANCE)


COMMANDS: dict[str, Command[Any]] = {
    "import": Command(name="import", arguments=ImportArguments, run=import_checkpoint),
}
