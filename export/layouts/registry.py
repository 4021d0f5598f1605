"""Registry of the checkpoint layouts that an artifact can be exported to."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ...modules import Drafter, Eagle, Target, UserError
from ..artifact import Artifact
from .compressed_tensors import COMPRESSED, as_compressed
from .eagle import EAGLE_FILE, export_eagle, export_eagle_sglang
from .eagle_folder import LOST_BIAS
from .gguf_file import FLOAT32, WEIGHTS, rounded
from .huggingface import export_huggingface
from .hydra import export_hydra
from .kangaroo import export_kangaroo
from .llama_cpp import GGUF_FILE, GGUF_FORMAT, export_gguf
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
    """Number format of the matrices, one of `POSSIBLE_WEIGHTS` of the format."""


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
    require_number_format(format_name, settings.weights)
    if artifact.drafter.export_refusal is not None:
        raise UserError(artifact.drafter.export_refusal)
    if format_name == GGUF_FORMAT:
        export_gguf(artifact.drafter, target, out, settings.target_gguf, settings.weights)
    elif format_name == OPENVINO_FORMAT:
        export_openvino(artifact.drafter, target, out, settings.convert_with)
    elif format_name in COMPRESSING:
        COMPRESSING[format_name](artifact.drafter, target, out, settings.weights)
    else:
        EXPORTERS[format_name](artifact.drafter, target, out)
    return out


def require_number_format(format_name: str, weights: str) -> None:
    """Refuse a number format that no engine reads in this layout. Raises UserError."""
    if weights == FLOAT32:
        return
    if format_name not in POSSIBLE_WEIGHTS:
        raise UserError(f"the format {format_name} holds its weights as they were trained, got weights {weights!r}; "
                        f"leave it out, or choose --format {', '.join(POSSIBLE_WEIGHTS)}")
    if weights not in POSSIBLE_WEIGHTS[format_name]:
        raise UserError(f"weights must be one of {', '.join(POSSIBLE_WEIGHTS[format_name])} in the format "
                        f"{format_name}, got {weights!r}")


def as_exported(format_name: str, weights: str) -> Callable[[Tensor, bool], Tensor]:
    """A weight as an engine reads it from the format, from the one that was trained and whether it is the matrix of a
    linear layer that is no embedding too."""
    if format_name == GGUF_FORMAT:
        return lambda weight, linear: rounded(weight, weights)
    return lambda weight, linear: as_compressed(weight, weights, linear=linear)


def weights_file(format_name: str) -> str:
    """Name of the file of weights of a format in `POSSIBLE_WEIGHTS`."""
    return GGUF_FILE if format_name == GGUF_FORMAT else EAGLE_FILE


def export_warning(drafter: Drafter, format_name: str) -> str:
    """A sentence on the part of the drafter that an engine leaves out of the format; empty where there is none."""
    return LOST_BIAS if isinstance(drafter, Eagle) and drafter.config.bias and format_name == "eagle" else ""


EXPORTERS: dict[str, Callable[[Drafter, Target, Path], None]] = {
    "eagle-sglang": export_eagle_sglang,
    "hydra": export_hydra,
    "kangaroo": export_kangaroo,
    "medusa": export_medusa,
    "medusa-vllm": export_medusa_vllm,
    "ppd": export_ppd,
}
"""Writers of the formats that need no settings, by name."""
COMPRESSING: dict[str, Callable[[Drafter, Target, Path, str], None]] = {
    "eagle": export_eagle,
    "huggingface": export_huggingface,
    "speculators": export_speculators,
}
"""Writers of the formats whose weights may have fewer bits, by name."""
POSSIBLE_WEIGHTS: dict[str, tuple[str, ...]] = {**dict.fromkeys(COMPRESSING, COMPRESSED), GGUF_FORMAT: WEIGHTS}
"""Number formats of matrices by format; the other formats hold them as they were trained."""
FORMATS: tuple[str, ...] = tuple(sorted({*EXPORTERS, *COMPRESSING, GGUF_FORMAT, OPENVINO_FORMAT}))
"""Names of formats that `export_artifact` accepts."""
EVERY_FORMAT: tuple[str, ...] = tuple(sorted({*FORMATS, *ADAPTED_FORMATS, SPECDEC_FORMAT}))
"""The same, with those of artifacts that change their target and of acceptance heads."""
