"""What the target alone answered, kept beside data that several runs share: it is the same for all of them."""

import hashlib
import json
from pathlib import Path
from typing import Any

from ...modules import Target, UserError
from ...modules.atomic_files import write_file
from ...modules.target.submodel import fields_of
from .contention import machine
from .methods import EvaluateConfig

REFERENCES = "references.json"
_FORMAT = "draftsmith references"


class References:
    """Answers by all that they depend on: the target, the prompt, the settings and the versions that decoded them.

    Args:
        file: where they are kept; None keeps nothing.
        target: who answers.
        config: how.

    Raises:
        UserError: if the file holds something else.
    """

    def __init__(self, file: Path | None, target: Target, config: EvaluateConfig) -> None:
        self.file = file
        self._known = _read(file)
        where = machine(target)
        self._common = [target.identity.weights_hash, fields_of(target.config), target.eos_ids, where,
                        target.packed is not None, config.max_new_tokens, config.top_k, config.top_p]
        self._seed = config.seed

    def find(self, prompt: tuple[int, ...], temperature: float, index: int) -> tuple[int, ...] | None:
        """The answer to a prompt; None where it has not been given yet.

        Args:
            prompt: its tokens.
            temperature: 0 is greedy.
            index: the random stream of a sampled answer.
        """
        found = self._known.get(self._key(prompt, temperature, index))
        return None if found is None else tuple(found)

    def note(self, prompt: tuple[int, ...], temperature: float, index: int, answer: tuple[int, ...]) -> None:
        """Take in an answer."""
        self._known[self._key(prompt, temperature, index)] = list(answer)

    def save(self) -> None:
        """Write what is known, beside what others have written meanwhile, for runs to come."""
        if self.file is not None:
            self._known = {**_read(self.file), **self._known}
            content = {"format": _FORMAT, "answers": self._known}
            write_file(self.file, json.dumps(content, sort_keys=True) + "\n")

    def _key(self, prompt: tuple[int, ...], temperature: float, index: int) -> str:
        stream = [self._seed, index] if temperature > 0 else []
        return hashlib.sha256(json.dumps([self._common, prompt, temperature, stream]).encode()).hexdigest()[:32]


def _read(file: Path | None) -> dict[str, list[int]]:
    """What a file holds; nothing where there is none yet.

    Raises:
        UserError: if it holds something else: it is not ours to write over.
    """
    if file is None or not file.exists():
        return {}
    try:
        content: Any = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        content = None
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise UserError(f"references names {file}, which holds no references; choose another file, or delete it")
    answers: dict[str, list[int]] = content["answers"]
    return answers
