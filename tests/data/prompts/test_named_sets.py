"""Sets by name: each row is asked as the table says, the same prompts are drawn in any order, and what is missing or
has changed is one sentence. Caches of the Hub's shape take the place of a network."""

import re
from importlib.resources import files
from pathlib import Path

import pytest
from draftsmith.data.prompts.named_sets import drawn, set_named, table
from draftsmith.modules import UserError
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
    cache_sets(tmp_path, monkeypatch)
    prompts, _ = table()["mt_bench"].prompts()
    four = drawn(prompts, 4)
    assert drawn(prompts[::-1], 4) == four
    assert drawn(prompts, 2) == four[:2]
    assert drawn(prompts, None) == prompts
    assert four != prompts[:4]


@pytest.mark.parametrize(("name", "rows", "sentence"), [
    ("gsm8k", [], "openai/gsm8k is not in the cache and cannot be downloaded .*; check its name, or fetch it where "
     r"there is a network: hf download openai/gsm8k --repo-type dataset --revision \w{40} '--include=main/test-\*"),
    ("spec_bench", [], r"fetch it where there is a network: curl -fLo spec_bench.jsonl https://raw.\S+/question.jsonl, "
     "and name that file"),
    ("math500", [{"question": "Find 0.", "subject": "math"}], "the set math500 has changed: test.jsonl:1 of "
     "HuggingFaceH4/MATH-500 has the columns question, subject, expected were problem, subject; write its prompts"),
])
def test_a_set_that_is_missing_or_has_changed(
    name: str, rows: list[dict[str, str]], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    cache_sets(tmp_path, monkeypatch, **{name: rows})
    with pytest.raises(UserError, match=sentence):
        table()[name].prompts()


@pytest.mark.parametrize(("name", "hint"), [
    ("mtbench", "did you mean mt_bench"), ("MT-Bench", "did you mean mt_bench"), ("gsm9k", "did you mean gsm8k"),
    ("xyz", "choose from mt_bench, humaneval, .*, speed_bench, handwritten"),
])
def test_an_unknown_name_gets_the_nearest_ones(name: str, hint: str) -> None:
    with pytest.raises(UserError, match=f"evaluate.prompts names '{name}', which is neither a set nor a file: {hint}"):
        set_named(name)
    assert set_named("mine.jsonl") == Path("mine.jsonl")
