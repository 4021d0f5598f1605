"""Tokens of chat messages, each marked as written by the assistant or not.

The mask is never found by searching for text. Where the template marks the assistant's words with `{% generation %}`,
the marks are used; elsewhere the conversation is rendered message by message, and what an answer adds to its prompt,
token for token, is the answer. Where neither is exact, the conversation is refused.
"""

import hashlib
import json
import re
import string
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from jinja2.exceptions import TemplateError

from ...modules import UserError
from .bounded_template import bounded_rendering, check_length, refuse_powers
from .prompt import Message

MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
DATE = "26 Jul 2024"
"""Llama 3 writes today's date into its prompt unless it is given one: a recipe must give the same tokens tomorrow."""
REMEDY = (
    "put {% generation %} ... {% endgeneration %} around the assistant's words in the template "
    "(target.chat_template), or let the target answer (distill.answered_by: target)"
)
TEMPLATE_FAILS = "the chat template fails: {}; change the messages, or set target.chat_template"
BOUNDARY_PROBES = tuple(string.ascii_letters + string.digits)


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One answer with the tokens before it."""

    prompt: list[int]
    """Everything before the answer, the generation prompt included."""
    answer: list[int]
    """Tokens of the assistant, the token that ends its turn included."""


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """Tokens of the template around a message."""

    before: tuple[int, ...]
    """Tokens before its text."""
    after: tuple[int, ...]
    """Tokens after its text."""


@contextmanager
def explained_template() -> Iterator[None]:
    """Turn what a chat template raises into one sentence: it is a program, and may divide by zero or call itself."""
    try:
        yield
    except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError, AssertionError,
            RecursionError, MemoryError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(TEMPLATE_FAILS.format(reason)) from error


class ChatTemplate:
    """A tokenizer's chat template with the settings that change what it renders.

    A tokenizer without a chat template renders plain text: system and user texts stand in paragraphs of their own, an
    answer follows its prompt directly.

    Args:
        tokenizer: of the target.
        system: system prompt of every conversation that brings none; None leaves it to the template.
        tools: JSON schemas of the tools the template may show.
        enable_thinking: passed to templates that know it; None leaves it to the template.

    Raises:
        UserError: if the template is not valid Jinja.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        system: str | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
        enable_thinking: bool | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.system = system
        self.tools = None if tools is None else list(tools)
        self.source: str | None = None
        if tokenizer.chat_template:
            try:
                self.source = str(tokenizer.get_chat_template(None, self.tools))
            except ValueError as error:
                raise UserError(f"no chat template to choose: {error}; set target.chat_template to a file") from error
        self.settings: dict[str, Any] = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        if self.source is not None and "date_string" in self.source:
            self.settings["date_string"] = DATE
        self.marked = self.source is not None and MARK.search(self.source) is not None
        """True where the template itself marks the assistant's words."""
        # Both take several renderings, and are needed only where text brings its own answers.
        self._answer_end: list[int] | None = None
        self._marks_checked = False
        if self.source is not None:
            refuse_powers(self.source)
            # A template that is no valid Jinja is refused now, not after the target has been loaded and asked.
            self._text([{"role": "user", "content": "a"}], generation_prompt=True)

    @property
    def hash(self) -> str:
        """SHA-256 of everything that decides what is rendered."""
        parts = {
            "template": self.source,
            "system": self.system,
            "tools": self.tools,
            "settings": self.settings,
            "special": {name: str(token) for name, token in self.tokenizer.special_tokens_map.items()},
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True, ensure_ascii=False).encode()).hexdigest()

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Tokens up to the start of the assistant's next answer, the generation prompt included.

        Raises:
            UserError: if the template refuses the messages, or nothing is left of them.
        """
        if self.source is None:
            tokens = self._plain(messages)
        else:
            tokens = self._encode(self._text(messages, generation_prompt=True))
        if not tokens:
            raise UserError("a prompt has no token at all; give some text")
        return tokens

    def rows(self, messages: Sequence[Message]) -> list[tuple[list[int], list[bool]]]:
        """The conversation as (tokens, supervised) rows: one, or several where the template rewrites earlier turns.

        Raises:
            UserError: if the mask cannot be had exactly; the message says what to do.
        """
        if not any(message["role"] == "assistant" for message in messages):
            raise UserError("a conversation without an answer holds no label; give an assistant message")
        if self.marked:
            # Marks are exact or they are not, whatever the conversation: one look is enough.
            if not self._marks_checked:
                self._check_marks()
                self._marks_checked = True
            return [self._marked_tokens(messages)]
        return join_turns(self.turns(messages))

    def turns(self, messages: Sequence[Message]) -> list[Turn]:
        """Each answer with the prompt before it, by rendering up to it and past it.

        Raises:
            UserError: if an answer is not exactly what its rendering adds to its prompt.
        """
        answered = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        if self.source is None:
            return [Turn(prompt=self.prompt(messages[:place]), answer=self._encode(messages[place]["content"]))
                    for place in answered]
        turns = [self._added(messages[:place], messages[place]) for place in answered]
        if self._answer_end is None:
            # Answers that share no character share only what the template writes after them.
            user = {"role": "user", "content": self._probes()[0]}
            added = [self._added([user], {"role": "assistant", "content": probe})[1] for probe in self._probes()]
            self._answer_end = common_prefix([tokens[::-1] for tokens in added])[::-1]
        end = self._answer_end
        # The assistant writes the end up to its first special token; a line break after that is the template's.
        special = {*self.tokenizer.all_special_ids, *self.tokenizer.get_added_vocab().values()}
        written = next((place + 1 for place, token in enumerate(end) if token in special), 0)
        found = []
        for place, (prompt, tokens) in zip(answered, turns, strict=True):
            if tokens[len(tokens) - len(end) :] != end:
                raise UserError(f"the end of the answer {_short(messages[place]['content'])} and the template's text "
                                f"after it share a token; {REMEDY}")
            found.append(Turn(prompt=prompt, answer=tokens[: len(tokens) - len(end) + written]))
        return found

    def document(self, text: str) -> tuple[list[int], list[bool]]:
        """(tokens, supervised) of plain text outside the template: all of it but the start token is supervised."""
        tokens = list(self.tokenizer(text, verbose=False)["input_ids"])
        bare = self._encode(text)
        # Some tokenizers end every text, but here an answer goes on from it.
        while tokens and len(tokens) > len(bare) and tokens[-1] == self.tokenizer.eos_token_id:
            tokens.pop()
        start = len(tokens) - len(bare)
        return tokens, [place >= start for place in range(len(tokens))]

    def user_turn(self, history: Sequence[Message] = ()) -> Surroundings:
        """Tokens around a user's next message after `history`, all before it included: a target that continues `before`
        writes one.

        Raises:
            UserError: if the template refuses the messages.
        """
        before, after = list[int](), list[int]()
        if self.source is None:
            before = self._plain(history)
        else:
            messages = [[*history, {"role": "user", "content": probe}] for probe in self._probes()]
            # What texts without a common token share is the template's. Some templates write the end of the user's
            # turn only together with the header of the assistant's.
            for generation_prompt in (False, True):
                rendered = [self._encode(self._text(one, generation_prompt=generation_prompt)) for one in messages]
                shared = common_prefix(rendered)
                before = before if generation_prompt else shared
                after = common_prefix([tokens[len(shared) :][::-1] for tokens in rendered])[::-1]
                if after:
                    break
        if not before:
            # Nothing can be written from no token at all: the tokenizer's start token stands for an empty text.
            starts = (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id)
            before = [int(token) for token in starts if token is not None][:1]
        if not before:
            raise UserError("this tokenizer has no start token to write prompts from; give a file (prompts.origin: "
                            "file)")
        return Surroundings(before=tuple(before), after=tuple(after))

    # Rendering -------------------------------------------------------------------------------------------------------

    def _with_system(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        own = [dict(message) for message in messages]
        if self.system is None or (own and own[0]["role"] == "system"):
            return own
        return [{"role": "system", "content": self.system}, *own]

    def _text(self, messages: Sequence[Message], *, generation_prompt: bool) -> str:
        with explained_template(), bounded_rendering():
            text = self.tokenizer.apply_chat_template(
                self._with_system(messages),
                tools=self.tools,
                tokenize=False,
                add_generation_prompt=generation_prompt,
                **self.settings,
            )
            return check_length(str(text))

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _plain(self, messages: Sequence[Message]) -> list[int]:
        """Tokens of plain text, with the start token where the tokenizer puts one, never with an end token."""
        text = ""
        for message in self._with_system(messages):
            gap = "\n\n" if text and message["role"] != "assistant" else ""
            text += gap + message["content"]
        return self.document(text)[0]

    def _added(self, before: Sequence[Message], answer: Message) -> tuple[list[int], list[int]]:
        """Tokens of the prompt, and those that rendering the answer adds to them."""
        prompt = self.prompt(before)
        whole = self._encode(self._text([*before, answer], generation_prompt=False))
        if whole[: len(prompt)] != prompt:
            raise UserError(
                f"with the answer {_short(answer['content'])} the chat template no longer renders its prompt "
                f"as it does before the answer; {REMEDY}"
            )
        return prompt, whole[len(prompt) :]

    def _probes(self) -> list[str]:
        """Three one-character texts that share no token."""
        found: dict[tuple[int, ...], str] = {}
        # Unknown characters all have this token.
        used: set[int] = {token for token in (self.tokenizer.unk_token_id,) if token is not None}
        for probe in BOUNDARY_PROBES:
            tokens = tuple(self._encode(probe))
            # Some tokenizers put a word's start before every text: only last tokens tell texts apart.
            if tokens and not used & set(tokens[-1:]):
                found[tokens] = probe
                used |= set(tokens[-1:])
            if len(found) == 3:
                return list(found.values())
        raise UserError(
            "this tokenizer encodes different letters alike, so that turns and template cannot be separated; "
            "choose the tokenizer that belongs to the target"
        )

    # The template's own marks ----------------------------------------------------------------------------------------

    def _marked_tokens(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        """A token is the assistant's when it lies inside a mark; one that straddles a mark is refused."""
        from transformers.utils.chat_template_utils import render_jinja_template

        values: dict[str, Any] = {**self.tokenizer.special_tokens_map, **self.settings, "tools": self.tools}
        with explained_template(), bounded_rendering():
            texts, marks = cast(
                tuple[list[str], list[list[tuple[int, int]]]],
                render_jinja_template(
                    conversations=[self._with_system(messages)],
                    chat_template=self.source,
                    return_assistant_tokens_mask=True,
                    **values,
                ),
            )
            check_length(texts[0])
        if not self.tokenizer.is_fast:
            raise UserError(
                "marks of {% generation %} need a fast tokenizer (tokenizer.json); convert it, or let the target "
                "answer (distill.answered_by: target)"
            )
        coded = self.tokenizer(texts[0], add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        supervised = []
        for start, stop in coded["offset_mapping"]:
            supervised.append(any(first <= start < stop <= last for first, last in marks[0]))
            if not supervised[-1] and any(start < last and first < stop for first, last in marks[0]):
                raise UserError(
                    f"a token joins the assistant's words with the template's at character {start}; put a special "
                    "token or a line break between them in the template"
                )
        return list(coded["input_ids"]), supervised

    def _check_marks(self) -> None:
        """Refuse marks that are off: with other answers, nothing but marked tokens may change.

        transformers counts characters of what has been rendered so far; inside a macro or a `set` block that count
        starts anew and the marks point anywhere.
        """
        first, second, third = self._probes()
        base = self._probe_marks(first, first, second)
        others = self._probe_marks(first, second * 3, third * 5)
        asked = self._probe_marks(third * 3, first, second)
        if base[False] != others[False] or base[True] != asked[True] or not 0 < len(base[True]) <= len(others[True]):
            raise UserError(
                "the {% generation %} marks of the chat template do not enclose the assistant's words (inside a "
                "macro or a set block they are misplaced); move them into the loop over the messages"
            )

    def _probe_marks(self, question: str, first: str, second: str) -> dict[bool, list[int]]:
        """Tokens inside and outside the marks of a conversation of two turns."""
        texts = (question, first, question, second)
        roles = ("user", "assistant", "user", "assistant")
        tokens, flags = self._marked_tokens([{"role": r, "content": t} for r, t in zip(roles, texts, strict=True)])
        return {side: [t for t, flag in zip(tokens, flags, strict=True) if flag is side] for side in (False, True)}


def join_turns(turns: Sequence[Turn]) -> list[tuple[list[int], list[bool]]]:
    """Join turns into (tokens, supervised) rows.

    A turn whose prompt starts with exactly the row so far extends it; any other starts a row of its own. So every
    supervised token follows the same tokens as when it was decoded, whatever the template does to earlier turns.
    """
    rows: list[tuple[list[int], list[bool]]] = []
    for turn in turns:
        tokens, supervised = rows[-1] if rows else ([], [])
        if not rows or turn.prompt[: len(tokens)] != tokens:
            tokens, supervised = [], []
            rows.append((tokens, supervised))
        context = turn.prompt[len(tokens) :]
        tokens += context + turn.answer
        supervised += [False] * len(context) + [True] * len(turn.answer)
    return rows


def common_prefix(rows: Sequence[Sequence[int]]) -> list[int]:
    """The longest common prefix of all rows."""
    shared = []
    for column in zip(*rows, strict=False):
        if len(set(column)) > 1:
            break
        shared.append(column[0])
    return shared


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")
