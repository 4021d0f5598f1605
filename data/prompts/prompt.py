"""Rows of every usual shape, read into prompts: a conversation with the places of its answers, or a plain document. A
value under a key that is read and cannot be kept is refused by name; other keys are not read.

Keys of a row, richer ones first: messages, conversations, conversation, turns, prompt, instruction or question (with
input), chosen, text. In rows, messages and calls null is no value."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...modules import UserError
from ...modules.files.json_records import bounded_json, problem

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
    reference: Any = None  # What the row has as texts that its answers may resemble; evaluations alone read it
    draft_prompt: Any = None  # And as a message that a draft reads in place of the last one

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
        # Texts alone: tables have columns of these names with dates or numbers, which nobody has asked to be read.
        row |= {key: value for key, value in (("reference", self.reference), ("draft_prompt", self.draft_prompt))
                if all(isinstance(one, str) for one in (value if isinstance(value, list) else [value]))}
        return {key: value for key, value in row.items() if value is not None}


def is_given(message: Message) -> bool:
    """True if an assistant message holds an answer."""
    return bool(message.get("content") or message.get("tool_calls"))


ROLES = {
    "system": "system", "developer": "system", "user": "user", "human": "user", "assistant": "assistant",
    "gpt": "assistant", "model": "assistant", "chatgpt": "assistant", "bing": "assistant", "tool": "tool",
    "function": "tool", "observation": "tool", "function_call": "assistant",
}  # Roles by the names that data sets give them, in any case
WHOLE = ("messages", "conversations", "conversation")
QUESTIONS = ("prompt", "instruction", "question")
CONVERSATIONS = (*WHOLE, "turns", *QUESTIONS, "chosen")  # Of conversations, questions and both, richer ones first
INPUTS = ("input", "context")
ANSWERS = ("chosen", "completion", "response", "output", "answer")
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
WEIGHTS = ("weight", "train", "loss")
"""Keys of what an instruction is about, of answers (richer ones first), of their thoughts, and of what is no label."""
PICTURES = ("images", "image", "videos", "video", "audios", "audio")
"""Keys of what is not read: without it the text would mean something else."""


class LeftOutError(UserError):
    """A row that its source or the recipe leaves out on purpose: no fault of the data."""


def parse_prompt(row: Any, where: str, column: str | None = None) -> Prompt:
    """The prompt of a row at a place of its source; `column` replaces known keys. Raises UserError with the place."""
    try:
        if not isinstance(row, Mapping):
            raise UserError(f"expected a JSON object, got {_short(row)}; write one object a line")
        known = (column,) if column else (*CONVERSATIONS, "text")
        key = next((key for key in known if not _is_empty(row.get(key))), None)
        if key is None and (empty := [key for key in known if row.get(key) is not None]):
            raise UserError(f"{empty[0]} is empty; write its text, or leave the row out")
        if key is None:
            raise UserError(f"the row has none of the keys {', '.join(known)}, got {_short(sorted(map(str, row)))}; "
                            "rename one, or set prompts.column")
        row = {key: value for key, value in row.items() if not _is_empty(value)}
        if not _is_learned(row, "a row"):
            raise LeftOutError(f"{' or '.join(WEIGHTS)} leaves the whole row out; nothing is to do")
        if pictures := [key for key in PICTURES if key in row]:
            raise UserError(f"{pictures[0]} stands next to the text, and only text is read; leave the row out")
        prompt = _prompt(row, where, key, key == column)
        # JSON can write what no file of prompts, answers or shards could hold as UTF-8.
        json.dumps([prompt.id, prompt.row], ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: the row holds half of a surrogate pair, which is no character; write the whole one"
                        ) from error
    except UserError as error:
        raise type(error)(f"{where}: {error}") from error
    return prompt


def _prompt(row: dict[str, Any], where: str, key: str, chosen: bool) -> Prompt:
    identifier, category = str(row.get("question_id", where)), str(row["category"]) if "category" in row else None
    if key == "text" and not chosen:
        return Prompt(document=_text(row, key), id=identifier, category=category)
    read = _conversation(row, key, chosen or key in QUESTIONS)
    if "system" in row and (not read or read[0][0]["role"] != "system"):
        read.insert(0, ({"role": "system", "content": _text(row, "system")}, True))
    # ShareGPT cut long conversations anywhere: a part may start with an answer whose question is lost.
    first = next((place for place, (message, _) in enumerate(read) if message["role"] == "user"), None)
    if first is None:
        raise UserError("no user message; there is nothing to answer")
    read = [one for place, one in enumerate(read) if place >= first or one[0]["role"] == "system"]
    # JSON schemas of tools may stand there as JSON.
    tools = _from_json(row.get("tools", row.get("functions")), "tools")
    tools = [] if _is_empty(tools) else [_from_json(one, "tools") for one in (
        tools if isinstance(tools, list) else [tools])]
    if wrong := [tool for tool in tools if not isinstance(tool, Mapping)]:
        raise UserError(f"tools must be a list of objects, one JSON schema for each tool, got {_short(wrong[0])}")
    tools = tuple(tool if "function" in tool else {"type": "function", "function": tool} for tool in tools)
    # A row names its mode as enable_thinking, or among the arguments of its template.
    settings = _from_json(row.get("chat_template_kwargs"), "chat_template_kwargs")
    mode = row.get("enable_thinking", settings.get("enable_thinking") if isinstance(settings, Mapping) else None)
    if not isinstance(mode, bool | None):
        raise UserError(f"enable_thinking must be true or false, got {_short(mode)}")
    prompt = Prompt(
        messages=tuple(message for message, _ in read), id=identifier, category=category, tools=tools or None,
        unlearned=frozenset(place for place, (_, learned) in enumerate(read) if not learned), thinking=mode,
        reference=row.get("reference"), draft_prompt=row.get("draft_prompt"))
    if not prompt.asked:
        raise UserError("every answer is left out of the labels; leave one in, or the row out")
    return prompt


def _conversation(row: dict[str, Any], key: str, question: bool) -> list[tuple[Message, bool]]:
    """Messages of a row, each with whether it may be a label; where none answers the last one, an answer of the row."""
    if key == "chosen" and isinstance(row[key], str):
        raise UserError("chosen is one text without a prompt, such as a transcript, which is not read; give messages")
    spoken = _spoken(row[key], key)
    if key in QUESTIONS[1:] and (name := next((name for name in INPUTS if name in row), None)):
        spoken = [{"role": "user", "content": f"{_text(row, key)}\n\n{_text(row, name)}"}]
    if question and "history" in row:
        # Pairs of a question and its answer, or messages.
        history = _from_json(row["history"], "history")
        if not isinstance(history, list) or not all(
                isinstance(one, Mapping) or (isinstance(one, list | tuple) and len(one) == 2) for one in history):
            raise UserError("history must be a list of pairs, a question and its answer, got "
                            f"{_short(history)}; write it so")
        spoken = [*(message for one in history for message in ([one] if isinstance(one, Mapping) else [
            {"role": "user", "content": one[0]}, {"role": "assistant", "content": one[1]}])), *spoken]
    read = _messages(spoken)
    answer = next((name for name in ANSWERS if name in row and name != key), None)
    answered = bool(read) and read[-1][0]["role"] == "assistant"
    if answer is None or (answered and is_given(read[-1][0]) and not question):
        return read
    read = read[:-1] if answered and not is_given(read[-1][0]) else read
    given = _messages(_spoken(row[answer], answer))
    if not given or given[0][0]["role"] not in ("system", "user"):
        return [*read, *given]
    # A chosen conversation may repeat its prompt or the end of it. One that starts otherwise stands for itself.
    systems = next((place for place, (message, _) in enumerate(read) if message["role"] != "system"), len(read))
    new = next((place for place in range(len(read)) if read[place:] == given[: len(read) - place]),
               systems if given[0][0]["role"] == "user" else 0)
    return [*read[:new], *given]


def _spoken(value: Any, key: str) -> list[Any]:
    """Messages as a row has them; texts are those of the user, with an answer asked for after each but the last."""
    whole = key in WHOLE
    if whole:
        value = _from_json(value, key)
    if isinstance(value, str | Mapping):
        value = [{"role": "assistant", "content": value} if key in ANSWERS and isinstance(value, str) else value]
    if not isinstance(value, list) or not value or (isinstance(value[0], str) and (whole or key in ANSWERS)):
        raise UserError(f"{key} must be {'' if whole else 'text or '}a list of messages, got {_short(value)}; give "
                        "each message as an object with its role and its content")
    if not isinstance(value[0], str):
        return value
    return [message for text in value for message in ({"role": "assistant"}, {"role": "user", "content": text})][1:]


def _messages(spoken: Sequence[Any]) -> list[tuple[Message, bool]]:
    """Messages as templates take them, without empty system prompts, each with whether it may be a label."""
    found = list[tuple[Message, bool]]()
    for message in spoken:
        if not isinstance(message, Mapping):
            raise UserError(f"a message must be an object, got {_short(message)}; give its role and its content")
        message = _present(message)
        name, value = message.get("role", message.get("from")), message.get("content", message.get("value"))
        if not isinstance(name, str) or (role := ROLES.get(name.strip().lower())) is None:
            raise UserError(f"the role of a message must be one of {', '.join(ROLES)}, got {_short(name)}; rename it")
        names = {key: message[key] for key in ("name", "tool_call_id") if isinstance(message.get(key), str)}
        if role == "assistant":
            found.append(_answer(message, names, value, name.strip().lower() == "function_call"))
            continue
        content = _content(value, role)
        if role == "user" and not content.strip():
            raise UserError("a message of the user is empty; write its text, or leave the row out")
        if role != "system" or content.strip():
            found.append(({"role": role, "content": content, **names}, True))
    return found


def _answer(message: Mapping[str, Any], names: Mapping[str, str], value: Any, call: bool) -> tuple[Message, bool]:
    """(one message of the assistant as templates take it, without content where it has none; whether it is learned)."""
    content = "" if call else _content(value, "assistant")
    found: dict[str, Any] = {"role": "assistant", "content": content, **names}
    if calls := value if call else message.get("tool_calls") or message.get("function_call"):
        found["tool_calls"] = _calls(calls)
    elif not content.strip():
        # An answer that is empty is none: it is asked for.
        found = {"role": "assistant"}
    if thought := next((message[key] for key in THOUGHTS if not _is_empty(message.get(key))), None):
        if not isinstance(thought, str):
            raise UserError(f"the thought of an answer must be text, got {_short(thought)}; write it as text")
        found["reasoning_content"] = thought
    learned = _is_learned(message, "an answer")
    return (found if learned else {"content": "", **found}), learned


def _content(value: Any, role: str) -> str:
    """The text of a message: a text, its parts joined, or what a tool returns as JSON."""
    if isinstance(value, str | None):
        return value or ""
    parts = [_present(part) for part in value] if isinstance(value, list) else []
    if role == "tool" and not (parts and all(isinstance(part, dict) and part.get("type") == "text" for part in parts)):
        return json.dumps(value, ensure_ascii=False)
    if not isinstance(value, list):
        raise UserError(f"the content of a message must be text, got {_short(value)}; write it as text")
    # A picture cannot be learned, and without it the text would mean something else.
    for part in parts:
        kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
        if not isinstance(part, str) and (kind != "text" or not isinstance(part.get("text"), str)):
            raise UserError(f"only text is read of a message, got a part of the kind {kind}; leave the row out")
    return "".join(part if isinstance(part, str) else part["text"] for part in parts)


def _is_learned(record: Mapping[str, Any], what: str) -> bool:
    """False of a row or an answer that is no label. Raises UserError if it shall be one in part."""
    marks = [(key, record[key]) for key in WEIGHTS if record.get(key) is not None]
    if wrong := [(key, mark) for key, mark in marks if mark not in (0, 1)]:
        raise UserError(f"the {wrong[0][0]} of {what} must be 0 or 1, false or true, got {_short(wrong[0][1])}; {what} "
                        "is learned or it is not, so rename a key that says something else")
    return all(mark == 1 for _, mark in marks)


def _calls(value: Any) -> list[Message]:
    """Tool calls with their arguments as objects, from one or several, as objects or as JSON."""
    value = _from_json(value, "tool_calls")
    found = list[Message]()
    for call in value if isinstance(value, list) else [value]:
        call = _present(_from_json(call, "tool_calls"))
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise UserError(f"a tool call must name its function, got {_short(call)}; give name and arguments")
        arguments = function.get("arguments", function.get("parameters"))
        arguments = _from_json(arguments, "the arguments of a tool call") if not _is_empty(arguments) else {}
        identity = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        found.append({**identity, "type": "function", "function": {"name": function["name"], "arguments": arguments}})
    return found


def _from_json(value: Any, what: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return bounded_json(value)
    except ValueError as error:
        raise UserError(f"{what} must be JSON, got {_short(value)} ({problem(error)}); write them as objects"
                        ) from error


def _text(row: Mapping[str, Any], key: str) -> str:
    if not isinstance(row[key], str):
        raise UserError(f"{key} must be text, got {_short(row[key])}; write it as text, or leave it out")
    return str(row[key])


def _is_empty(value: Any) -> bool:
    """True of null, of text without a character, and of a list or object without anything in it."""
    return value is None or (isinstance(value, str) and not value.strip()) or (
        isinstance(value, list | tuple | dict) and not value)


def _present(value: Any) -> Any:
    """An object without the keys whose value is null; anything else as it is."""
    return {key: one for key, one in value.items() if one is not None} if isinstance(value, Mapping) else value


def _short(value: Any) -> str:
    text = json.dumps(value) if isinstance(value, bool | None) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
