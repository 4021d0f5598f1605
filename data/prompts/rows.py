"""Rows of every usual shape, read into prompts. What cannot be kept is refused by name: nothing is lost silently.

Keys of a row, richer ones first: messages, conversations, conversation, turns, prompt, instruction (with input), text.
"""

import json
from collections.abc import Mapping
from typing import Any

from ...modules import UserError
from ...modules.files.bounded_reading import bounded_json
from ...modules.files.json_records import problem
from .prompt import Message, Prompt, is_given

ROLES = {
    "system": "system", "developer": "system", "user": "user", "human": "user", "assistant": "assistant",
    "gpt": "assistant", "model": "assistant", "chatgpt": "assistant", "bing": "assistant", "tool": "tool",
    "function": "tool", "observation": "tool", "function_call": "assistant",
}
"""Roles by the names that data sets give them, in any case."""
CONVERSATIONS = ("messages", "conversations", "conversation", "turns", "prompt", "instruction")
"""Keys of a conversation or of its first message, richer ones first."""
INPUTS = ("input", "context")
ANSWERS = ("chosen", "completion", "response", "output")
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
            raise UserError(f"expected a JSON object, got {type(row).__name__}; write one object a line")
        row = {key: value for key, value in row.items() if not _is_empty(value)}
        if left_out := [key for key in WEIGHTS if row.get(key) in (0, False)]:
            raise LeftOutError(f"{left_out[0]} is {row[left_out[0]]!r}, which leaves the whole row out; nothing is to "
                               "do")
        if beside := [key for key in PICTURES if key in row]:
            raise UserError(f"{beside[0]} stands next to the text, and only text is read; leave the row out")
        prompt = _prompt(row, where, column)
        # JSON can write what no file of prompts, answers or shards could hold as UTF-8.
        json.dumps([prompt.id, prompt.row], ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: the row holds half of a surrogate pair, which is no character; write the whole one"
                        ) from error
    except UserError as error:
        raise type(error)(f"{where}: {error}") from error
    return prompt


def _prompt(row: dict[str, Any], where: str, column: str | None) -> Prompt:
    identifier, category = str(row.get("question_id", where)), str(row["category"]) if "category" in row else None
    key = column or next((key for key in CONVERSATIONS if key in row), None)
    if key is None and "text" in row:
        return Prompt(document=_text(row, "text"), id=identifier, category=category)
    if key is None or key not in row:
        raise UserError(f"none of {column or ', '.join((*CONVERSATIONS, 'text'))} holds anything among the keys "
                        f"{_short(sorted(map(str, row)))}; rename one or set prompts.column")
    spoken = _spoken(row[key], key)
    if key == "instruction" and (name := next((name for name in INPUTS if name in row), None)):
        spoken = [{"role": "user", "content": f"{_text(row, key)}\n\n{_text(row, name)}"}]
    answer = next((name for name in ANSWERS if name in row), None)
    if answer is not None and (column or key in ("prompt", "instruction")):
        given = _spoken(row[answer], answer)
        # A chosen conversation may repeat its prompt.
        spoken = given if ROLES[_role(given[0])] in ("system", "user") else [*spoken, *given]
    read = [one for message in spoken if (one := _message(message))[0] is not None]
    if "system" in row and (not read or read[0][0]["role"] != "system"):
        read.insert(0, ({"role": "system", "content": _text(row, "system")}, True))
    # ShareGPT cut long conversations anywhere: a part may start with an answer whose question is lost.
    first = next((place for place, (message, _) in enumerate(read) if message["role"] == "user"), None)
    if first is None:
        raise UserError("no user message; there is nothing to answer")
    read = [one for place, one in enumerate(read) if place >= first or one[0]["role"] == "system"]
    prompt = Prompt(
        messages=tuple(message for message, _ in read), id=identifier, category=category, tools=_tools(row),
        unlearned=frozenset(place for place, (_, learned) in enumerate(read) if not learned), thinking=_thinking(row))
    if not prompt.asked:
        raise UserError("every answer is left out of the labels; leave one in, or the row out")
    return prompt


def _spoken(value: Any, key: str) -> list[Any]:
    """Messages as a row has them; texts are those of the user, with an answer asked for after each but the last."""
    whole = key in CONVERSATIONS[:3]
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


def _role(message: Any) -> str:
    """The name of a message's speaker, which is one of `ROLES`."""
    if not isinstance(message, Mapping):
        raise UserError(f"a message must be an object, got {_short(message)}; give its role and its content")
    name = message.get("role", message.get("from"))
    if not isinstance(name, str) or name.strip().lower() not in ROLES:
        raise UserError(f"the role of a message must be one of {', '.join(ROLES)}, got {_short(name)}; rename it")
    return name.strip().lower()


def _message(message: Any) -> tuple[Any, bool]:
    """(one message as templates take it, or None for an empty system prompt; whether it may be a label)."""
    name = _role(message)
    role, value = ROLES[name], message.get("content", message.get("value"))
    if role == "tool" and isinstance(value, Mapping):
        value = json.dumps(value, ensure_ascii=False)
    if isinstance(value, list):
        # Parts of a message: a picture cannot be learned, and without it the text would mean something else.
        for part in value:
            kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
            if not isinstance(part, str) and (kind != "text" or not isinstance(part.get("text"), str)):
                raise UserError(f"a message has a part of the kind {kind}, and only text is read; leave the row out")
        value = "".join(part if isinstance(part, str) else part["text"] for part in value)
    if not isinstance(value, str | None):
        raise UserError(f"the content of a message must be text, got {_short(value)}; write it as text")
    found: dict[str, Any] = {"role": role, "content": value or ""}
    found |= {key: message[key] for key in ("name", "tool_call_id") if isinstance(message.get(key), str)}
    empty = not (value or "").strip()
    if role != "assistant":
        if empty and role == "user":
            raise UserError("a message of the user is empty; write its text, or leave the row out")
        return (None if empty and role == "system" else found), True
    if calls := value if name == "function_call" else message.get("tool_calls") or message.get("function_call"):
        found |= {"content": "" if calls is value else found["content"], "tool_calls": _calls(calls)}
    elif empty:
        # An answer that is empty is none: it is asked for.
        found = {"role": role}
    if thought := next((message[key] for key in THOUGHTS if not _is_empty(message.get(key))), None):
        if not isinstance(thought, str):
            raise UserError(f"the thought of an answer must be text, got {_short(thought)}; write it as text")
        found |= {"reasoning_content": thought} if is_given(found) else {}
    marks = [(key, message[key]) for key in WEIGHTS if message.get(key) is not None]
    if wrong := [(key, mark) for key, mark in marks if mark not in (0, 1)]:
        raise UserError(f"the {wrong[0][0]} of an answer must be 0 or 1, false or true, got {_short(wrong[0][1])}; an "
                        "answer is learned or it is not")
    learned = all(mark == 1 for _, mark in marks)
    return (found if learned else {"content": "", **found}), learned


def _calls(value: Any) -> list[Message]:
    """Tool calls with their arguments as objects, from one or several, as objects or as JSON."""
    value = _from_json(value, "tool_calls")
    found = list[Message]()
    for call in value if isinstance(value, list) else [value]:
        call = _from_json(call, "tool_calls")
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise UserError(f"a tool call must name its function, got {_short(call)}; give name and arguments")
        arguments = function.get("arguments", function.get("parameters"))
        arguments = _from_json(arguments, "the arguments of a tool call") if not _is_empty(arguments) else {}
        identity = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        found.append({**identity, "type": "function", "function": {"name": function["name"], "arguments": arguments}})
    return found


def _tools(row: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...] | None:
    """JSON schemas of the tools of a row, which may stand there as JSON."""
    value = _from_json(row.get("tools", row.get("functions")), "tools")
    if _is_empty(value):
        return None
    found = [_from_json(tool, "tools") for tool in (value if isinstance(value, list) else [value])]
    if wrong := [tool for tool in found if not isinstance(tool, Mapping)]:
        raise UserError(f"tools must be a list of objects, one JSON schema for each tool, got {_short(wrong[0])}")
    return tuple(tool if "function" in tool else {"type": "function", "function": tool} for tool in found)


def _thinking(row: Mapping[str, Any]) -> bool | None:
    """The mode that a row names, as enable_thinking or among the arguments of its template."""
    settings = _from_json(row.get("chat_template_kwargs"), "chat_template_kwargs")
    mode = row.get("enable_thinking", settings.get("enable_thinking") if isinstance(settings, Mapping) else None)
    if not isinstance(mode, bool | None):
        raise UserError(f"enable_thinking must be true or false, got {_short(mode)}")
    return mode


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


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
