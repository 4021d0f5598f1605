"""The commands import and push: a published checkpoint becomes an artifact, and an artifact or an exported folder a
model on the Hugging Face Hub."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...export import ImportSettings, import_drafter, load_artifact, save_artifact
from ...export.layouts.parts.checkpoint import EXPORT, ORIGIN, Checkpoint
from ...export.layouts.registry import EXPORT_FORMATS, IMPORTED, format_named
from ...export.measured_files import described, read_acceptance
from ...export.model_card import hub_card
from ...export.stored_drafter import ACCEPTANCE, CARD, CHANGING, CONFIG, TUNING, read_description
from ...modules import Drafter, StaticTree, TargetConfig, Topology, UserError, load_target
from ...modules.files.folders import MARKER, own_files
from ...modules.files.json_records import read_object
from ...modules.policies.registry import MOST
from ...modules.target.loading.hf_folder import own_folder
from ..chat_settings import ARTIFACT_TARGET, AskedSets, TemplateConfig, own_target
from ..reading.command_line import Command, Parsed
from ..terminal import say
from .artifact_commands import EvaluateArguments, measure

if TYPE_CHECKING:
    from huggingface_hub import HfApi

# Remedy for a draft tree that is missing or none.
TREE = ("give --tree N for a chain of N tokens, as engines draft (3 is usual), or the rank paths of its nodes as the "
        "official code of Medusa and EAGLE lists them, such as --tree '[[0],[1],[0,0]]'")
KEPT_BACK = (MARKER, TUNING)  # Files that are true on this machine alone


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
    checkpoint = Checkpoint(folder, chosen.file, chosen.config_file, bare=chosen.bare)
    known = {name: getattr(given, name) for name in chosen.opens if getattr(given, name) is not None}
    target = loaded or load_target(given.target)
    drafter = import_drafter(given.format, checkpoint, target, given)
    origin = {"imported": {**checkpoint.origin(given.format), **known}}
    save_artifact(given.out, drafter, target.identity, origin, given.topology(drafter))
    say(f"{given.out} holds the {drafter.family} drafter of {folder}; draftsmith generate, chat, evaluate and export "
        "take it like a trained one")
    if given.evaluate:
        report = given.out.with_name(f"{given.out.name}-evaluation")
        arguments = EvaluateArguments(out=report, template=given.template)
        measure(arguments, target, [given.out], [load_artifact(given.out, target)], AskedSets.of(arguments.evaluate))
        # The measured profile is the artifact's own.
        shutil.copyfile(report / ACCEPTANCE, given.out / ACCEPTANCE)


@dataclass(frozen=True, kw_only=True)
class PushArguments:
    """Arguments of `draftsmith push`."""

    folder: Path
    """Folder of an artifact, or one that `draftsmith export` wrote."""
    repository: str
    """Name of the model on the Hub, OWNER/NAME; it is made if it is not there."""
    licence: str
    """Licence of the target, by the Hub's name of it, such as apache-2.0: it binds what is learnt from the target."""
    artifact: Path | None = None
    """With an exported folder, the artifact that was exported, for the card."""
    base_model: str | None = None
    """Name of the target on the Hub, OWNER/NAME, for the card of a target in a folder; null takes the artifact's."""
    evaluation: Path | None = None
    """evaluation.json of the artifact, for the accepted lengths by kind of prompt in the card."""
    private: bool = True
    """Make the model private if it is not there yet."""
    dry_run: bool = True
    """Show what would be uploaded, and upload nothing; --dry_run false uploads."""

    def __post_init__(self) -> None:
        require_hub_name("repository", self.repository)
        if self.base_model is not None:
            require_hub_name("base_model", self.base_model)
        # Which names the Hub knows, it says itself before anything is uploaded.
        if self.licence.split() != [self.licence]:
            raise UserError(f"licence must be a name as the Hub writes it, such as apache-2.0, llama3.2 or other, got "
                            f"{self.licence!r}; choose one of https://huggingface.co/docs/hub/repositories-licenses")


def require_hub_name(key: str, name: str) -> None:
    """Refuse what is no OWNER/NAME of the Hub. Raises UserError."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        # Its sentences end with the name, which is said before them here.
        rules = str(error).removesuffix(".").removesuffix(f"'{name}'").rstrip(": ")
        raise UserError(f"{key} must be OWNER/NAME, got {name!r}: {rules}; choose another name") from error
    if "/" not in name:
        raise UserError(f"{key} must be OWNER/NAME, got {name!r}; give both parts")


def push(parsed: Parsed[PushArguments]) -> None:
    """Upload an artifact or an exported folder with its model card."""
    given = parsed.values
    files = planned(given)
    say(f"{listing(files, given.repository)}\n\n{CARD}:\n\n{bytes(files[CARD]).decode()}")
    if given.dry_run:
        say("nothing was uploaded; add --dry_run false to upload")
        return
    from huggingface_hub import HfApi

    say(f"uploaded: {upload(HfApi(), given, files)}")


def planned(given: PushArguments) -> dict[str, Path | bytes]:
    """The files of an upload by their names: paths, and the text of the card."""
    kind, names = own_files(given.folder, ("artifact", EXPORT), changing=CHANGING)
    if kind == EXPORT and given.artifact is None:
        raise UserError(f"{given.folder} is an export, which does not say how it was trained; give its artifact with "
                        "--artifact DIR")
    config, source = read_description(given.artifact or given.folder), ORIGIN if kind == EXPORT else CONFIG
    again = f"write the {kind} again"
    if source not in names:
        raise UserError(f"{given.folder} does not say of which artifact it is; {again}")
    # The record of an export has the keys of an artifact's config.json.
    origin = read_object(given.folder / source, again)
    if origin.get("weights_sha256") != config["weights_sha256"]:
        raise UserError(f"{given.folder} is of another artifact ({origin.get('family')} for "
                        f"{origin.get('target', {}).get('name')}) than {given.artifact} ({config['family']} for "
                        f"{config['target']['name']}); give its own with --artifact DIR")
    # An evaluation may rewrite this file, so that its hash is not the folder's.
    counted = read_acceptance(given.folder)
    if counted and any(counted.get(name) != value for name, value in described(config).items()):
        raise UserError(f"{given.folder / ACCEPTANCE} counts another draft ({counted.get('family')} for "
                        f"{counted.get('target')}); delete it, draftsmith evaluate writes it again")
    card = hub_card((given.folder / CARD).read_text(encoding="utf-8"), config, given.licence, given.evaluation,
                    given.base_model)
    kept = [name for name in names if Path(name).name not in KEPT_BACK and name != CARD]
    return {CARD: card.encode(), **{name: given.folder / name for name in kept}}


def listing(files: Mapping[str, Path | bytes], repository: str) -> str:
    """The files of an upload with their sizes."""
    sizes = {name: len(one) if isinstance(one, bytes) else one.stat().st_size for name, one in files.items()}
    lines = [f"{repository}: {len(files)} files, {sum(sizes.values()):,} bytes"]
    return "\n".join([*lines, *(f"  {size:>15,}  {name}" for name, size in sizes.items())])


def upload(hub: "HfApi", given: PushArguments, files: Mapping[str, Path | bytes]) -> str:
    """Upload files in one commit; returns its address. Raises UserError if the Hub refuses or cannot be reached."""
    from huggingface_hub import CommitOperationAdd, ModelCard
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, LocalTokenNotFoundError  # type: ignore[attr-defined]

    operations = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=one) for name, one in files.items()]
    checked = False
    try:
        ModelCard(bytes(files[CARD]).decode()).validate()
        checked = True
        # One commit holds all files or none, so that nobody loads half a draft.
        hub.create_repo(given.repository, private=given.private, exist_ok=True)
        done = hub.create_commit(given.repository, operations, commit_message=f"{len(files)} files of draftsmith")
    except (HfHubHTTPError, HTTPError, LocalTokenNotFoundError, OSError, ValueError) as error:
        if isinstance(error, ValueError) and not checked:
            raise UserError(f"the Hub refuses the card ({' '.join(str(error).split())}); choose another licence or "
                            "description, nothing was uploaded") from error
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"{given.repository} could not be uploaded ({reason}); check the network, the name, and that "
                        "you are logged in (hf auth login)") from error
    return str(done.commit_url)


COMMANDS: dict[str, Command[Any]] = {
    "import": Command(name="import", arguments=ImportArguments, run=import_checkpoint),
    "push": Command(name="push", arguments=PushArguments, run=push),
}
