"""Registry of the checkpoint layouts that an artifact can be exported to."""

from pathlib import Path
from typing import Any

from ...modules import Target, UserError
from ..artifact import Artifact
from .eagle import EAGLE, EAGLE_SGLANG
from .huggingface import HUGGINGFACE
from .hydra import HYDRA
from .kangaroo import KANGAROO
from .llama_cpp import GGUF
from .medusa_vllm import MEDUSA_VLLM
from .merged_target import MEDUSA, MERGED
from .openvino import OPENVINO
from .parts.export_format import PLAIN, ExportFormat, ExportSettings
from .parts.gguf_file import FLOAT32
from .ppd import PPD
from .specdec import SPECDEC
from .speculators import SPECULATORS

EXPORT_FORMATS: tuple[ExportFormat[Any], ...] = (
    EAGLE, EAGLE_SGLANG, HUGGINGFACE, SPECULATORS, GGUF, OPENVINO, HYDRA, KANGAROO, MERGED, MEDUSA, MEDUSA_VLLM, PPD,
    SPECDEC,
)
"""All layouts, in the order of the tables."""
EVERY_FORMAT: tuple[str, ...] = tuple(sorted(one.name for one in EXPORT_FORMATS))
"""Their names."""
FORMATS: tuple[str, ...] = tuple(sorted(one.name for one in EXPORT_FORMATS if one.write is not None))
"""Names of those that hold a drafter, which `export_artifact` accepts."""


def format_named(name: str) -> ExportFormat[Any]:
    """A layout by its name. Raises UserError for an unknown one."""
    found = next((one for one in EXPORT_FORMATS if one.name == name), None)
    if found is None:
        raise UserError(f"unknown export format {name!r}; choose one of {', '.join(EVERY_FORMAT)}")
    return found


def export_artifact(artifact: Artifact, target: Target, format_name: str, out: Path,
                    settings: ExportSettings = PLAIN) -> Path:
    """Write `artifact` in the layout of another project to `out` (new, empty, or an earlier export); returns it.

    Args:
        artifact: the drafter.
        target: the model it drafts for.
        format_name: one of `FORMATS`.
        out: the folder.
        settings: what single formats need.

    Raises:
        UserError: if the format is unknown or cannot hold the drafter, or `out` cannot be written.
    """
    if artifact.adapter is not None:
        raise ValueError("an artifact that changes its target is exported by export_adapted")
    chosen = next((one for one in EXPORT_FORMATS if one.name == format_name), None)
    if chosen is None or chosen.write is None:
        raise UserError(f"unknown export format {format_name!r}; choose one of {', '.join(FORMATS)}"
                        f"{'' if chosen is None else chosen.instead}")
    require_number_format(chosen, settings.weights)
    # A family that no engine runs says why; the refusal of a format would send it to one of its own.
    if artifact.drafter.export_refusal is not None:
        raise UserError(artifact.drafter.export_refusal)
    # A class of another package may derive from one of these, and is then written as its base.
    if not isinstance(artifact.drafter, chosen.families):
        raise UserError(f"the format {chosen.name} holds {chosen.content}, this artifact is {artifact.drafter.family}; "
                        "export that family in its own format")
    chosen.write(artifact.drafter, target, out, settings)
    return out


def export_adapted(artifact: Artifact, format_name: str, out: Path) -> Path:
    """Write an artifact that changes its target to `out` (new, empty or an earlier export); returns it.

    Raises:
        UserError: if the format cannot hold an adapted target or these heads, or `out` cannot be written.
    """
    writers = {one.name: one.write_adapted for one in EXPORT_FORMATS if one.write_adapted is not None}
    if format_name not in writers:
        raise UserError(f"this artifact changes its target, which the format {format_name!r} cannot hold; choose "
                        f"one of {', '.join(writers)}")
    writers[format_name](artifact, out)
    return out


def require_number_format(chosen: ExportFormat[Any], weights: str) -> None:
    """Refuse a number format that no engine reads in this layout. Raises UserError."""
    if weights == FLOAT32 or weights in chosen.weights:
        return
    if not chosen.weights:
        raise UserError(f"the format {chosen.name} holds its weights as they were trained, got weights {weights!r}; "
                        f"leave it out, or choose --format {', '.join(in_fewer_bits())}")
    raise UserError(f"weights must be one of {', '.join(chosen.weights)} in the format {chosen.name}, got {weights!r}")


def in_fewer_bits() -> list[str]:
    """Names of the layouts whose matrices may have fewer bits than as trained."""
    return [one.name for one in EXPORT_FORMATS if one.weights]
