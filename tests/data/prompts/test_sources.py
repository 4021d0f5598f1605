"""Prompts are read in every shape people keep them in, and a bad line is named; kinds are drawn by seed and number."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from draftsmith.data import ChatTemplate, Prompt, PromptConfig, ReadPrompts
from draftsmith.data.prompts import prompt_files, sources
from draftsmith.data.prompts.sources import (
    ALL_KINDS,
    OPENINGS,
    SYSTEM_PROMPTS,
    UNSTEERED,
    OwnPrompts,
    drawn,
    named_kinds,
)
from draftsmith.modules import Generation, Request, Target, UserError, decode
from draftsmith.modules.target.loading.tiny_model import CHATML, tiny_model, tiny_tokenizer
from draftsmith.recipes.chat_settings import handwritten_prompts
from support.data.chat_templates import MIXTRAL, merging_tokenizer
from support.data.data_folders import spoken


def write_lines(folder: Path, *rows: Any) -> Path:
    file = folder / "prompts.jsonl"
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows),
                    encoding="utf-8")
    return file


def test_messages_carry_the_answers_given_so_far() -> None:
    prompt = Prompt.from_turns("a", "c", id="1", system="s")
    answers = spoken("", "b", "", "d")[1::2]
    assert [message["content"] for message in prompt.history()] == ["s", "a"]
    assert [message["content"] for message in prompt.history(answers[:1])] == ["s", "a", "b", "c"]
    assert prompt.history(answers)[-1] == answers[1]
    called = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    empty = Prompt(messages=spoken("a", "", "b", "c"), id="3", unlearned=frozenset({1}))
    assert (empty.asked, empty.learned) == ((3,), (3,)), "what is context alone may be empty"
    result, words = {"role": "tool", "content": "1"}, {"role": "assistant", "content": "one"}
    tooled = Prompt(messages=(*spoken("a"), called, result, words, *spoken("b", "c", "d")), id="2",
                    unlearned=frozenset({5}))
    assert (tooled.asked, tooled.learned) == ((1, 3, 7), (1, 3))
    assert tooled.history(answers[:1]) == [*spoken("a"), called, result], "results stay with the call that they answer"
    assert tooled.history(answers[:2]) == [*spoken("a"), called, result, answers[1], *spoken("b", "c", "d")]


def test_candidates_are_the_same_however_often_they_are_asked_for(tmp_path: Path) -> None:
    file = write_lines(tmp_path, *({"prompt": str(number)} for number in range(9)))
    config = PromptConfig(origin="file", path=str(file), shuffle=True, limit=7)
    source = ReadPrompts(config, seed=3)
    first, second = source.take(0, 4), source.take(4, 4)
    assert (first.read, second.read) == (4, 3)
    assert [number for number, _ in first.prompts + second.prompts] == list(range(7))
    assert source.take(2, 3).prompts == (first.prompts + second.prompts)[2:5]
    assert ReadPrompts(config, seed=3).take(4, 4) == second
    assert ReadPrompts(config, seed=4).take(0, 4) != first


@pytest.mark.parametrize(("limit", "total"), [(None, 9), (7, 7), (10, 9)])
def test_a_file_has_as_many_candidates_as_lines_up_to_the_limit(tmp_path: Path, limit: int | None, total: int) -> None:
    file = write_lines(tmp_path, *({"prompt": str(number)} for number in range(9)))
    assert ReadPrompts(PromptConfig(origin="file", path=str(file), limit=limit), seed=0).total == total


@pytest.mark.parametrize("streaming", [False, True])
def test_a_local_dataset(tmp_path: Path, streaming: bool) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "set").mkdir()
    write_lines(tmp_path / "set", *({"question": f"q{number}"} for number in range(5)))
    config = PromptConfig(origin="dataset", path=str(tmp_path / "set"), column="question", streaming=streaming)
    assert [prompt.question for prompt in all_of(config)] == [f"q{number}" for number in range(5)]


def test_a_dataset_saved_to_disk_and_one_that_is_missing(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"messages": [{"role": "user", "content": "a", "name": "n"}]},
            {"messages": [{"role": "user", "content": "b", "name": None}]}]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    saved = PromptConfig(origin="dataset", path=str(tmp_path / "saved"))
    assert [prompt.messages for prompt in all_of(saved)] == [
        ({"role": "user", "content": "a", "name": "n"},), ({"role": "user", "content": "b"},)]
    with pytest.raises(UserError, match=r"cannot load the dataset .*check prompts.path"):
        all_of(PromptConfig(origin="dataset", path=str(tmp_path / "nowhere")))


@pytest.mark.parametrize("streaming", [False, True])
def test_a_broken_dataset_is_one_sentence(tmp_path: Path, streaming: bool) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "rows.jsonl").write_text('{"prompt": "a"}\n{"prompt": \n')
    config = PromptConfig(origin="dataset", path=str(tmp_path / "set"), streaming=streaming)
    with pytest.raises(UserError, match=r"cannot load the dataset .*check prompts.path"):
        all_of(config)
    (tmp_path / "set" / "rows.jsonl").write_text('{"words": "a"}\n')
    with pytest.raises(UserError, match=r"set\[train\]:0: the row has none of the keys messages"):
        ReadPrompts(config, 0).skipped()


# Rows that are skipped -----------------------------------------------------------------------------------------------


def all_of(config: PromptConfig) -> list[Prompt]:
    return [prompt for _, prompt in ReadPrompts(config, 0).take(0, 99).prompts]


def mixed(folder: Path, *bad: Any) -> PromptConfig:
    """Twenty good rows with others among them."""
    good = [{"prompt": str(number)} for number in range(20)]
    return PromptConfig(origin="file", path=str(write_lines(folder, *good[:3], *bad, *good[3:])))


def test_bad_rows_are_skipped_counted_and_named(tmp_path: Path) -> None:
    config = mixed(tmp_path, {"prompt": 3}, {"prompt": 4})
    source = ReadPrompts(config, 0)
    found = source.skipped()
    assert [(one.row, one.kind) for one in found] == [
        (f"prompts.jsonl:{line}", "prompt must be text or a list of messages") for line in (4, 5)]
    assert found[0].reason == ("prompt must be text or a list of messages, got 3; give each message as an object with "
                               "its role and its content")
    taken = source.take(0, 22)
    numbers = [number for number, _ in taken.prompts]
    assert (taken.read, numbers) == (22, [0, 1, 2, *range(5, 22)]), "a skipped row keeps its number"
    assert source.take(3, 2).prompts == []


ODD: list[Callable[[int], Any]] = [
    lambda place: {f"words {place}": place},
    lambda place: {"prompt": place},
    lambda place: {"prompt": "a", "weight": place + 2},
    lambda place: {"prompt": "a", "history": [str(place)]},
    lambda place: {"prompt": "a", "tools": f"tool {place}"},
    lambda place: {"prompt": "a", "enable_thinking": f"mode {place}"},
    lambda place: {"messages": [{"role": f"role {place}", "content": "a"}]},
    lambda place: {"messages": [{"role": "user", "content": [{"type": f"kind {place}"}]}]},
    lambda place: {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [f"{place}"]}]},
    lambda place: '{"prompt": ' + " " * place + "no",
]


@pytest.mark.parametrize("row", ODD)
def test_rows_of_one_fault_are_counted_together_whatever_they_hold(tmp_path: Path, row: Callable[[int], Any]) -> None:
    found = ReadPrompts(replace(mixed(tmp_path, *map(row, range(9))), most_skipped=0.5), 0).skipped()
    assert (len(found), len({one.kind for one in found}), len({one.reason for one in found}) > 1) == (9, 1, True)


def test_a_prompt_that_cannot_be_used_is_skipped_like_a_row_that_cannot_be_read(tmp_path: Path) -> None:
    def check(number: int, prompt: Prompt) -> None:
        if prompt.question == "7":
            raise UserError(f"the template refuses {number}")

    source = ReadPrompts(mixed(tmp_path, "{"), 0, check)
    assert [(one.row, one.reason[:11]) for one in source.skipped()] == [("prompts.jsonl:4", "not JSON (E"),
                                                                        ("prompts.jsonl:9", "the templat")]
    assert "7" not in [prompt.question for _, prompt in source.take(0, 21).prompts]


def test_too_many_bad_rows_end_with_the_commonest_reasons(tmp_path: Path) -> None:
    config = mixed(tmp_path, {"prompt": 3}, {"words": "a"}, {"prompt": 4})
    with pytest.raises(UserError, match=r"^3 of 23 rows of \S+ cannot be used, and prompts.most_skipped 0.1 allows "
                                        r"fewer: 2 like prompts.jsonl:4: prompt must be .*; 1 like prompts.jsonl:5"):
        ReadPrompts(config, 0).skipped()
    assert len(ReadPrompts(replace(config, most_skipped=0.2), 0).skipped()) == 3
    with pytest.raises(UserError, match=r"^1 of 4 rows of \S+ cannot be used, and prompts.most_skipped 0 allows fewer: "
                                        r"1 like prompts.jsonl:4: prompt must be text"):
        ReadPrompts(replace(config, most_skipped=0), 0).skipped()


def test_rows_that_are_left_out_on_purpose_are_listed_and_no_fault(tmp_path: Path) -> None:
    config = replace(mixed(tmp_path, *[{"prompt": "a", "weight": 0}] * 9), most_skipped=0)
    found = ReadPrompts(config, 0).skipped()
    assert [(one.wanted, one.kind) for one in found] == [(True, "weight or train or loss leaves the whole row out")] * 9


def test_rows_are_checked_once_and_only_as_many_as_may_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = list[int]()

    def check(number: int, _prompt: Prompt) -> None:
        checked.append(number)
        if number in (2, 15):
            raise UserError("no")

    monkeypatch.setattr(prompt_files, "STREAM_BUFFER", 10)
    config = PromptConfig(origin="file", path=str(write_lines(tmp_path, *({"prompt": str(one)} for one in range(20)))),
                          most_skipped=0.5)
    for whole, looked in ((True, 20), (False, 10)):
        checked.clear()
        source = ReadPrompts(config, 0, check, whole=whole)
        assert ([one.row for one in source.skipped()], checked) == (
            [f"prompts.jsonl:{place + 1}" for place in (2, 15) if place < looked], list(range(looked)))
        taken = source.take(0, 20)
        assert [number for number, _ in taken.prompts] == [one for one in range(20) if one not in (2, 15)]
        assert [one.row for one in taken.skipped] == ([] if whole else ["prompts.jsonl:16"])
        assert checked == list(range(20)), "no row twice"


def test_a_limit_ends_the_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, original = [], prompt_files.decoded
    monkeypatch.setattr(prompt_files, "decoded", lambda row: read.append(row) or original(row))
    config = replace(mixed(tmp_path, *["{"] * 9), limit=3)
    source = ReadPrompts(config, 0)
    assert (source.total, source.skipped(), source.take(0, 9).read, len(read)) == (3, [], 3, 6)


# Written by the target -----------------------------------------------------------------------------------------------


def own(target: Target, own_max_tokens: int = 200, **fields: Any) -> OwnPrompts:
    config = PromptConfig(own_max_tokens=own_max_tokens, **fields)
    return OwnPrompts(target, ChatTemplate(target.tokenizer), config, seed=0, slots=8)


@pytest.fixture
def all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a turn is seldom in the nucleus of a random target."""
    monkeypatch.setattr(sources, "TOP_P", 1.0)


@pytest.mark.usefixtures("all_tokens")
def test_the_target_writes_prompts_that_depend_on_their_number_alone(tiny_target_f64: Target) -> None:
    written = own(tiny_target_f64).take(0, 16)
    assert written.read == 16
    assert written.prompts, "no prompt of sixteen was usable"
    again = own(tiny_target_f64).take(8, 8)
    assert again.prompts == [(number, prompt) for number, prompt in written.prompts if number >= 8]
    assert all(prompt.question == prompt.question.strip() for _, prompt in written.prompts)


@pytest.mark.usefixtures("all_tokens")
def test_written_prompts_that_cannot_be_used_are_left_out(tiny_target_f64: Target) -> None:
    def check(number: int, _prompt: Prompt) -> None:
        if number in odd:
            raise UserError("too long")

    source = own(tiny_target_f64)
    numbers = [number for number, _ in source.take(0, 16).prompts]
    odd, source.check = numbers[::2], check
    found = source.take(0, 16)
    assert ([number for number, _ in found.prompts], found.read) == (numbers[1::2], 16)


@pytest.mark.usefixtures("all_tokens")
def test_kinds_depend_on_the_number_alone(tiny_target_f64: Target) -> None:
    fields = {"own_kinds": ("coding", "any", "summary"), "own_openings": True}
    written = dict(own(tiny_target_f64, 100, **fields).take(0, 32).prompts)
    assert written
    first = min(written)
    assert dict(own(tiny_target_f64, 100, **fields).take(first, 32 - first).prompts) == written


@pytest.mark.usefixtures("all_tokens")
def test_each_prompt_is_written_after_the_system_prompt_of_its_kind(
    tiny_target_f64: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, kinds = dict[int, str](), ("coding", "any", "summary")

    def watched(target: Target, requests: list[Request], settings: Any, **more: Any) -> Any:
        asked.update({request.index: target.tokenizer.decode(list(request.tokens)) for request in requests})
        return decode(target, requests, settings, **more)

    monkeypatch.setattr(sources, "decode", watched)
    written = own(tiny_target_f64, 100, own_kinds=kinds).take(0, 12)
    assert len(asked) == 12
    for number, before in asked.items():
        kind, _ = drawn(kinds, 0, number)
        system = "" if kind == "any" else f"<|im_start|>system\n{SYSTEM_PROMPTS[kind]}<|im_end|>\n"
        assert before == f"{system}<|im_start|>user\n"
    assert written.prompts
    assert all(prompt.messages[0]["role"] == "user" for _, prompt in written.prompts)


@pytest.mark.usefixtures("all_tokens")
def test_the_target_goes_on_from_the_opening_of_a_kind(tiny_target_f64: Target,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    written, kinds = dict[int, tuple[str, str]](), ("coding", "any", "summary")

    def watched(target: Target, requests: list[Request], settings: Any, **more: Any) -> Any:
        result = decode(target, requests, settings, **more)
        for one in result.generations:
            asked, text = (target.tokenizer.decode(list(tokens)) for tokens in (one.request.tokens, one.tokens))
            written.setdefault(one.request.index, (asked, text.replace("<|im_end|>", "")))
        return result

    monkeypatch.setattr(sources, "decode", watched)
    prompts = dict(own(tiny_target_f64, 100, own_kinds=kinds, own_openings=True).take(0, 64).prompts)
    for number, (asked, text) in written.items():
        _, opening = drawn(kinds, 0, number)
        assert asked == f"<|im_start|>user\n{opening}", "no system prompt"
        if number in prompts:
            assert prompts[number].question == f"{opening}{text}".strip()
    assert prompts


NO_SYSTEM = CHATML.replace("{% for message", "{% if messages[0]['role'] == 'system' %}"
                           "{{ raise_exception('no system') }}{% endif %}{% for message")
SILENT = CHATML.replace("{% for message in messages %}", "{% for message in messages if message['role'] != 'system' %}")


@pytest.mark.parametrize(("template", "fields", "told"), [
    (NO_SYSTEM, {"own_kinds": ("math",)}, r"own_kinds asks for math by a system prompt, .* refuses \(.*no system"),
    (SILENT, {"own_kinds": ("any", "math")}, r"own_kinds asks for math by a system prompt, .* does not show; leave"),
    (None, {"own_kinds": ("any",)}, r"own_kinds without .*own_openings needs a chat template, .* set prompts\.own"),
])
def test_a_template_that_cannot_show_kinds_is_refused(template: str | None, fields: dict[str, Any], told: str) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(UserError, match=told):
        own(Target(tiny_model(), tokenizer, name="tiny"), 100, **fields)


@pytest.mark.parametrize("template", [NO_SYSTEM, SILENT])
def test_openings_need_no_system_prompts(template: str) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    source = own(Target(tiny_model(), tokenizer, name="tiny"), 100, own_kinds=("math",), own_openings=True)
    assert source.befores == {"math": source.around.before}


def test_a_target_without_a_template_goes_on_from_openings(tiny_target_f64: Target) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    target = Target(tiny_target_f64.model, tokenizer, name="tiny")
    prompts = own(target, 100, own_kinds=("math", "writing"), own_openings=True).take(0, 8).prompts
    assert prompts
    for number, prompt in prompts:
        _, opening = drawn(("math", "writing"), 0, number)
        assert prompt.question.startswith(opening)
        assert len(prompt.question) > len(opening)


def test_a_limit_ends_the_writing(tiny_target: Target) -> None:
    source = own(tiny_target, limit=3)
    assert [source.take(0, 2).read, source.take(2, 2).read, source.take(3, 2).read] == [2, 1, 0]


def test_unfit_prompts_are_dropped(tiny_target: Target) -> None:
    encode, source = tiny_target.tokenizer, own(tiny_target)

    def text(words: str, finish: str = "eos") -> str:
        tokens = encode(words + ("<|im_end|>" if finish == "eos" else ""), add_special_tokens=False)["input_ids"]
        return source._text(Generation(Request((1,), 0, 8), tokens=tokens, finish=finish))  # type: ignore[arg-type]

    assert text(" How far? ") == " How far? "
    assert text("How far", finish="length") == ""
    assert text("12 + 3?") == ""
    assert text("one<|im_start|>two") == ""
    assert text("ha ha ha ha ha ha ha ha") == ""
    assert text("") == ""


def test_a_turn_that_ends_in_no_end_token_is_cut_at_its_end(tiny_target: Target) -> None:
    tokenizer = merging_tokenizer(MIXTRAL)
    around = ChatTemplate(tokenizer).user_turn()
    assert tokenizer.decode(list(around.before)) == "<bos>[INST]"
    source = own(tiny_target)
    source.around, source.settings = around, type(source.settings)(stop=("[/INST]",))
    source.target = type("Stub", (), {"tokenizer": tokenizer})()  # type: ignore[assignment]
    tokens = tokenizer("how are you?[/INST]", add_special_tokens=False)["input_ids"]
    assert source._text(Generation(Request((1,), 0, 8), tokens=tokens, finish="stop")) == "how are you?"


def test_every_kind_is_drawn_alike() -> None:
    kinds = named_kinds([ALL_KINDS])
    found = Counter(drawn(kinds, 5, number)[0] for number in range(2800))
    assert set(found) == set(kinds) == {*SYSTEM_PROMPTS, UNSTEERED}
    assert all(150 < count < 250 for count in found.values()), found


def test_a_kind_depends_on_seed_and_number_alone() -> None:
    kinds, numbers = ("math", "coding", UNSTEERED), range(20)
    first, again, other = ([drawn(kinds, seed, number)[0] for number in numbers] for seed in (0, 0, 1))
    assert first == again != other


def test_the_kinds_of_the_hand_written_prompts_are_known() -> None:
    asked = handwritten_prompts()
    assert {prompt.category for prompt in asked} <= set(SYSTEM_PROMPTS)
    turns = [message["content"] for prompt in asked for message in prompt.messages if "content" in message]
    assert not any(turn in text for turn in turns for text in SYSTEM_PROMPTS.values())


def test_every_kind_has_openings_and_each_is_drawn() -> None:
    assert set(OPENINGS) == set(SYSTEM_PROMPTS)
    for kind, openings in OPENINGS.items():
        assert len(openings) == len(set(openings)) >= 5
        assert all(opening == opening.strip() for opening in openings), kind
        assert {drawn((kind,), 3, number)[1] for number in range(300)} == set(openings)
    assert drawn((UNSTEERED,), 3, 0) == (UNSTEERED, "")


def test_no_opening_is_that_of_a_hand_written_prompt() -> None:
    """Drafts are judged by those prompts: two common words in a row is all that training may share with their start."""
    asked = [str(message["content"]).lower() for prompt in handwritten_prompts() for message in prompt.messages
             if "content" in message]
    longer = [opening.lower() for openings in OPENINGS.values() for opening in openings if len(opening.split()) > 2]
    assert not [(opening, turn) for opening in longer for turn in asked if turn.startswith(opening)]
