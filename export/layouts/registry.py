"""Registry of the checkpoint layouts that an artifact can be exported to."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...modules import Drafter, Eagle, Target, UserError
from ..artifact import Artifact
from .eagle import export_eagle, export_eagle_sglang
from .eagle_folder import LOST_BIAS
from .gguf_file import FLOAT32, WEIGHTS
from .huggingface import export_huggingface
from .hydra import export_hydra
from .kangaroo import export_kangaroo
from .llama_cpp import GGUF_FORMAT, export_gguf
from .medusa import export_medusa
from .medusa_vllm import export_medusa_vllm
from .merged_target import ADAPTED_FORMATS
from .openvino import OPENVINO_FORMAT, export_openvino
from .ppd import export_ppd
from .specdec import SPECDEC_FORMAT
from .speculators import export_speculators


@dataclass(frozen=True, kw_only=True)
class ExportSettings:
    """Settings of single formats, beyond the artifact and its target."""

    target_gguf: Path | None = None
    """With gguf, the target's GGUF file, whose tokenizer is copied."""
    convert_with: Path | None = None
    """With openvino, the interpreter of an environment with optimum-intel."""
    weights: str = FLOAT32
    """With gguf, the number format of the matrices: float32, bfloat16 or int8."""

    def __post_init__(self) -> None:
        if self.weights not in WEIGHTS:
            raise UserError(f"weights must be one of {', '.join(WEIGHTS)}, got {self.weights!r}")


def export_artifact(artifact: Artifact, target: Target, format_name: str, out: Path,
                    settings: ExportSettings = ExportSettings()) -> Path:
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
        raise ValueError("an artifact that changes its target is exported by draftsmith.export.layouts.merged_target")
    if format_name not in FORMATS:
        others = dict.fromkeys(ADAPTED_FORMATS, "; merged is for an artifact that changes its target")
        others[SPECDEC_FORMAT] = f"; {SPECDEC_FORMAT} holds an acceptance head, which export_head writes"
        raise UserError(f"unknown export format {format_name!r}; choose one of {', '.join(FORMATS)}"
                        f"{others.get(format_name, '')}")
    if artifact.drafter.export_refusal is not None:
        raise UserError(artifact.drafter.export_refusal)
    if format_name == GGUF_FORMAT:
        export_gguf(artifact.drafter, target, out, settings.target_gguf, settings.weights)
    elif format_name == OPENVINO_FORMAT:
        export_openvino(artifact.drafter, target, out, settings.convert_with)
    else:
        EXPORTERS[format_name](artifact.drafter, target, out)
    return out


def export_warning(drafter: Drafter, format_name: str) -> str:
    """A sentence on the part of the drafter that an engine leaves out of the format; empty where there is none."""
    return LOST_BIAS if isinstance(drafter, Eagle) and drafter.config.bias and format_name == "eagle" else ""


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
"""Writers of the formats that need no settings, by name."""
FORMATS: tuple[str, ...] = (*EXPORTERS, GGUF_FORMAT, OPENVINO_FORMAT)
"""Names of formats that `export_artifact` accepts."""
EVERY_FORMAT: tuple[str, ...] = tuple(sorted({*FORMATS, *ADAPTED_FORMATS, SPECDEC_FORMAT}))
"""The same, with those of artifacts that change their target and of acceptance heads."""
