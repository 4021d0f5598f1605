"""Rows of the comparison of families that draft with acceptance heads: NAME+HEADS is the artifact of the row NAME, with
heads by the recipe HEADS of `draftsmith specdec`. A head is no family: it ends the drafts of one.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ...export.artifact_files import CHANGING, CONFIG, HEAD, HEADS
from ...export.stored_drafter import read_description
from ...modules import TargetConfig, UserError
from ...modules.files.atomic_files import file_sha256, write_file
from ...modules.files.json_records import read_object
from ...modules.files.owned_folders import MARKER, whole_folder
from ..reading.parsing import Parsed
from ..reading.recipe_files import recipe_path
from ..stages.records import Stage
from ..stages.training_folder import RESULT_FILE
from .acceptance_head import COMMANDS, SpecdecArguments, specdec

PLUS = "+"
"""Sign between the row whose artifact is taken and the recipe of the heads."""


def head_settings(row: str, out: Path, shared: Parsed[Any], target: TargetConfig) -> Parsed[SpecdecArguments]:
    """Arguments of `draftsmith specdec` for a row: its recipe, for the answers that the comparison measures.

    Args:
        row: NAME+HEADS.
        out: folder of the row; the data lies next to it.
        shared: arguments of the comparison.
        target: its target.
    """
    asked = shared.settings["evaluate"]
    degrees = asked["temperatures"] if isinstance(asked["temperatures"], list) else [asked["temperatures"]]
    words = ["--config", recipe_path(row.partition(PLUS)[2]), "--artifact", str(out / "artifact"),
             "--data", str(out.parent / "data"), "--labels.temperatures", json.dumps(degrees)]
    found: Parsed[SpecdecArguments] = COMMANDS["specdec"].parse(words)
    return Parsed(values=replace(found.values, target=target),
                  settings={**found.settings, "target": shared.settings["target"]})


def head_stage(source: Path, out: Path, settings: Parsed[SpecdecArguments]) -> Stage:
    """The stage that copies a row's artifact and trains heads for it."""
    return Stage(name="heads", title="acceptance heads are trained", work=partial(_train, source, out, settings),
                 sections=("target", "labels", "head", "fit", "rule"))


def source_of(row: str, out: Path) -> tuple[Path, str]:
    """The folder of the row whose artifact is taken, and the hash of that artifact.

    Raises:
        UserError: if that row is not trained yet.
    """
    name = row.partition(PLUS)[0]
    artifact = out / name / "artifact"
    if not (artifact / CONFIG).is_file():
        raise UserError(f"the row {row} takes the artifact of the row {name}, which {out} does not hold yet; run "
                        f"draftsmith families with --only {name} first, or with all rows")
    return out / name, file_sha256(artifact / CONFIG)


def _train(source: Path, out: Path, settings: Parsed[SpecdecArguments]) -> Sequence[Path]:
    """Copy the artifact without any heads, train its own, and note the trained parameters of both."""
    artifact = source / "artifact"
    read_description(artifact)
    with whole_folder(out / "artifact", "artifact", changing=CHANGING, inside=HEAD) as partial_folder:
        for file in artifact.iterdir():
            if file.is_file() and file.name != MARKER:
                shutil.copyfile(file, partial_folder / file.name)
    specdec(settings)
    configs = sorted((out / "artifact" / HEADS).glob(f"*/{CONFIG}"))
    former = source / "train" / RESULT_FILE
    trained = int(read_object(former, f"delete {former.parent} and train that row again")["parameters"])
    for config in configs:
        shape = read_object(config, "train the head again")["head"]
        # Blocks of width * (width + 1), of which tied ones are one, and two output rows.
        blocks = 1 if shape["tie_blocks"] else shape["num_layers"]
        trained += int((blocks * shape["width"] + 2) * (shape["width"] + 1))
    result = write_file(out / "train" / RESULT_FILE, json.dumps({"parameters": trained}) + "\n")
    return [out / "artifact" / CONFIG, *configs, result]
