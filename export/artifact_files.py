"""Files of an artifact's folder: their names, their hashes, JSON read with a remedy."""

import hashlib
import json
from pathlib import Path
from typing import Any

from ..modules import UserError

CONFIG, WEIGHTS, CARD, TUNING = "config.json", "model.safetensors", "README.md", "tuning.json"
HEADS = "acceptance_heads"
"""Folder of the acceptance heads."""
OWNED = frozenset({CONFIG, WEIGHTS, CARD, TUNING, HEADS})
"""All that an artifact holds; a folder with anything else is never replaced."""


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        UserError: if there is none.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"{path} cannot be read as JSON ({error}); copy or train the artifact again") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} holds no JSON object; copy or train the artifact again")
    return value


def sha256(path: Path) -> str:
    """Hex digest of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
