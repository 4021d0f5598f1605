"""Acceptance heads of an artifact: a folder for each temperature inside it, bound to the drafter by its weights' hash.

`acceptance_heads/<temperature>/` holds config.json, model.safetensors and, where the head was measured,
measurements.json, written whole or not at all. An artifact that is written anew loses its heads: they belong to the
former weights.
"""

import json
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ..modules import (
    AcceptanceHead,
    AcceptanceHeadConfig,
    ConfidenceCurve,
    DraftedTokens,
    Policy,
    RejectionRisk,
    SamplingSetting,
    UserError,
    chain_for,
)
from ..modules.files.atomic_files import file_sha256, write_file
from ..modules.files.json_records import read_object, read_record, typed_fields
from ..modules.files.owned_folders import whole_folder
from ..modules.policies.registry import MOST
from ..modules.tuning.drafted_tokens import HEAD as HEAD_RULE
from ..modules.tuning.drafted_tokens import NAMES
from .artifact_files import AGAIN, CONFIG, HEAD, HEADS, MEASUREMENTS, WEIGHTS
from .weight_checks import require_weights

FORMAT, FORMAT_VERSION = "draftsmith acceptance head", 1
"""Name of the files' content, and a number that is raised when a reader of the previous version could not read them."""

MEASURED, DIGEST = "measurements_sha256", "weights_sha256"
"""Keys of the hashes in config.json."""
FIELDS: dict[str, Any] = {
    "format": str, "format_version": int, "head": dict[str, Any], "drafter": dict[str, str],
    "sampling": SamplingSetting, "threshold": float, "least": int, "most": int, DIGEST: str,
    "provenance": dict[str, Any], "versions": dict[str, str],
}
"""Fields of config.json and their types; the hash of the measurements is one more."""
SHAPE: dict[str, Any] = {"num_layers": int, "tie_blocks": bool, "width": int}
"""Fields of a head's description and their types."""
RETRAIN = "delete that folder and train the head again with draftsmith specdec"
"""Remedy for a damaged head; an artifact with one is not loaded, for training either."""


@dataclass(frozen=True, kw_only=True)
class HeadMeasurements:
    """Figures of a head on whole drafts after prompts that neither it nor the drafter was trained on."""

    drafts: int
    """Number of drafts."""
    length: int
    """Tokens of each."""
    calibration: ConfidenceCurve
    """Reliability: the exact acceptance of drafted tokens by the head's estimate of it."""
    calibration_error_unweighted: float
    """Expected calibration error once the estimates are freed from the loss's weights."""
    policy: DraftedTokens
    """The head's own policy, and the rules without a head at its accepted length."""
    fixed: tuple[DraftedTokens, ...]
    """All rules at the accepted lengths of 1, 2, ... drafted tokens, whatever the threshold of each."""

    def __post_init__(self) -> None:
        for row in (self.policy, *self.fixed):
            if row.by_rule.keys() != set(NAMES):
                raise ValueError(f"by_rule must name {', '.join(NAMES)}, got {', '.join(row.by_rule) or 'nothing'}")
        if (self.policy.by_rule[HEAD_RULE] or 0) < 1:
            raise ValueError(f"policy.by_rule lacks the tokens of {HEAD_RULE}, at least 1")
        if self.drafts < 1 or not 1 <= self.length <= MOST:
            raise ValueError(f"drafts must be at least 1 and length between 1 and {MOST}, got {self.drafts} and "
                             f"{self.length}")
        tokens = [count for row in (self.policy, *self.fixed) for count in row.by_rule.values() if count is not None]
        if wrong := [count for count in tokens if not 0 <= count <= MOST]:
            raise ValueError(f"drafted tokens of a rule must lie between 0 and {MOST}, got {wrong[0]:g}")


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
    """Settings of the fit and what came of it, JSON-ready."""
    measurements: HeadMeasurements | None = None
    """Figures for the report; None where it was not measured."""

    def __post_init__(self) -> None:
        check_rule(self.threshold, self.least, self.most)

    def policy(self, threshold: float | None = None) -> Policy:
        """The chain that ends by this head; `threshold` in place of its own."""
        rule = RejectionRisk(self.head.log_acceptance, self.setting, threshold or self.threshold, self.least)
        return chain_for(self.setting, self.most, rule)


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


def save_head(artifact: Path, stored: StoredHead) -> Path:
    """Write a head into the artifact whose drafter it judges, in place of a former one for this temperature.

    Returns:
        Its folder.

    Raises:
        UserError: if there is no artifact, or the folder cannot be written.
    """
    owner = read_object(artifact / CONFIG, AGAIN)
    folder = artifact / HEADS / temperature_name(stored.setting.temperature)
    with whole_folder(folder, HEAD) as partial:
        weights = stored.head.state_dict()
        save_file({name: tensor.float().cpu().contiguous() for name, tensor in weights.items()}, partial / WEIGHTS,
                  metadata={"format": "pt"})
        content = {
            "format": FORMAT, "format_version": FORMAT_VERSION,
            "head": {**asdict(stored.head.config), "width": stored.head.width},
            "drafter": {"family": owner["family"], "weights_sha256": owner["weights_sha256"]},
            "sampling": asdict(stored.setting),
            "threshold": stored.threshold, "least": stored.least, "most": stored.most,
            DIGEST: file_sha256(partial / WEIGHTS), "provenance": stored.provenance,
            "versions": {name: version(name) for name in ("draftsmith", "torch", "safetensors")},
        }
        if stored.measurements is not None:
            content[MEASURED] = file_sha256(write_file(partial / MEASUREMENTS, _json(asdict(stored.measurements))))
        write_file(partial / CONFIG, _json(content))
    return folder


def _json(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=2, sort_keys=True, allow_nan=False) + "\n"


def load_heads(artifact: Path, weights_sha256: str) -> dict[float, StoredHead]:
    """The heads of an artifact by temperature; none when no head was trained.

    Args:
        artifact: its folder.
        weights_sha256: hash of its drafter's weights.

    Raises:
        UserError: if a head is damaged, of another format version, or belongs to another drafter.
    """
    # A folder that starts with a dot is one that was being written.
    folder = artifact / HEADS
    places = sorted(folder.iterdir()) if folder.is_dir() else []
    found = [_load(one, weights_sha256) for one in places if not one.name.startswith(".")]
    return {stored.setting.temperature: stored for stored in found}


def _load(folder: Path, weights_sha256: str) -> StoredHead:
    """The head in a folder. Raises UserError as `load_heads` does."""
    config = read_object(folder / CONFIG, RETRAIN)
    if config.get("format") != FORMAT:
        raise UserError(f"{folder} holds no acceptance head: {CONFIG} has the format {config.get('format')!r}, not "
                        f"{FORMAT!r}; {RETRAIN}")
    if config.get("format_version") != FORMAT_VERSION:
        raise UserError(f"{folder} has acceptance head format version {config.get('format_version')}, this program "
                        f"reads {FORMAT_VERSION}; {RETRAIN}")
    try:
        config = typed_fields(config, FIELDS, {MEASURED: str})
    except ValueError as error:
        raise UserError(f"{folder} is damaged ({' '.join(str(error).split())}); {RETRAIN}") from error
    # A drafter that was trained again has other states, which the head cannot judge.
    owner, theirs = config["drafter"].get("family"), config["drafter"].get(DIGEST, "")
    if theirs != weights_sha256:
        raise UserError(f"{folder} judges the {owner} drafter with the weights {theirs[:12]}..., this artifact's are "
                        f"{weights_sha256[:12]}...; delete that folder and train a head for this drafter with "
                        "draftsmith specdec")
    # Hashes come first: a changed file is named as such, not by what its content breaks.
    hashed = {WEIGHTS: config[DIGEST], **({MEASUREMENTS: config[MEASURED]} if MEASURED in config else {})}
    for file, expected in hashed.items():
        if not (folder / file).is_file() or file_sha256(folder / file) != expected:
            raise UserError(f"{folder / file} does not have the hash that {CONFIG} names ({expected[:12]}...); copy "
                            f"the head again, or {RETRAIN}")
    measurements = read_record(HeadMeasurements, folder / MEASUREMENTS, RETRAIN) if MEASURED in config else None
    try:
        stored = StoredHead(
            head=_head(folder, config["head"]), setting=config["sampling"], measurements=measurements,
            **{name: config[name] for name in ("threshold", "least", "most", "provenance")})
    except (KeyError, TypeError, ValueError, RuntimeError, OSError, SafetensorError) as error:
        raise UserError(f"{folder} is damaged ({' '.join(str(error).split())}); {RETRAIN}") from error
    if folder.name != (own := temperature_name(stored.setting.temperature)):
        raise UserError(f"{folder} holds the head for temperature {own}; rename it to {own}, or delete that folder")
    return stored


def _head(folder: Path, described: dict[str, Any]) -> AcceptanceHead:
    shape = typed_fields(described, SHAPE)
    weights = load_file(folder / WEIGHTS)
    require_weights(weights, {}, WEIGHTS)
    settings = AcceptanceHeadConfig(num_layers=shape["num_layers"], tie_blocks=shape["tie_blocks"])
    blocks = sum(name.startswith("blocks.") for name in weights) // 2
    # Compared before a layer is made: a wrong number could ask for all memory.
    if (claimed := 1 if settings.tie_blocks else settings.num_layers) != blocks:
        raise ValueError(f"{CONFIG} names {claimed} blocks, {WEIGHTS} holds {blocks}")
    if list(weights["output.weight"].shape) != [2, shape["width"]]:
        raise ValueError(f"{CONFIG} names states of width {shape['width']}, {WEIGHTS} has an output layer of "
                         f"{list(weights['output.weight'].shape)}")
    head = AcceptanceHead(settings, shape["width"])
    head.load_state_dict(weights)
    return head.eval()
