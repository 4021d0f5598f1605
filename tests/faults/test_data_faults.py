"""Files of a finished run that were changed or lost, and what a killed one left."""

import shutil

import pytest
from draftsmith.recipes.__main__ import main
from support.faults import Fault, Place, check, flip, ids

RUN = "run --config {tiny} --out {run}"
LOGS = ("train/tensorboard/*",)


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


FAULTS = [
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


@pytest.mark.parametrize("fault", FAULTS, ids=ids(FAULTS))
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
