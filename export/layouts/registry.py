"""Registry of the checkpoint layouts that an artifact can be exported to."""

from collections.abc import Callable
from pathlib import Path

from ...modules import Drafter, Target, UserError
from ..artifact import Artifact
from .eagle import export_eagle, export_eagle_sglang
from .huggingface import export_huggingface
from .hydra import export_hydra
from .kangaroo import export_kangaroo
from .medusa import export_medusa
from .medusa_vllm import export_medusa_vllm
from .merged_target import ADAPTED_FORMATS
from .ppd import export_ppd
from .specdec import SPECDEC_FORMAT
from .speculators import export_speculators


def export_artifact(artifact: Artifact, target: Target, format_name: str, out: Path) -> Path:
    """Write `artifact` in the layout of another project to `out` (new, empty, or an earlier export); returns it.

    Raises:
        UserError: if the format is unknown or cannot hold the drafter, or `out` cannot be written.
    """
    if artifact.adapter is not None:
        raise ValueError("an artifact that changes its target is exported by draftsmith.export.layouts.merged_target")
    if format_name not in EXPORTERS:
        others = dict.fromkeys(ADAPTED_FORMATS, "; merged is for an artifact that changes its target")
        others[SPECDEC_FORMAT] = f"; {SPECDEC_FORMAT} holds an acceptance head, which export_head writes"
        raise UserError(f"unknown export format {format_name!r}; choose one of {', '.join(FORMATS)}"
                        f"{others.get(format_name, '')}")
    if artifact.drafter.export_refusal is not None:
        raise UserError(artifact.drafter.export_refusal)
    EXPORTERS[format_name](artifact.drafter, target, out)
    return out


EXPORTERS: dict[str, Callable[[Drafter, Target, Path], None]] = {
    "eagle": export_eagle,
    "eagle-sglang": export_eagle_sglang,
    "huggingface": export_huggingface,
    "hydra": export_hydra,
    "kangaroo": export_kangaroo,
    "medusa": export_medusa,
    "medusa-vllm": export_medusa_vllm,
    "ppd": export_ppd,
    "speculators": export_speculators,
}
"""Writers of the formats, by name."""
FORMATS: tuple[str, ...] = tuple(EXPORTERS)
"""Names of formats that `export_artifact` accepts."""
EVERY_FORMAT: tuple[str, ...] = tuple(sorted({*FORMATS, *ADAPTED_FORMATS, SPECDEC_FORMAT}))
"""The same, with those of artifacts that change their target and of acceptance heads."""
