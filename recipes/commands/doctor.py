"""The command doctor: why a draft is accepted less than it could be."""

import json
import os
import sys
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ...data import Manifest
from ...data.store.token_store import MANIFEST
from ...export import load_artifact, read_description
from ...export.artifact_files import CONFIG
from ...export.page import as_html
from ...modules import Target, TargetConfig, TargetIdentity, UserError, load_target
from ...modules.config_checks import CheckedSettings
from ...modules.decoding.token_text import visible
from ...modules.files.atomic_files import write_file
from ...modules.target.loading.identity import SHAPE
from ...modules.target.loading.loading import sketch_target
from ...modules.verification.sampling import Temperature
from ..chat_settings import TemplateConfig, handwritten_prompts, named_target
from ..doctor.case import Case, DataSample, Finding, unchecked
from ..doctor.diagnosis import diagnose, lines
from ..doctor.page import page
from ..reading.parsing import Command, Parsed
from ..terminal.draft_colours import RESET, marks_for
from ..terminal.terminal_text import say, stage_line
from .artifact_commands import own_target


@dataclass(frozen=True, kw_only=True)
class DoctorArguments(CheckedSettings):
    """Arguments of `draftsmith doctor`."""

    artifact: Path
    """Folder of the artifact, or of the run that made it."""
    data: Path | None = None
    """Folder of the data that it was trained on; null takes the run's, if they are there."""
    target: TargetConfig = field(default_factory=own_target)
    """The target as it is served; the one that the artifact names by default."""
    template: TemplateConfig = field(default_factory=TemplateConfig)
    """Settings of its chat template as it is served."""
    temperature: Temperature = 0.0
    """Temperature at which the draft is used; 0 is greedy."""
    out: Path | None = None
    """Folder for doctor.html, a page in the style of the report, and doctor.json; null writes none."""
    json: bool = False
    """Print the findings as JSON."""
    trust: bool = False
    """Import the class that an artifact names where its family is none of this package's, which runs its code."""


def doctor(parsed: Parsed[DoctorArguments]) -> None:
    """Check an artifact, its data and its target for whatever lowers acceptance: each check has a figure, a verdict and
    a remedy that names the recipe's key."""
    given = parsed.values
    if given.out is not None and given.out.exists() and not given.out.is_dir():
        raise UserError(f"{given.out} is a file, a folder was expected; choose another --out")
    inside = given.artifact / "artifact"
    folder = inside if not (given.artifact / CONFIG).is_file() and (inside / CONFIG).is_file() else given.artifact
    named = named_target(folder, given.target)
    # By shapes alone, before any weight is read.
    TargetIdentity.from_dict(read_description(folder)["target"]).require_same(
        sketch_target(named).identity, ("architecture", *SHAPE), "give --target.name the target that it was made for, "
        "or another version of it")
    target = load_target(named)
    artifact = load_artifact(folder, target, trust=given.trust, retarget=True)
    data, no_data = read_data(given.data, folder, target)
    case = Case(artifact=artifact, target=target, template=given.template.build(target), data=data,
                no_data=no_data, temperature=given.temperature)
    tell = partial(stage_line, file=sys.stderr)
    tell("the checks start; on a processor they take minutes")
    found = diagnose(case, [case.template.prompt(one.history()) for one in handwritten_prompts()],
                     folder.parent / "evaluation.json", tell)
    text = json.dumps({"headline": found.headline, "findings": [asdict(one) for one in found.findings],
                       "acceptance_by_position": found.curves,
                       "sample": [{"text": text, "supervised": learned} for text, learned in found.sample]},
                      indent=2, ensure_ascii=False)
    if given.out is not None:
        title = f"{artifact.drafter.family.capitalize()} drafts for {target.identity.name}: doctor"
        write_file(given.out / "doctor.json", f"{text}\n")
        write_file(given.out / "doctor.html", as_html(page(found, title)))
    if given.json:
        say(text)
        return
    say("\n".join(lines(found.findings)))
    if found.sample:
        before, after = marks_for(sys.stdout.isatty(), os.environ).guessed
        said = "green" if after == RESET else "[ ]"
        say(f"\nThe first training row, its labels {'in ' * (after == RESET)}{said}:\n")
        # Each piece is made printable by itself, since colours are control characters too.
        print("".join(f"{before}{visible(text)}{after}" if learned and text else visible(text)
                      for text, learned in found.sample) + "\n", flush=True)
    say(found.headline)
    if given.out is not None:
        say(f"{given.out / 'doctor.html'} shows it with plots")


def read_data(given: Path | None, artifact: Path, target: Target) -> tuple[DataSample | None, Finding | None]:
    """(rows of an artifact's data, a finding on the data where none can be read). Raises UserError if the folder is
    named and holds none, or they are damaged."""
    folder = given or artifact.parent / "data"
    if given is None and not (folder / MANIFEST).is_file():
        return None, unchecked("data", f"{folder} holds no data; name their folder with --data")
    manifest = Manifest.load(folder)
    written, here = manifest.target, target.identity
    if (written.vocab_size, written.tokens_hash or here.tokens_hash) != (here.vocab_size, here.tokens_hash):
        return None, Finding(name="data", figure=f"{folder} holds answers of {written.name}", verdict="its tokens are "
                             f"others than those of {here.name}: none of their rows can be read", remedy="name the "
                             "folder of the draft's own data with --data, or, if these are its data, distil with the "
                             "target.name that is served and train again")
    if not manifest.total("train", "rows"):
        return None, unchecked("data", f"{folder} holds no training row; finish it with draftsmith distill")
    return DataSample.read(folder, manifest), None


COMMANDS: dict[str, Command[Any]] = {"doctor": Command(name="doctor", arguments=DoctorArguments, run=doctor), }
