"""Answers to questions: decoded with drafts, without drafts and by transformers' `generate`, with the seconds each
takes; and those of the target alone, which several runs share in a file next to data: they are the same for all."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ...modules import Accepted, DecodeResult, Generation, Request, Target, TokenTree, UserError, decode
from ...modules.config_checks import MOST_TOKENS
from ...modules.decoding.recorders import PartCounter, PassRecorder
from ...modules.files.atomic_files import write_file
from ...modules.files.json_records import PROMPT_BYTES, MistypedError, read_json, typed_fields
from ...modules.target.submodel import fields_of
from .contention import clock, machine
from .lossless import generate, native_model
from .methods import SEED, EvaluateConfig, Method
from .results import Timing
from .schedule import UNTIMED_ROWS, Entry

TURN_STREAMS = 1 << 32  # Distance between the random streams of a question's turns: more than there are questions
REFERENCES = "references.json"


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """One turn of a question: its prompt, the same for all methods, and the target's own answer."""

    entry: Entry  # The question
    turn: int  # Its turn, from 1
    temperature: float  # Sampling temperature; 0 is greedy
    prompt: tuple[int, ...]  # Tokens of the conversation up to this turn's answer
    reference: tuple[int, ...] = ()  # The answer of the target alone

    @property
    def index(self) -> int:
        """Number of its random stream."""
        return self.entry.number + (self.turn - 1) * TURN_STREAMS

    @property
    def reference_text(self) -> tuple[int, ...]:
        """The text that the answer may resemble; empty for none."""
        texts = self.entry.question.references
        return tuple(texts[self.turn - 1]) if texts else ()


@dataclass(kw_only=True)
class Records:
    """Answers, timings and target calls of one method."""

    generations: dict[int, Generation] = field(default_factory=dict)  # Answers by `Exchange.index`
    timings: list[Timing] = field(default_factory=list)  # One for each timed group
    target_calls: int = 0  # Forward calls of the target after the prompts'
    recorder: PassRecorder | None = None  # The guesses of all passes, of the method whose answers are shown
    parts: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Accepted guesses of each drafter of an ensemble, by `Exchange.index`; empty with a single drafter."""
    graph_refusal: str = ""  # Why some work was not replayed as CUDA graphs; empty where all was, or none was to be

    def with_untimed(self, untimed: "Records") -> "Records":
        """These timed records and those of the questions that were not timed."""
        return Records(generations={**untimed.generations, **self.generations}, timings=self.timings,
                       target_calls=untimed.target_calls + self.target_calls,
                       recorder=self.recorder, parts={**untimed.parts, **self.parts},
                       graph_refusal=untimed.graph_refusal or self.graph_refusal)


@dataclass(frozen=True)
class TimedDecoder:
    """Decodes exchanges in one call and measures it."""

    target: Target
    config: EvaluateConfig

    def decode(self, asked: Sequence[Exchange], method: Method | None, batch_size: int, *, rows: int | None = None,
               tokens: int | None = None, records: Records | None = None, exact: bool = False,
               on_tokens: Callable[[Generation, list[int], bool], None] | None = None) -> tuple[DecodeResult, float]:
        """This project's loop on exchanges of one temperature: its answers, and the seconds it took. The method, None
        for the target alone, chooses its tree for `batch_size` rows, while `rows` (None for as many) are decoded at
        once. `records` takes the answers and counts of the method; `exact` leaves a lossy rule out."""
        drafter, families = (method.drafter, method.parts) if method else (None, ())
        # The texts that some drafts read besides the prompt go to those alone.
        requests = [Request(
            tokens=exchange.prompt, index=exchange.index, temperature=exchange.temperature,
            max_new_tokens=tokens or self.config.max_new_tokens,
            reference=exchange.reference_text if drafter is not None and drafter.reads_references else (),
            draft_tokens=tuple(exchange.entry.question.draft_tokens) if drafter is not None and drafter.reads_own_text
            else ()) for exchange in asked]
        policy = method.policy_for(batch_size, asked[0].temperature) if method else None
        counter = PartCounter() if len(families) > 1 else None
        observers = [one for one in (counter, records.recorder if records else None) if one is not None]

        def observe(tree: TokenTree, accepted: Accepted, generations: Sequence[Generation]) -> None:
            for one in observers:
                one(tree, accepted, generations)

        started = clock(self.target)
        settings = self.config.settings(rows or batch_size, exact=exact or method is None)
        result = decode(self.target, requests, settings, drafter=drafter, policy=policy, on_tokens=on_tokens,
                        observer=observe if observers else None)
        seconds = clock(self.target) - started
        if records is not None:
            records.parts |= counter.counts(result.generations, len(families)) if counter else {}
            records.graph_refusal = records.graph_refusal or result.stats.graph_refusal
            records.target_calls += result.stats.target_calls
            records.generations |= {one.request.index: one for one in result.generations}
        return result, seconds

    def generate(self, asked: Sequence[Exchange], *, tokens: int | None = None) -> tuple[list[list[int]], float]:
        """transformers' `generate` on all exchanges as one batch: its answers, and the seconds it took."""
        with native_model(self.target) as model:
            started = clock(self.target)
            answers = generate(model, self.target, [exchange.prompt for exchange in asked],
                               max_new_tokens=tokens or self.config.max_new_tokens,
                               temperature=asked[0].temperature, settings=self.config.settings(1))
            return answers, clock(self.target) - started


def untimed_batches(exchanges: Sequence[Exchange]) -> list[list[Exchange]]:
    """Batches for exchanges that are not timed, those of similar lengths together: less is padded."""
    ordered = sorted(exchanges, key=lambda one: len(one.prompt))
    return [ordered[start : start + UNTIMED_ROWS] for start in range(0, len(ordered), UNTIMED_ROWS)]


class References:
    """Store of answers by all that they depend on: target, prompt, settings, versions and machine. Without a file it is
    forgotten with the run. Raises UserError if the file holds anything but references."""

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
            content = {"format": "draftsmith references", "answers": self._known, "sha256": _digest(self._known)}
            write_file(self.file, json.dumps(content, sort_keys=True) + "\n")

    def _key(self, prompt: tuple[int, ...], temperature: float, index: int) -> str:
        stream = [SEED, index] if temperature > 0 else []
        return hashlib.sha256(json.dumps([self._common, prompt, temperature, stream]).encode()).hexdigest()[:32]


def _read(file: Path | None) -> dict[str, list[int]]:
    """The answers in a file; empty if there is no file yet. Raises UserError if it holds anything else, which must not
    be overwritten, or was changed."""
    if file is None or not file.exists():
        return {}
    try:
        content = typed_fields(read_json(file, "", PROMPT_BYTES),
                               {"format": Literal["draftsmith references"], "answers": dict[str, list[int]],
                                "sha256": str})
    except (UserError, MistypedError) as error:
        raise UserError(f"references names {file}, which holds no references; choose another file, or delete "
                        "it") from error
    answers: dict[str, list[int]] = content["answers"]
    # A reference changed by hand would let a fault of drafting pass, or report one where there is none.
    known = all(0 <= token < MOST_TOKENS for answer in answers.values() for token in answer)
    if not known or content["sha256"] != _digest(answers):
        raise UserError(f"references names {file}, which was changed since it was written; delete it, the answers are "
                        "made again")
    return answers


def _digest(answers: dict[str, list[int]]) -> str:
    return hashlib.sha256(json.dumps(answers, sort_keys=True).encode()).hexdigest()
