"""Prompts written by the target itself (Magpie, arXiv:2406.08464).

An instruct model that continues the tokens before a user's turn writes a message like a user's. Its text up to the end
of that turn is a prompt; no prompt set is needed.
"""

import hashlib
from collections.abc import Sequence

from ..modules import DecodeSettings, DecodeStats, Generation, Request, Target, decode, repeats_itself
from .chat import ChatTemplate
from .prompts import Prompt, PromptConfig, Taken

OPENING_TOKENS = 16
"""Tokens of a prompt that a base model without a chat template writes: the start of a text to be continued."""


class OwnPrompts:
    """Candidates that the target writes; candidate n is a pure function of the weights, the config and the seed."""

    def __init__(self, target: Target, template: ChatTemplate, config: PromptConfig, *, seed: int, slots: int) -> None:
        self.target, self.config = target, config
        self.around = template.user_turn()
        self.plain = template.source is None
        self.stats = DecodeStats()
        end = self.around.after
        stop = () if not end or end[0] in target.eos_ids else (target.tokenizer.decode(list(end)),)
        self.settings = DecodeSettings(
            batch_size=slots,
            prefill_chunk=len(self.around.before),
            top_p=config.own_top_p,
            seed=prompt_seed(seed),
            stop=stop,
        )

    @property
    def total(self) -> int | None:
        """The config's limit; None without one."""
        return self.config.limit

    def take(self, start: int, count: int) -> Taken:
        """Write candidates start to start + count - 1 and keep the usable ones."""
        limit = self.config.limit
        count = count if limit is None else max(0, min(count, limit - start))
        longest = min(OPENING_TOKENS, self.config.own_max_tokens) if self.plain else self.config.own_max_tokens
        requests = [
            Request(self.around.before, start + place, longest, self.config.own_temperature) for place in range(count)
        ]
        result = decode(self.target, requests, self.settings)
        self.stats.add(result.stats)
        texts = ((generation.request.index, self._text(generation)) for generation in result.generations)
        prompts = [(number, Prompt(turns=(text,), id=str(number), category="own")) for number, text in texts if text]
        return Taken(prompts=prompts, read=count)

    def _text(self, generation: Generation) -> str:
        """The prompt's text, empty where it is not usable: cut off, repetitive, or with special tokens inside."""
        tokens = generation.tokens
        if not self.plain:
            if generation.finish == "length":
                return ""
            tokens = self._before_end(tokens)
        special = set(self.target.tokenizer.all_special_ids)
        if special & set(tokens) or repeats_itself(tokens):
            return ""
        text: str = self.target.tokenizer.decode(tokens).strip()
        return text if any(character.isalpha() for character in text) else ""

    def _before_end(self, tokens: Sequence[int]) -> list[int]:
        """The tokens without the end of the turn."""
        if not self.settings.stop:
            return list(tokens[:-1])
        text = self.target.tokenizer.decode(list(tokens)).split(self.settings.stop[0])[0]
        return list(self.target.tokenizer(text, add_special_tokens=False)["input_ids"])


def prompt_seed(seed: int) -> int:
    """Seed of the prompts' random streams, different from those of the answers."""
    return int.from_bytes(hashlib.sha256(f"prompts {seed}".encode()).digest()[:8], "little")
