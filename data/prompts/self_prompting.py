"""Prompts written by the target itself (Magpie, arXiv:2406.08464).

An instruct model that continues the tokens before a user's turn writes a message like a user's. Its text up to the end
of that turn is a prompt; no prompt set is needed. A system prompt before the turn can ask for a kind of message, or the
message's first words can be given (`prompt_kinds`)."""

import hashlib
import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ...modules import DecodeSettings, DecodeStats, Generation, Request, Target, UserError, decode
from ...modules.decoding.requests import repeats_itself
from .chat import ChatTemplate
from .prompt import Prompt
from .prompt_kinds import SYSTEM_PROMPTS, UNSTEERED, drawn, named_kinds
from .sources import PromptConfig, ReadPrompts, Taken

OPENING_TOKENS = 16  # Tokens of a prompt by a base model without a template: the start of a text to be continued
TOP_P = 0.95  # Nucleus from which the target draws its prompts
RECORDED = Path(__file__).with_name("recorded.jsonl")
"""Candidates 0, 1, ... that the embedded target wrote once (`tests/benchmarks/record_prompts.py`), since to write them
takes as long as to answer them. First comes `OwnPrompts.origin`, then the text of each, empty where it is unusable."""


class OwnPrompts:
    """Candidates that the target writes, so many slots at once; candidate n is a pure function of the weights, the
    config and the seed of the run. None is written twice: what is recorded for these weights and settings is read, and
    what was written is kept. `check` raises UserError for the number and the prompt of one that cannot be used, which
    is left out.

    Raises UserError if kinds are asked for and the chat template cannot show them."""

    def __init__(self, target: Target, template: ChatTemplate, config: PromptConfig, *, seed: int, slots: int,
                 check: Callable[[int, Prompt], None] = lambda *_: None) -> None:
        self.target, self.template, self.config, self.seed, self.check = target, template, config, seed, check
        self.total = config.limit  # Largest number of candidates; None where there is no limit
        self.around = template.user_turn()
        self.plain = template.source is None
        self.kinds = (UNSTEERED,) if config.own_kinds is None else named_kinds(config.own_kinds)
        self.befores = dict.fromkeys(self.kinds, self.around.before)  # Tokens after which one of each kind is written
        if config.own_kinds is not None and not config.own_openings:
            # The system prompt of each kind stands before its prompts, and must be seen there: a template that drops
            # it would give prompts of no kind at all.
            if self.plain:
                raise UserError("prompts.own_kinds without prompts.own_openings needs a chat template, and this target "
                                "has none; set prompts.own_openings: true")
            for kind in (one for one in self.kinds if one != UNSTEERED):
                asked = f"prompts.own_kinds asks for {kind} by a system prompt, which the chat template of this target"
                try:
                    shown = template.user_turn([{"role": "system", "content": SYSTEM_PROMPTS[kind]}])
                except UserError as error:
                    raise UserError(f"{asked} refuses ({error}); leave prompts.own_kinds out") from error
                if shown == self.around:
                    raise UserError(f"{asked} does not show; leave prompts.own_kinds out")
                self.befores[kind] = shown.before
        self.stats = DecodeStats()
        self.watch: Callable[[], None] = lambda: None  # Called in every pass; what it raises ends the writing
        # An end token of the target ends a message; where the template writes something else after one, that text does.
        end = self.around.after
        stop = () if not end or end[0] in target.eos_ids else (target.tokenizer.decode(list(end)),)
        # Streams of their own: prompt n and answer n would otherwise draw the same numbers.
        stream = int.from_bytes(hashlib.sha256(f"prompts {seed}".encode()).digest()[:8], "little")
        self.settings = DecodeSettings(batch_size=slots, top_p=TOP_P, seed=stream, stop=stop)

    @property
    def origin(self) -> dict[str, Any]:
        """All that decides the candidates, as JSON has it."""
        return {"target": self.target.identity.weights_hash, "tokens": self.target.identity.tokens_hash,
                "befores": {kind: list(tokens) for kind, tokens in self.befores.items()},
                "stop": list(self.settings.stop), "seed": self.seed, "top_p": TOP_P,
                **{name: getattr(self.config, name) for name in ("own_max_tokens", "own_temperature", "own_openings")}}

    @cached_property
    def texts(self) -> dict[int, str]:
        """Candidates that are known, by number; the text of an unusable one is empty."""
        with RECORDED.open(encoding="utf-8") as lines:
            known = json.loads(next(lines)) == self.origin
            return {number: json.loads(line) for number, line in enumerate(lines)} if known else {}

    def take(self, start: int, count: int) -> Taken:
        """Candidates start to start + count - 1, without the unusable ones."""
        limit = self.config.limit
        numbers = range(start, start + (count if limit is None else max(0, min(count, limit - start))))
        self.texts.update(self._written(number for number in numbers if number not in self.texts))
        prompts = []
        for number in numbers:
            if text := self.texts[number]:
                prompt = Prompt.from_turns(text, id=str(number), category="own")
                with suppress(UserError):
                    self.check(number, prompt)
                    prompts.append((number, prompt))
        return Taken(prompts=prompts, read=len(numbers))

    def _written(self, numbers: Iterable[int]) -> dict[int, str]:
        """These candidates, written now."""
        longest = min(OPENING_TOKENS, self.config.own_max_tokens) if self.plain else self.config.own_max_tokens
        openings, requests = dict[int, str](), list[Request]()
        for number in numbers:
            kind, opening = drawn(self.kinds, self.seed, number)
            openings[number] = opening if self.config.own_openings else ""
            first = self.target.tokenizer(openings[number], add_special_tokens=False)["input_ids"]
            tokens = (*self.befores[kind], *first)
            # A kind's system prompt may fill a short context; such a candidate counts as read and unusable.
            if len(tokens) + longest <= self.target.context_length:
                requests.append(Request(tokens, number, longest, self.config.own_temperature))
        found = dict.fromkeys(openings, "")
        if not requests:
            return found
        # Every slot holds a whole chunk of its prompt, so a chunk is no longer than the longest prompt.
        chunk = min(self.settings.prefill_chunk, max(len(request.tokens) for request in requests))
        result = decode(self.target, requests, replace(self.settings, prefill_chunk=chunk),
                        on_tokens=lambda *_: self.watch())
        self.stats.add(result.stats)
        for generation in result.generations:
            number = generation.request.index
            if text := self._text(generation):
                found[number] = f"{openings[number]}{text}".strip()
        return found

    def _text(self, generation: Generation) -> str:
        """The text of a turn, empty where it is not usable: cut off, repetitive, or with special tokens inside."""
        tokens = generation.tokens
        # A base model's text is a beginning that may stop anywhere; a message that was cut is none that a user sends.
        if not self.plain:
            if generation.finish == "length":
                return ""
            if self.settings.stop:
                # The text that ends a turn may share its first token with the turn's last word.
                before = self.target.tokenizer.decode(list(tokens)).split(self.settings.stop[0])[0]
                tokens = list(self.target.tokenizer(before, add_special_tokens=False)["input_ids"])
            else:
                tokens = list(tokens[:-1])
        # Special tokens inside are a turn of another role; repetitions are where a small model got stuck.
        special = set(self.target.tokenizer.all_special_ids)
        if special & set(tokens) or repeats_itself(tokens):
            return ""
        text: str = self.target.tokenizer.decode(tokens)
        return text if any(character.isalpha() for character in text) else ""


Source = OwnPrompts | ReadPrompts  # Numbered candidates for prompts; candidate n is the same whenever it is asked for
