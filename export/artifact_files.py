"""Files of an artifact's folder: their names, their hashes, JSON read with a remedy."""

import hashlib
import json
from pathlib import Path
from typing import Any

from ..modules import UserError
from ..modules.bounded_reading import bounded_json, read_bounded_text

CONFIG, WEIGHTS, CARD, TUNING = "config.json", "model.safetensors", "README.md", "tuning.json"
HEADS = "acceptance_heads"
"""Folder of the acceptance heads."""


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        UserError: if there is none.
    """
    try:
        value = bounded_json(read_bounded_text(path))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"{path} cannot be read as JSON ({error}); copy or train the artifact again") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} holds no JSON object; copy or train the artifact again")
    return value


def sha256(path: Path) -> str:
    """Hex digest of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
