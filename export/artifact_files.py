"""Files of an artifact's folder: their names and hashes."""

import hashlib
from pathlib import Path

CONFIG, WEIGHTS, CARD, TUNING = "config.json", "model.safetensors", "README.md", "tuning.json"
HEADS = "acceptance_heads"
"""Folder of the acceptance heads."""
HEAD = "acceptance head"
"""The kind of each folder in it."""


def sha256(path: Path) -> str:
    """Hex digest of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
