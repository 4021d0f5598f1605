"""A stored drafter: the files of an artifact's folder, what its config.json says of it, and its weights, checked before
they take memory."""

import importlib
import json
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from ..modules import DRAFTERS, Adapter, Drafter, Target, TargetIdentity, UserError
from ..modules.files.atomic_files import file_sha256
from ..modules.files.json_records import read_object, shortened, typed_fields
from ..modules.target.adapter import PREFIX
from ..modules.target.draft_vocabulary import require_distinct
from ..modules.target.loading.model_parts import SHAPE
from ..modules.target.loading.stored_weights import all_finite

CONFIG, WEIGHTS, CARD, TUNING = "config.json", "model.safetensors", "README.md", "tuning.json"
ACCEPTANCE = "acceptance.json"  # The file with what the target accepts, by position
HEADS = "acceptance_heads.safetensors"  # The file of the acceptance heads
CHANGING = frozenset({TUNING, ACCEPTANCE, HEADS})  # Files of an artifact that are written later than the others
AGAIN = "copy or train the artifact again"  # Remedy for a damaged artifact
FORMAT_VERSION = 1  # Raised when a reader of the previous version could not read the new files
FIELDS: dict[str, Any] = {
    "format": str, "format_version": int, "family": str, "class": str, "drafter": dict[str, Any],
    "target": TargetIdentity, "tree": dict[str, Any], "weights_sha256": str, "provenance": dict[str, Any],
    "versions": dict[str, str]}
"""Fields of config.json and their types; an adapter's is one more."""
FORMER: dict[str, dict[str, Any]] = {
    "draft_lm": {"decode_exit": None, "exits": [], "intermediate_size": None, "keep_least": 0.2, "keep_rate": 0.7,
                 "num_kv_heads": None, "tied": None},
    "falcon": {"skip": True},
    "prompt_tokens": {"first_text": "Next 2 word Next 3 word Next 4 word"}}
"""Settings that a family once had, with the value, as JSON holds it, that is now fixed: artifacts of that time name
them. Family -> key of the section `drafter` -> value."""


def as_json(value: Any) -> str:
    """Indented, keys in order, so that equal values give equal bytes."""
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


class StoredDrafter(NamedTuple):
    """A drafter in the number format of its file, not bound to a target."""

    drafter: Drafter  # The drafter; without values for a sketch of its target
    adapter: Adapter | None  # Changes of the target's weights; None if there are none, and for a sketch
    config: dict[str, Any]  # config.json


def read_description(folder: Path) -> dict[str, Any]:
    """config.json of an artifact, its format version checked. Needs no target and loads no weights. Raises UserError if
    there is no artifact, it is damaged, or of another format version."""
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
    """The drafter of an artifact for its target, as it was trained; arguments and errors as of `load_artifact`. For a
    sketch of the target no weight is read."""
    config, sketched = read_description(folder), target.device.type == "meta"
    try:
        # The target is compared before any weight is read: another one would show as a damaged artifact.
        identity = TargetIdentity.from_dict(config["target"])
        family = drafter_class(config, trust=trust)
        if family.serves_all(config["drafter"]):
            # A sketch has no tokenizer, nor has every target; training goes on with other tokens too.
            same = identity.weights_hash == target.identity.weights_hash or retarget or not (
                identity.tokens_hash and target.identity.tokens_hash)
            identity.require_same(target.identity, ("vocab_size",) if same else ("vocab_size", "tokens_hash"),
                                  "a draft language model drafts for every target of its own tokenizer and vocabulary: "
                                  "choose such a target, or train a draft for this one")
        elif retarget:
            # Taps, exits and borrowed layers are numbers of layers, and rotate as the architecture does.
            identity.require_same(target.identity, ("architecture", *SHAPE), "--retarget carries a draft over to a "
                                  "target of the same architecture, sizes and vocabulary alone; choose such a one, or "
                                  "leave train.start out")
        else:
            identity.require_same(target.identity, SHAPE)
            identity.require_same(target.identity, () if sketched else ("weights_hash",), "load the target it was made "
                                  "for, or, if this is another version of it, continue the draft by draftsmith run "
                                  "with train.start and --retarget")
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
    """The class of an artifact's drafter: one of this package's families or, if trusted, the class it names. Raises
    UserError if the family is unknown and not trusted, or the class cannot be imported."""
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


# Checks of tensors ----------------------------------------------------------------------------------------------------


def check_shapes(family: type[Drafter], description: dict[str, Any], identity: TargetIdentity, weights: Path) -> None:
    """Refuse a description, from config.json, of other tensors than the file of weights holds, which may be missing.
    Raises UserError naming the first tensor that differs."""
    # A family outside the package is trusted code, which need not run on torch's meta device.
    if family not in DRAFTERS or not weights.is_file():
        return
    described = _shapes(family, description, identity)
    try:
        with safe_open(weights, framework="pt") as opened:
            names: list[str] = opened.keys()
            # The same file may hold an adapter of the target, which the drafter knows nothing of.
            held = {name: opened.get_slice(name).get_shape() for name in names if not name.startswith(PREFIX)}
    except (OSError, SafetensorError) as error:
        raise UserError(f"{weights} is damaged ({error}); {AGAIN}") from error
    for name in sorted(described.keys() | held.keys()):
        if described.get(name) != held.get(name):
            raise UserError(f"{weights} does not fit the drafter that config.json describes: the tensor {name} should "
                            f"be {described.get(name, 'absent')} and is {held.get(name, 'absent')}; {AGAIN}")


def require_described(drafter: Drafter, identity: TargetIdentity) -> None:
    """Refuse a drafter with other tensors than its own description asks for: an engine passes over an unknown one and
    leaves a missing one at random. Raises ValueError, which names five of them at most."""
    if type(drafter) in DRAFTERS:
        described = _shapes(type(drafter), drafter.describe(), identity)
        held = {name: list(tensor.shape) for name, tensor in drafter.state_dict().items()}
        if wrong := sorted(name for name in described | held if described.get(name) != held.get(name)):
            raise ValueError(f"the export would hold wrong tensors: {', '.join(wrong[:5])}")


def _shapes(family: type[Drafter], description: dict[str, Any], identity: TargetIdentity) -> dict[str, list[int]]:
    """Shapes of the tensors that a description asks for."""
    # On the meta device nothing is allocated: config.json could claim any size.
    with torch.device("meta"):
        return {name: list(tensor.shape) for name, tensor in family.rebuild(description, identity).state_dict().items()}


def require_weights(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor], where: str) -> None:
    """Refuse values that are not finite, and weights whose number format is of another kind than a drafter's: loading
    would turn them into weights without a word. What is not `expected` is a matrix of real numbers; `where` names what
    was read. Raises UserError naming the first such tensor."""
    for name, tensor in tensors.items():
        kind, wanted = (
            "truth values" if dtype == torch.bool else "complex numbers" if dtype.is_complex else
            "real numbers" if dtype.is_floating_point else "whole numbers"
            for dtype in (tensor.dtype, expected[name].dtype if name in expected else torch.float32))
        if kind != wanted:
            raise UserError(f"the tensor {name} of {where} holds {kind} ({tensor.dtype}), {wanted} were expected; "
                            "train, export or copy it again")
        if not all_finite(tensor):
            raise UserError(f"the tensor {name} of {where} holds values that are not finite (nan or inf); train, "
                            "export or copy it again")
