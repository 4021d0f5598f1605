"""The command doctor: why a draft is accepted less than it could be. All checks of a case, in order, and their findings
as text, JSON and a page in the style of the report."""

import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from ...data import Manifest
from ...data.store.token_store import MANIFEST
from ...export import load_artifact, read_description
from ...export.page import Block, Figure, Heading, Passage, Table, Text, as_html
from ...export.report import plots
from ...export.stored_drafter import CONFIG, drafter_class
from ...modules import Target, TargetConfig, TargetIdentity, UserError, load_target
from ...modules.config_checks import CheckedSettings
from ...modules.decoding.requests import visible
from ...modules.files.atomic_files import write_file
from ...modules.target.loading.loading import sketch_target
from ...modules.target.loading.model_parts import SHAPE
from ...modules.tuning.tree_search import acceptance_of
from ...modules.verification.sampling import Temperature
from ..chat_settings import TemplateConfig, handwritten_prompts, named_target, own_target
from ..doctor.case import Case, DataSample, Finding, findings_of, unchecked
from ..doctor.draft_checks import DRAFT_CHECKS, GAIN_CHECKS, Gains, accepted, read_gains, read_texts
from ..doctor.target_checks import TARGET_CHECKS
from ..doctor.text_checks import TEXT_CHECKS, rendered
from ..reading.command_line import Command, Parsed
from ..terminal import say, stage_line
from .answer_commands import RESET, marks_for

# Checks of what a draft reaches: wrong data, another target or wrong states lower that too.
CONSEQUENCES = ("draft as it was trained", "context lengths", "training against held-out", "ceiling", "time of a pass")


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
    config = read_description(folder)
    free = drafter_class(config, trust=given.trust).serves_all(config["drafter"])
    TargetIdentity.from_dict(config["target"]).require_same(
        sketch_target(named).identity, ("vocab_size",) if free else ("architecture", *SHAPE),
        "give --target.name the target that it was made for, or another version of it")
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
    """(rows of an artifact's data, a finding on the data where none can be read)."""
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


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The outcome of all checks."""

    findings: tuple[Finding, ...]  # One for each check
    sample: tuple[tuple[str, bool], ...]  # The first training row as pieces of text, each with its mask: True: labels
    curves: dict[str, tuple[float, ...]]  # Decoded and by training: share of passes with at least 1, 2 ... guesses
    gains: Gains  # Timing and training

    @property
    def faults(self) -> list[Finding]:
        """Those that something is to be done about, causes first."""
        return sorted((one for one in self.findings if one.remedy), key=lambda one: bool(one.follows))

    @property
    def headline(self) -> str:
        """The outcome in a sentence."""
        checked = sum(bool(one.figure) for one in self.findings)
        names = ", ".join(one.name for one in self.faults)
        return (f"{len(self.faults)} of {checked} checks found something: {names}" if self.faults else
                f"none of {checked} checks found anything wrong")


def diagnose(case: Case, prompts: Sequence[Sequence[int]], report: Path,
             tell: Callable[[str], None] = lambda said: None) -> Diagnosis:
    """Run every check that the case allows; what it does not allow says why. The prompts, tokens up to the answer, are
    answered; the report, evaluation.json of its run, need not be there; `tell` takes a line on each check, and on what
    takes long. Raises UserError if a file of the data is corrupted."""
    findings = [case.no_data] if case.no_data else []

    def make(checks: Sequence[Callable[..., Finding | Iterable[Finding]]], *given: Any) -> None:
        for one in findings_of(checks, *given):
            findings.append(one)
            tell(f"checked: {one.name}")

    if case.data is not None:
        make((*TEXT_CHECKS, *TARGET_CHECKS), case, case.data)
    tell(f"answering {len(prompts)} prompts with the draft")
    texts, gains = read_texts(case, prompts), read_gains(case, report)
    make(DRAFT_CHECKS, case, texts)
    make(GAIN_CHECKS, case, texts, gains)
    causes = ", ".join(one.name for one in findings if one.remedy and one.name not in CONSEQUENCES)
    findings = [replace(one, follows=causes) if one.remedy and one.name in CONSEQUENCES else one for one in findings]
    curves = {"decoded": acceptance_of(texts.emitted, texts.topology.depth).by_position,
              "training forward": accepted(case, texts.decoded, texts.topology).by_position}
    return Diagnosis(findings=tuple(findings), sample=tuple(rendered(case, case.data)) if case.data else (),
                     curves=curves, gains=gains)


def lines(findings: Sequence[Finding]) -> list[str]:
    """Text for terminals: what is wrong first, each with its remedy, then what is not."""
    found = list[str]()
    for one in sorted(findings, key=lambda one: (not one.remedy, bool(one.follows), not one.figure)):
        mark = "✗" if one.remedy else "✓" if one.figure else "–"
        said = "; ".join(part for part in (one.figure, one.verdict) if part)
        found.append(f"{mark} {one.name}: {said}")
        if one.follows:
            found.append(f"    perhaps a consequence of {one.follows}: put that right first")
        if one.remedy:
            found.append(f"    → {one.remedy}")
    return found


def page(found: Diagnosis, title: str) -> list[Block]:
    """The whole page; the title names the draft and its target."""
    gains = found.gains
    drawn = [Figure(partial(plots.acceptance_by_position, found.curves), "Share of passes that accepted at least so "
                    "many guesses in a row, decoded and by the training forward on the same answers: one line if "
                    "equal."),
             Figure(partial(plots.cost_curve, gains.cost, gains.size, {}),
                    f"Time of a pass and of drafting by the nodes of the tree; {gains.size} are in use.")]
    if (training := gains.training) is not None:
        drawn.append(Figure(partial(plots.training_lengths, training.curve, training.best_step), training.outcome))
    shown: list[Block] = [Heading(title, 1), Text(f"{found.headline.capitalize()}.", "headline")]
    for one in found.faults:
        cause = f" Perhaps a consequence of {one.follows}: put that right first." if one.follows else ""
        # A verdict may be sentences of the report.
        shown.append(Text(f"{one.figure}.{cause}", "warn", f"{f'{one.name.capitalize()}: {one.verdict}'.rstrip('.')}.",
                          (f"Remedy: {one.remedy}.",)))
    shown += [Heading("Acceptance and time"), *drawn]
    for heading, measured in (("Nothing wrong", True), ("Not checked", False)):
        rows = [(one.name, one.figure, one.verdict) for one in found.findings
                if not one.remedy and bool(one.figure) is measured]
        shown += [Heading(heading), Table(("", "measured", "verdict"), rows, "words")] if rows else []
    if found.sample:
        pieces = [(visible(text), "guess" if learned else "", "") for text, learned in found.sample]
        shown += [Heading("The first training row"), Passage(pieces, note="Labels are marked.")]
    return shown


COMMANDS: dict[str, Command[Any]] = {"doctor": Command(name="doctor", arguments=DoctorArguments, run=doctor)}
