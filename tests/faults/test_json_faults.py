"""JSON files of a run whose fields are missing or of another kind than they were written."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from draftsmith.data.store.feature_shards import read_features
from draftsmith.modules import UserError
from draftsmith.recipes.stages.training_folder import read_result
from draftsmith.trainers.steps.checkpoints import PARTS, AtomicCheckpointIO
from support.faults import Fault, Place, check, ids
from support.tiers import others_long

VALUES: dict[str, Any] = {
    "null": None, "a list": [[]], "text": "x", "negative": -1, "huge": 10**30, "nested": {"a": {"b": 1}}, "true": True,
    "a fraction": 1.5, "infinite": float("inf"),
}
"""Wrong values by name."""
WRONG = {
    int: ("null", "a list", "text", "huge", "nested", "true", "a fraction"),
    float: ("null", "a list", "text", "huge", "nested", "true", "infinite"),
    str: ("null", "a list", "negative", "nested", "true"),
    bool: ("null", "a list", "text", "negative", "nested"),
    list: ("null", "text", "negative", "nested", "a list"),
    dict: ("null", "a list", "text", "negative"),
}
"""Values that are wrong for a field of each kind."""


@dataclass(frozen=True)
class JsonFile:
    """A JSON file of a run, its fields, and a command that reads it."""

    path: str  # From the run's folder
    words: str  # The command line
    fields: dict[str, type]  # Kind of each field, by dotted name
    remedy: str  # End of the error's sentence
    may_lack: tuple[str, ...] = ()  # Fields that may be missing
    may_be: dict[str, tuple[str, ...]] = field(default_factory=dict)  # Values of `WRONG` that a field may have
    also: tuple[tuple[str, str], ...] = ()  # Further wrong (field, value)


IDENTITY = {"architecture": str, "hidden_size": int, "name": str, "num_layers": int, "vocab_size": int,
            "weights_hash": str}
GENERATE = "generate --artifact {artifact} --prompt hi --max_new_tokens 1"
FILES = (
    JsonFile(
        "artifact/config.json", GENERATE,
        {"format_version": int, "family": str, "class": str, "drafter": dict, "drafter.num_heads": int,
         "drafter.num_layers": int, "drafter.output": str, "drafter.tie_blocks": bool, "drafter.vocabulary_size": int,
         "target": dict, **{f"target.{name}": kind for name, kind in IDENTITY.items()}, "tree": dict,
         "tree.parents": list, "tree.ranks": list, "versions": dict, "versions.torch": str, "weights_sha256": str,
         "provenance": dict},
        "use the version|copy or train", may_lack=("versions.torch",), may_be={"drafter.vocabulary_size": ("null",)},
        also=(("drafter.num_heads", "negative"), ("drafter.num_layers", "negative"), ("target.vocab_size", "negative")),
    ),
    JsonFile(
        "artifact/tuning.json", GENERATE,
        {"device": str, "cost": dict, "cost.curves": list, "cost.curves.0": dict, "cost.curves.0.batch": int,
         "cost.curves.0.sizes": list, "cost.curves.0.pass_seconds": list, "cost.copy_seconds": float, "greedy": list},
        "delete it", may_lack=("cost.copy_seconds", "greedy"),
        also=(("cost.curves.0.batch", "negative"), ("cost.copy_seconds", "negative")),
    ),
    JsonFile(
        "data/manifest.json", "train --config {tiny} --out {run}",
        {"format_version": int, "candidates": int, "complete": bool, "target": dict, "target.hidden_size": int,
         "template_hash": str, "recipe": dict, "versions": dict, "held_out": dict, "held_out.file": str,
         "held_out.prompts": int, "shards": list, "shards.0": dict, "shards.0.file": str, "shards.0.split": str,
         "shards.0.sha256": str, "shards.0.rows": int, "shards.0.tokens": int},
        "distil again", may_be={"held_out": ("null",)},
        also=(("shards.0.rows", "negative"), ("held_out.prompts", "negative"), ("shards.0.split", "text")),
    ),
    JsonFile(
        "stages.json", "run --config {tiny} --out {run}",
        {"artifact": dict, "artifact.inputs": dict, "artifact.files": dict,
         "artifact.files.artifact/config\\.json": str},
        "delete it, finished work is found again", may_lack=("artifact", "artifact.files.artifact/config\\.json"),
    ),
)


def parts_of(name: str) -> list[str | int]:
    """The keys that lead to a field; a dot inside a key is escaped."""
    words = name.replace("\\.", "\0").split(".")
    return [int(word) if word.isdigit() else word.replace("\0", ".") for word in words]


def changed(file: Path, name: str, change: Callable[[Any, Any], None]) -> None:
    """Change the mapping or list that holds a field of a JSON file."""
    content = json.loads(file.read_text())
    *above, last = parts_of(name)
    inner = content
    for part in above:
        inner = inner[part]
    change(inner, last)
    file.write_text(json.dumps(content))


def removing(path: str, name: str) -> Callable[[Place], None]:
    """A preparation that takes a field out of a copied run's file."""
    def prepare(place: Place) -> None:
        changed(place.run / path, name, lambda inner, last: inner.pop(last))
    return prepare


def setting(path: str, name: str, value: Any) -> Callable[[Place], None]:
    """A preparation that gives a field of a copied run's file a value."""
    def prepare(place: Place) -> None:
        changed(place.run / path, name, lambda inner, last: inner.__setitem__(last, value))
    return prepare


def faults_of(file: JsonFile) -> Iterator[Fault]:
    """One case for each field and each wrong value of it."""
    for name, kind in file.fields.items():
        says, wrong = rf"{Path(file.path).name}.*({file.remedy})", set(WRONG[kind]) - set(file.may_be.get(name, ()))
        if name not in file.may_lack and name != "shards.0":
            yield Fault(f"{file.path}: {name} missing", file.words, says, removing(file.path, name))
        for value in sorted(wrong | {one for other, one in file.also if other == name}):
            yield Fault(f"{file.path}: {name} {value}", file.words, says, setting(file.path, name, VALUES[value]))


FAULTS = [fault for file in FILES for fault in faults_of(file)]
WHOLE = {"no JSON": "{", "a list": "[]", "null": "null", "a number": "3", "empty": "", "Latin-1": b'{"a": "\xe9"}',
         "nested deeply": "[" * 100_000, "a long number": '{"a": ' + "9" * 5000 + "}", "a text that does not end": '"'}
WHOLE_FAULTS = [
    Fault(f"{file.path}: {name}", file.words, rf"{Path(file.path).name}.*({file.remedy})",
          lambda place, path=file.path, content=content: place.write(f"run/{path}", content))  # type: ignore[misc]
    for file in FILES for name, content in WHOLE.items()
]
FIRST = [*{(fault.name.partition(":")[0], fault.name.split()[-1]): fault for fault in FAULTS}.values(),
         *WHOLE_FAULTS[::4]]
"""One field of each file for each wrong value, and some damaged files."""
OTHERS = [*FIRST, *[fault for fault in FAULTS + WHOLE_FAULTS if fault not in FIRST][::2]]
"""Half of the others: all take a minute."""


@pytest.mark.parametrize("fault", others_long(OTHERS, FIRST), ids=ids(OTHERS))
def test_a_damaged_json_file_is_refused_in_one_sentence(fault: Fault, place: Place) -> None:
    if not (place.folder / "run").exists():
        assert place.run.is_dir()
    check(fault, place)


RESULT = {"checkpoint": str, "accepted_length": float, "by_position": list, "parameters": int, "step": int}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, kind in RESULT.items() for value in WRONG[kind]])
def test_a_damaged_result_of_a_training_is_refused(place: Place, name: str, value: str) -> None:
    setting("train/result.json", name, VALUES[value])(place)
    sentence = rf"(results in .* are|result\.json is) damaged: {name}.* must be .*; delete result.json, and the same c"
    with pytest.raises(UserError, match=sentence):
        read_result(place.run / "train")


FEATURES = {"format_version": int, "target": str, "dtype": str, "files": dict}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, kind in FEATURES.items() for value in WRONG[kind]])
def test_a_damaged_list_of_states_is_refused(place: Place, name: str, value: str) -> None:
    setting("data/features.json", name, VALUES[value])(place)
    with pytest.raises(UserError, match=rf"features\.json is damaged: {name}.* must be .*; run draftsmith distill"):
        read_features(place.run / "data")


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("content", ["missing", "number"])
def test_a_checkpoint_without_a_part_is_refused(place: Place, part: str, content: str) -> None:
    import torch

    file = place.run / "train" / "last.ckpt"
    checkpoint = torch.load(file, weights_only=True)
    checkpoint.pop(part)
    torch.save(checkpoint | ({} if content == "missing" else {part: 0.5}), file)
    with pytest.raises(UserError, match=rf"{part} is not as it was written\); delete it to start training again"):
        AtomicCheckpointIO().load_checkpoint(file)
