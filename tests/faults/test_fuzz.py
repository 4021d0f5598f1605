"""Random bytes and fields in artifacts, data folders, recipes and prompts: work or one sentence, never a traceback."""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from draftsmith.data import read_prompts
from draftsmith.modules import UserError
from draftsmith.recipes.__main__ import main
from draftsmith.recipes.stages.records import StageRecord
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from support.faults import ERROR, REMEDIES, Place
from support.tiers import some_long

EXAMPLES = settings(max_examples=20, database=None, suppress_health_check=list(HealthCheck))
TINY = str(Path(__file__).resolve().parents[2] / "recipes" / "tiny.yaml")
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3), max_leaves=5)
"""Values of JSON."""
FILES = {"artifact/config.json": "generate", "artifact/tuning.json": "generate",
         "artifact/model.safetensors": "generate",
         "data/manifest.json": "train", "stages.json": "train", "data/features.json": "train"}
WORDS = {"generate": ["generate", "--artifact", "run/artifact", "--prompt", "hi", "--max_new_tokens", "2"],
         "train": ["train", "--config", TINY, "--out", "run"]}


def answered(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    """Call a command: it does its work, or says in one sentence why not."""
    code = main(words)
    said = capfd.readouterr().err
    sentences = [line for line in said.splitlines() if line.startswith(ERROR)]
    assert code in (0, 2), said[-1000:]
    assert len(sentences) == (1 if code else 0), said[-1000:]
    assert "Traceback" not in said
    assert all(any(word in sentence.lower() for word in REMEDIES) for sentence in sentences), sentences


@pytest.mark.parametrize("file", [file for file, command in FILES.items() if command == "generate"])
@seed(1)
@EXAMPLES
@given(data=st.data())
def test_flipped_bytes_of_an_artifact(file: str, place: Place, data: Any) -> None:
    whole = (place.tiny_run / file).read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    bytes_ = data.draw(st.binary(max_size=6))
    cut = data.draw(st.booleans())
    (place.run / file).write_bytes(whole[:at] + bytes_ + (b"" if cut else whole[at + len(bytes_):]))
    answered(WORDS[FILES[file]], place.capfd)


def replaced(content: Any, path: list[Any], value: Any) -> Any:
    """The content with the entry at a path replaced."""
    if not path:
        return value
    copy = content.copy()
    copy[path[0]] = replaced(content[path[0]], path[1:], value)
    return copy


def paths(content: Any) -> list[list[Any]]:
    """Paths to all entries of a JSON value."""
    parts = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    return [[], *([key, *rest] for key, part in parts for rest in paths(part))]


@pytest.mark.parametrize("file", some_long([file for file in FILES if file.endswith(".json")], 9, 1))
@seed(2)
@EXAMPLES
@given(data=st.data())
def test_random_fields_of_json_files(file: str, place: Place, monkeypatch: pytest.MonkeyPatch, data: Any) -> None:
    content = json.loads((place.tiny_run / file).read_text())
    places = [path for path in paths(content) if "provenance" not in path]
    # Widths of the drafter and of trees decide how much memory is taken: their bounds have cases of their own.
    path = data.draw(st.sampled_from([path for path in places if path[:1] != ["drafter"]]))
    (place.run / file).write_text(json.dumps(replaced(content, path, data.draw(VALUES))))
    if FILES[file] == "train":
        # Nothing is trained: only what is read before is of interest.
        monkeypatch.setattr("draftsmith.recipes.stages.records.perform", lambda *_: StageRecord(inputs={}, files={}))
    answered(WORDS[FILES[file]], place.capfd)


@pytest.mark.long
@seed(3)
@EXAMPLES
@given(text=st.one_of(st.binary(max_size=40), VALUES.map(lambda value: json.dumps(value).encode()),
                      st.text(alphabet="{}[]:,-&*!|>'\"#%@ \nab01.", max_size=40).map(str.encode)))
def test_random_recipes(capfd: pytest.CaptureFixture[str], text: bytes) -> None:
    folder = Path(tempfile.mkdtemp())
    try:
        (folder / "r.yaml").write_bytes(text)
        answered(["plan", "--config", str(folder / "r.yaml")], capfd)
        (folder / "r.yaml").write_bytes(b"out: o\nfamily: medusa\ntarget:\n  name: tiny-random\ntrain: " + text)
        answered(["plan", "--config", str(folder / "r.yaml")], capfd)
    finally:
        shutil.rmtree(folder)


@seed(4)
@EXAMPLES
@given(value=VALUES, key=st.sampled_from(["prompt", "turns", "messages", "conversations", "category", "system"]))
def test_random_prompts(place: Place, value: Any, key: str) -> None:
    file = place.write("p.jsonl", json.dumps({"prompt": "hi", key: value}))
    try:
        said = "" if read_prompts(file) else "nothing was read"
    except UserError as error:
        said = str(error)
    assert not said or any(word in said for word in REMEDIES), said
