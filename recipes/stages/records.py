"""Stages of a run and the record of the finished ones: a stage whose output is complete is not done again."""

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ...modules import UserError
from ...modules.files.atomic_files import file_sha256, files_digest, write_file
from ...modules.files.folders import remove_leftovers
from ...modules.files.json_records import read_record
from ...modules.processes import ALONE, Processes
from ..reading.recipe_files import flat
from ..terminal import say

STAGES_FILE = "stages.json"


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A step of a run whose output is kept."""

    name: str  # Its name in the list of finished stages
    title: str  # Its progress line
    sections: tuple[str, ...]  # Recipe sections that decide its output, besides the stages before it
    work: Callable[[], Sequence[Path]]
    """Does it, resuming what an interrupted run left; returns the files that stand for its whole output."""
    reads: Mapping[str, Sequence[Path]] = field(default_factory=dict)
    """Files and folders that it reads besides what stages left, by the settings that name them."""
    together: bool = False
    """Whether several processes do it together: the first one returns from it, the others end there."""


@dataclass(frozen=True, kw_only=True)
class StageRecord:
    """A finished stage as stages.json keeps it."""

    inputs: dict[str, str]  # Everything that decided its output: settings, hashes of what it read, the stages before it
    files: dict[str, str]  # Hash of each file that it wrote, by path from the run's folder


def run_stages(
    out: Path, settings: Mapping[str, Any], stages: Sequence[Stage], chosen: Sequence[str], before: str = "",
    processes: Processes = ALONE, shared: Path | None = None,
) -> None:
    """Run the chosen ones of a run's stages in order, skipping those whose output is complete.

    A stage is complete when it ended with the same recipe sections (`settings`) after the same earlier stages, and
    `before` them the same was done elsewhere, what it read has not changed since, and its files are still the ones that
    it wrote. Else it is done again: what cannot be made from other files without a loss is refused by the stage itself.
    What a killed process left half-written is removed first, but for `shared`, a folder in which others may be writing.
    Each of several `processes` calls this; only the last chosen stage may be one for several."""
    if not processes.rank:
        remove_leftovers(out, shared, out / STAGES_FILE)
    finished, file = dict[str, StageRecord](), out / STAGES_FILE
    if file.is_file():
        finished = read_record(dict[str, StageRecord], file, "delete it, finished work is found again")
    for number, stage in enumerate(stages, 1):
        # Everything that decides the output: a run with another recipe finds a stage open of which these differ.
        inputs = {key: json.dumps(value) for key, value in flat({name: settings[name] for name in stage.sections})
                  if not isinstance(value, Mapping)}
        inputs |= {f"the content of {name}": json.dumps([files_digest(path, ("**/*",), whole=False) for path in paths])
                   for name, paths in stage.reads.items()}
        inputs["what was done before"] = hashlib.sha256(before.encode()).hexdigest()
        label = f"[{number}/{len(stages)}] {stage.title}"
        record = finished.get(stage.name)
        former = inputs if record is None else record.inputs
        others = sorted(name for name in {*inputs, *former} if inputs.get(name) != former.get(name))
        changed = None
        if record is not None and not others:
            changed = [name for name, digest in record.files.items()
                       if not (out / name).is_file() or file_sha256(out / name) != digest]
        if stage.name not in chosen:
            if changed and any(later.name in chosen for later in stages[number:]):
                raise UserError(f"{out / changed[0]} is missing or not what was written ({stage.title}); put it back, "
                                f"or delete {(out / changed[0]).parent} and start draftsmith run with this recipe")
        elif changed == []:
            say(f"{label}: already complete, skipped")
        else:
            if processes.world > 1 and not stage.together:
                # Each of them would do the whole work and write the same files.
                raise UserError(f"before {processes.world} processes can train, one must have finished the stage "
                                f"{stage.name!r} ({stage.title}); run draftsmith distill with this recipe without "
                                "torchrun, a large target with --target.placement layers")
            if others:
                label += f", again: {', '.join(others[:3])}{' and others' * (len(others) > 3)} changed since"
            record = perform(stage, out, label, inputs)
            # After each stage: a run that is killed in the next one has lost nothing of this one.
            finished[stage.name] = record
            kept = {name: asdict(one) for name, one in finished.items()}
            write_file(file, json.dumps(kept, indent=2, sort_keys=True) + "\n")
        before = json.dumps(record.files, sort_keys=True) if record else ""


def perform(stage: Stage, out: Path, label: str, inputs: dict[str, str]) -> StageRecord:
    """Do a stage and return its record."""
    say(label)
    started = time.monotonic()
    files = {os.path.relpath(file, out): file_sha256(file) for file in stage.work()}
    say(f"     done in {time.monotonic() - started:.0f} s")
    return StageRecord(inputs=inputs, files=files)
