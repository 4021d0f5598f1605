"""The size of states is predicted, shown, and refused where the disk cannot hold them, before any work."""

import shutil
from collections import namedtuple
from pathlib import Path

import pytest
from draftsmith.data import Manifest, WantedStates
from draftsmith.data.store.feature_store import Encoding, in_words, require_room
from draftsmith.modules import Target, UserError
from draftsmith.recipes.__main__ import main
from support.data.data_folders import encode

Disk = namedtuple("Disk", "total used free")


def free(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Let every disk have so many free bytes."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Disk(2**50, 0, count))


def test_bytes_are_said_in_words() -> None:
    assert [in_words(count) for count in (1024, 3 * 2**20, 5 * 2**30 + 2**29, 38 * 2**40)] == [
        "1.0 KiB", "3.0 MiB", "5.5 GiB", "38.0 TiB"]


def test_a_disk_without_room_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 2**20)
    folder = tmp_path / "not" / "there"
    assert require_room(folder, 2**20, "the states") == "the states take 1.0 MiB, 1.0 MiB are free"
    with pytest.raises(UserError, match=r"the states take 1.5 MiB, and the disk of \S+there has 1.0 MiB free; make"):
        require_room(folder, 3 * 2**19, "the states")


def test_answers_are_not_written_for_which_the_states_have_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    free(monkeypatch, 1000)
    assert main(["distill", "--config", "tiny", "--out", str(tmp_path), "--distill.budget_tokens", "1200"]) == 2
    # The tiny target is 32 wide, in float32, and Medusa reads final states alone.
    assert f"the states of 1,200 answer tokens take {in_words(1200 * 32 * 4)}, and the disk" in capsys.readouterr().err
    assert not (tmp_path / "data").exists()


def test_data_do_not_grow_for_which_the_states_have_no_room(copied_run: Path, monkeypatch: pytest.MonkeyPatch,
                                                            capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(copied_run / "train")
    before = Manifest.load(copied_run / "data")
    missing = 1600 - before.total("train", "supervised")
    free(monkeypatch, 1000)
    assert main(["distill", "--config", "tiny", "--out", str(copied_run), "--distill.budget_tokens", "1600"]) == 2
    said = capsys.readouterr().err
    assert f"the states of {missing:,} answer tokens take {in_words(missing * 32 * 4)}, and the disk" in said
    assert Manifest.load(copied_run / "data") == before


def test_a_second_pass_says_what_it_writes_and_is_refused_without_room(
    copied_run: Path, tiny_target: Target, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data, tokens = copied_run / "data", sum(record.tokens for record in Manifest.load(copied_run / "data").shards)
    assert Encoding(tiny_target, data).bytes == 0
    assert Encoding(tiny_target, data, (0, 1)).bytes == tokens * 2 * 32 * 4
    with monkeypatch.context() as patch:
        free(patch, 1000)
        assert encode(tiny_target, data), "nothing is to be written"
        with pytest.raises(UserError, match=rf"the states of {tokens:,} tokens take .* has 1.0 KiB free; make room"):
            encode(tiny_target, data, (0, 1))
    assert not list(data.glob("tap_*"))
    words = ["distill", "--config", "tiny", "--out", str(copied_run), "--family", "eagle3"]
    assert main(words) == 0
    assert f"the states of {tokens:,} tokens take " in capsys.readouterr().out


def test_each_kind_of_state_takes_its_bytes(tiny_target: Target) -> None:
    assert WantedStates(taps=(0, 1)).bytes(10, tiny_target) == 10 * 3 * tiny_target.hidden_size * 4
    assert WantedStates(taps=(0, 1), form="int8").bytes(10, tiny_target) == 10 * 3 * (tiny_target.hidden_size + 4)
