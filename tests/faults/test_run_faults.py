"""Files of a finished run that were changed, damaged or lost, and what a killed one left."""

import hashlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.data.store.feature_shards import read_features
from draftsmith.modules import UserError
from draftsmith.recipes.__main__ import main
from draftsmith.recipes.stages.training_folder import read_result
from draftsmith.trainers.checkpoints import PARTS, AtomicCheckpointIO
from safetensors.torch import load_file, save_file
from support.faults import Fault, Place, check, edited, flip, ids, written
from support.tiers import others_long
from torch import Tensor

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
        # Of several curves any may be missing.
        "delete it", may_lack=("cost.copy_seconds", "cost.curves.0", "greedy"),
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


def changed(path: str, name: str, change: Callable[[Any, Any], object]) -> Callable[[Place], object]:
    """A preparation that changes the mapping or list that holds a field of a JSON file of the run."""
    def edit(inner: Any) -> None:
        *above, last = parts_of(name)
        for part in above:
            inner = inner[part]
        change(inner, last)

    return edited(edit, path)


def setting(path: str, name: str, value: Any) -> Callable[[Place], object]:
    """A preparation that gives a field a value."""
    return changed(path, name, lambda inner, last: inner.__setitem__(last, value))


def faults_of(file: JsonFile) -> Iterator[Fault]:
    """One case for each field and each wrong value of it."""
    for name, kind in file.fields.items():
        says, wrong = rf"{Path(file.path).name}.*({file.remedy})", set(WRONG[kind]) - set(file.may_be.get(name, ()))
        if name not in file.may_lack and name != "shards.0":
            yield Fault(f"{file.path}: {name} missing", file.words, says,
                        changed(file.path, name, lambda inner, last: inner.pop(last)))
        for value in sorted(wrong | {one for other, one in file.also if other == name}):
            yield Fault(f"{file.path}: {name} {value}", file.words, says, setting(file.path, name, VALUES[value]))


FAULTS = [fault for file in FILES for fault in faults_of(file)]
WHOLE = {"no JSON": "{", "a list": "[]", "null": "null", "a number": "3", "empty": "", "Latin-1": b'{"a": "\xe9"}',
         "nested deeply": "[" * 100_000, "a long number": '{"a": ' + "9" * 5000 + "}", "a text that does not end": '"'}
WHOLE_FAULTS = [
    Fault(f"{file.path}: {name}", file.words, rf"{Path(file.path).name}.*({file.remedy})",
          written(f"run/{file.path}", content))
    for file in FILES for name, content in WHOLE.items()
]
FIRST = [*{(fault.name.partition(":")[0], fault.name.split()[-1]): fault for fault in FAULTS}.values(),
         *WHOLE_FAULTS[::4]]
"""One field of each file for each wrong value, and some damaged files."""
OTHERS = [*FIRST, *[fault for fault in FAULTS + WHOLE_FAULTS if fault not in FIRST][::2]]
"""Half of the others: all take a minute."""


@pytest.mark.parametrize("fault", others_long(OTHERS, FIRST), ids=ids(OTHERS))
def test_a_damaged_json_file_is_refused_in_one_sentence(fault: Fault, place: Place) -> None:
    check(fault, place)


RESULT = {"checkpoint": str, "accepted_length": float, "by_position": list, "parameters": int, "step": int}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, kind in RESULT.items() for value in WRONG[kind]])
def test_a_damaged_result_of_a_training_is_refused(place: Place, name: str, value: str) -> None:
    setting("train/result.json", name, VALUES[value])(place)
    sentence = rf"result\.json is damaged: {name}.* must be .*; delete result.json, and the same c"
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
    file = place.run / "train" / "last.ckpt"
    checkpoint = torch.load(file, weights_only=True)
    checkpoint.pop(part)
    torch.save(checkpoint | ({} if content == "missing" else {part: 0.5}), file)
    with pytest.raises(UserError, match=rf"{part} is not as it was written\); delete it to start training again"):
        AtomicCheckpointIO().load_checkpoint(file)


# Weights, data and checkpoints ---------------------------------------------------------------------------------------

RUN = "run --config {tiny} --out {run}"
LOGS = ("train/tensorboard/*",)


def first_tensor(change: Callable[[Tensor], Tensor]) -> Callable[[Place], None]:
    """Change the first tensor, and the hash of the file with it: nothing but the values is wrong."""

    def prepare(place: Place) -> None:
        weights = place.artifact / "model.safetensors"
        tensors = load_file(weights)
        name = min(tensors)
        save_file({**tensors, name: change(tensors[name]).contiguous()}, weights)
        digest = hashlib.sha256(weights.read_bytes()).hexdigest()
        edited(lambda content: content.update(weights_sha256=digest))(place)

    return prepare


def with_value(value: float) -> Callable[[Tensor], Tensor]:
    """A change of one element."""
    return lambda tensor: tensor.flatten().index_fill(0, tensor.new_zeros(1).long(), value).view_as(tensor)


def unfinished_training(place: Place) -> None:
    """A run that was killed after its last checkpoint, which has a flipped bit."""
    (place.run / "train" / "result.json").unlink()
    flip(place.run / "train" / "last.ckpt", (place.run / "train" / "last.ckpt").stat().st_size // 2)


def other_manifest(place: Place) -> None:
    """A manifest that claims another number of prompts."""
    file = place.run / "data" / "manifest.json"
    file.write_text(file.read_text().replace('"prompts": 4', '"prompts": 3'))


def lost_artifact(place: Place) -> None:
    """A run without its artifact, and with damaged figures of its training."""
    shutil.rmtree(place.artifact)
    flip(place.run / "train" / "stats.json", 0)


def linked_queue(place: Place) -> None:
    """A folder for data whose queue would be another folder."""
    (place.folder / "elsewhere").mkdir()
    (place.folder / "new" / "data").mkdir(parents=True)
    (place.folder / "new" / "data" / "queue").symlink_to(place.folder / "elsewhere")


CHANGED = [
    Fault("a weight that is not a number", GENERATE, r"the tensor \S+ of \S+model.safetensors holds values that are "
          r"not finite \(nan or inf\); train, export or copy it again", first_tensor(with_value(float("nan")))),
    Fault("an infinite weight", GENERATE, r"holds values that are not finite", first_tensor(with_value(float("-inf")))),
    Fault("whole numbers for weights", GENERATE, r"holds whole numbers \(torch.int32\), real numbers were expected",
          first_tensor(lambda tensor: (100 * tensor).int())),
    Fault("truth values for weights", GENERATE, r"holds truth values \(torch.bool\), real numbers were expected",
          first_tensor(lambda tensor: tensor > 0)),
    Fault("a flipped bit", GENERATE, r"model.safetensors does not have the hash that config.json names",
          lambda place: flip(place.artifact / "model.safetensors", -1)),
    Fault("an empty text that would end every answer", GENERATE,
          r"stop must not hold an empty text, which would end every answer at once; leave it out",
          given=("--stop", "['']")),
    Fault("trained weights with a flipped bit", RUN, r"the trained weights \S+best.safetensors cannot be read \(they "
          r"are not the ones that training saved\); delete that folder to train again",
          lambda place: flip(place.run / "train" / "best.safetensors", -1), leaves=LOGS),
    Fault("a checkpoint with a flipped bit", RUN, r"the checkpoint \S+last.ckpt is damaged .*; delete it to start",
          unfinished_training, leaves=LOGS),
    Fault("other held-out prompts", RUN, r"test.jsonl is corrupted .*; delete the folder \S+ and distil again",
          lambda place: (place.run / "data" / "test.jsonl").write_text('{"prompt": "hi"}\n')),
    Fault("lost held-out prompts", RUN, r"cannot read \S+test.jsonl: No such file",
          lambda place: (place.run / "data" / "test.jsonl").unlink()),
    Fault("a queue that is a link", "distill --config {tiny} --out new",
          r"new/data/queue is a link to \S+elsewhere, and unfinished work is kept in a folder of its "
          "own; remove the link", linked_queue),
    Fault("a changed manifest", RUN, r"manifest.json is corrupted", other_manifest),
    Fault("damaged figures of the training", RUN,
          r"stats.json cannot be read as JSON .*; delete result.json, and the same command",
          lost_artifact),
    Fault("changed data before a training alone", "train --config {tiny} --out {run}",
          r"train-\d{5}.safetensors is missing or not what was written \(the target answers prompts\); put it back",
          lambda place: flip(min((place.run / "data").glob("train-*.safetensors")), -1)),
]


@pytest.mark.parametrize("fault", CHANGED, ids=ids(CHANGED))
def test_changed_files_are_noticed_before_they_are_used(fault: Fault, place: Place) -> None:
    check(fault, place)


def test_what_a_killed_run_left_half_written_is_removed(place: Place) -> None:
    words = ["--config", "tiny", "--out", str(place.run)]
    kept = place.fingerprints()
    for name in ("artifact/.tuning.json.partial", "data/.train-00001.safetensors.partial", ".artifact.partial/x",
                 "train/.last.ckpt.partial"):
        place.write(f"run/{name}", "half")
    assert main(["run", *words]) == 0
    assert place.fingerprints() == kept
    # Killed amid the artifact's last file: that stage is done again.
    place.write("run/artifact/.tuning.json.partial", "half")
    (place.artifact / "tuning.json").unlink()
    assert main(["train", *words]) == 0
    after, machine = place.fingerprints(), {"run/artifact/tuning.json", "run/stages.json"}
    assert after.keys() == kept.keys()
    assert [name for name in sorted(kept) if name not in machine and after[name] != kept[name]] == []
