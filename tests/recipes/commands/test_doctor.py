"""The command doctor, as a user runs it."""

import html
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from draftsmith.data import Manifest
from draftsmith.recipes.__main__ import main
from draftsmith.recipes.commands import doctor
from draftsmith.recipes.doctor import draft_checks
from draftsmith.recipes.reading.keys import keys_of
from draftsmith.recipes.recipe import Recipe
from transformers import LlamaConfig

ROOT = Path(__file__).resolve().parents[3]


def said(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The text that the command prints."""
    capsys.readouterr()
    assert main(["doctor", *map(str, words)]) == 0
    return capsys.readouterr().out


def test_a_run_is_checked(tiny_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--artifact", str(tiny_run)]) == 0
    text, progress = capsys.readouterr()
    assert "     the checks start; on a processor they take minutes\n     checked: supervised tokens\n" in progress
    assert "     answering 80 prompts with the draft\n     checked: target of the draft\n" in progress
    # A line for each check.
    assert progress.count("     checked: ") == len(re.findall("^[✓✗–] ", text, re.MULTILINE))
    assert "✓ mask: 0 of 15 answers start next to where" in text
    assert re.search(r"<\|im_start\|>assistant\n\[.*\]\n", text)
    # Answers of a random model, twelve hundred tokens, seen seven times: what is wrong with the tiny run is known.
    assert text.startswith("✗ truncated answers: ")
    assert "    perhaps a consequence of truncated answers: put that right first\n" in text
    assert text.strip().splitlines()[-1] == (
        "2 of 20 checks found something: truncated answers, training against held-out")


def test_data_of_another_model_come_first(
    tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The figures that a draft reaches with them are marked as their consequence."""
    run = Path(shutil.copytree(tiny_run, tmp_path / "run"))
    manifest = Manifest.load(run / "data")
    other = replace(manifest.target, name="other", tokens_hash="0" * 64)
    (run / "data" / "manifest.json").write_bytes(replace(manifest, target=other).to_bytes())
    monkeypatch.setattr(draft_checks, "LEAST_PERFECT", 1e9)
    text = said(capsys, "--artifact", run)
    assert text.startswith("✗ data: ")
    first, _, rest = text.partition("✗ ceiling: ")
    assert "holds answers of other; its tokens are others than those of tiny-random" in first
    assert "→ name the folder of the draft's own data with --data" in first
    assert "even a perfect draft would hardly be faster" in rest
    assert rest.splitlines()[1] == "    perhaps a consequence of data: put that right first"


def test_another_target_is_refused_by_shapes_and_with_options_of_this_command(
    tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "load_target", lambda _: pytest.fail("the target is read"))
    (tmp_path / "target").mkdir()
    LlamaConfig(hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=100,
                architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path / "target")
    assert main(["doctor", "--artifact", str(tiny_run), "--target.name", str(tmp_path / "target")]) == 2
    sentence = capsys.readouterr().err
    assert "; give --target.name the target that it was made for, or another version of it" in sentence
    assert "retarget" not in sentence
    assert "train.start" not in sentence


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
