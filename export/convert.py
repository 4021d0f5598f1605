"""Foreign layouts: what serving engines load, written from an artifact, and read back."""

from pathlib import Path

from ..modules import Medusa, Target
from .artifact import Artifact

FORMATS: tuple[str, ...] = ("medusa",)
"""Names accepted by `export_artifact`."""


def export_artifact(artifact: Artifact, target: Target, format_name: str, out: Path) -> Path:
    """Write `artifact` in the layout of a serving engine to the new or empty folder `out`; returns the folder."""
    raise NotImplementedError


def import_medusa(folder: Path, target: Target) -> Medusa:
    """Read Medusa heads in the FasterDecoding layout (safetensors only) and bind them to `target`."""
    raise NotImplementedError
