"""Sets by name: each row is asked as the table says, the same prompts are drawn in any order, and what is missing or
has changed is one sentence. Caches of the Hub's shape take the place of a network."""

import re
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from draftsmith.data.prompts.named_sets import set_named, table
from draftsmith.export import EvaluateConfig
from draftsmith.modules import UserError
from draftsmith.recipes.chat_settings import AskedSets, TemplateConfig
from support.data.chat_templates import CHATML, shaped_tokenizer
from support.data.named_sets import ROWS, cache_sets

SAID = {  # The first prompt of each set, its turns apart
    "mt_bench": ["say 0 things", "and more"],
    "humaneval": ["Write a solution to the following problem and make sure that it passes the tests:\n```python\n"
                  "def add(a, b):\n\n```"],
    "gsm8k": ["What is 2 + 3?\nPlease reason step by step, and put your final answer within \\boxed{}."],
    "math500": ["Find 0.\nPlease reason step by step, and put your final answer within \\boxed{}."],
    "spec_bench": ["Compose a blog post.", "Shorten it."],
    "alpaca": ["Translate.\n\nInput:\nHallo"],
    "cnn_dailymail": ["Summarize the following article.\n\nIt rained."],
    "livecodebench": ["Add two numbers.\n\nWrite a Python program that solves this problem. It reads from standard "
                      "input and writes to standard output."],
    "swe_bench": ["Problem Statement:\nIt fails.\nPlease fix the issue described above."],
    "speed_bench": ["Who?"],
}


@pytest.mark.parametrize("name", SAID)
def test_every_set_is_asked_as_the_table_says(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache_sets(tmp_path, monkeypatch)
    one = table()[name]
    prompts, without = one.prompts()
    first = prompts[0]
    assert [message["content"] for message in first.messages if message["role"] == "user"] == SAID[name]
    assert len(first.asked) == len(SAID[name])
    assert first.category == (None if one.category is None else ROWS[name][0][one.category])
    assert (len(prompts), without) == (len(ROWS[name]) - (name == "speed_bench"), int(name == "speed_bench"))
    # A branch may move, and what was measured on it could not be repeated.
    assert re.fullmatch("[0-9a-f]{40}", one.revision)
    assert one.licence
    if name in ("alpaca", "livecodebench"):
        assert str(prompts[1].messages[0]["content"]) in (
            "Say hi.", "Add them.\n\nWrite a Python program that solves this problem. Start with this code:\n"
            "```python\nclass Solution:\n```")


def test_all_names_are_in_the_table_and_in_the_help() -> None:
    assert set(SAID) == set(table())
    text = (files("draftsmith.recipes") / "keys.md").read_text()
    [meaning] = {line for line in text.splitlines() if line.startswith("| `evaluate.prompts` |")}
    assert all(name in meaning for name in table())


def test_the_same_prompts_are_drawn_in_any_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for rows, limit in ((ROWS["mt_bench"], 4), (ROWS["mt_bench"][::-1], 2), (ROWS["mt_bench"], None)):
        cache_sets(tmp_path, monkeypatch, mt_bench=rows)
        prompts = AskedSets.of(EvaluateConfig(prompts="mt_bench", prompt_limit=limit)).prompts["mt_bench"]
        found.append([one.messages for one in prompts])
    assert found[0] == found[1] != found[2]
    assert sorted(found[0], key=found[2].index) == found[2]


@pytest.mark.parametrize(("name", "rows", "sentence"), [
    ("gsm8k", [], "openai/gsm8k is not in the cache and cannot be downloaded .*; check its name, or fetch it where "
     r"there is a network: hf download openai/gsm8k --repo-type dataset --revision \w{40} '--include=main/test-\*"),
    ("spec_bench", [], r"fetch it where there is a network: curl -fLo spec_bench.jsonl https://raw.\S+/question.jsonl, "
     "and name that file"),
    ("math500", [{"question": "Find 0.", "subject": "math"}], "the set math500 has changed: test.jsonl:1 of "
     "HuggingFaceH4/MATH-500: its content lacks problem, expected was text in the columns problem, subject; write"),
    ("math500", [*ROWS["math500"], [1, 2]], r"test.jsonl:4 of \S+: its content must be .*, got \[1, 2\], expected"),
    ("math500", [{"problem": "\ud800", "subject": "a"}], "has changed: test.jsonl:1 of .* not UTF-8, expected"),
    ("math500", [{"problem": float("nan"), "subject": "a"}], "test.jsonl:1 of .*problem .*nan.*expected was text"),
    ("spec_bench", [{"turns": "Hello", "category": "a"}], r"has changed: \w+:1 of https.*: turns must be a list, each "
     r"text, got 'Hello', expected was text in the columns turns, category"),
    ("humaneval", [{"prompt": ["x"]}], r"00001.parquet:1 of \S+: prompt must be text, got \[.x.\], expected"),
    *[("mt_bench", [{"prompt": prompt, "category": "a"}],
       f"set mt_bench has changed: train-00000-of-00001.parquet:1 of .*: {told}.*, expected was") for prompt, told in (
        ({"a": "b"}, "prompt must be a list, each text"), ("plain text", "prompt must be a list, .* got 'plain"),
        (5, "prompt must be a list, each text, got 5"), ([1, 2], r"prompt\[0\] must be text, got 1"),
        ([None, "b"], r"prompt\[0\] must be text, got null"), ([["a"]], r"prompt\[0\] must be text, got \[.a.\]"))],
    ("gsm8k", [*ROWS["gsm8k"], {"question": None, "answer": "a"}], "gsm8k has changed: test-00000-of-00001.parquet:2 "
     "of openai/gsm8k: its content lacks question, expected was text"),
])
def test_a_set_that_is_missing_or_has_changed(
    name: str, rows: list[Any], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    cache_sets(tmp_path, monkeypatch, **{name: rows})
    with pytest.raises(UserError, match=sentence):
        table()[name].prompts()


@pytest.mark.parametrize(("name", "start", "sentence"), [
    ("math500", 90, r"the set math500 cannot be read: test.jsonl:2 of \S+: not JSON \(.*\); delete {} and "
     "fetch it again: hf download HuggingFaceH4/MATH-500 --repo-type dataset --revision .* '--include=test.jsonl'"),
    ("gsm8k", 90, r"set gsm8k cannot be read: \S+ is damaged \(.*\); delete {} and fetch it again: hf download"),
    ("gsm8k", 0, r"set gsm8k cannot be read: \S+ is neither JSON Lines .*; delete {} and fetch it again: hf download "),
    ("spec_bench", 50, r"set spec_bench cannot be read: \w+:1 of \S+: not JSON .*; delete {} and fetch it again: curl"),
])
def test_a_damaged_file_of_the_cache_is_deleted_and_fetched_again(
    name: str, start: int, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache_sets(tmp_path, monkeypatch)
    [file] = table()[name].fetched()
    content = file.read_bytes()
    # The Hub keeps the file elsewhere, and would link to a damaged one again.
    (kept := tmp_path / "blob").write_bytes(content[:start] or b"damaged" + content)
    file.unlink()
    file.symlink_to(kept)
    with pytest.raises(UserError, match=sentence.replace("{}", re.escape(str(kept)))):
        table()[name].prompts()


@pytest.mark.parametrize(("name", "rows", "limit", "counts"), [
    ("gsm8k", [*ROWS["gsm8k"], {"question": " ", "answer": "a"}], None, (2, 1, 1, 0)),
    ("alpaca", [{"instruction": "", "input": ""}, {"instruction": "", "input": "Hallo"}], 3, (2, 1, 1, 0)),
    # Of the first three drawn, as of most, none leaves room.
    ("cnn_dailymail", [{"article": f"{n} " + "It rained. " * 300 * (n not in (3, 8))} for n in range(20)], 3,
     (20, 0, 2, 18)),
    ("cnn_dailymail", [{"article": f"{n}"} for n in range(20)], 3, (20, 0, 3, 0)),
    ("gsm8k", [{"question": "", "answer": "a"}], 3, r"the set gsm8k holds no prompt \(rows without text: 1\); choose"),
    ("math500", None, 3, r"the set math500 holds no prompt \(rows without text: 0\); choose"),
])
def test_a_limit_counts_the_prompts_that_are_asked(
    name: str, rows: list[Any] | None, limit: int | None, counts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache_sets(tmp_path, monkeypatch, **({} if rows is None else {name: rows}))
    if rows is None:
        table()[name].fetched()[0].write_bytes(b"")
    config = EvaluateConfig(prompts=name, prompt_limit=limit, max_new_tokens=8)
    if isinstance(counts, str):
        with pytest.raises(UserError, match=counts):
            AskedSets.of(config)
        return
    tokenizer = shaped_tokenizer(CHATML)
    template = TemplateConfig().build(cast(Any, SimpleNamespace(tokenizer=tokenizer, eos_ids=())))
    sets, origins = AskedSets.of(config).questions(template, config, 512)
    keys = ("rows", "without text", "prompts", "too long")
    assert tuple(origins[name][key] for key in keys) == counts
    assert len(sets[name]) == counts[2]


@pytest.mark.parametrize(("name", "hint"), [
    ("mtbench", "did you mean mt_bench"), ("MT-Bench", "did you mean mt_bench"), ("gsm9k", "did you mean gsm8k"),
    ("xyz", "choose from mt_bench, humaneval, .*, speed_bench, handwritten"),
])
def test_an_unknown_name_gets_the_nearest_ones(name: str, hint: str) -> None:
    with pytest.raises(UserError, match=f"evaluate.prompts names '{name}', which is neither a set nor a file: {hint}"):
        set_named(name)
    assert set_named("mine.jsonl") == Path("mine.jsonl")
