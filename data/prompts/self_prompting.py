"""Prompts written by the target itself (Magpie, arXiv:2406.08464).

An instruct model that continues the tokens before a user's turn writes a message like a user's. Its text up to the end
of that turn is a prompt; no prompt set is needed. A system prompt before the turn can ask for a kind of message, or the
message's first words can be given (`prompt_kinds`). After an answer the target writes the user's next message.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ...modules import DecodeSettings, DecodeStats, Generation, Request, Target, UserError, decode, repeats_itself
from .chat import ChatTemplate, Message, Surroundings
from .prompt_kinds import SYSTEM_PROMPTS, UNSTEERED, drawn_kind, drawn_opening, drawn_turns, named_kinds
from .sources import Prompt, PromptConfig, Taken

OPENING_TOKENS = 16
"""Tokens of a prompt that a base model without a chat template writes: the start of a text to be continued."""


@dataclass(kw_only=True)
class _Draft:
    """A conversation that is being written."""

    number: int
    system: tuple[Message, ...]
    """The system message that asks for its kind; none where nothing is asked for."""
    opening: str
    """First words of its first message, which the target goes on from; may be empty."""
    wanted: int
    """User turns that it is to have."""
    said: list[Message] = field(default_factory=list)
    """Its user turns, and the answers between them."""

    @property
    def turns(self) -> tuple[str, ...]:
        """The text of its user turns."""
        return tuple(message["content"] for message in self.said if message["role"] == "user")

    @property
    def given(self) -> str:
        """First words of its next user turn, which are given: those of the first, none of a later one."""
        return "" if self.said else self.opening


class OwnPrompts:
    """Candidates that the target writes; candidate n is a pure function of the weights, the config and the seed.

    Args:
        target: writes them, and the answers between the turns of a conversation.
        template: of its tokenizer.
        config: how they are written.
        seed: of the run.
        slots: conversations written at once.
        answer_tokens: tokens of the longest answer between two turns.

    Raises:
        UserError: if kinds or several turns are asked for and the chat template cannot show them.
    """

    def __init__(self, target: Target, template: ChatTemplate, config: PromptConfig, *, seed: int, slots: int,
                 answer_tokens: int) -> None:
        self.target, self.template, self.config, self.seed = target, template, config, seed
        self.answer_tokens = answer_tokens
        self.around = template.user_turn()
        self.plain = template.source is None
        self.kinds = (UNSTEERED,) if config.own_kinds is None else named_kinds(config.own_kinds)
        self.asked_kinds = () if config.own_openings else tuple(kind for kind in self.kinds if kind != UNSTEERED)
        self.most_turns = config.own_turns or 1
        self._check_template()
        self.stats = DecodeStats()
        end = self.around.after
        stop = () if not end or end[0] in target.eos_ids else (target.tokenizer.decode(list(end)),)
        self.settings = DecodeSettings(batch_size=slots, top_p=config.own_top_p, seed=prompt_seed(seed), stop=stop)

    def _check_template(self) -> None:
        """Refuse a template that has no system prompts or no turns where the config needs them."""
        steered = self.config.own_kinds is not None and not self.config.own_openings
        if self.plain and (steered or self.most_turns > 1):
            raise UserError("prompts.own_kinds without prompts.own_openings, and prompts.own_turns, need a chat "
                            "template, and this target has none; set prompts.own_openings: true, and leave "
                            "prompts.own_turns out")
        for kind in self.asked_kinds:
            if self._shown(kind) == self.around:
                raise UserError(f"prompts.own_kinds asks for {kind} by a system prompt, which the chat template of "
                                "this target does not show; leave prompts.own_kinds out")

    def _shown(self, kind: str) -> Surroundings:
        try:
            return self.template.user_turn(_system(kind))
        except UserError as error:
            raise UserError(f"prompts.own_kinds asks for {kind} by a system prompt, which the chat template of this "
                            f"target refuses ({error}); leave prompts.own_kinds out") from error

    @property
    def total(self) -> int | None:
        """The config's limit; None without one."""
        return self.config.limit

    def take(self, start: int, count: int) -> Taken:
        """Write candidates start to start + count - 1 and keep the usable ones."""
        limit = self.config.limit
        count = count if limit is None else max(0, min(count, limit - start))
        drafts = [self._draft(start + place) for place in range(count)]
        self._write_turn(drafts, 0)
        for turn in range(1, self.most_turns):
            longer = [draft for draft in drafts if len(draft.turns) == turn < draft.wanted]
            self._answer(longer)
            self._write_turn(longer, turn)
        prompts = [(draft.number, Prompt(turns=draft.turns, id=str(draft.number), category="own"))
                   for draft in drafts if draft.turns]
        return Taken(prompts=prompts, read=count)

    def _draft(self, number: int) -> _Draft:
        """An empty conversation of the kind and length drawn for its number."""
        kind = drawn_kind(self.kinds, self.seed, number)
        opening = drawn_opening(kind, self.seed, number) if self.config.own_openings else ""
        return _Draft(number=number, system=_system(kind) if kind in self.asked_kinds else (), opening=opening,
                      wanted=drawn_turns(self.most_turns, self.seed, number))

    def _write_turn(self, drafts: Sequence[_Draft], turn: int) -> None:
        """Add the next user turn to each conversation where it is usable, with random streams of its own."""
        longest = min(OPENING_TOKENS, self.config.own_max_tokens) if self.plain else self.config.own_max_tokens
        asked = [(draft, self._before(draft)) for draft in drafts]
        settings = replace(self.settings, seed=prompt_seed(self.seed, turn))
        for draft, generation in self._decoded(asked, longest, self.config.own_temperature, settings):
            if text := self._text(generation):
                draft.said.append({"role": "user", "content": f"{draft.given}{text}".strip()})

    def _before(self, draft: _Draft) -> tuple[int, ...]:
        """The tokens after which the next user turn is written."""
        before = self.template.user_turn([*draft.system, *draft.said]).before
        return (*before, *self.target.tokenizer(draft.given, add_special_tokens=False)["input_ids"])

    def _answer(self, drafts: Sequence[_Draft]) -> None:
        """Answer the newest turn of each conversation greedily, without the system prompt that asked for its kind."""
        asked = [(draft, tuple(self.template.prompt(draft.said))) for draft in drafts]
        for draft, generation in self._decoded(asked, self.answer_tokens, 0.0, replace(self.settings, stop=())):
            text = str(self.target.tokenizer.decode(generation.tokens, skip_special_tokens=True))
            draft.said.append({"role": "assistant", "content": text})

    def _decoded(self, asked: Sequence[tuple[_Draft, tuple[int, ...]]], longest: int, temperature: float,
                 settings: DecodeSettings) -> list[tuple[_Draft, Generation]]:
        """The text that the target writes after these tokens; conversations that fill its context are left out."""
        fitting = {draft.number: (draft, tokens) for draft, tokens in asked
                   if len(tokens) + longest <= self.target.context_length}
        requests = [Request(tokens, number, longest, temperature) for number, (_, tokens) in fitting.items()]
        if not requests:
            return []
        chunk = min(settings.prefill_chunk, max(len(request.tokens) for request in requests))
        result = decode(self.target, requests, replace(settings, prefill_chunk=chunk))
        self.stats.add(result.stats)
        return [(fitting[generation.request.index][0], generation) for generation in result.generations]

    def _text(self, generation: Generation) -> str:
        """The text of a turn, empty where it is not usable: cut off, repetitive, or with special tokens inside."""
        tokens = generation.tokens
        if not self.plain:
            if generation.finish == "length":
                return ""
            tokens = self._before_end(tokens)
        special = set(self.target.tokenizer.all_special_ids)
        if special & set(tokens) or repeats_itself(tokens):
            return ""
        text: str = self.target.tokenizer.decode(tokens)
        return text if any(character.isalpha() for character in text) else ""

    def _before_end(self, tokens: Sequence[int]) -> list[int]:
        """The tokens without the end of the turn."""
        if not self.settings.stop:
            return list(tokens[:-1])
        text = self.target.tokenizer.decode(list(tokens)).split(self.settings.stop[0])[0]
        return list(self.target.tokenizer(text, add_special_tokens=False)["input_ids"])


def _system(kind: str) -> tuple[Message, ...]:
    """The system message that asks for a kind."""
    return ({"role": "system", "content": SYSTEM_PROMPTS[kind]},)


def prompt_seed(seed: int, turn: int = 0) -> int:
    """Seed of the random streams of a user turn, different from those of other turns and of the answers."""
    words = f"prompts {seed}" if turn == 0 else f"prompts {seed} turn {turn}"
    return int.from_bytes(hashlib.sha256(words.encode()).digest()[:8], "little")
