"""Held-out prompts of a folder of data, as lines of a file that only evaluations read."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...modules import UserError
from ..prompts.sources import Prompt, read_prompts
from .token_store import Manifest, corrupted, hash_bytes, read_bytes


def read_held_out(folder: Path) -> list[Prompt]:
    """The prompts of a folder of data that only evaluations ask; none where none were held out.

    Raises:
        UserError: if their file is missing or is not the one that distillation wrote.
    """
    held_out = Manifest.load(folder).held_out
    if held_out is None:
        return []
    file = folder / held_out.file
    if hash_bytes(read_bytes(file)) != held_out.sha256:
        raise UserError(corrupted(file))
    return read_prompts(file) if held_out.prompts else []


def prompt_lines(prompts: Sequence[tuple[int, Prompt]]) -> bytes:
    """Numbered prompts as JSONL that `read_prompts` reads."""
    lines = []
    for number, prompt in prompts:
        row: dict[str, Any] = {
            "question_id": prompt.id,
            "number": number,
            "category": prompt.category,
            "system": prompt.system,
            "turns": list(prompt.turns),
        }
        lines.append(
            json.dumps({key: value for key, value in row.items() if value is not None}, ensure_ascii=False) + "\n"
        )
    return "".join(lines).encode()
