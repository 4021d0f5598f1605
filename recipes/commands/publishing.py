"""The command `draftsmith push`: an artifact or an exported folder as a model on the Hugging Face Hub."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...export.acceptance_profile import described, read_acceptance
from ...export.artifact_files import ACCEPTANCE, CARD, CHANGING, CONFIG, TUNING
from ...export.layouts.parts.layout_folder import EXPORT, ORIGIN
from ...export.model_card import hub_card
from ...export.stored_drafter import read_description
from ...modules import UserError
from ...modules.files.json_records import read_object
from ...modules.files.owned_folders import MARKER, own_files
from ..reading.parsing import Command, Parsed
from ..terminal.terminal_text import say

if TYPE_CHECKING:
    from huggingface_hub import HfApi

KEPT_BACK = (MARKER, TUNING)
"""Files that are true on this machine alone."""


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
    """The files of an upload by their names: paths, and the text of the card.

    Raises:
        UserError: if the folder is neither an artifact nor an export, holds other or changed files, or the artifact of
            an export or the evaluation is missing or another.
    """
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
    """Upload files in one commit; returns its address.

    Raises:
        UserError: if the Hub refuses or cannot be reached.
    """
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


COMMANDS: dict[str, Command[Any]] = {"push": Command(name="push", arguments=PushArguments, run=push)}
