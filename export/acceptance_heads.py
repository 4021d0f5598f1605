"""Acceptance heads of an artifact: one file of tensors, bound to the drafter by its weights' hash.

The tensors of the head for a temperature are named after it, `1/output.weight`; one JSON entry in the header of the
file says the rest. An artifact that is written anew loses its heads: they belong to the former weights."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save, save_file
from torch import Tensor

from ..modules import AcceptanceHead, AcceptanceHeadConfig, SamplingSetting, UserError
from ..modules.files.atomic_files import write_atomically
from ..modules.files.json_records import typed_fields
from ..modules.policies.registry import MOST
from .stored_drafter import HEADS, read_description, require_weights

RETRAIN = "delete that file and train the heads again with draftsmith specdec"
"""Remedy for damaged heads; an artifact with such is not loaded, for training either."""


@dataclass(frozen=True, kw_only=True)
class HeadRule:
    """A head but for its tensors: its shape, the answers that it was calibrated for, and how it decides by default."""

    config: AcceptanceHeadConfig  # Shape of the head
    width: int  # Width of the drafter's states
    setting: SamplingSetting  # Sampling of the answers and of the drafts that it was fitted to
    threshold: float = 0.7  # Risk of a rejection above which drafting ends
    least: int = 2  # Tokens drafted whatever the risk
    most: int = 20  # Most tokens of a draft
    provenance: dict[str, Any] = field(default_factory=dict)  # Settings of the fit and what came of it, JSON-ready

    def __post_init__(self) -> None:
        check_rule(self.threshold, self.least, self.most)


@dataclass(frozen=True)
class StoredHead:
    """An acceptance head and its rule."""

    head: AcceptanceHead  # The head, on the drafter's device
    rule: HeadRule  # All else of it


_ENTRY = {"weights_sha256": str, "tensors_sha256": str, "rules": dict[str, HeadRule]}
"""The JSON entry: hashes of the drafter's weights and of the heads' tensors, and the rules by temperature."""


def check_rule(threshold: float, least: int, most: int) -> None:
    """Refuse a risk or lengths out of their range. Raises UserError."""
    if not 0 < threshold < 1:
        raise UserError(f"threshold must be above 0 and below 1, got {threshold}; choose a risk such as 0.7")
    if not 1 <= least <= most:
        raise UserError(f"least and most must satisfy 1 <= least <= most, got {least} and {most}; lower least or raise "
                        "most")
    if most > MOST:
        raise UserError(f"most must be at most {MOST:,} tokens of a draft, got {most}; lower it")


def temperature_name(temperature: float) -> str:
    """A temperature as short as it can be without becoming another one; 0 has no sign."""
    short = f"{abs(temperature):g}"
    return short if float(short) == temperature else repr(temperature)


def save_head(artifact: Path, head: AcceptanceHead, **rule: Any) -> Path:
    """Write a head into the folder of the artifact whose drafter it judges, in place of a former one for this
    temperature; `rule` are the fields of `HeadRule` but for its shape. Raises UserError if there is no artifact, the
    rule is out of its range, or the file cannot be written."""
    owner = read_description(artifact)["weights_sha256"]
    given = HeadRule(config=head.config, width=head.width, **rule)
    heads = {**load_heads(artifact, owner), given.setting.temperature: StoredHead(head, given)}
    rules = {temperature_name(temperature): asdict(one.rule) for temperature, one in heads.items()}
    tensors = {f"{temperature_name(temperature)}/{name}": tensor.float().cpu().contiguous()
               for temperature, one in heads.items() for name, tensor in one.head.state_dict().items()}
    digest = hashlib.sha256(save(tensors)).hexdigest()
    entry = json.dumps({"weights_sha256": owner, "tensors_sha256": digest, "rules": rules}, sort_keys=True,
                       allow_nan=False)
    return write_atomically(artifact / HEADS, lambda file: save_file(tensors, file, metadata={"heads": entry}))


def load_heads(artifact: Path, weights_sha256: str) -> dict[float, StoredHead]:
    """The heads of an artifact's folder by temperature; none when no head was trained. Raises UserError if the file is
    damaged or belongs to a drafter with other weights than those with this hash."""
    if not (file := artifact / HEADS).exists():
        return {}
    try:
        with safe_open(file, framework="pt") as opened:
            entry = typed_fields(json.loads((opened.metadata() or {})["heads"]), _ENTRY)
            names: list[str] = opened.keys()
            tensors: dict[str, Tensor] = {name: opened.get_tensor(name) for name in names}
        found = _heads(entry, tensors)
    except (LookupError, TypeError, ValueError, RuntimeError, OSError, SafetensorError) as error:
        raise UserError(f"{file} is damaged ({' '.join(str(error).split())}); {RETRAIN}") from error
    # A drafter that was trained again has other states, which the heads cannot judge.
    if entry["weights_sha256"] != weights_sha256:
        raise UserError(f"{file} judges a drafter with the weights {entry['weights_sha256'][:12]}..., this artifact's "
                        f"are {weights_sha256[:12]}...; {RETRAIN}")
    return found


def _heads(entry: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[float, StoredHead]:
    """The heads of an entry by temperature. Raises ValueError where the tensors are not theirs."""
    if hashlib.sha256(save(dict(tensors))).hexdigest() != entry["tensors_sha256"]:
        raise ValueError("its tensors do not have the hash that it names")
    require_weights(tensors, {}, HEADS)
    found, left = {}, dict(tensors)
    for name, rule in entry["rules"].items():
        if name != temperature_name(rule.setting.temperature):
            raise ValueError(f"the head for temperature {rule.setting.temperature:g} is named {name}")
        # On the meta device nothing is allocated: the entry could claim any size.
        with torch.device("meta"):
            shapes = {part: tensor.shape for part, tensor in AcceptanceHead(rule.config, rule.width)
                      .state_dict().items()}
        own = {part: left.pop(f"{name}/{part}") for part in shapes if f"{name}/{part}" in left}
        if {part: tensor.shape for part, tensor in own.items()} != shapes:
            raise ValueError(f"its tensors are not those of the head that it describes for temperature {name}")
        head = AcceptanceHead(rule.config, rule.width)
        head.load_state_dict(own)
        found[rule.setting.temperature] = StoredHead(head.eval(), rule)
    if left:
        raise ValueError(f"no head has its tensor {min(left)}")
    return found
