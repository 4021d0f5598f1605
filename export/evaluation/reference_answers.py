"""Answers of the target alone, kept in a file next to data that several runs share: they are the same for all."""

import hashlib
import json
from pathlib import Path

from ...modules import Target, UserError
from ...modules.config_checks import MOST_TOKENS
from ...modules.files.atomic_files import write_file
from ...modules.files.json_records import PROMPT_BYTES, MistypedError, read_json, typed_fields
from ...modules.target.submodel import fields_of
from .contention import machine
from .methods import SEED, EvaluateConfig

REFERENCES = "references.json"
_FORMAT = "draftsmith references"


class References:
    """Store of answers by all that they depend on: target, prompt, settings, versions and machine. Without a file it is
    forgotten with the run.

    Raises:
        UserError: if the file holds anything but references.
    """

    def __init__(self, file: Path | None, target: Target, config: EvaluateConfig) -> None:
        self.file = file
        self._known, self._added = _read(file), False
        where = machine(target)
        self._common = [target.identity.weights_hash, fields_of(target.config), target.eos_ids, vars(target.biases),
                        where, target.linears.packing.packed_from, config.max_new_tokens, config.top_k, config.top_p,
                        config.repetition_penalty]

    def find(self, prompt: tuple[int, ...], temperature: float, index: int) -> tuple[int, ...] | None:
        """The known answer to a prompt, of a sampled one from the random stream `index`; None if there is none yet."""
        found = self._known.get(self._key(prompt, temperature, index))
        return None if found is None else tuple(found)

    def add(self, prompt: tuple[int, ...], temperature: float, index: int, answer: tuple[int, ...]) -> None:
        """Add an answer; `save` writes it."""
        self._known[self._key(prompt, temperature, index)] = list(answer)
        self._added = True

    def save(self) -> None:
        """Write all known answers, if some were added, and those that other runs have added to the file meanwhile."""
        if self.file is not None and self._added:
            self._added = False
            # Read again, since a run next to this one may have added to the file.
            self._known = {**_read(self.file), **self._known}
            content = {"format": _FORMAT, "answers": self._known, "sha256": _digest(self._known)}
            write_file(self.file, json.dumps(content, sort_keys=True) + "\n")

    def _key(self, prompt: tuple[int, ...], temperature: float, index: int) -> str:
        stream = [SEED, index] if temperature > 0 else []
        return hashlib.sha256(json.dumps([self._common, prompt, temperature, stream]).encode()).hexdigest()[:32]


def _read(file: Path | None) -> dict[str, list[int]]:
    """The answers in a file; empty if there is no file yet.

    Raises:
        UserError: if it holds anything else, which must not be overwritten, or was changed.
    """
    if file is None or not file.exists():
        return {}
    try:
        content = typed_fields(read_json(file, "", PROMPT_BYTES),
                               {"format": str, "answers": dict[str, list[int]], "sha256": str})
    except (UserError, MistypedError) as error:
        raise UserError(f"references names {file}, which holds no references; choose another file, or delete "
                        "it") from error
    if content["format"] != _FORMAT:
        raise UserError(f"references names {file}, which holds no references; choose another file, or delete it")
    answers: dict[str, list[int]] = content["answers"]
    # A reference changed by hand would let a fault of drafting pass, or report one where there is none.
    known = all(0 <= token < MOST_TOKENS for answer in answers.values() for token in answer)
    if not known or content["sha256"] != _digest(answers):
        raise UserError(f"references names {file}, which was changed since it was written; delete it, the answers are "
                        "made again")
    return answers


def _digest(answers: dict[str, list[int]]) -> str:
    return hashlib.sha256(json.dumps(answers, sort_keys=True).encode()).hexdigest()
