"""A row of a source once it is read: a conversation with the places of its answers, or a plain document."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...modules import UserError

Message = Mapping[str, Any]
"""One message as chat templates take it: role (system, user, assistant or tool), content, and where the source has them
name, reasoning_content (the assistant's thought before its words), tool_calls and tool_call_id."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A conversation with answers that are asked for or learned, or a plain document, which has no messages."""

    messages: tuple[Message, ...] = ()
    """The conversation as its source has it. An assistant message without content and tool_calls is an answer that the
    source does not have: it is asked for, and never learned."""
    id: str  # Name of the prompt in its source: a question_id, or file:line
    category: str | None = None  # Kind of prompt, where the source names one
    tools: tuple[Mapping[str, Any], ...] | None = None  # JSON schemas of its tools; None leaves them to the recipe
    document: str | None = None  # Plain text; None for a conversation
    unlearned: frozenset[int] = field(default_factory=frozenset)
    """Places of assistant messages that are context alone: neither asked for nor learned."""
    thinking: bool | None = None  # Mode of the chat template, where the row names one; None leaves it to the recipe

    @classmethod
    def from_turns(cls, *texts: str, id: str, system: str | None = None, category: str | None = None) -> "Prompt":
        """A prompt of user turns, with an answer asked for after each."""
        messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        for number, text in enumerate(texts):
            messages += [{"role": "assistant"}] * (number > 0) + [{"role": "user", "content": text}]
        return cls(messages=tuple(messages), id=id, category=category)

    @property
    def asked(self) -> tuple[int, ...]:
        """Places of the answers that the target or a draft gives: those of assistant messages, and the end where the
        last message is not the assistant's. None of a document."""
        places = [place for place, message in enumerate(self.messages)
                  if message["role"] == "assistant" and place not in self.unlearned]
        if self.messages and self.messages[-1]["role"] != "assistant":
            places.append(len(self.messages))
        return tuple(places)

    @property
    def learned(self) -> tuple[int, ...]:
        """Places of the source's own answers that are labels where the source writes the rows (answered_by: text)."""
        # After an answer that the source does not have, nobody knows what the next one was said to.
        places = [place for place in self.asked if place < len(self.messages)]
        missing = next((place for place in places if not is_given(self.messages[place])), len(self.messages))
        return tuple(place for place in places if place < missing)

    @property
    def question(self) -> str:
        """Text of the first user message; empty where there is none."""
        return next((str(message.get("content", "")) for message in self.messages if message["role"] == "user"), "")

    def history(self, answers: Sequence[Message] = ()) -> list[Message]:
        """The messages before the next answer, or all of them where none is left to be asked. Raises UserError for a
        document. `answers`, to the first places of `asked`, replace the source's own, but for one whose tool calls have
        results in the source: those would answer a call that nobody has made."""
        if self.document is not None:
            raise UserError(
                "a plain document is not answered; train on it with distill.answered_by: text, or give messages")
        asked, messages = self.asked, list[Message]()
        given, answered = dict(zip(asked, answers, strict=False)), len(answers)
        # One place after the last message: the conversation may end with the answer to it.
        for place in range(asked[answered] if answered < len(asked) else len(self.messages) + 1):
            own, then = self.messages[place : place + 1], self.messages[place + 1 : place + 2]
            has_results = bool(own and own[0].get("tool_calls") and then and then[0]["role"] == "tool")
            messages += [given[place]] if place in given and not has_results else own
        return messages

    @property
    def row(self) -> dict[str, Any]:
        """This prompt as a row of a file: it is read back as it is."""
        messages = [{**message, "weight": 0} if place in self.unlearned else message
                    for place, message in enumerate(self.messages)]
        row = {"question_id": self.id, "category": self.category, "messages": messages or None, "text": self.document,
               "tools": self.tools, "enable_thinking": self.thinking}
        return {key: value for key, value in row.items() if value is not None}


def is_given(message: Message) -> bool:
    """True if an assistant message holds an answer."""
    return bool(message.get("content") or message.get("tool_calls"))
