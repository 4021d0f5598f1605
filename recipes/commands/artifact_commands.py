"""The commands that measure or export an artifact: evaluate, export. They need none of the training extras."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...data import ChatTemplate, Prompt
from ...export import (
    Artifact,
    EvaluateConfig,
    ExportSettings,
    Method,
    TrialSettings,
    busy_warning,
    evaluate,
    export_artifact,
    load_artifact,
    served,
    terminal_table,
    try_export,
    use_free_processors,
    write_report,
)
from ...export.engine_process import require_engine
from ...export.engine_settings import DraftSettings, draft_settings, read_costs
from ...export.evaluation.engine_trial import BATCH_SIZES, chain_length, rounded_artifact, tried_tokens
from ...export.layouts.parts.export_format import ON_CPU, WRONG_SAMPLES, ExportFormat, Places, hub_name
from ...export.layouts.parts.gguf_file import FLOAT32
from ...export.layouts.registry import (
    EVERY_FORMAT,
    EXPORT_FORMATS,
    format_named,
    in_fewer_bits,
    require_number_format,
    target_command,
    writer_of,
)
from ...export.measured_files import described, save_acceptance
from ...export.stored_drafter import read_description
from ...modules import Adapter, Target, TargetConfig, UserError, load_target
from ...modules.files.folders import sole_writer
from ...modules.files.json_records import require_ordinary
from ...modules.target.loading.loading import gguf_of, sketch_target
from ..chat_settings import (
    ARTIFACT_TARGET,
    AskedSets,
    TemplateConfig,
    artifact_target,
    conversations,
    handwritten_prompts,
    named_target,
    own_target,
)
from ..reading.command_line import Command, Parsed
from ..stages.records import STAGES_FILE
from ..terminal import say
from .published import HUB, draft_folder, facts, imported


@dataclass(frozen=True, kw_only=True)
class EvaluateArguments:
    """Arguments of `draftsmith evaluate`."""

    out: Path
    """Folder for evaluation.json, report.md and report.html."""
    artifact: Path | list[Path] = field(default_factory=list)
    """Folder of the artifact or of a checkpoint that `draftsmith import` reads, or hub:OWNER/NAME; a list compares
    several, --artifact [A,hub:B/C]; without one, name a target and baselines."""
    target: TargetConfig = field(default_factory=own_target)
    """The target; the one that the artifact names by default."""
    template: TemplateConfig = field(default_factory=TemplateConfig)
    """Settings of its chat template."""
    references: Path | None = None
    """File of the target's own answers to prompts, read and added to; evaluations that share it generate them once."""
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    """Evaluation: decoded prompts and timing."""
    trust: bool = False
    """Import the class that an artifact names where its family is none of this package's, which runs its code."""


def evaluate_artifacts(parsed: Parsed[EvaluateArguments]) -> None:
    """Decode prompts with artifacts and with the target alone; write JSON, Markdown and HTML."""
    given = parsed.values
    folders = given.artifact if isinstance(given.artifact, list) else [given.artifact]
    if not folders and (given.target.name == ARTIFACT_TARGET or not given.evaluate.baseline_names):
        raise UserError("evaluate needs an artifact, or a target and baselines; give --artifact DIR, or --target.name "
                        "and --baselines")
    if twice := [str(one) for place, one in enumerate(folders) if one.resolve() in map(Path.resolve, folders[:place])]:
        raise UserError(f"artifact names {twice[0]} more than once; name each artifact once")
    if given.out.exists() and not given.out.is_dir():
        raise UserError(f"{given.out} is a file, a folder was expected; choose another --out")
    use_free_processors()
    asked = AskedSets.of(given.evaluate)
    found = [draft_folder(place) for place in folders]
    own = next((folder for folder, published in found if not published), None)
    if folders and own is None and given.target.name == ARTIFACT_TARGET:
        raise UserError(f"{folders[0]} does not name the target that it drafts for; give it with --target.name")
    target = load_target(given.target) if own is None else artifact_target(own, given.target)
    called = [str(place).removeprefix(HUB) if str(place).startswith(HUB) else name
              for place, name in zip(folders, names(folders), strict=True)]
    artifacts = [imported(folder, name or str(folder), target) if published else
                 load_artifact(folder, target, trust=given.trust)
                 for (folder, published), name in zip(found, called, strict=True)]
    if len(artifacts) > 1 and any(artifact.adapter is not None for artifact in artifacts):
        changing = [str(folder) for folder, artifact in zip(folders, artifacts, strict=True) if artifact.adapter]
        raise UserError(f"{', '.join(changing)} changes the target, so that it has no baseline in common with the "
                        "others; evaluate each such artifact by itself")
    compared = [facts(artifact, folder, name or str(folder)) | {"published": published}
                for artifact, (folder, published), name in zip(artifacts, found, called, strict=True)
                if published or len(found) > 1]
    measure(given, target, [] if compared else folders, artifacts, asked, called, compared)


def measure(given: EvaluateArguments, target: Target, folders: Sequence[Path], artifacts: Sequence[Artifact],
            asked: AskedSets, called: Sequence[str | None] = (None,), compared: Sequence[dict[str, Any]] = ()) -> None:
    """Evaluate artifacts next to the target alone; write and show the report, and what was counted of a single one that
    was loaded from a folder. Several have names, and facts that stand next to their figures."""
    each = [Method.each(artifact, given.evaluate, name=name, say=say)
            for artifact, name in zip(artifacts, called, strict=True)]
    methods = [method for found in each for method in found]
    questions, origins = asked.questions(given.template.build(target), given.evaluate, target.context_length,
                                         [artifact.drafter for artifact in artifacts])
    changed = next((artifact.target for artifact in artifacts if artifact.adapter is not None), None)
    # The lock of a run, which writes its report there too. Only now: what is refused before leaves no folder.
    with sole_writer(given.out / STAGES_FILE, wait=False):
        result = evaluate(changed or target, methods, questions, given.evaluate, references=given.references,
                          origins=origins, original=None if changed is None else target, say=say)
        drafts = {method.name: facts for found, facts in zip(each, compared, strict=False) for method in found}
        result = replace(result, header={**result.header, "drafts": drafts})
        written = write_report(given.out, result, artifacts[0] if artifacts else None)
        # Of several artifacts each profile holds its own methods, and only one fits the folder.
        if len(folders) == 1:
            records = [record for one in result.evaluations for record in one.acceptance]
            counted = described(read_description(folders[0]))
            if artifacts[0].shared:
                counted["target"] = target.identity.name
            save_acceptance(given.out, counted, records)
    say(terminal_table(result))
    say(f"{written['html']} shows it with plots")


def names(folders: Sequence[Path]) -> list[str | None]:
    """Distinct names of folders: their paths without a common start and end; None for a single one."""
    if len(folders) < 2:
        return [None] * len(folders)
    paths = [list(folder.parts) for folder in folders]
    for end in (-1, 0):
        while min(map(len, paths)) > 1 and len({path[end] for path in paths}) == 1:
            for path in paths:
                path.pop(end)
    return [str(Path(*path)) for path in paths]


MOST_TRIED = 32  # Most prompts of a user's file that a trial answers


@dataclass(frozen=True, kw_only=True)
class ExportArguments:
    """Arguments of `draftsmith export`."""

    artifact: Path
    """Folder of the artifact."""
    format: str = field(metadata={"choices": EVERY_FORMAT})
    """Name of the layout; target is the artifact's target as a folder that engines load, merged that of an artifact
    that changes its target."""
    out: Path
    """New or empty folder for it."""
    try_with: Path | None = None
    """Interpreter of an environment with vLLM, which then answers prompts with the export and without, 1, 4 and 8 at
    once, in float32 and, with up to three numbers of drafted tokens, in the number format of its own choice: tokens per
    second, seconds to the first token, equal answers, accepted length next to this project's, and what to set."""
    prompts: Path | None = None
    """JSONL file of your own prompts for `try_with` and `measure`, of which up to 32 are taken; null takes ten of the
    hand-written ones."""
    target_gguf: Path | None = None
    """With gguf, the target's GGUF file, from which llama.cpp serves it: its tokenizer is copied; null is the file that
    the target itself is read from."""
    convert_with: Path | None = None
    """With openvino, the interpreter of an environment with optimum-intel, which converts the drafter."""
    weights: str = FLOAT32
    """Number format of the matrices: float32, as they were trained; with gguf also bfloat16 or int8 (llama.cpp's Q8_0);
    with eagle, huggingface and speculators bfloat16, int8 or float8, which vLLM reads."""
    engine_costs: Path | None = None
    """JSON file with your engine's own seconds, by which the printed commands say how many tokens to draft; null takes
    those of this project's loop."""
    measure: bool = False
    """With eagle, gguf, huggingface and speculators, decode ten prompts with the weights as trained and as exported,
    and show what fewer bits cost next to the size."""
    target: TargetConfig = field(default_factory=own_target)
    """The target; the one that the artifact names by default."""
    template: TemplateConfig = field(default_factory=TemplateConfig)
    """Settings of its chat template, for the prompts of `try_with`."""
    trust: bool = False
    """Import the class that the artifact names where its family is none of this package's, which runs its code."""

    def __post_init__(self) -> None:
        chosen = format_named(self.format)
        for one in EXPORT_FORMATS:
            if one.option and getattr(self, one.option) is not None and one.name != self.format:
                raise UserError(f"{one.option} {getattr(self, one.option)} is for the format {one.name} alone; leave "
                                f"it out, or choose --format {one.name}")
        require_number_format(chosen, self.weights)
        if self.prompts is not None and self.try_with is None and not self.measure:
            raise UserError(f"prompts {self.prompts} are for try_with and measure; give one of both, or leave them out")
        if self.measure and not chosen.weights:
            raise UserError(f"measure compares weights of fewer bits, which the format {self.format} does not hold; "
                            f"leave it out, or choose --format {', '.join(in_fewer_bits())}")


def export(parsed: Parsed[ExportArguments]) -> None:
    """Write an artifact in the layout of another project."""
    given = parsed.values
    if given.target_gguf is not None:
        require_ordinary(given.target_gguf)
    for python, engine, module in ((given.try_with, "vLLM", "vllm"),
                                   (given.convert_with, "optimum-intel", "optimum.intel")):
        if python is not None:
            require_engine(python, engine, module)
    prompts = [] if given.prompts is None else conversations(given.prompts)
    costs = None if given.engine_costs is None else read_costs(given.engine_costs)
    named = named_target(given.artifact, given.target)
    chosen, gguf = format_named(given.format), given.target_gguf or gguf_of(named)
    settings = ExportSettings(target_gguf=gguf, convert_with=given.convert_with, weights=given.weights)
    # Whether the format holds it is known by shapes alone, and said before the target's weights are read.
    sketch = load_artifact(given.artifact, sketch_target(named), trust=given.trust)
    if "adapter" in read_description(given.artifact):
        sketch = replace(sketch, adapter=Adapter({}, 1.0))
    if given.try_with is not None:
        served(sketch, given.format)
    writer_of(chosen, sketch, sketch.target, settings)
    target = load_target(named)
    artifact = load_artifact(given.artifact, target, trust=given.trust)
    settings = replace(settings, drafts=draft_settings(artifact, costs))
    folder = export_artifact(artifact, target, given.format, given.out, settings)
    held = "target" if chosen.write_target else "artifact"
    say(f"{folder} holds the {held} in the layout {given.format}; its README.md says more")
    if chosen.write is None or artifact.adapter is None:
        say_commands(given, chosen, artifact, gguf, settings.drafts)
    if warning := chosen.warning(artifact.drafter):
        say(warning)
    asked = trial_prompts(given.template.build(target), prompts) if given.measure or given.try_with else []
    if given.measure:
        size = TrialSettings()
        rounded = rounded_artifact(artifact, lambda weight, linear: chosen.as_read(weight, given.weights, linear))
        trained, exported = (chain_length(one, asked, size) for one in (artifact, rounded))
        say(f"{(folder / chosen.file).stat().st_size:,} bytes; with its weights this project accepts {exported:.3f} "
            f"tokens per pass, with those trained {trained:.3f} (chains of {size.draft_tokens[0]} tokens, "
            f"{len(asked)} prompts, {size.max_new_tokens} tokens each)")
    if given.try_with is not None:
        if busy := busy_warning():
            say(busy)
        numbers = tried_tokens(artifact.drafter, settings.drafts.chain(artifact.drafter))
        trial = try_export(artifact, given.format, folder, given.try_with, asked, TrialSettings(draft_tokens=numbers))
        say("\n".join(filter(None, (f"\n{trial.engine}, {len(asked)} prompts\n\n{trial.table()}", trial.note))))
        say(trial.advice)
        if trial.fault:
            raise UserError(f"{trial.fault}; serve it with another engine or format")


def say_commands(given: ExportArguments, chosen: ExportFormat[Any], artifact: Artifact, gguf: Path | None,
                 drafts: DraftSettings) -> None:
    """Print the commands that serve an export, ready for the current folder."""
    named = None if given.target.name == ARTIFACT_TARGET else given.target.name
    name = named or artifact.identity.name
    there = name if Path(name).is_dir() else hub_name(name)
    # Not the folder of the export itself, which it would replace.
    neighbour = str(given.out.parent / ("target" if given.out.name != "target" else "whole-target"))
    places = Places(folder=str(given.out), target=there or neighbour, gguf=str(gguf or Places.gguf), merged=neighbour,
                    on_hub=there is not None and there == hub_name(name), drafts=drafts).adapted(
                        artifact.target, given.target.adapter or "")
    commands = chosen.commands(artifact.drafter, places)
    if writing := target_command(artifact, commands, places, str(given.artifact), named):
        commands = {"the target as a folder": writing, **commands}
    for engine, command in commands.items():
        say(f"\n{engine}:\n{command}")
        if engine == ON_CPU and chosen.write is not None:
            say(WRONG_SAMPLES)
    if commands and chosen.write is not None:
        for sentence in (*places.said(commands), drafts.said):
            say(f"\n{sentence}")


def trial_prompts(template: ChatTemplate, prompts: Sequence[Prompt] = ()) -> list[list[int]]:
    """The first turns of these prompts, of at most `MOST_TRIED` at equal distances, of fewer than eight repeatedly;
    without any of ten of the hand-written ones, of all categories."""
    most = MOST_TRIED if prompts else 10
    prompts = prompts or handwritten_prompts()
    found = [template.prompt(one.history(), tools=one.tools) for one in prompts[:: -(-len(prompts) // most)]]
    # As many as are answered at once.
    return found * -(-max(BATCH_SIZES) // len(found))


COMMANDS: dict[str, Command[Any]] = {
    "evaluate": Command(name="evaluate", arguments=EvaluateArguments, run=evaluate_artifacts, home="evaluate"),
    "export": Command(name="export", arguments=ExportArguments, run=export),
}
