"""The command doctor, as a user runs it."""

import html
import json
import re
import shutil
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
    assert main(["doctor", "--artifact", str(tiny_run)]) == 0
    text, progress = capsys.readouterr()
    assert "     the checks start; on a processor they take minutes\n" in progress
    assert "✓ mask: 0 of 15 answers start next to where" in text
    assert re.search(r"<\|im_start\|>assistant\n\[.*\]\n", text)
    # Twelve hundred tokens, seen seven times: what is wrong with the tiny run is known.
    assert text.strip().splitlines()[-1] == "1 of 20 checks found something: training against held-out"


def test_a_page_and_json_say_the_same(tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of an artifact alone, without its data, what decoding shows is said."""
    artifact = shutil.copytree(tiny_run / "artifact", tmp_path / "alone")
    found = json.loads(said(capsys, "--artifact", artifact, "--json", "--out", tmp_path / "out"))
    assert json.loads((tmp_path / "out" / "doctor.json").read_text()) == found
    by_name = {one["name"]: one for one in found["findings"]}
    assert "holds no data; name their folder with --data" in by_name["data"]["verdict"]
    assert by_name["decoding against training"]["figure"]
    page = html.unescape((tmp_path / "out" / "doctor.html").read_text())
    for one in found["findings"]:
        assert one["name"] in page
        assert one["verdict"] in page
    assert page.count("<svg") == 2
    assert "http" not in re.sub(r"http://www\.w3\.org|http://purl\.org|http://creativecommons\.org", "", page)


def test_wrong_input_is_one_sentence(tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    for words, sentence in ((("--artifact", tmp_path), "holds no artifact"),
                            (("--artifact", tiny_run, "--out", tmp_path / "file"), "a folder was expected"),
                            (("--artifact", tiny_run, "--target.device", "cuda:9"), "cuda"),
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
