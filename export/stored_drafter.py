"""A stored drafter: what an artifact's config.json says of it, and its weights as they were trained."""

import importlib
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load_file

from ..modules import DRAFTERS, Adapter, Drafter, Target, TargetIdentity, UserError
from ..modules.files.atomic_files import file_sha256
from ..modules.files.json_records import read_object, shortened, typed_fields
from ..modules.target.adapter import PREFIX
from ..modules.target.draft_vocabulary import require_distinct
from ..modules.target.loading.model_parts import SHAPE
from .artifact_files import AGAIN, CONFIG, WEIGHTS
from .weight_checks import check_shapes, require_weights

FORMAT_VERSION = 1  # Raised when a reader of the previous version could not read the new files
FIELDS: dict[str, Any] = {
    "format": str, "format_version": int, "family": str, "class": str, "drafter": dict[str, Any],
    "target": TargetIdentity, "tree": dict[str, Any], "weights_sha256": str, "provenance": dict[str, Any],
    "versions": dict[str, str],
}
"""Fields of config.json and their types; an adapter's is one more."""
FORMER: dict[str, dict[str, Any]] = {
    "draft_lm": {"decode_exit": None, "exits": [], "intermediate_size": None, "keep_least": 0.2, "keep_rate": 0.7,
                 "num_kv_heads": None, "tied": None},
    "falcon": {"skip": True},
    "prompt_tokens": {"first_text": "Next 2 word Next 3 word Next 4 word"},
}
"""Settings that a family once had, with the value, as JSON holds it, that is now fixed: artifacts of that time name
them. Family -> key of the section `drafter` -> value."""


class StoredDrafter(NamedTuple):
    """A drafter in the number format of its file, not bound to a target."""

    drafter: Drafter  # The drafter; without values for a sketch of its target
    adapter: Adapter | None  # Changes of the target's weights; None if there are none, and for a sketch
    config: dict[str, Any]  # config.json


def read_description(folder: Path) -> dict[str, Any]:
    """config.json of an artifact, its format version checked. Needs no target and loads no weights.

    Raises:
        UserError: if there is no artifact, it is damaged, or of another format version.
    """
    path = folder / CONFIG
    if not path.is_file():
        inside = folder / "artifact"
        raise UserError(f"{folder} holds no artifact ({CONFIG} is missing); give "
                        + (str(inside) if (inside / CONFIG).is_file() else "the folder that training wrote"))
    config = read_object(path, AGAIN)
    if config.get("format") != "draftsmith":
        raise UserError(f"{folder} is no artifact, but a checkpoint in another layout; give the folder that training "
                        f"wrote, or make an artifact of this one with draftsmith import --folder {folder}")
    if config.get("format_version") != FORMAT_VERSION:
        raise UserError(f"{path} has artifact format version {shortened(config.get('format_version'))}, this program "
                        f"reads {FORMAT_VERSION}; use the version of draftsmith that wrote it, or train again")
    try:
        typed_fields(config, FIELDS, {"adapter": dict[str, Any]})
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}; {AGAIN}") from error
    return config


def load_drafter(folder: Path, target: Target, *, trust: bool = False, retarget: bool = False) -> StoredDrafter:
    """The drafter of an artifact for its target, as it was trained. For a sketch of the target no weight is read.

    Args:
        target: the one it was trained for.
        trust: as in `load_artifact`.
        retarget: take a target of the same architecture and sizes with other weights too.

    Raises:
        UserError: as `load_artifact` does.
    """
    config, sketched = read_description(folder), target.device.type == "meta"
    try:
        # The target is compared before any weight is read: another one would show as a damaged artifact.
        identity = TargetIdentity.from_dict(config["target"])
        if retarget:
            # Taps, exits and borrowed layers are numbers of layers, and rotate as the architecture does.
            identity.require_same(target.identity, ("architecture", *SHAPE), "--retarget carries a draft over to a "
                                  "target of the same architecture, sizes and vocabulary alone; choose such a one, or "
                                  "leave train.start out")
        else:
            identity.require_same(target.identity, SHAPE)
            identity.require_same(target.identity, () if sketched else ("weights_hash",), "load the target it was made "
                                  "for, or, if this is another version of it, continue the draft by draftsmith run "
                                  "with train.start and --retarget")
        family = drafter_class(config, trust=trust)
        with target.device if sketched else nullcontext():
            drafter = _rebuilt(family, config["drafter"], identity, folder / WEIGHTS)
        adapter = None if sketched else _load_weights(drafter, folder / WEIGHTS, config)
    except UserError:
        raise
    except (TypeError, ValueError) as error:
        raise UserError(f"{folder / CONFIG} is damaged: {error}; {AGAIN}") from error
    return StoredDrafter(drafter, adapter, config)


def _rebuilt(family: type[Drafter], description: dict[str, Any], identity: TargetIdentity, weights: Path) -> Drafter:
    """The drafter that config.json describes. Raises ValueError with what is wrong in the description, UserError for a
    former setting with another value than the fixed one."""
    # Values that are fixed now need no setting: an artifact that asks for another value would draft differently.
    former = {key: fixed for key, fixed in FORMER.get(family.family, {}).items() if key in description}
    for key, fixed in former.items():
        if description[key] != fixed:
            raise UserError(f"{weights.with_name(CONFIG)} has {key} {shortened(description[key])}, and {family.family} "
                            f"drafters are now decoded with {shortened(fixed)} alone; use the version of draftsmith "
                            "that wrote it, or train again")
    description = {key: value for key, value in description.items() if key not in former}
    try:
        check_shapes(family, description, identity, weights)
        return family.rebuild(description, identity)
    except KeyError as error:
        raise ValueError(f"drafter lacks {error}") from error
    except UserError as error:
        raise ValueError(str(error)) from error


def drafter_class(config: Mapping[str, Any], *, trust: bool) -> type[Drafter]:
    """The class of an artifact's drafter: one of this package's families or, if trusted, the class it names.

    Raises:
        UserError: if the family is unknown and `trust` is False, or the class cannot be imported.
    """
    families = {cls.family: cls for cls in DRAFTERS}
    if config["family"] in families:
        return families[config["family"]]
    if not trust:
        raise UserError(f"the artifact's family {config['family']!r} is not one of {', '.join(sorted(families))}; if "
                        f"you trust its class {config['class']}, which would be imported and run, add --trust to the "
                        "command line (trust=True in Python)")
    # From here on code of another package runs: --trust allows it.
    module_name, _, class_name = config["class"].rpartition(".")
    try:
        cls = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise UserError(f"the artifact's class {config['class']} cannot be imported: {error}; install the package that "
                        "it belongs to") from error
    if not (isinstance(cls, type) and issubclass(cls, Drafter)):
        raise UserError(f"the artifact's class {config['class']} is not a draftsmith Drafter; {AGAIN}")
    return cls


def _load_weights(drafter: Drafter, path: Path, config: Mapping[str, Any]) -> Adapter | None:
    """Load the drafter's weights; returns the adapter whose weights are in the same file, if there is one."""
    if not path.is_file():
        raise UserError(f"{path} is missing; the artifact is incomplete, {AGAIN}")
    if file_sha256(path) != config["weights_sha256"]:
        raise UserError(f"{path} does not have the hash that {CONFIG} names ({config['weights_sha256'][:12]}...); it "
                        "is damaged, copy or train the artifact again")
    try:
        weights = load_file(path)
        require_weights(weights, drafter.state_dict(), str(path))
        changes = {name: tensor for name, tensor in weights.items() if name.startswith(PREFIX)}
        drafter.load_state_dict({name: tensor for name, tensor in weights.items() if name not in changes})
    except (SafetensorError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path} does not fit the drafter that {CONFIG} describes: {reason}; {AGAIN}") from error
    require_distinct(drafter.token_ids_Q)
    # An adapter without layers is refused by `rebuild`, and so are tensors without a description.
    if "adapter" not in config and not changes:
        return None
    return Adapter.rebuild(config.get("adapter", {"layers": [], "scale": 1.0}), changes)
