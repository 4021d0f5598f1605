"""Rows of every usual shape become the conversation that they say, or are refused by name; files of every usual form
hold the same rows."""

import gzip
import json
import random
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from draftsmith.data import Prompt, PromptConfig, ReadPrompts, read_prompts
from draftsmith.data.prompts import prompt_files
from draftsmith.data.prompts.prompt import ROLES, parse_prompt
from draftsmith.data.prompts.prompt_files import decoded, file_rows
from draftsmith.modules import UserError
from support.data.data_folders import spoken

SYSTEM = {"role": "system", "content": "Be brief."}
SCHEMA = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
CALLED, RESULT = {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "7"}


def one(*turns: str) -> dict[str, Any]:
    return {"messages": list(spoken(*turns))}


def share(*turns: tuple[str, Any], **more: Any) -> dict[str, Any]:
    return {"conversations": [{"from": role, "value": text} for role, text in turns], **more}


def said(message: dict[str, Any], *after: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A row of a question and one answer."""
    return {"messages": [*spoken("a"), {"role": "assistant", **message}, *after], **more}


def ended(**message: Any) -> tuple[Any, ...]:
    return (*spoken("a"), {"role": "assistant", **message})


TOOLED = (*spoken("a"), CALLED, RESULT, {"role": "assistant", "content": "b"})
READ: list[tuple[str, dict[str, Any], tuple[Any, ...], dict[str, Any]]] = [
    ("a prompt", {"prompt": "a"}, spoken("a"), {}),
    ("with a completion", {"prompt": "a", "completion": "b"}, spoken("a", "b"), {}),
    ("with a response", {"prompt": "a", "response": "b"}, spoken("a", "b"), {}),
    ("with a chosen answer", {"prompt": "a", "chosen": "b", "rejected": "c"}, spoken("a", "b"), {}),
    ("with messages of both", {"prompt": list(spoken("a")), "completion": [{"role": "assistant", "content": "b"}]},
     spoken("a", "b"), {}),
    ("a chosen conversation", {"prompt": "a", "chosen": list(spoken("a", "b")), "rejected": []}, spoken("a", "b"), {}),
    ("a chosen conversation alone of its prompt", {"prompt": list(spoken("z")), "chosen": list(spoken("a", "b"))},
     spoken("a", "b"), {}),
    ("a chosen answer as a message", share(("human", "a"), chosen={"from": "gpt", "value": "b"}), spoken("a", "b"), {}),
    ("messages with a response", {**one("a"), "response": "b"}, spoken("a", "b"), {}),
    ("in place of an empty answer", {**one("a", ""), "response": "b"}, spoken("a", "b"), {}),
    ("next to an answer of the messages", {**one("a", "b"), "response": "c"}, spoken("a", "b"), {}),
    ("an answer after the prompt's own", {"prompt": list(spoken("a", "b")), "completion": "c"},
     (*spoken("a", "b"), *spoken("", "c")[1:]), {}),
    ("chosen alone", {"chosen": list(spoken("a", "b")), "rejected": list(spoken("a", "c"))}, spoken("a", "b"), {}),
    ("chosen after the prompt's system", {"prompt": [SYSTEM, *spoken("a")], "chosen": list(spoken("a", "b"))},
     (SYSTEM, *spoken("a", "b")), {}),
    ("chosen after another question", {"prompt": [SYSTEM, *spoken("z")], "chosen": list(spoken("a", "b"))},
     (SYSTEM, *spoken("a", "b")), {}),
    ("chosen repeats the system", {"prompt": [SYSTEM, *spoken("a")], "chosen": [SYSTEM, *spoken("a", "b")]},
     (SYSTEM, *spoken("a", "b")), {}),
    ("chosen repeats the end", {"prompt": list(spoken("a", "b", "c")), "chosen": list(spoken("c", "d"))},
     spoken("a", "b", "c", "d"), {}),
    ("a question with an answer", {"question": "a", "answer": "b"}, spoken("a", "b"), {}),
    ("a question about a text", {"question": "a", "context": "b", "answers": {"text": ["c"]}}, spoken("a\n\nb"), {}),
    ("turns before an instruction", {"instruction": "c", "input": "", "output": "d", "history": [["a", "b"]]},
     spoken("a", "b", "c", "d"), {}),
    ("messages before a prompt", {"prompt": "c", "history": list(spoken("a", "b"))}, spoken("a", "b", "c"), {}),
    ("messages are richer than a prompt", {"prompt": "a", **one("a", "b", "c", "d")}, spoken("a", "b", "c", "d"), {}),
    ("messages are richer than text", {"text": "all", **one("a", "b")}, spoken("a", "b"), {}),
    ("a null is no key", {"messages": None, "prompt": "a"}, spoken("a"), {}),
    ("an empty list is no key", {"messages": [], "prompt": "a"}, spoken("a"), {}),
    ("turns", {"turns": ["a", "b"]}, spoken("a", "", "b"), {}),
    ("prompts of two turns", {"prompt": ["a", "b"]}, spoken("a", "", "b"), {}),
    ("an instruction", {"instruction": "a", "input": "", "output": "b"}, spoken("a", "b"), {}),
    ("with an input", {"instruction": "a", "input": "b", "output": "c", "text": "all"}, spoken("a\n\nb", "c"), {}),
    ("with a context", {"instruction": "a", "context": "b", "response": "c"}, spoken("a\n\nb", "c"), {}),
    ("an instruction alone", {"instruction": "a"}, spoken("a"), {}),
    ("a system prompt of the row", {"prompt": "a", "system": "Be brief."}, (SYSTEM, *spoken("a")), {}),
    ("that of the messages counts", {"messages": [SYSTEM, *spoken("a")], "system": "x"}, (SYSTEM, *spoken("a")), {}),
    ("an empty system prompt is none", {"prompt": "a", "system": " "}, spoken("a"), {}),
    ("nor is an empty system message one", {"messages": [{**SYSTEM, "content": ""}, *spoken("a")]}, spoken("a"), {}),
    ("two systems", {"messages": [SYSTEM, SYSTEM, *spoken("a")]}, (SYSTEM, SYSTEM, *spoken("a")), {}),
    ("a system in the middle", {"messages": [*spoken("a", "b"), SYSTEM, *spoken("c")]},
     (*spoken("a", "b"), SYSTEM, *spoken("c")), {}),
    ("two users in turn", {"messages": [*spoken("a"), *spoken("b")]}, (*spoken("a"), *spoken("b")), {}),
    ("ShareGPT", share(("human", "a"), ("gpt", "b")), spoken("a", "b"), {}),
    ("ShareGPT cut before a question", share(("gpt", "z"), ("human", "a"), ("gpt", "b")), spoken("a", "b"), {}),
    ("ShareGPT with a system", share(("system", "Be brief."), ("human", "a")), (SYSTEM, *spoken("a")), {}),
    ("a conversation of LMSYS", {"conversation": list(spoken("a", "b"))}, spoken("a", "b"), {}),
    ("messages as JSON", {"messages": json.dumps(spoken("a", "b"))}, spoken("a", "b"), {}),
    ("parts", {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}]}, spoken("ab"), {}),
    ("an empty answer is asked for", one("a", "", "b"), spoken("a", "", "b"), {}),
    ("so is one of null", said({"content": None}), spoken("a", ""), {}),
    ("a category and a name", {"prompt": "a", "category": "math", "question_id": 8}, spoken("a"),
     {"category": "math", "id": "8"}),
    ("an empty category is none", {"prompt": "a", "category": ""}, spoken("a"), {}),
    ("a category of a number", {"prompt": "a", "category": 3}, spoken("a"), {"category": "3"}),
    *((f"a thought under {key}", said({"content": "b", key: "t"}), ended(content="b", reasoning_content="t"), {})
      for key in ("reasoning_content", "thinking", "reasoning")),
    ("a thought without an answer", said({"content": "", "reasoning": "t"}),
     (*spoken("a"), {"role": "assistant", "reasoning_content": "t"}), {}),
    ("an empty answer as context", said({"content": "", "weight": 0}, *spoken("c", "d")), (*spoken("a"), {
        "role": "assistant", "content": ""}, *spoken("c", "d")), {"unlearned": frozenset({1})}),
    ("nulls of a table", share(("human", "a"), ("gpt", "b")) | {"conversations": [
        {"role": None, "from": "human", "content": None, "value": "a"},
        {"role": "assistant", "content": [{"type": None, "text": "b"}], "tool_calls": None, "weight": None}]},
     spoken("a", "b"), {}),
    ("a null in a call is kept", said({"tool_calls": [{"function": None, "name": "f", "arguments": {"x": None}}]}),
     ended(content="", tool_calls=[{**CALL, "function": {"name": "f", "arguments": {"x": None}}}]), {}),
    *((f"a result of {value}", {"messages": [*TOOLED[:2], {"role": "tool", "content": value}]},
       (*TOOLED[:2], {"role": "tool", "content": json.dumps(value)}), {})
      for value in ([{"temp": 3}], ["a", "b"], [], {}, 7, False)),
    ("a result in parts", {"messages": [*TOOLED[:2], {"role": "tool", "content": [{"type": "text", "text": "7"}]}]},
     (*TOOLED[:2], RESULT), {}),
    ("an empty thought", said({"content": "b", "reasoning": ""}), spoken("a", "b"), {}),
    *((f"{key} leaves an answer out", said({"content": "b", key: no}, *spoken("c", "d")), spoken("a", "b", "c", "d"),
       {"unlearned": frozenset({1})}) for key, no in (("weight", 0), ("train", False), ("loss", False))),
    ("a weight of one", said({"content": "b", "weight": 1}), spoken("a", "b"), {}),
    ("tools and their results", {"messages": [*TOOLED], "tools": [SCHEMA]}, TOOLED, {"tools": (SCHEMA,)}),
    ("tools as JSON", {"messages": [*TOOLED], "tools": json.dumps([SCHEMA])}, TOOLED, {"tools": (SCHEMA,)}),
    ("bare schemas", {"prompt": "a", "functions": [SCHEMA["function"]]}, spoken("a"), {"tools": (SCHEMA,)}),
    ("no tools", {"prompt": "a", "tools": []}, spoken("a"), {}),
    ("arguments as JSON", said({"content": None, "tool_calls": [{"id": "1", "function": {
        "name": "f", "arguments": '{"x": 1}'}}]}), ended(content="", tool_calls=[{"id": "1", **CALL}]), {}),
    ("a function call", said({"function_call": {"name": "f", "arguments": '{"x": 1}'}}, {
        "role": "function", "name": "f", "content": "7"}), (*spoken("a"), CALLED, {**RESULT, "name": "f"}), {}),
    ("a call and its result in ShareGPT", share(
        ("human", "a"), ("function_call", '{"name": "f", "arguments": {"x": 1}}'), ("observation", "7"), ("gpt", "b")),
     TOOLED, {}),
    ("a result without a word", {"messages": [*TOOLED[:2], {"role": "tool", "content": ""}]},
     (*TOOLED[:2], {"role": "tool", "content": ""}), {}),
    ("a mode", {"prompt": "a", "enable_thinking": False}, spoken("a"), {"thinking": False}),
    ("a mode of the template", {"prompt": "a", "chat_template_kwargs": {"enable_thinking": True}}, spoken("a"),
     {"thinking": True}),
]
REFUSED: list[tuple[str, Any, str]] = [
    ("a list", [1], r"expected a JSON object, got \[1\]; write one object a line"),
    ("a null", None, "expected a JSON object, got null; write"),
    ("no known key", {"words": "a"}, r"the row has none of the keys messages, .* text, got \['words'\]; rename one"),
    ("nothing under the keys", {"prompt": None}, r"has none of the keys messages, .*, got \['prompt'\]; rename one"),
    ("an empty prompt", {"prompt": " ", "words": "a"}, "prompt is empty; write its text, or leave the row out"),
    ("an empty instruction", {"instruction": "", "input": "a", "output": "b"}, "instruction is empty; write its text"),
    ("an empty list", {"messages": [], "id": 3}, "messages is empty; write"),
    ("a transcript", {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "c"},
     "chosen is one text without a prompt, such as a transcript, which is not read; give messages"),
    ("an answer of an object", {"instruction": "a", "output": {"b": 1}}, "the role of a message must be one of"),
    ("a history of text", {"prompt": "a", "history": "b"}, "history must be JSON, got 'b'"),
    *(("a history of no pairs", {"prompt": "a", "history": [one]}, "history must be a list of pairs")
      for one in (["b", "c", "d"], "bc", 3)),
    ("a prompt of a number", {"prompt": 3}, "prompt must be text or a list of messages, got 3"),
    ("messages of text", {"messages": ["a"]}, r"messages must be a list of messages, got \['a'\]"),
    ("messages of numbers", {"messages": [1]}, "a message must be an object, got 1; give its role"),
    ("no role", {"messages": [{"content": "a"}]}, "the role of a message must be one of system.*got null"),
    ("another role", {"messages": [{"role": "cat", "content": "a"}]}, "must be one of system, .* got 'cat'; rename"),
    ("a picture", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
     "only text is read of a message, got a part of the kind image_url; leave"),
    ("pictures next to the text", {"image": "cat.png", "conversations": [{"from": "human", "value": "<image>\nWhat?"}]},
     "image stands next to the text, and only text is read; leave the row out"),
    ("an empty user", {"messages": [*spoken("a", "b"), {"role": "user"}]},
     "a message of the user is empty"),
    ("no user", {"messages": [SYSTEM]}, "no user message; there is nothing to answer"),
    ("a text of a number", {"text": 3}, "text must be text, got 3"),
    ("half a pair", {"prompt": "a\ud800b"}, "holds half of a surrogate pair.*write the whole"),
    ("half a pair in a name", {"prompt": "a", "question_id": "\udcff"}, "holds half of a surrogate pair"),
    ("half a weight", said({"content": "b", "weight": 0.5}), "weight of an answer must be 0 or 1, .*got 0.5"),
    ("a row of half a weight", {**one("a", "b"), "weight": 0.5}, "weight of a row must be 0 or 1, .*got 0.5; .*rename"),
    ("a row of a word", {**one("a", "b"), "train": "false"}, "train of a row must be 0 or 1, .*got 'false'"),
    ("a row left out", {"prompt": "a", "weight": 0}, "weight or train or loss leaves the whole row out"),
    ("no answer to learn", said({"content": "b", "train": False}), "every answer is left out of the labels"),
    ("a thought of a list", said({"content": "b", "thinking": [1]}), "the thought of an answer must be text"),
    ("tools that are names", {"prompt": "a", "tools": ["search"]}, "tools must be JSON, got 'search'"),
    ("a call without a name", said({"tool_calls": [{"function": {}}]}), "a tool call must name its function"),
    ("arguments that are no JSON", said({"tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}),
     "the arguments of a tool call must be JSON"),
    ("a mode of text", {"prompt": "a", "enable_thinking": "on"}, "enable_thinking must be true or false, got 'on'"),
]


@pytest.mark.parametrize(("row", "messages", "more"), [case[1:] for case in READ], ids=[case[0] for case in READ])
def test_a_row_is_the_conversation_that_it_says(row: dict[str, Any], messages: tuple[Any, ...], more: dict[str, Any]
                                                ) -> None:
    prompt = parse_prompt(row, "p:1")
    assert prompt == Prompt(messages=messages, **{"id": "p:1", **more})
    assert parse_prompt(json.loads(json.dumps(prompt.row)), "elsewhere") == prompt, "it is read back as it was"


@pytest.mark.parametrize(("row", "message"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_a_row_that_cannot_be_kept_is_refused_by_name(row: Any, message: str) -> None:
    with pytest.raises(UserError, match=f"^p:1: .*{message}"):
        parse_prompt(row, "p:1")


@pytest.mark.parametrize("name", [name for role in ROLES for name in (role, role.upper(), f" {role.title()} ")])
def test_roles_of_any_case(name: str) -> None:
    words = '{"name": "f", "arguments": {}}'
    messages = [*spoken("a"), {"role": name, "content": words}]
    assert parse_prompt({"messages": messages}, "p:1").messages[1]["role"] == ROLES[name.strip().lower()]


def test_a_document_and_a_column() -> None:
    assert parse_prompt({"text": "all"}, "p:1") == Prompt(document="all", id="p:1")
    for words in ("a", list(spoken("a"))):
        assert parse_prompt({"question": words, "prompt": "b"}, "p:1", "question").messages == spoken("a")
    with pytest.raises(UserError, match=r"p:1: the row has none of the keys question, got \['prompt'\]; rename"):
        parse_prompt({"prompt": "b"}, "p:1", "question")


ROWS = [row for _, row, _, _ in READ] + [{"prompt": 'text , ] } \u2028 " \\ \n'}]


def parquet(rows: list[dict[str, Any]]) -> bytes:
    """A table in which every row has every key."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    written = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows), written)
    return bytes(written.getvalue())


def lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


FORMATS: dict[str, Callable[[list[dict[str, Any]]], bytes]] = {
    "lines": lines,
    "lines without a last end": lambda rows: lines(rows).rstrip(),
    "lines of Windows": lambda rows: b"\xef\xbb\xbf" + lines(rows).replace(b"\n", b"\r\n"),
    "blank lines": lambda rows: b"\n \n" + lines(rows).replace(b"\n", b"\n\n"),
    "an array": lambda rows: json.dumps(rows).encode(),
    "an array in lines, with a mark": lambda rows: b"\xef\xbb\xbf\n" + json.dumps(rows, indent=2).encode() + b"\n",
}
FORMATS |= {f"{name}, packed": lambda rows, form=form: gzip.compress(form(rows)) for name, form in FORMATS.items()}


@pytest.mark.parametrize("piece", [5, prompt_files.PIECE])
@pytest.mark.parametrize("form", FORMATS)
def test_files_of_every_form_hold_the_same_rows(form: str, piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                                ) -> None:
    monkeypatch.setattr(prompt_files, "PIECE", piece)
    file, expected = tmp_path / "p", [parse_prompt(row, "p").messages for row in ROWS]
    file.write_bytes(FORMATS[form](ROWS))
    assert [prompt.messages for prompt in read_prompts(file)] == expected
    shuffled = [(place, decoded(row)) for place, row in file_rows(file, 3)]
    order = list(range(len(ROWS)))
    random.Random(3).shuffle(order)
    assert [row for _, row in shuffled] == [ROWS[place] for place in order]
    assert sorted(shuffled, key=str) == sorted(((place, decoded(row)) for place, row in file_rows(file)), key=str)


@pytest.mark.parametrize("shuffled", [False, True])
def test_rows_of_an_array_are_named_by_the_line_in_which_they_start(tmp_path: Path, shuffled: bool) -> None:
    for text, places in (('\n[\n {"prompt": "a"},\n\n {\n"prompt": "b"}, {"prompt": "c"}\n]\n', [3, 5, 6]),
                         ('[{"prompt": "a"}, {"prompt": "b"}]', [1, 1])):
        (tmp_path / "p{}").write_text(text)
        found = dict(file_rows(tmp_path / "p{}", 3 if shuffled else None))
        assert {place: decoded(row)["prompt"] for place, row in found.items()} == {
            f"p{{}}:{line} (row {number})": "abc"[number - 1] for number, line in enumerate(places, 1)}


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_table_reads_alike_in_any_order(tmp_path: Path, shuffle: bool) -> None:
    calls = [{"name": "f", "arguments": {"city": "Paris", "unit": None}},
             {"name": "f", "arguments": {"city": None, "unit": "C"}}]
    rows = [said({"content": None, "tool_calls": [call]}) | {"made": date(2024, 7, 26), "raw": b"a"} for call in calls]
    (tmp_path / "p").write_bytes(parquet(rows))
    config = PromptConfig(origin="file", path=str(tmp_path / "p"), shuffle=shuffle)
    found = {prompt.id: prompt for _, prompt in ReadPrompts(config, 0).take(0, 9).prompts}
    assert {key: one.messages[1]["tool_calls"][0]["function"]["arguments"] for key, one in found.items()} == {
        "p:1": {"city": "Paris"}, "p:2": {"unit": "C"}}


@pytest.mark.parametrize("packed", [False, True])
def test_a_table_of_parquet(tmp_path: Path, packed: bool) -> None:
    rows = [{"prompt": "a", **said({"content": "", "tool_calls": [CALL]}, RESULT, tools=[SCHEMA])}, {"prompt": "b"},
            one("c", "d")]
    data, file = parquet(rows), tmp_path / "p.parquet"
    file.write_bytes(gzip.compress(data) if packed else data)
    assert read_prompts(file) == [parse_prompt(row, f"p.parquet:{place}") for place, row in enumerate(rows, 1)]
    config = PromptConfig(origin="file", path=str(file), shuffle=True)
    assert {prompt.question for _, prompt in ReadPrompts(config, 1).take(0, 3).prompts} == {"a", "b", "c"}


@pytest.mark.parametrize(("content", "says"), [
    (b'[{"prompt": "a"}, {"prom', "p is damaged .its list has no end.; write it anew"),
    (b'[{"prompt": "a"}, {"prompt": "b', "its list has no end"), (b'[{"prompt": "a"},', "its list has no end"),
    (b'[{"prompt": "a"}] 3', "p is damaged .there is text after its list.; write"), (b"[" * 50_000, "has no end"),
    (b'[{"prompt": "a"}]\n[{"prompt": "b"}]', "there is text after its list"),
    (b'[\n{"prompt": "a"},, {"prompt": "b"}]', r"p:2 \(row 2\): not JSON"),
    (b"[" * 500 + b"]" * 500, r"p:1 \(row 1\): not JSON .nested more than 100"),
    *((content, "p is neither JSON Lines nor a JSON array in UTF-8, nor Parquet, and CSV and plain text are not read; "
       "write each row as a JSON object on a line of its own")
      for content in (b"prompt,response\na,b\n", b"Once upon a time\n\nthere was", '{"prompt": "a"}'.encode("utf-16"))),
    (gzip.compress(b'{"prompt": "a"}\n' * 99, mtime=0)[:40], "is damaged .*; write it anew"),
    (b"PAR1 and more", "is damaged"),
    (b'{"prompt": "caf\xe9"}', "p:1: the row is not UTF-8 text .*; save it as UTF-8"),
    (b"\n\n", "holds no prompt; write one JSON object a line"),
])
def test_damaged_files_are_one_sentence(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "p").write_bytes(content)
    with pytest.raises(UserError, match=says):
        read_prompts(tmp_path / "p")
    with pytest.raises(UserError, match=r"cannot read the prompts .*nowhere.*No such file"):
        read_prompts(tmp_path / "nowhere.jsonl")


def test_no_row_and_no_unpacked_file_is_without_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_files, "ROW_BYTES", 100)
    (tmp_path / "p").write_bytes(b'{"prompt": "' + b"a" * 200 + b'"}\n{"prompt": "b"}\n')
    [(_, first), (place, second)] = file_rows(tmp_path / "p")
    assert (place, decoded(second)) == ("p:2", {"prompt": "b"})
    with pytest.raises(UserError, match="the row has more than 100 bytes"):
        decoded(first)
    monkeypatch.setattr(prompt_files, "PROMPT_BYTES", 300)
    for content in (b'{"prompt": "a"}\n' * 99, b"[" + b'{"prompt": "a"},' * 99, b"{" * 900):
        (tmp_path / "p").write_bytes(gzip.compress(content))
        with pytest.raises(UserError, match=r"more than .*; split"):
            list(file_rows(tmp_path / "p"))
