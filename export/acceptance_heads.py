"""Acceptance heads of an artifact: a folder for each temperature inside it, bound to the drafter by its weights' hash.

`acceptance_heads/<temperature>/` holds config.json and model.safetensors, written whole or not at all. An artifact that
is written anew loses its heads: they belong to the former weights.
"""

import json
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ..modules import AcceptanceHead, AcceptanceHeadConfig, Policy, RejectionRisk, SamplingSetting, UserError, chain_for
from ..modules.atomic_files import file_sha256, write_file
from ..modules.json_records import read_object
from ..modules.owned_folders import whole_folder
from .artifact_files import AGAIN, CONFIG, HEAD, HEADS, WEIGHTS

FORMAT_VERSION = 1
"""Raised when a reader of the previous version could not read the new files."""


@dataclass(frozen=True, kw_only=True)
class StoredHead:
    """An acceptance head with the answers that it was calibrated for, and the rule that it decides by default."""

    head: AcceptanceHead
    """The head, on the drafter's device."""
    setting: SamplingSetting
    """Sampling of the answers and of the drafts that it was fitted to."""
    threshold: float = 0.7
    """Risk of a rejection above which drafting ends."""
    least: int = 2
    """Tokens drafted whatever the risk."""
    most: int = 20
    """Most tokens of a draft."""
    provenance: dict[str, Any] = field(default_factory=dict)
    """Settings of the fit and its measurements, JSON-ready."""

    def __post_init__(self) -> None:
        check_rule(self.threshold, self.least, self.most)

    def policy(self, threshold: float | None = None) -> Policy:
        """The chain that ends by this head; `threshold` in place of its own."""
        rule = RejectionRisk(self.head.log_acceptance, self.setting, threshold or self.threshold, self.least)
        return chain_for(self.setting, self.most, rule)


def check_rule(threshold: float, least: int, most: int) -> None:
    """Refuse a risk or lengths out of their range. Raises UserError."""
    if not 0 < threshold < 1:
        raise UserError(f"threshold must be above 0 and below 1, got {threshold}")
    if not 1 <= least <= most:
        raise UserError(f"least and most must satisfy 1 <= least <= most, got {least} and {most}")


def save_head(artifact: Path, stored: StoredHead) -> Path:
    """Write a head into the artifact whose drafter it judges, in place of a former one for this temperature.

    Returns:
        Its folder.

    Raises:
        UserError: if there is no artifact, or the folder cannot be written.
    """
    owner = read_object(artifact / CONFIG, AGAIN)
    folder = artifact / HEADS / f"{stored.setting.temperature:g}"
    with whole_folder(folder, HEAD) as partial:
        weights = stored.head.state_dict()
        save_file({name: tensor.float().cpu().contiguous() for name, tensor in weights.items()}, partial / WEIGHTS,
                  metadata={"format": "pt"})
        content = {
            "format": "draftsmith acceptance head", "format_version": FORMAT_VERSION,
            "head": {**asdict(stored.head.config), "width": stored.head.width},
            "drafter": {"family": owner["family"], "weights_sha256": owner["weights_sha256"]},
            "sampling": asdict(stored.setting),
            "threshold": stored.threshold, "least": stored.least, "most": stored.most,
            "weights_sha256": file_sha256(partial / WEIGHTS), "provenance": stored.provenance,
            "versions": {name: version(name) for name in ("draftsmith", "torch", "safetensors")},
        }
        write_file(partial / CONFIG, json.dumps(content, indent=2, sort_keys=True) + "\n")
    return folder


def load_heads(artifact: Path, weights_sha256: str) -> dict[float, StoredHead]:
    """The heads of an artifact by temperature; none when no head was trained.

    Args:
        artifact: its folder.
        weights_sha256: hash of its drafter's weights.

    Raises:
        UserError: if a head is damaged, of another format version, or belongs to another drafter.
    """
    folder = artifact / HEADS
    found = [_load(one, weights_sha256) for one in sorted(folder.iterdir()) if not one.name.startswith(".")] \
        if folder.is_dir() else []
    return {stored.setting.temperature: stored for stored in found}


def _load(folder: Path, weights_sha256: str) -> StoredHead:
    config = read_object(folder / CONFIG, AGAIN)
    if config.get("format_version") != FORMAT_VERSION:
        raise UserError(f"{folder} has acceptance head format version {config.get('format_version')}, this program "
                        f"reads {FORMAT_VERSION}; train the head again with draftsmith specdec")
    try:
        owner, head = config["drafter"], config["head"]
        if owner["weights_sha256"] != weights_sha256:
            raise UserError(f"{folder} judges the {owner['family']} drafter with the weights "
                            f"{owner['weights_sha256'][:12]}..., this artifact's are {weights_sha256[:12]}...; train a "
                            "head for it with draftsmith specdec, or delete that folder")
        if file_sha256(folder / WEIGHTS) != config["weights_sha256"]:
            raise UserError(f"{folder / WEIGHTS} does not have the hash that {CONFIG} names "
                            f"({config['weights_sha256'][:12]}...); copy or train the head again")
        made = AcceptanceHead(AcceptanceHeadConfig(num_layers=head["num_layers"], tie_blocks=head["tie_blocks"]),
                              head["width"])
        made.load_state_dict(load_file(folder / WEIGHTS))
        return StoredHead(head=made.eval(), setting=SamplingSetting(**config["sampling"]),
                          threshold=config["threshold"], least=config["least"], most=config["most"],
                          provenance=config["provenance"])
    except (KeyError, TypeError, RuntimeError, OSError, SafetensorError) as error:
        raise UserError(f"{folder} is damaged ({' '.join(str(error).split())}); train the head again with draftsmith "
                        "specdec, or delete that folder") from error
