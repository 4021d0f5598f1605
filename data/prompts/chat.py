"""Tokens of chat messages before an answer: the template's rendering with its generation prompt. Templates come with a
model: they are programs, and one that never ends would stop a run, so that they have bounds."""

import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import date
from functools import partial
from types import FrameType
from typing import Any

import jinja2

from ...modules import UserError
from .prompt import Message, Prompt

MOST_STEPS = 2_000_000  # Most lines of compiled template code in a rendering; 100 messages take some thousands
MOST_CHARACTERS = 2**24  # Longest rendering
_JINJA = os.path.dirname(jinja2.__file__) + os.sep
TODAY = date(2024, 7, 26)  # Day for templates that ask for it: a recipe must give the same tokens tomorrow
PROBE = "\ue000"  # A private character, which stands in no template: a message in a trial
REASONING = "reasoning_content"  # Key of a message: the thought of the assistant before its words
AS_JSON = partial(json.dumps, ensure_ascii=False)
_MARK = r"((?:\w+:)?think\w*|thought|reasoning)"
THOUGHT_END = re.compile(rf"</{_MARK}>")  # In the source of a template whose model thinks
OTHER_MARKS = (("[THINK]", "[/THINK]"), ("<|START_THINKING|>", "<|END_THINKING|>"), ("◁think▷", "◁/think▷"))
EMPTY_THOUGHT = re.compile(rf"\A\s*<{_MARK}>\s*</\1>\s*")  # Starts answers, also of another model than the target


@contextmanager
def bounded_rendering() -> Iterator[None]:
    """A block in which templates are rendered. A template is a program: one with more steps, memory or stack than there
    is ends, and whatever it raises becomes one sentence. Steps are counted, not seconds: whether a template is accepted
    does not depend on the machine."""
    steps = 0

    def count(_frame: FrameType, event: str, _value: Any) -> Any:
        nonlocal steps
        steps += event == "line"
        if steps > MOST_STEPS:
            raise RuntimeError(f"it takes more than {MOST_STEPS:,} steps")
        return count

    def enter(frame: FrameType, _event: str, _value: Any) -> Any:
        file = frame.f_code.co_filename
        return count if file == "<template>" or file.startswith(_JINJA) else None

    # Coverage and debuggers trace too: what was set before is set again.
    former = sys.gettrace()
    sys.settrace(enter)
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, MemoryError | OverflowError):
            reason = "it takes more memory than there is"
        if isinstance(error, RecursionError):
            reason = "it calls itself without end"
        raise UserError(f"the chat template fails: {reason}; change the messages, or set target.chat_template"
                        ) from error
    finally:
        sys.settrace(former)


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """Tokens of the template around a message."""

    before: tuple[int, ...]  # Tokens before its text
    after: tuple[int, ...]  # Tokens after its text


class ChatTemplate:
    """A tokenizer's chat template with the settings that change what it renders.

    A tokenizer without a chat template renders plain text: system and user texts stand in paragraphs of their own, an
    answer follows its prompt directly.

    Args:
        tokenizer: of the target.
        system: system prompt of every conversation that brings none; None leaves it to the template.
        tools: JSON schemas of tools that the template may show in conversations that bring none.
        modes: thinking or not, for templates that have such a switch, given to prompts in turn; None leaves it to the
            template.
        ends: the target's end tokens; None takes the tokenizer's.
        today: day for templates that ask for the date.

    Raises:
        UserError: if the template is not valid Jinja, or writes the same prompt in several modes."""

    def __init__(self, tokenizer: Any, *, system: str | None = None, tools: Sequence[dict[str, Any]] | None = None,
                 modes: Sequence[bool | None] = (None,), ends: Sequence[int] | None = None,
                 today: date = TODAY) -> None:
        self.tokenizer, self.system, self.modes, self.today = tokenizer, system, tuple(modes), today
        self.tools = list(tools or ())
        own = tokenizer.eos_token_id
        self.ends = tuple(ends if ends is not None else () if own is None else (own,))
        self.source: str | None = None
        if tokenizer.chat_template:
            try:
                self.source = str(tokenizer.get_chat_template(None, self.tools or None))
            except ValueError as error:
                raise UserError(f"no chat template to choose: {error}; set target.chat_template to a file") from error
        source = self.source or ""
        tag = THOUGHT_END.search(source)
        others = next((pair for pair in OTHER_MARKS if pair[1] in source), ("", ""))
        self.thought = (f"<{tag[1]}>", tag[0]) if tag else others
        """Texts before and after a thought; empty where the template knows of none."""
        start, stop = map(re.escape, self.thought)
        self.thought_at_end = re.compile(rf"{start}(?P<gap>\s*)(?P<closed>{stop}\s*)?\Z" if stop else "(?!)")
        """A thought that a generation prompt ends with: opened, or opened and closed again."""
        # Flags of single tokens say more than the tokenizer's own list of special ones, and some ends are in neither.
        special = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
        # Of no mark, or one of several tokens, convert_tokens_to_ids gives the unknown token, which ends many models.
        ids = tokenizer.get_vocab()
        self._wordless = {*tokenizer.all_special_ids, *special, *self.ends} - {
            ids[mark] for mark in self.thought if mark and mark in ids}  # Tokens of an answer that are no text of it
        self._opens: dict[bool | None, bool] = {}
        self._as_json: dict[str, bool] = {}
        """Whether a template, by its source, takes the arguments of a call as JSON text in place of an object."""
        self.nothing = ""  # Words of an answer that has none, which some templates refuse
        known = tokenizer.chat_template or ""
        for source in known.values() if isinstance(known, dict) else (known,):
            # No count of steps bounds the digits of a power. A template that is no valid Jinja is left to its reader.
            with suppress(jinja2.TemplateError):
                tokens = jinja2.Environment().lex(source)
                if powers := [line for line, kind, value in tokens if (kind, value) == ("operator", "**")]:
                    raise UserError(f"the chat template raises a number to a power (** in line {powers[0]}), which may "
                                    "never end; set target.chat_template to one without")
        # A template that is no valid Jinja is refused now, not after the target has been loaded and asked.
        shown = {self.rendered([{"role": "user", "content": "a"}], mode, True) for mode in self.modes}
        try:
            self.rendered([{"role": role, "content": "a" * (role == "user")} for role in ("user", "assistant", "user")])
        except UserError:
            self.nothing = "…"
        if len(shown) < len(self.modes):
            raise UserError("template.enable_thinking gives several modes, and this chat template writes the same "
                            "prompt in them; give one, or leave it out")

    @property
    def hash(self) -> str:
        """SHA-256 of everything that decides what is rendered."""
        parts = {
            "template": self.tokenizer.chat_template,
            "system": self.system,
            "tools": self.tools,
            "modes": self.modes,
            "today": str(self.today),
            "special": {name: str(token) for name, token in self.tokenizer.special_tokens_map.items()},
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True, ensure_ascii=False).encode()).hexdigest()

    def mode(self, prompt: Prompt, number: int = 0) -> bool | None:
        """Thinking or not: a prompt's own mode, or the one that falls to its number."""
        return self.modes[number % len(self.modes)] if prompt.thinking is None else prompt.thinking

    def prompt(self, messages: Sequence[Message], *, tools: Sequence[Message] | None = None,
               thinking: bool | None = None) -> list[int]:
        """Tokens up to the start of the assistant's next answer, the generation prompt included; `thinking` None is the
        first mode of the recipe's. Raises UserError if the template refuses the messages, or nothing is left of
        them."""
        tokens = self.encode(self.rendered(messages, thinking, True, tools))
        if not tokens:
            raise UserError("a prompt has no token at all; give some text")
        return tokens

    def said(self, answer: Sequence[int], thinking: bool | None = None) -> Message:
        """The message that a server makes of the tokens of an answer, its thought apart from its words; `thinking` None
        is the first mode of the recipe's."""
        # Whatever a tokenizer calls special: the marks of a thought stay, and no space is put around them.
        text = str(self.tokenizer.decode(
            [token for token in answer if token not in self._wordless], skip_special_tokens=False,
            clean_up_tokenization_spaces=False, spaces_between_special_tokens=False))
        if self.thought[1] not in text and self._thinks(text, thinking):
            # An answer that was cut inside its thought has no words yet.
            text += self.thought[1]
        return self.own({"role": "assistant", "content": text}, thinking)

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
        writes one. Raises UserError if the template refuses the messages."""
        if self.source is None:
            before, after = self.encode(self.rendered(history)), list[int]()
        else:
            # Some templates write the end of the user's turn only together with the header of the assistant's.
            for generation_prompt in (False, True):
                text = self.rendered([*history, {"role": "user", "content": PROBE}], None, generation_prompt)
                start, _, end = text.partition(PROBE)
                before, after = self.encode(start), self.encode_after(f"{start}{PROBE}", end)
                if end:
                    break
        if not before:
            # Nothing can be written from no token at all: the tokenizer's start token stands for an empty text.
            starts = (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id)
            before = [int(token) for token in starts if token is not None][:1]
        if not before:
            raise UserError("this tokenizer has no start token to write prompts from; give a file (prompts.origin: "
                            "file)")
        return Surroundings(before=tuple(before), after=tuple(after))

    # Text ------------------------------------------------------------------------------------------------------------

    def rendered(self, messages: Sequence[Message], thinking: bool | None = None, generation_prompt: bool = False,
                 tools: Sequence[Message] | None = None) -> str:
        """Messages as the template writes them, with the start of the assistant's next answer where a generation prompt
        is asked for; without a template plain text, in paragraphs. None takes the recipe's first mode of thinking, and
        its tools. Raises UserError if the template refuses the messages."""
        from transformers.utils.chat_template_utils import _compile_jinja_template

        own = [self.own(message, thinking) for message in messages]
        if self.system is not None and not (own and own[0]["role"] in ("system", "developer")):
            own.insert(0, {"role": "system", "content": self.system})
        if self.source is None:
            return "".join(("\n\n" if place and message["role"] != "assistant" else "") + message["content"]
                           for place, message in enumerate(own))
        every = list(map(dict, self.tools if tools is None else tools)) or None
        thinking = self.modes[0] if thinking is None else thinking
        # DeepSeek's and Granite's templates call the switch thinking.
        settings: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking, "thinking": thinking}
        with bounded_rendering():
            source = str(self.tokenizer.get_chat_template(None, every))
            # Llama 3 writes today's date unless it is given one.
            if "date_string" in source:
                settings["date_string"] = f"{self.today:%d %b %Y}"
            if "strftime_now" in source:
                # Functions do not pass as settings. Compiled templates are kept, so that this is the one rendered.
                _compile_jinja_template(source).globals["strftime_now"] = self.today.strftime

        def write(form: Callable[[Any], Any]) -> str:
            # The arguments of calls are written in this form.
            shown = [message if not message.get("tool_calls") else {**message, "tool_calls": [
                {**call, "function": {**call["function"], "arguments": form(call["function"].get("arguments"))}}
                for call in message["tool_calls"]]} for message in own]
            with bounded_rendering():
                text = str(self.tokenizer.apply_chat_template(
                    shown, tools=every, tokenize=False, add_generation_prompt=generation_prompt, **settings))
                if len(text) > MOST_CHARACTERS:
                    raise ValueError(f"it writes more than {MOST_CHARACTERS:,} characters")
                return text

        calls = any(message.get("tool_calls") for message in own)
        return write(AS_JSON if calls and self._takes_json(source, write) else lambda arguments: arguments)

    def _takes_json(self, source: str, write: Callable[[Callable[[Any], Any]], str]) -> bool:
        """True where the arguments of calls are given as JSON text: to a template that refuses objects, or writes
        them in Python's form, which no model has read. A trial in place of the first ones that it writes decides."""
        def tried(arguments: Any) -> str:
            with suppress(UserError):
                return write(lambda _: arguments)
            return ""

        if (known := self._as_json.get(source)) is not None:
            return known
        trial = {PROBE: PROBE}
        objects = tried(trial)
        wanted = (not objects or str(trial) in objects) and bool(tried(AS_JSON(trial)))
        # A conversation that is refused for another reason, or without its calls, decides nothing.
        if wanted or PROBE in objects:
            self._as_json[source] = wanted
        return wanted

    def unwritten(self, messages: Sequence[Message], tools: Sequence[Message] | None = None) -> list[str]:
        """Parts of a conversation without which its rendering is the same: tools, tool calls, words before these."""
        bare = [{key: value for key, value in one.items() if key != "tool_calls"} for one in messages]
        wordless = [{**one, "content": ""} if one.get("content") and one.get("tool_calls") else one for one in messages]
        trials: list[tuple[str, Sequence[Message], Sequence[Message] | None]] = [
            *[("tools", messages, ())] * bool(tools), *[("tool calls", bare, tools)] * (bare != [*messages]),
            *[("words before tool calls", wordless, tools)] * (wordless != [*messages])]
        found = list[str]()
        for part, less, fewer in trials:
            # Less may be what the template refuses.
            with suppress(UserError):
                if self.rendered(less, None, True, fewer) == self.rendered(messages, None, True, tools):
                    found.append(part)
        return found

    def own(self, message: Message, thinking: bool | None = None) -> dict[str, Any]:
        """A message as templates take it: with content, and an assistant's thought apart from its words, if they start
        inside one in this mode."""
        found = {**message, "content": message.get("content") or ""}
        if found["role"] != "assistant":
            return found
        thought, words = found.pop(REASONING, None) or "", found["content"]
        opened = bool(self.thought[1]) and words.lstrip().startswith(self.thought[0])
        # A thought without an end is one that was cut: no words follow.
        if not thought and (opened or (self.thought[1] in words and self._thinks(words, thinking))):
            thought, _, words = words.partition(self.thought[1])
            thought = re.sub(rf"^\s*{re.escape(self.thought[0])}", "", thought).strip("\n")
            words = words.lstrip("\n")
        # Templates have several names for it; transformers fills in `thinking` itself.
        named = {REASONING: thought, "reasoning": thought} if thought.strip() else {}
        return {**found, "content": words or ("" if found.get("tool_calls") else self.nothing), **named}

    def _thinks(self, words: str, thinking: bool | None) -> bool:
        """True if an answer starts inside a thought, by its own first mark or by that at the end of the prompt."""
        if not self.thought[1]:
            return False
        if thinking not in self._opens:
            found = self.thought_at_end.search(self.rendered([{"role": "user", "content": "a"}], thinking, True))
            self._opens[thinking] = found is not None and not found["closed"]
        return self._opens[thinking] or words.lstrip().startswith(self.thought[0])

    def encode(self, text: str) -> list[int]:
        """Tokens of what `rendered` gives."""
        return self.document(text)[0] if self.source is None else self._encode(text)

    def encode_after(self, text: str, added: str) -> list[int]:
        """Tokens of a text that decoding writes after another. One that merges across the border is none of them."""
        before, both = self.encode(text), self.encode(text + added)
        return both[len(before) :] if both[: len(before)] == before else self._encode(added)

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
