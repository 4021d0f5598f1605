"""Answers are the target's own, shards pure functions of the recipe, and a killed run ends in the same bytes."""

import itertools
import json
import os
import re
import shutil
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from draftsmith.data import (
    ChatTemplate,
    DistillConfig,
    Manifest,
    Prompt,
    PromptConfig,
    ReadPrompts,
    TokenShard,
    distill,
    read_prompts,
)
from draftsmith.data.answers import answering, data_folder, distill_task
from draftsmith.data.answers import distill as shard_answering
from draftsmith.data.answers.answering import Answerer
from draftsmith.data.answers.data_folder import DataFolder
from draftsmith.data.answers.distill import ShardAnswering
from draftsmith.data.answers.distill_task import DistillTask, RowWriters, take_given
from draftsmith.data.answers.shard_queue import HELD_OUT, MERGE, ShardQueue
from draftsmith.data.datamodule import BatchConfig
from draftsmith.data.prompts import prompt_files, sources
from draftsmith.modules import DecodeSettings, Loop, Request, Target, UserError, decode, progress
from draftsmith.modules.files.folders import FolderLocks
from draftsmith.modules.target.loading.tiny_model import CHATML, tiny_model, tiny_tokenizer
from support.data.chat_templates import THINKING
from support.data.data_folders import WORDS, asked_prompts, contents, many, rows, shards, spoken, write_prompts
from support.processes import Killed, die, killed_after, killed_in
from support.targets import templated_target
from support.tiers import others_long

SMALL = DistillConfig(shard_prompts=4, slots=3, max_new_tokens=8, temperatures=(0.0, 1.0), validation_prompts=2,
                      test_prompts=1)


def run(target: Target, prompts: PromptConfig, config: DistillConfig, out: Path, **settings: Any) -> Manifest:
    return distill(target, prompts, config, ChatTemplate(target.tokenizer, **settings), out, progress=False)


def task_of(target: Target, config: DistillConfig = SMALL, **settings: Any) -> DistillTask:
    return DistillTask(target=target, train_target=target, prompts=PromptConfig(limit=9, origin="file", path="p"),
                       config=config, template=ChatTemplate(target.tokenizer, **settings), writer=None)


# What is written -----------------------------------------------------------------------------------------------------


def test_rows_are_prompts_with_the_targets_own_answers(tmp_path: Path, tiny_target_f64: Target) -> None:
    target, config = tiny_target_f64, replace(SMALL, max_new_tokens=24)
    prompts = write_prompts(tmp_path, many(15))
    held_out = run(target, prompts, config, tmp_path / "out").held_out
    template, given = ChatTemplate(target.tokenizer), read_prompts(str(prompts.path))
    # Prompts of the test are only kept.
    assert held_out is not None
    assert [one.question for one in read_prompts(tmp_path / "out" / held_out.file)] == [given[2].question]
    found = list(rows(tmp_path / "out"))
    assert [number for _, _, number, _ in found] == list(range(3, 15))
    ends = set()
    for tokens, supervised, number, temperature in found:
        prompt = template.prompt(given[number].history())
        assert tokens[: len(prompt)] == prompt
        assert supervised == [False] * len(prompt) + [True] * (len(tokens) - len(prompt))
        assert temperature == (0.0, 1.0)[number % 2]
        request = Request(tuple(prompt), number * 1024, 24, temperature)
        alone = decode(target, [request], DecodeSettings(seed=config.seed)).generations[0]
        assert tokens[len(prompt) :] == alone.tokens
        assert (alone.finish == "length") != (tokens[-1] in target.eos_ids), "a cut answer has no end, a whole one has"
        ends.add(alone.finish)
    assert ends == {"length", "eos"}


def test_validation_prompts_are_answered_greedily_and_drawn_without_filters(
    tmp_path: Path, tiny_target_f64: Target
) -> None:
    target, config = tiny_target_f64, replace(SMALL, top_k=2, max_new_tokens=24)
    manifest = run(target, write_prompts(tmp_path, many(9)), config, tmp_path / "out")
    found = list(rows(tmp_path / "out", "validation"))
    assert [(number, temperature) for _, _, number, temperature in found] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    for tokens, supervised, number, temperature in found:
        start = supervised.index(True)
        request = Request(tuple(tokens[:start]), number * 1024, 24, temperature)
        assert tokens[start:] == decode(target, [request], DecodeSettings(seed=config.seed)).generations[0].tokens
    [record] = manifest.split("validation")
    assert (record.prompts, record.rows, record.answers) == (2, 4, 4)


def test_held_out_prompts_and_duplicates_never_train(tmp_path: Path, tiny_target: Target) -> None:
    # Rows that reach the model alike are the same prompt: another system prompt makes another.
    other = [{"system": "Be brief.", **row} for row in many(3)]
    named = [{**row, "category": "x", "other": 1} for row in many(3)]
    repeated = [*many(3), *named, *other, *many(6), *other, *many(6)]
    manifest = run(tiny_target, write_prompts(tmp_path, repeated), SMALL, tmp_path / "out")
    assert manifest.total("train", "prompts") == 6
    assert manifest.candidates == len(repeated)
    held = {key for shard in shards(tmp_path / "out", "validation") for key in shard.keys_P.tolist()}
    task = task_of(tiny_target)
    held |= {task.asked_key(prompt) for prompt in read_prompts(tmp_path / "out" / "test.jsonl")}
    trained = [key for shard in shards(tmp_path / "out") for key in shard.keys_P.tolist()]
    assert len(held) == 3
    assert not held & set(trained)
    assert len(trained) == len(set(trained))


@pytest.mark.long
def test_the_target_writes_its_own_prompts(tmp_path: Path, tiny_target: Target,
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "TOP_P", 1.0)
    prompts = PromptConfig(own_max_tokens=150)
    config = replace(SMALL, shard_prompts=8, slots=8, budget_tokens=40)
    manifest = run(tiny_target, prompts, config, tmp_path / "out")
    assert manifest.complete
    assert manifest.total("train", "supervised") >= 40
    assert all(prompt.category == "own" for prompt in read_prompts(tmp_path / "out" / "test.jsonl"))
    for tokens, supervised, *_ in rows(tmp_path / "out"):
        text = tiny_target.tokenizer.decode(tokens[: supervised.index(True)])
        assert text.startswith("<|im_start|>user\n")
        assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_each_turn_is_answered_behind_the_answers_before_it(tmp_path: Path, tiny_target: Target) -> None:
    turns = [{"turns": [f"{word} one", f"{word} two", f"{word} three"]} for word in WORDS]
    run(tiny_target, write_prompts(tmp_path, turns), replace(SMALL, test_prompts=0), tmp_path / "out")
    tokenizer, found = tiny_target.tokenizer, list(rows(tmp_path / "out"))
    # A random target also writes special tokens; its answer as text has none, so its next turn starts a row of its own.
    numbers = [number for _, _, number, _ in found]
    whole = [row for row in found if numbers.count(row[2]) == 1]
    assert len(whole) >= 4
    for tokens, supervised, number, _ in whole:
        spoken = [tokenizer.decode([t]) + "^" * s for t, s in zip(tokens, supervised, strict=True)]
        asked = [f"{WORDS[number]} {word}<|im_end|>\n<|im_start|>assistant\n" for word in ("one", "two", "three")]
        places = ["".join(spoken).index(text) for text in asked]
        assert places == sorted(places)
        assert all("".join(spoken)[place + len(text) + 1] == "^" for place, text in zip(places, asked, strict=True))


def test_a_template_that_rewrites_history_gives_a_row_a_turn(tiny_target: Target) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = THINKING.replace("split('</think>')", "split('e')")
    template = ChatTemplate(tokenizer)
    answerer = Answerer(tiny_target, template, DecodeSettings(batch_size=2), 40, lambda _: None)
    prompts = [(n, Prompt.from_turns(word, "go on", id=str(n))) for n, word in enumerate(WORDS)]
    answered_ = answerer.answer(prompts, (1.0,))
    assert {len(one.rows) for one in answered_} == {1, 2}
    for one in answered_:
        assert len(one.turns) == 2
        for turn, texts in zip(one.turns, ((), one.said[:1]), strict=True):
            assert turn.prompt == template.prompt(one.prompt.history(texts))
        assert len(one.rows) == 2 or "e" not in one.said[0]["content"]
        supervised = [t for row in one.rows for t, s in zip(row.tokens, row.supervised, strict=True) if s]
        assert supervised == one.turns[0].answer + one.turns[1].answer


def test_every_mode_comes_with_every_temperature(tiny_target: Target) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = THINKING
    template = ChatTemplate(tokenizer, modes=(True, False))
    answerer = Answerer(tiny_target, template, DecodeSettings(batch_size=4), 4, lambda _: None)
    found = answerer.answer([(n, Prompt.from_turns("a", id=str(n))) for n in range(4)], (0.0, 1.0))
    assert {(one.thinking, one.temperature) for one in found} == {(m, t) for m in (True, False) for t in (0.0, 1.0)}
    for one in found:
        assert one.turns[0].prompt == template.prompt(one.prompt.history(), thinking=one.thinking)


def test_a_conversation_ends_where_the_context_does(tiny_target: Target) -> None:
    template = ChatTemplate(tiny_target.tokenizer)
    answerer = Answerer(tiny_target, template, DecodeSettings(), 10, lambda _: None)
    asked = [Prompt.from_turns("a", "b" * 600, "c", id="0"), Prompt.from_turns("a", "b", id="1"),
             Prompt.from_turns("c" * (512 - 5 - len(template.prompt([{"role": "user", "content": ""}]))), id="2")]
    found = answerer.answer(list(enumerate(asked)), (0.0,))
    assert [(len(one.turns), one.full) for one in found] == [(1, True), (2, False), (1, True)]
    assert len(found[2].turns[0].answer) == 5


def test_a_base_model_continues_plain_text(tmp_path: Path) -> None:
    target = templated_target(None)
    config = replace(SMALL, budget_tokens=30)
    manifest = run(target, PromptConfig(), config, tmp_path / "own")
    assert manifest.complete
    run(target, write_prompts(tmp_path, many(8)), SMALL, tmp_path / "out")
    first = next(rows(tmp_path / "out"))
    assert target.tokenizer.decode(first[0]).startswith(many(4)[3]["prompt"])
    assert first[1].index(True) == len(many(4)[3]["prompt"])


# Ready-made answers --------------------------------------------------------------------------------------------------


def answered(count: int) -> list[dict[str, Any]]:
    return [{"messages": list(spoken(f"ask {number}", f"answer {number}"))} for number in range(count)]


def test_given_answers_are_used_as_they_are_and_marked(tmp_path: Path, tiny_target: Target) -> None:
    given = replace(SMALL, answered_by="text")
    manifest = run(tiny_target, write_prompts(tmp_path, answered(7)), given, tmp_path / "out")
    assert manifest.total("train", "by_text") == manifest.total("train", "rows")
    assert manifest.total("train", "by_target") == 0
    decoded = [tiny_target.tokenizer.decode([t for t, s in zip(row[0], row[1], strict=True) if s])
               for row in rows(tmp_path / "out")]
    assert decoded == [f"answer {number}<|im_end|>" for number in range(3, 7)]
    tokens, supervised, *_ = next(rows(tmp_path / "out", "validation"))
    answer = tiny_target.tokenizer.decode(tokens[supervised.index(True) :])
    assert answer != "answer 0<|im_end|>", "validation is on-policy"


def test_rows_that_differ_in_given_answers_are_no_duplicates_and_held_out_prompts_train_with_none(
    tmp_path: Path, tiny_target: Target
) -> None:
    given, config = answered(8), replace(SMALL, answered_by="text")
    others = [{"messages": [row["messages"][0], {"role": "assistant", "content": "another"}]} for row in given]
    prompts = write_prompts(tmp_path, [*given, *given, *others])
    manifest = run(tiny_target, prompts, config, tmp_path / "out")
    texts = [tiny_target.tokenizer.decode(tokens) for tokens, *_ in rows(tmp_path / "out")]
    said = [message for row in (*given[3:], *others[3:]) for message in row["messages"][1:]]
    assert [message["content"] in text for message, text in zip(said, texts, strict=True)] == [True] * 10
    assert not [text for text in texts for number in range(3) if f"ask {number}" in text]
    assert manifest.repeated == 8 + 3
    # Data that grow know the rows of their shards as well.
    run(tiny_target, prompts, replace(config, budget_tokens=20), tmp_path / "grown")
    run(tiny_target, prompts, config, tmp_path / "grown")
    assert contents(tmp_path / "grown") == contents(tmp_path / "out")


def test_equal_keys_are_those_of_rows_that_reach_the_model_as_the_same() -> None:
    target = templated_target("{% if tools %}T{{ tools | length }}{% endif %}{% if enable_thinking is defined and not "
                           "enable_thinking %}no{% endif %}" + CHATML)
    task, plain, tools = task_of(target, system="s"), Prompt(messages=spoken("a"), id="1"), ({"name": "f"},)
    same = [Prompt(messages=spoken("a", "b"), id="2", category="c"), replace(plain, thinking=True),
            Prompt.from_turns("a", id="3", system="s")]
    assert {task.key(0, one) for one in [plain, *same]} == {task.asked_key(plain)}, "the answer is asked for"
    others = [Prompt.from_turns("a", id="3", system="S"), Prompt.from_turns("A", id="4"), replace(plain, tools=tools),
              Prompt.from_turns("a", "b", id="5"), replace(plain, thinking=False), Prompt(document="a", id="6"),
              Prompt(messages=spoken("a", "b", "c"), unlearned=frozenset({1}), id="7")]
    assert len({task.key(0, one) for one in [plain, *others]}) == 1 + len(others)
    task, given = task_of(target, replace(SMALL, answered_by="text")), Prompt(messages=spoken("a", "b"), id="8")
    more = Prompt(messages=spoken("a", "b", "c"), id="9", category="c")
    assert task.key(0, given) == task.key(0, more), "nobody answers c"
    others = [Prompt(messages=spoken("a", "c"), id="10"), replace(given, tools=tools),
              Prompt(messages=spoken("a", "b", "c", "d"), id="11"), Prompt(document="a", id="13"),
              Prompt(messages=spoken("a", "b", "c", "d"), unlearned=frozenset({1}), id="12")]
    assert len({task.key(0, one) for one in [given, *others]}) == 1 + len(others)


def test_a_row_with_the_recipes_own_system_prompt_is_held_out_like_one_without(tmp_path: Path, tiny_target: Target
                                                                              ) -> None:
    rows_ = [*many(9), *[{"system": "S", **row} for row in many(3)]]
    manifest = run(tiny_target, write_prompts(tmp_path, rows_), SMALL, tmp_path / "out", system="S")
    assert (manifest.total("train", "prompts"), manifest.repeated) == (6, 3)


ALTERNATING = ("{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles "
               "must alternate') }}{% endif %}{% endfor %}" + CHATML)
LAST = ("{% if add_generation_prompt and messages[-1].role == 'assistant' %}{{ raise_exception('nobody asked') }}"
        "{% endif %}" + CHATML)
WORDY = ("{% for m in messages %}{% if not m.content %}{{ raise_exception('no words') }}{% endif %}{% endfor %}"
         + CHATML)


@pytest.mark.parametrize("writer", ["target", "text"])
@pytest.mark.parametrize(("source", "row"), [
    (ALTERNATING, {"messages": [*spoken("a", "b", "c"), *spoken("d")]}),
    (LAST, {"messages": [*spoken("a", "b"), *spoken("", "c", "d", "e")[1:]]}),
    (CHATML, {"messages": spoken("a " * 300, "b")}), (CHATML, {"messages": spoken("a", "b", "a " * 300, "b")}),
])
def test_what_would_be_refused_later_is_skipped_before_the_first_answer(
    tmp_path: Path, writer: Any, source: str, row: dict[str, Any]
) -> None:
    config, whole = replace(SMALL, answered_by=writer), {"messages": spoken("a", "b")}
    prompts = replace(write_prompts(tmp_path, [*answered(6), row, *answered(9)[6:], whole]), most_skipped=0.2)
    manifest = run(templated_target(source), prompts, config, tmp_path / "out")
    assert (sum(manifest.skipped.values()), manifest.total("train", "prompts")) == (1, 7)


def test_short_rows_are_checked_without_their_tokens(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = [task_of(tiny_target, replace(SMALL, answered_by=writer)) for writer in ("target", "text")]
    monkeypatch.setattr(ChatTemplate, "_encode", lambda *_: pytest.fail("a row was tokenized"))
    for task in tasks:
        task.check(0, Prompt(messages=spoken("a", "b", "c", "d"), id="1"))
    long = Prompt(messages=spoken("é" * 40), id="2")
    with pytest.raises(pytest.fail.Exception, match="a row was tokenized"):
        tasks[0].check(0, long)


def test_an_answer_without_a_word_does_not_end_a_conversation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = templated_target(WORDY)
    monkeypatch.setattr(ChatTemplate, "said", lambda self, *_: self.own({"role": "assistant", "content": ""}))
    prompts = write_prompts(tmp_path, [{"turns": [f"a{number}", "b"]} for number in range(9)])
    manifest = run(target, prompts, SMALL, tmp_path / "out")
    assert (manifest.total("train", "answers"), manifest.skipped) == (12, {})
    for source, words in ((WORDY, "…"), (CHATML, "")):
        shown = ChatTemplate(templated_target(source).tokenizer).rendered(spoken("a", "", "b"))
        assert f"<|im_start|>assistant\n{words}<|im_end|>" in shown


@pytest.mark.parametrize(("texts", "says"), [(("a",), "the row has no answer of its own"),
                                             (("a", "", "c", "d"), "one of its answers is empty, and what follows")])
def test_a_row_without_a_given_answer_says_why(tiny_target: Target, texts: tuple[str, ...], says: str) -> None:
    with pytest.raises(UserError, match=f"^{says}"):
        task_of(tiny_target, replace(SMALL, answered_by="text")).check(0, Prompt(messages=spoken(*texts), id="1"))


def test_given_answers_are_cut_and_must_be_exact(tiny_target: Target) -> None:
    long = Prompt(messages=spoken("a", "b" * 200), id="y")
    [one] = take_given([(0, long)], ChatTemplate(tiny_target.tokenizer), 100)
    assert (len(one.rows[0].tokens), one.full) == (100, True)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ 'X' if messages[-1]['content'] == 'bad' else 'Y' }}{{ m['content'] }}{% endfor %}")
    bad, good = (Prompt(messages=spoken("a", text), id=text) for text in ("bad", "good"))
    assert [one.full for one in take_given([(1, good)], ChatTemplate(tokenizer), 100)] == [False]
    with pytest.raises(UserError, match="writes a prompt otherwise than without one"):
        take_given([(0, bad)], ChatTemplate(tokenizer), 100)


def test_rows_that_cannot_be_used_are_skipped_before_the_first_answer(
    tmp_path: Path, tiny_target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = ("{% if messages[0]['content'] == 'Why 2' %}{{ raise_exception('no') }}{% endif %}"
                               + CHATML)
    rows = [*many(3), {"prompt": 3}, {"text": "a document"}, *many(9), *[{"prompt": f"{word}!"} for word in WORDS]]
    prompts, out = replace(write_prompts(tmp_path, rows), most_skipped=0.2), tmp_path / "out"
    manifest = distill(tiny_target, prompts, SMALL, ChatTemplate(tokenizer), out, progress=False)
    assert [json.loads(line) for line in (out / "skipped.jsonl").read_text().splitlines()] == [
        {"row": "prompts.jsonl:3", "reason": (refused := "the chat template fails: no; change the messages, or set "
                                              "target.chat_template")},
        {"row": "prompts.jsonl:4", "reason": "prompt must be text or a list of messages, got 3; give each message as "
                                             "an object with its role and its content"},
        {"row": "prompts.jsonl:5", "reason": "a plain document is not answered; train on it with distill.answered_by: "
                                             "text, or give messages"},
        {"row": "prompts.jsonl:8", "reason": refused}]
    assert manifest.skipped == {"a plain document is not answered": 1, "prompt must be text or a list of messages": 1,
                                "the chat template fails": 2}
    assert caplog.messages[0] == (
        f"4 rows are skipped, which {out / 'skipped.jsonl'} lists: 2 × the chat template fails; 1 × a plain document "
        "is not answered; 1 × prompt must be text or a list of messages")
    assert (manifest.candidates, manifest.repeated) == (22, 2)
    assert sum(shard.prompts for shard in manifest.shards) + SMALL.test_prompts == 22 - 4 - 2
    with pytest.raises(UserError, match=r"allows fewer: 1 like prompts.jsonl:3: the chat template fails: no"):
        distill(tiny_target, replace(prompts, most_skipped=0.0), SMALL, ChatTemplate(tokenizer), tmp_path / "b",
                progress=False)
    assert not list((tmp_path / "b").glob("*.safetensors"))


def test_what_the_template_leaves_out_of_rows_is_said_and_counted(
    tmp_path: Path, tiny_target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    function = {"name": "add", "arguments": {"a": 1}}
    agents = [{"tools": [{"type": "function", "function": {"name": "add"}}], "messages": [
        {"role": "user", "content": f"add {number}"}, {"role": "assistant", "tool_calls": [{"function": function}]},
        {"role": "tool", "content": "3"}]} for number in range(3)]
    prompts = write_prompts(tmp_path / "agents", [*many(6), *agents])
    manifest = run(tiny_target, prompts, SMALL, tmp_path / "a")
    assert (manifest.unwritten, manifest.skipped) == ({"tools": 3, "tool calls": 3}, {})
    assert caplog.messages[:2] == [
        f"the chat template leaves out the {part} of 3 rows; set target.chat_template to one that writes them, or "
        "leave such rows out" for part in ("tools", "tool calls")]
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ tools }}{% for m in messages %}{{ m.tool_calls }}{% endfor %}" + CHATML
    manifest = distill(tiny_target, prompts, SMALL, ChatTemplate(tokenizer), tmp_path / "b", progress=False)
    assert manifest.unwritten == {}
    given = answered(12)
    for row in given[:8]:
        row["messages"][1]["reasoning_content"] = "hm"
    manifest = run(tiny_target, write_prompts(tmp_path, given), replace(SMALL, answered_by="text"), tmp_path / "c")
    assert manifest.unwritten == {"thoughts": 8}


def test_the_list_of_skipped_rows_is_that_of_the_corrected_file(tmp_path: Path, tiny_target: Target) -> None:
    out = tmp_path / "out"
    with pytest.raises(UserError, match="usable prompts among the first 3, but 3 are to be held out"):
        run(tiny_target, replace(write_prompts(tmp_path, [*many(2), {"prompt": 3}]), most_skipped=0.5), SMALL, out)
    assert (out / "skipped.jsonl").exists()
    assert run(tiny_target, replace(write_prompts(tmp_path, many(9)), most_skipped=0.5), SMALL, out).skipped == {}
    assert not (out / "skipped.jsonl").exists()


# Interrupted runs ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("source", others_long(["file", "own", "kinds"], kept=("file",)))
def test_a_run_killed_at_any_write_ends_in_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                          source: str) -> None:
    target = templated_target(None) if source == "own" else Target(tiny_model(), tiny_tokenizer(), name="tiny-random")
    monkeypatch.setattr(sources, "TOP_P", 1.0)
    kinds = PromptConfig(own_kinds=("math", "any"), own_max_tokens=100)
    rows = [*many(2), {"prompt": 3}, *many(12)]
    prompts = {"file": write_prompts(tmp_path, rows), "own": PromptConfig(), "kinds": kinds}[source]
    config = replace(SMALL, budget_tokens=50 if source == "file" else 24)
    run(target, prompts, config, tmp_path / "whole")
    expected = contents(tmp_path / "whole")
    assert ("skipped.jsonl" in expected) == (source == "file")
    # Prompts of kinds take the longest, and are written by the same code: every third write of theirs.
    for last in itertools.count(step=3 if source == "kinds" else 1):
        out = tmp_path / f"killed-{last}"
        with suppress(Killed), killed_after(last):
            run(target, prompts, config, out)
            break
        run(target, prompts, config, out)
        assert contents(out) == expected, f"killed before write {last}"
    assert last >= 6
    assert contents(tmp_path / f"killed-{last}") == expected


def test_a_resumed_run_redoes_no_finished_shard(tmp_path: Path, tiny_target: Target,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, out = write_prompts(tmp_path, many(12)), tmp_path / "out"
    run(tiny_target, prompts, SMALL, out)
    manifest = Manifest.load(out)
    replace(manifest, shards=manifest.shards[:-1], candidates=11, complete=False).save(out)
    before = {file.name: file.stat().st_mtime_ns for file in out.glob("*.safetensors")}
    asked = asked_prompts(monkeypatch)
    assert run(tiny_target, prompts, SMALL, out) == manifest
    assert asked == [11]
    after = {file.name: file.stat().st_mtime_ns for file in out.glob("*.safetensors")}
    assert {name for name in before if after[name] != before[name]} == {manifest.shards[-1].file}
    asked.clear()
    run(tiny_target, prompts, SMALL, out)
    assert not asked, "a complete folder is left as it is"


@pytest.mark.parametrize(("change", "message"), [
    ({"seed": 1}, r"distill.seed was 0 and is now 1; choose another --out"),
    ({"temperatures": (0.0,)}, r"distill.temperatures was \[0.0, 1.0\] and is now \[0.0\]"),
    ({"budget_tokens": 500}, r"distill.budget_tokens was 1000 and is now 500"),
    ({"budget_tokens": 2000, "seed": 1}, r"distill.seed was 0 and is now 1; choose another --out"),
])
def test_changed_settings_are_refused(tmp_path: Path, tiny_target: Target, change: dict[str, Any],
                                      message: str) -> None:
    prompts, config = write_prompts(tmp_path, many(8)), replace(SMALL, budget_tokens=1000)
    run(tiny_target, prompts, config, tmp_path / "out")
    with pytest.raises(UserError, match=message):
        run(tiny_target, prompts, replace(config, **change), tmp_path / "out")


def test_settings_that_change_no_byte_leave_complete_data_as_they_are(tmp_path: Path, tiny_target: Target) -> None:
    prompts, out = write_prompts(tmp_path, [*many(12), {"prompt": 3}]), tmp_path / "out"
    manifest = run(tiny_target, prompts, SMALL, out)
    before = {file.name: (file.stat().st_mtime_ns, file.read_bytes()) for file in out.iterdir()}
    assert run(tiny_target, replace(prompts, most_skipped=0.0), SMALL, out) == manifest
    assert {file.name: (file.stat().st_mtime_ns, file.read_bytes()) for file in out.iterdir()} == before


@pytest.mark.parametrize("limit", [60, None])
def test_a_higher_limit_adds_answers_to_a_complete_folder(tmp_path: Path, tiny_target: Target,
                                                          limit: int | None) -> None:
    prompts, out = write_prompts(tmp_path, many(24)), tmp_path / "out"
    few = run(tiny_target, prompts, replace(SMALL, budget_tokens=20), out)
    before = contents(out)
    more = run(tiny_target, prompts, replace(SMALL, budget_tokens=limit), out)
    assert more.complete
    assert more.shards[:len(few.shards)] == few.shards
    assert all((out / shard.file).read_bytes() == before[shard.file] for shard in few.shards)
    assert more.total("train", "supervised") >= (limit or 100)
    keys = [key for shard in more.shards for key in TokenShard.read(out / shard.file, shard.sha256).keys_P.tolist()]
    assert len(keys) == len(set(keys)), "a prompt was answered twice"
    assert Manifest.load(out).recipe["distill"]["budget_tokens"] == limit
    assert run(tiny_target, prompts, replace(SMALL, budget_tokens=limit), out) == more, "it is complete"


def test_data_that_may_not_grow_stay_complete(tmp_path: Path, tiny_target: Target,
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, out, config = write_prompts(tmp_path, many(24)), tmp_path / "out", replace(SMALL, budget_tokens=20)
    run(tiny_target, prompts, config, out)
    before = contents(out)
    monkeypatch.setattr(distill_task, "PACKAGES", ("torch",))
    with pytest.raises(UserError, match="the installed versions was"):
        run(tiny_target, prompts, replace(config, budget_tokens=60), out)
    assert contents(out) == before
    assert run(tiny_target, prompts, config, out).complete


def test_growing_data_are_finished_by_the_higher_limit_alone(tmp_path: Path, tiny_target: Target) -> None:
    prompts, out = write_prompts(tmp_path, many(24)), tmp_path / "out"
    higher = replace(SMALL, budget_tokens=60)
    run(tiny_target, prompts, replace(SMALL, budget_tokens=20), out)
    run(tiny_target, prompts, higher, out)
    expected, few = contents(out), tmp_path / "few"
    run(tiny_target, prompts, replace(SMALL, budget_tokens=20), few)
    with killed_in(Answerer, "answer"):
        run(tiny_target, prompts, higher, few)
    run(tiny_target, prompts, higher, few)
    assert contents(few) == expected


def test_growth_that_would_add_nothing_is_refused(tmp_path: Path, tiny_target: Target,
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, out = write_prompts(tmp_path, many(24)), tmp_path / "out"
    config = replace(SMALL, budget_tokens=1000, budget_minutes=100.0)
    now, spent, answer, calls = time.monotonic, [0.0], Answerer.answer, []

    def slow(self: Answerer, *given: Any, **settings: Any) -> Any:
        calls.append(given)
        if len(calls) < len(("first shard", "validation", "second shard")):
            return answer(self, *given, **settings)
        spent[0] = 6060.0
        return []

    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: now() / 1e6 + spent[0])
        patch.setattr(Answerer, "answer", slow)
        few = run(tiny_target, prompts, config, out)
    assert len(few.split("train")) == 1
    before, tokens = contents(out), few.total("train", "supervised")
    with pytest.raises(UserError, match=r"no answer would be added to the complete data in .*: they have taken "
                                        r"101\.\d minutes; raise distill.budget_minutes \(100\) above that, or go"):
        run(tiny_target, prompts, replace(config, budget_tokens=2000), out)
    assert contents(out) == before
    same = run(tiny_target, prompts, replace(config, budget_minutes=100.5), out)
    assert same.shards == few.shards, "more minutes, which are spent as well, end the same data"
    more = run(tiny_target, prompts, replace(config, budget_minutes=200.0), out)
    assert more.total("train", "supervised") > tokens
    before = contents(out)
    with pytest.raises(UserError, match=r": all 24 prompts have been asked; choose another --out for more prompts"):
        run(tiny_target, prompts, replace(config, budget_minutes=300.0), out)
    assert contents(out) == before


def test_growth_up_to_what_the_data_hold_is_refused(tmp_path: Path, tiny_target: Target) -> None:
    prompts, out = write_prompts(tmp_path, many(24)), tmp_path / "out"
    config = replace(SMALL, budget_tokens=20, budget_minutes=200.0)
    held = run(tiny_target, prompts, config, out).total("train", "supervised")
    before = contents(out)
    for higher in ({"budget_minutes": 300.0}, {"budget_tokens": held}):
        with pytest.raises(UserError, match=rf": they hold {held} answer tokens; raise distill.budget_tokens above"):
            run(tiny_target, prompts, replace(config, **higher), out)
        assert contents(out) == before


def test_changed_prompts_template_and_target_are_refused(tmp_path: Path, tiny_target: Target) -> None:
    prompts, out = write_prompts(tmp_path, many(8)), tmp_path / "out"
    run(tiny_target, prompts, SMALL, out)
    moved = write_prompts(tmp_path / "moved", many(8))
    assert run(tiny_target, moved, SMALL, out).complete, "the same prompts elsewhere are the same prompts"
    with pytest.raises(UserError, match="the chat template or its settings was"):
        run(tiny_target, prompts, SMALL, out, system="Be brief.")
    with pytest.raises(UserError, match=r"prompts.sha256 was"):
        run(tiny_target, write_prompts(tmp_path, many(9)), SMALL, out)
    with pytest.raises(UserError, match="weights_hash"):
        run(Target(tiny_model(seed=1), tiny_tokenizer(), name="other"), moved, SMALL, out)


def test_a_corrupted_shard_or_test_file_is_refused(tmp_path: Path, tiny_target: Target) -> None:
    prompts, out = write_prompts(tmp_path, many(8)), tmp_path / "out"
    run(tiny_target, prompts, SMALL, out)
    file = out / "train-00000.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(UserError, match=r"train-00000.safetensors is corrupted"):
        run(tiny_target, prompts, SMALL, out)
    file.write_bytes(data)
    (out / "test.jsonl").write_text("")
    with pytest.raises(UserError, match=r"test.jsonl is corrupted"):
        run(tiny_target, prompts, SMALL, out)


def test_a_full_disk_keeps_finished_work_and_leaves_nothing_half(
    tmp_path: Path, tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, out, syncs, sync = write_prompts(tmp_path, many(12)), tmp_path / "out", itertools.count(), os.fsync

    def full(handle: int) -> None:
        if next(syncs) > 16:
            raise OSError(28, "No space left on device")
        sync(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(UserError, match="No space left on device"):
            run(tiny_target, prompts, SMALL, out)
    assert not [file for file in out.iterdir() if "partial" in file.name]
    assert list((out / "queue").glob("train-*.json"))
    assert run(tiny_target, prompts, SMALL, out).complete


# Budgets, counts and warnings ----------------------------------------------------------------------------------------


def slowed(patch: pytest.MonkeyPatch, seconds: float) -> None:
    """Each pass over answers or prompts takes so many seconds by the clock."""
    now, spent, taken = time.monotonic, [0.0], Loop._pass

    def slow(self: Loop) -> Any:
        spent[0] += seconds
        return taken(self)

    patch.setattr(time, "monotonic", lambda: now() / 1e6 + spent[0])
    patch.setattr(Loop, "_pass", slow)


def prompts_of(manifest: Manifest) -> tuple[int, int]:
    """Numbers of train and of validation prompts with an answer."""
    return manifest.total("train", "prompts"), manifest.total("validation", "prompts")


@pytest.mark.parametrize("origin", others_long(["file", "own"], kept=("file",)))
def test_minutes_that_are_over_at_once_leave_a_least_share(tmp_path: Path, origin: str,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    """The first batch of train prompts, and four of validation, get the first tokens of their answers."""
    monkeypatch.setattr(answering, "LEAST_TOKENS", 3)
    target = templated_target(None)
    prompts = write_prompts(tmp_path, many(40)) if origin == "file" else PromptConfig(own_max_tokens=12)
    config = replace(SMALL, validation_prompts=6, shard_prompts=8, budget_tokens=60, budget_minutes=1e-9)
    out = tmp_path / "out"
    few = run(target, prompts, config, out)
    assert few.complete
    assert 1 <= prompts_of(few)[0] <= config.slots
    assert prompts_of(few)[1] == 4
    for split in ("train", "validation"):
        for _, supervised, *_ in rows(out, split):
            assert sum(supervised) <= 3
    assert few.total("train", "truncated") > 0
    held = TokenShard.read(out / few.split("validation")[0].file)
    assert len(held.keys_P) == 6, "those without an answer are no train prompts either"
    assert run(target, prompts, config, out) == few
    # The folder goes on with more minutes, and not with other settings, of which the message names the one.
    with pytest.raises(UserError, match=r"with other settings: distill.validation_prompts was 6 and is now 2"):
        run(target, prompts, replace(config, budget_minutes=9.0, validation_prompts=2), out)
    grown = run(target, prompts, replace(config, budget_minutes=99.0), out)
    assert grown.total("train", "supervised") >= 60
    assert prompts_of(grown)[0] > prompts_of(few)[0]
    assert prompts_of(grown)[1] == 6, "validation prompts that had no answer have one"
    assert len(grown.split("validation")) == 1
    assert not (out / "validation.jsonl").exists()


@pytest.mark.parametrize("answered_by", ["target", {"target": 0.5, "text": 0.5}])
def test_prompts_that_were_not_asked_when_the_minutes_ended_are_asked_with_more_of_them(
    tmp_path: Path, tiny_target: Target, monkeypatch: pytest.MonkeyPatch, answered_by: Any
) -> None:
    """One shard has them all; prompts that another writer answered after the first such one come only once."""
    prompts, out = write_prompts(tmp_path, [*answered(60), *answered(9)]), tmp_path / "out"
    config = replace(SMALL, answered_by=answered_by, shard_prompts=99, max_new_tokens=24, budget_minutes=80.0)
    with monkeypatch.context() as patch:
        slowed(patch, 100.0)
        cut = run(tiny_target, prompts, config, out)
    asked = {number for *_, number, _ in rows(out)}
    assert len(cut.split("train")) == 1
    assert 3 < len(asked) < 57
    assert cut.candidates == next(number for number in itertools.count(3) if number not in asked)
    assert (cut.candidates < max(asked)) == isinstance(answered_by, dict)
    assert len(TokenShard.read(out / cut.split("train")[0].file).keys_P) == len(asked)
    grown = run(tiny_target, prompts, replace(config, budget_minutes=9000.0), out)
    assert grown.split("train")[0] == cut.split("train")[0]
    numbers = [number for *_, number, _ in rows(out)]
    assert len(set(numbers)) == len(numbers)
    assert set(numbers) >= set(range(3, 60))
    # A prompt that another writer answers is another row.
    assert (grown.candidates, grown.repeated) == (69, 69 - 3 - len(numbers))


def test_held_out_prompts_without_an_answer_get_one_where_no_train_prompt_is_left(tmp_path: Path, tiny_target: Target
                                                                                ) -> None:
    prompts, out = write_prompts(tmp_path, many(12)), tmp_path / "out"
    config = replace(SMALL, validation_prompts=6, slots=5, shard_prompts=5, budget_minutes=1e-9)
    assert prompts_of(run(tiny_target, prompts, config, out)) == (5, 4)
    assert prompts_of(run(tiny_target, prompts, replace(config, budget_minutes=99.0), out)) == (5, 6)
    with pytest.raises(UserError, match="all 12 prompts have been asked"):
        run(tiny_target, prompts, replace(config, budget_minutes=999.0), out)


def test_shards_that_the_minutes_cut_are_answered_anew_by_a_killed_run_with_more(
    tmp_path: Path, tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, out = write_prompts(tmp_path, many(60)), tmp_path / "out"
    config = replace(SMALL, shard_prompts=99, max_new_tokens=24, budget_minutes=80.0)
    with monkeypatch.context() as patch, killed_in(ShardAnswering, "_merge"):
        slowed(patch, 100.0)
        run(tiny_target, prompts, config, out)
    assert '"cut": true' in (out / "queue" / "train-00000.json").read_text()
    shutil.copytree(out, tmp_path / "same")
    (tmp_path / "same" / "stats.json").unlink()
    same = run(tiny_target, prompts, config, tmp_path / "same")
    assert (len(same.split("train")), prompts_of(same)[0] < 57) == (1, True), "the minutes were over for a process"
    grown = run(tiny_target, prompts, replace(config, budget_minutes=9000.0), out)
    assert [number for *_, number, _ in rows(out)] == list(range(3, 60))
    assert len(grown.split("train")) == 1


def test_the_time_that_is_spent_is_written_while_a_shard_is_answered(
    tmp_path: Path, tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that joins reads it; sums come with whole shards, whose number says what an answer takes. Nobody writes
    without a lock."""
    stats, held, publish = list[dict[str, float]](), set[int](), ShardQueue.publish
    take, drop, write = FolderLocks.take, FolderLocks.drop, DataFolder.write_stats

    def noted(self: ShardQueue, *given: Any) -> None:
        stats.append(json.loads((tmp_path / "out" / "stats.json").read_text()))
        publish(self, *given)

    def locked(self: FolderLocks, number: int, *given: Any, **more: Any) -> bool:
        held.add(number)
        return take(self, number, *given, **more)

    def dropped(self: FolderLocks, number: int, *given: Any) -> None:
        held.discard(number)
        drop(self, number, *given)

    def written(self: DataFolder, *given: Any) -> None:
        assert held & {MERGE, HELD_OUT}
        write(self, *given)

    monkeypatch.setattr(shard_answering, "CHECK_SECONDS", 50.0)
    monkeypatch.setattr(ShardQueue, "publish", noted)
    monkeypatch.setattr(FolderLocks, "take", locked)
    monkeypatch.setattr(FolderLocks, "drop", dropped)
    monkeypatch.setattr(DataFolder, "write_stats", written)
    slowed(monkeypatch, 100.0)
    run(tiny_target, write_prompts(tmp_path, many(12)), replace(SMALL, budget_minutes=9000.0), tmp_path / "out")
    assert stats[0]["seconds"] > 300
    assert stats[0]["answers_seconds"] == 0


def test_a_folder_whose_minutes_ran_out_while_it_was_killed_goes_on(tmp_path: Path, tiny_target: Target) -> None:
    """Before the first answer, after the first shard, and before validation is answered."""
    prompts, config = write_prompts(tmp_path, many(30)), replace(SMALL, budget_minutes=99.0)
    for place, name in enumerate(("conversations", "answer_validation", "_merge")):
        out = tmp_path / name
        with killed_in((RowWriters, shard_answering, ShardAnswering)[place], name):
            run(tiny_target, prompts, config, out)
        stats = json.loads((out / "stats.json").read_text())
        (out / "stats.json").write_text(json.dumps({**stats, "seconds": 6000.0}))
        late = run(tiny_target, prompts, config, out)
        assert late.complete
        assert min(prompts_of(late)) > 0


def test_the_deadline_ends_answers_and_no_pass_follows_it(tmp_path: Path, tiny_target: Target,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(SMALL, shard_prompts=3, max_new_tokens=48, validation_prompts=0, test_prompts=0,
                     budget_minutes=100.0)
    whole = run(tiny_target, write_prompts(tmp_path, many(60)), config, tmp_path / "whole")
    slowed(monkeypatch, 100.0)
    cut = run(tiny_target, write_prompts(tmp_path, many(60)), config, tmp_path / "cut")
    stats = json.loads((tmp_path / "cut" / "stats.json").read_text())
    assert 55 <= stats["answers_target_calls"] <= 61, "6,000 seconds, of which a pass takes 100"
    *before, last = cut.split("train")
    assert list(whole.split("train")[:len(before)]) == before
    assert 0 < last.supervised < whole.split("train")[len(before)].supervised, "its batch is kept as far as it came"
    assert last.full == 0
    assert cut.candidates == 3 * len(cut.split("train"))


@pytest.mark.parametrize(("seconds", "wanted"), [(0.1, 30), (72.0, 12), (0.0, 12)])
def test_as_many_validation_prompts_are_answered_as_their_part_of_the_minutes_allows(
    tmp_path: Path, tiny_target: Target, monkeypatch: pytest.MonkeyPatch, seconds: float, wanted: int
) -> None:
    """They come after the first train answers, which say how long each takes (those of a killed process too), or there
    are few; greedy and drawn ones are one batch."""
    config = replace(SMALL, validation_prompts=30, slots=60, shard_prompts=8, budget_minutes=120.0)
    order, answer = list[tuple[int, bool]](), Answerer.answer

    def noted(self: Answerer, numbered: Any, *rest: Any, **more: Any) -> Any:
        order.append((len(numbered), more.get("every", False)))
        return answer(self, numbered, *rest, **more)

    monkeypatch.setattr(Answerer, "answer", noted)

    def paced(task: Any, folder: Any, states: Any, each: float, on_tokens: Any) -> Any:
        stats = json.loads((tmp_path / "out" / "stats.json").read_text())
        assert each == stats["answers_seconds"] / 8 > 0
        if len(order) == 1:
            raise Killed
        return data_folder.answer_validation(task, folder, states, seconds, on_tokens)

    monkeypatch.setattr(shard_answering, "answer_validation", paced)
    with pytest.raises(Killed):
        run(tiny_target, write_prompts(tmp_path, many(60)), config, tmp_path / "out")
    order.append((0, False))
    manifest = run(tiny_target, write_prompts(tmp_path, many(60)), config, tmp_path / "out")
    assert order[:3] == [(8, False), (0, False), (wanted, True)]
    assert prompts_of(manifest)[1] == wanted
    temperatures = [temperature for *_, temperature in rows(tmp_path / "out", "validation")]
    assert temperatures == [0.0] * wanted + [1.0] * wanted


def test_held_out_conversations_of_many_turns_leave_minutes_to_training_text(
    tmp_path: Path, tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    talks = [{"messages": spoken(f"{word} {other}", "a", *["go on", "b"] * 9)}
             for word in WORDS[:8] for other in WORDS[:4]]
    config = replace(SMALL, slots=20, budget_minutes=200.0, validation_prompts=4, temperatures=(0.0,))
    slowed(monkeypatch, 100.0)
    manifest = run(tiny_target, write_prompts(tmp_path, talks), config, tmp_path / "out")
    assert prompts_of(manifest)[1] == 4
    assert len(manifest.split("train")) > 1, "the shard before validation is not the only one"


def test_slots_are_kept_busy_and_the_share_is_reported(tmp_path: Path, tiny_target: Target) -> None:
    config = replace(SMALL, shard_prompts=60, slots=3, max_new_tokens=24)
    run(tiny_target, write_prompts(tmp_path, many(63)), config, tmp_path / "out")
    stats = json.loads((tmp_path / "out" / "stats.json").read_text())
    assert stats["answers_busy_share"] >= 0.9
    assert stats["seconds"] > stats["answers_seconds"] > 0


def test_counts_and_the_warning_about_cut_answers(tmp_path: Path, tiny_target: Target,
                                                  caplog: pytest.LogCaptureFixture) -> None:
    manifest = run(tiny_target, write_prompts(tmp_path, many(9)), replace(SMALL, max_new_tokens=4), tmp_path / "out")
    [first, *_] = manifest.split("train")
    assert (first.prompts, first.rows, first.answers) == (4, 4, 4)
    assert first.truncated == sum(tokens[-1] not in tiny_target.eos_ids
                                  for tokens, *_ in list(rows(tmp_path / "out"))[:4]) > 0
    assert first.supervised == int(shards(tmp_path / "out")[0].supervised_T.sum())
    assert "answers were cut at 4 tokens" in caplog.text


@pytest.mark.parametrize(("row", "turns"), [
    ({"prompt": "x" * 600}, ""), ({"turns": ["Say hi.", "x" * 300, "y" * 300]}, " in all its turns")])
def test_prompts_that_do_not_fit(tmp_path: Path, tiny_target: Target, row: dict[str, Any], turns: str) -> None:
    prompts = write_prompts(tmp_path, [*many(5), row, *many(8)[5:]])
    told = (rf"the prompt leaves no room for an answer, got 6\d\d tokens{turns}, and the target's context of 512 less "
            r"distill.max_new_tokens holds 504; shorten it, or lower")
    with pytest.raises(UserError, match=rf"^1 of 9 rows .* allows fewer: 1 like prompts.jsonl:6: {told}"):
        run(tiny_target, prompts, SMALL, tmp_path / "refused")
    manifest = run(tiny_target, replace(prompts, most_skipped=0.2), SMALL, tmp_path / "skipped")
    assert (manifest.total("train", "prompts"), manifest.skipped) == (5, {"the prompt leaves no room for an answer": 1})
    assert re.search(told, (tmp_path / "skipped" / "skipped.jsonl").read_text())
    # What the recipe itself leaves out is no fault of the rows.
    manifest = run(tiny_target, replace(prompts, max_prompt_tokens=504, most_skipped=0.0), SMALL, tmp_path / "out")
    assert (manifest.total("train", "prompts"), manifest.skipped) == (
        5, {"the prompt is longer than prompts.max_prompt_tokens": 1})


def test_only_prompts_that_may_be_too_long_are_counted_in_tokens(
    tmp_path: Path, tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are looked at before the first answer, all those of a large file too."""
    prompts = write_prompts(tmp_path, [*many(5), {"prompt": "x" * 480}, {"prompt": "\u00e9" * 240}])
    template, counted = ChatTemplate(tiny_target.tokenizer), list[str]()
    task = DistillTask(target=tiny_target, train_target=tiny_target, prompts=prompts, config=SMALL, template=template,
                       writer=None)
    encode = template.encode
    monkeypatch.setattr(template, "encode", lambda text: counted.append(text) or encode(text))
    source = task.source()
    assert isinstance(source, ReadPrompts)
    assert [one.row for one in source.skipped()] == []
    assert [text.count("x") + text.count("\u00e9") for text in counted] == [480, 240]


def test_rows_of_an_endless_stream_are_skipped_and_counted_when_it_is_their_turn(
    tmp_path: Path, tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = many(40)
    for place in (2, 13, 26):
        rows[place] = {"prompt": place}
    monkeypatch.setattr(prompt_files, "STREAM_BUFFER", 10)
    monkeypatch.setattr(prompt_files, "_dataset_rows", lambda *_: (
        (f"x:{place}", row) for place, row in enumerate(rows)))
    prompts = PromptConfig(origin="dataset", path="x", streaming=True, most_skipped=0.1)
    listed = [f"x:{place}" for place in (2, 13, 26)]

    def skipped(out: Path) -> list[str]:
        return [json.loads(line)["row"] for line in (out / "skipped.jsonl").read_text().splitlines()]

    manifest = run(tiny_target, prompts, SMALL, tmp_path / "calm")
    assert skipped(tmp_path / "calm") == listed
    assert manifest.skipped == {"prompt must be text or a list of messages": 3}
    assert sum(shard.prompts for shard in manifest.shards) + SMALL.test_prompts == 40 - 3
    # Killed after the list was written, and before the manifest.
    save = DataFolder.save
    with monkeypatch.context() as patch:
        patch.setattr(DataFolder, "save", lambda self, found: die() if found.complete else save(self, found))
        with pytest.raises(Killed):
            run(tiny_target, prompts, SMALL, tmp_path / "killed")
    assert skipped(tmp_path / "killed") == listed
    run(tiny_target, prompts, SMALL, tmp_path / "killed")
    assert contents(tmp_path / "killed") == contents(tmp_path / "calm")
    # With too many the run ends before their answers, and goes on once more are allowed.
    for place in range(14, 24):
        rows[place] = {"prompt": place}
    with pytest.raises(UserError, match=r"^3 of 16 rows of x cannot be used, and prompts.most_skipped 0.1 allows"):
        run(tiny_target, prompts, SMALL, tmp_path / "out")
    assert run(tiny_target, replace(prompts, most_skipped=0.9), SMALL, tmp_path / "out").complete
    assert skipped(tmp_path / "out") == [f"x:{place}" for place in (2, *range(13, 24), 26)]
    rows[2] = many(3)[2]
    with pytest.raises(UserError, match=r"allows fewer: 2 like x:13: prompt must be text"):
        run(tiny_target, replace(prompts, most_skipped=0.0), SMALL, tmp_path / "strict")


@pytest.mark.parametrize(("prompts", "config", "message"), [
    (PromptConfig(), SMALL, "prompts of the target have no limit; set distill.budget_tokens"),
    (PromptConfig(limit=9), replace(SMALL, answered_by="text"), "no ready-made answers"),
    (PromptConfig(limit=9), replace(SMALL, max_new_tokens=512),
     "leaves no room for a prompt in the target's context of 512"),
    (PromptConfig(limit=9), replace(SMALL, max_new_tokens=505), "leaves no room for an answer, got .* holds 7;"),
    (PromptConfig(limit=9, max_prompt_tokens=505), SMALL, "exceed the target's context of 512 tokens; lower one"),
    (PromptConfig(limit=2), SMALL, "usable prompts among the first 2, but 3 are to be held out"),
])
def test_recipes_that_cannot_work_are_refused(tmp_path: Path, tiny_target: Target, prompts: PromptConfig,
                                              config: DistillConfig, message: str) -> None:
    with pytest.raises(UserError, match=message):
        run(tiny_target, prompts, config, tmp_path / "out")


WRITERS = {"answered_by": {"target": 0.5, "text": 0.3}}


@pytest.mark.parametrize(("kind", "fields", "message"), [
    (DistillConfig, {"slots": 0}, "distill.slots must be at least 1, got 0"),
    (DistillConfig, {"temperatures": ()}, "distill.temperatures must be one or more"),
    (DistillConfig, {"temperatures": (-1.0,)}, r"distill.temperatures\[0\] must be 0 \(greedy\) or from"),
    (DistillConfig, {"temperatures": (0.0, 1e-4)},
     r"temperatures\[1\] must be 0 \(greedy\) or from 0.001 to 1000, got 0.0001"),
    (DistillConfig, {"budget_tokens": 0}, "distill.budget_tokens must be at least 1, got 0"),
    (DistillConfig, {"top_p": 0.0}, "distill.top_p must be above 0, got 0.0"),
    (DistillConfig, {"workers": 0}, "distill.workers must be at least 1, got 0"),
    (DistillConfig, {"workers": 2000}, "distill.workers must be at most 1,024, got 2000; lower it"),
    (DistillConfig, {"train_dtype": "int8"}, "must be one of own, fastest, float32, bfloat16, got 'int8'"),
    (DistillConfig, WRITERS, r"sum to 1, got 0.8 \(target: 0.5, text: 0.3\)"),
    (DistillConfig, {"answered_by": {"target": 1.5, "text": -0.5}},
     "distill.answered_by must be at most 1, got 1.5; lower it"),
    (DistillConfig, {"answered_by": {"target": 0.5, "books": 0.5}},
     "answered_by must be one of target, text, draft or a mapping"),
    (DistillConfig, {"answered_by": "books"},
     "answered_by must be one of target, text, draft or a mapping .*, got 'books'"),
    (DistillConfig, {"answered_by": "draft"},
     "distill.draft is None, but a draft writes 100% of the train rows; name an artifact"),
    (DistillConfig, {"answered_by": {"target": 0.8, "draft": 0.2}}, "distill.draft is None, but a draft writes 20%"),
    (DistillConfig, {"draft": "a"}, "distill.draft is a, but a draft writes 0% of the train rows"),
    (DistillConfig, {"engine": "file:///etc/passwd"},
     r"must be own or an address such as http://localhost:8000/v1, got 'file"),
    *((DistillConfig, {"engine": engine}, rf"distill.engine must be own or an address such as http.*, got '{engine}'")
      for engine in ("localhost:8000", "vllm", "transformers")),
    (DistillConfig, {"engine": "http://x/v1", "train_dtype": "bfloat16"}, r"bfloat16; set train_dtype: own"),
    (DistillConfig, {"engine": "http://x/v1", "answered_by": "text"}, r"is text; set a share of the target"),
    (PromptConfig, {"origin": "file"},
     "prompts.origin is file and prompts.path is null; give the path of a file or the name of"),
    (PromptConfig, {"origin": "dataset"}, "prompts.origin is dataset and prompts.path is null; give"),
    (PromptConfig, {"path": "a/b"}, "prompts.origin is own and prompts.path is 'a/b'; .*only there"),
    (PromptConfig, {"limit": 0}, "prompts.limit must be at least 1, got 0"),
    (PromptConfig, {"most_skipped": 1.5}, "prompts.most_skipped must be at most 1, got 1.5"),
    (PromptConfig, {"own_temperature": 0.0}, "own_temperature must be at least 0.001, got 0.0"),
    (PromptConfig, {"own_openings": True},
     r"own_openings is true, but prompts\.own_kinds is null, .* set prompts\.own_kinds: \[all"),
    *((PromptConfig, {"own_kinds": names}, r"prompts\.own_kinds must be one or more different names among coding, .* "
       r"any, or all alone, got \[") for names in ((), ("poems",), ("math", "math"), ("all", "math"))),
    (BatchConfig, {"row_length": 1}, "row_length must be at least 2, got 1"),
    (BatchConfig, {"states": "both"}, "batch.states must be one of stored, computed, auto, got 'both'"),
    (BatchConfig, {"states_format": "int4"}, "batch.states_format must be one of .*float16, .*or null, got 'int4'"),
])
def test_bad_settings_are_refused(kind: type[Any], fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        kind(**fields)


def test_the_progress_bar_shows_tokens_and_idle_slots(
    tmp_path: Path, tiny_target: Target, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Short stages have no line in a log.
    monkeypatch.setattr(progress, "LOG_SECONDS", 0.0)
    prompts, template = write_prompts(tmp_path, many(20)), ChatTemplate(tiny_target.tokenizer)
    distill(tiny_target, prompts, replace(SMALL, budget_tokens=40), template, tmp_path / "out")
    shown = capsys.readouterr().err
    assert "held-out prompts" in shown
    assert " of 40 tok in " in shown
    assert re.search(r"tok/s, \d+% of slots idle\n", shown)
    distill(tiny_target, prompts, replace(SMALL, max_new_tokens=24), template, tmp_path / "all")
    shown = capsys.readouterr().err.split("answers:")[-1]
    assert "20 of 20 prompt" in shown, "the prompts are counted"
    [(rate, idle)] = re.findall(r"(?:prompt/s|s/prompt), (\d+) tok/s, (\d+)% of slots idle\n", shown)
    stats = json.loads((tmp_path / "all" / "stats.json").read_text())
    assert int(rate) > 0
    assert 0 < int(idle) < 100
    # Of all stages; the bar's are those of the train shards.
    assert abs(1 - stats["answers_busy_share"] - int(idle) / 100) < 0.2


def test_idle_slots_are_those_without_an_unfinished_answer(tiny_target: Target) -> None:
    passes: list[tuple[int, int]] = []
    answerer = Answerer(tiny_target, ChatTemplate(tiny_target.tokenizer), DecodeSettings(batch_size=3), 12,
                        lambda _: None, on_slots=lambda busy, slots: passes.append((busy, slots)))
    prompts = [(n, Prompt.from_turns(word, id=str(n))) for n, word in enumerate(WORDS)]
    answerer.answer(prompts, (1.0,), taps=())
    assert (sum(busy for busy, _ in passes), sum(slots for _, slots in passes)) == (
        answerer.stats.busy_slots, answerer.stats.total_slots)
    assert {slots for _, slots in passes} == {3}
    assert min(busy for busy, _ in passes) < 3
