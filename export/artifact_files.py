"""Names of the files and folders of an artifact, and the text of its JSON files."""

import json
from typing import Any

CONFIG, WEIGHTS, CARD, TUNING = "config.json", "model.safetensors", "README.md", "tuning.json"
ACCEPTANCE = "acceptance.json"  # The file with what the target accepts, by position
HEADS = "acceptance_heads.safetensors"  # The file of the acceptance heads
CHANGING = frozenset({TUNING, ACCEPTANCE, HEADS})  # Files of an artifact that are written later than the others
AGAIN = "copy or train the artifact again"  # Remedy for a damaged artifact


def as_json(value: Any) -> str:
    """Indented, keys in order, so that equal values give equal bytes."""
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
