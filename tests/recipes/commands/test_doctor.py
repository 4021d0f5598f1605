"""The command doctor, as a user runs it."""

import json
import re
from pathlib import Path

import pytest
from draftsmith.recipes.__main__ import main
from draftsmith.recipes.reading.recipe_keys import keys_of
from draftsmith.recipes.recipe import Recipe

ROOT = Path(__file__).resolve().parents[3]


def said(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The text that the command prints."""
    capsys.readouterr()
    assert main(["doctor", *map(str, words)]) == 0
    return capsys.readouterr().out


def test_a_run_is_checked(tiny_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "--artifact", tiny_run)
    assert "✓ mask: 0 of 15 answers start next to where" in text
    assert re.search(r"<\|im_start\|>assistant\n\[.*\]\n", text)
    found = json.loads(said(capsys, "--artifact", tiny_run / "artifact", "--json"))
    assert {one["name"] for one in found["findings"]} >= {"mask", "on-policy", "stored states", "template"}
    assert found["headline"] == text.strip().splitlines()[-1]
    # Without data, and with another use than they were made for.
    assert "not checked: " in said(capsys, "--artifact", tiny_run / "artifact", "--data", tiny_run / "data",
                                   "--temperature", 1)


def test_wrong_input_is_one_sentence(tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, sentence in ((("--artifact", tmp_path), "holds no artifact"),
                            (("--artifact", tiny_run, "--data", tmp_path), "holds no manifest.json"),
                            (("--artifact", tiny_run, "--temperature", -1), "temperature must be")):
        assert main(["doctor", *map(str, words)]) == 2
        assert sentence in capsys.readouterr().err


def test_remedies_name_keys_that_there_are() -> None:
    """Every section.key in the doctor's sentences is a key of some recipe."""
    text = "".join(file.read_text() for file in (ROOT / "recipes" / "doctor").glob("*.py"))
    known = set(re.findall(r"^\| `([a-z_.]+)` \|", (ROOT / "recipes" / "keys.md").read_text(), re.M)) | {
        *keys_of(Recipe, skip=("train",))}
    named = set(re.findall(r"\b(?:target|template|prompts|distill|batch|drafter|train|tree|evaluate)\.[a-z_]{3,}\b",
                           "\n".join(re.findall(r'"[^"\n]*"', text))))
    assert named
    assert {name for name in named if name not in known} == set()
