"""What the target alone answered, kept beside data that several runs share: it is the same for all of them."""

import hashlib
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from ..modules import Target
from .files import write_file
from .plan import EvaluateConfig

REFERENCES = "references.json"


class References:
    """Answers by all that they depend on: the target, the prompt, the settings and the versions that decoded them.

    Args:
        file: where they are kept; None keeps nothing.
        target: who answers.
        config: how.
    """

    def __init__(self, file: Path | None, target: Target, config: EvaluateConfig) -> None:
        self.file = file
        self._known: dict[str, list[int]] = _read(file)
        self._common = [target.identity.weights_hash, str(target.dtype), target.device.type, config.max_new_tokens,
                        config.top_k, config.top_p, version("torch"), version("transformers"),
                        torch.get_num_threads()]
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
        """Write what is known, for runs to come."""
        if self.file is not None:
            write_file(self.file, json.dumps(self._known, sort_keys=True) + "\n")

    def _key(self, prompt: tuple[int, ...], temperature: float, index: int) -> str:
        stream = [self._seed, index] if temperature > 0 else []
        return hashlib.sha256(json.dumps([self._common, prompt, temperature, stream]).encode()).hexdigest()[:32]


def _read(file: Path | None) -> dict[str, list[int]]:
    """What a file holds; a lost or damaged one only costs the time to answer again."""
    try:
        content: Any = {} if file is None else json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
