"""Places that one process writes at a time, and what several do to them at once."""

import errno
import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from draftsmith.modules import UserError
from draftsmith.modules.files import folders
from draftsmith.modules.files.atomic_files import write_atomically, write_file
from draftsmith.modules.files.folders import FolderLocks, remove_leftovers, sole_writer, whole_folder
from support.forked_workers import ended, kill, start


def write(folder: Path, content: str) -> None:
    with whole_folder(folder, "export") as partial:
        write_file(partial / "file", content)


def holding(place: Path, seconds: float = 600.0) -> int:
    """A process that writes a place for so many seconds."""
    started = place.parent / "started"

    def work() -> None:
        with whole_folder(place, "export") as partial:
            write_file(partial / "file", "first")
            started.touch()
            time.sleep(seconds)

    process = start(work)
    while not started.exists():
        time.sleep(0.01)
    started.unlink()
    return process


def test_two_that_write_one_file_at_once_both_end_well(tmp_path: Path) -> None:
    def slow(partial: Path) -> None:
        partial.write_text("slow")
        write_file(tmp_path / "file", "fast")

    write_atomically(tmp_path / "file", slow)
    assert (tmp_path / "file").read_text() == "slow"
    assert os.listdir(tmp_path) == ["file"]


def test_a_folder_in_work_is_refused_until_its_writer_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "PATIENCE", 0.1)
    process = holding(tmp_path / "new")
    with pytest.raises(UserError, match=r"another process is writing .*/new; start again when it has ended, or choose"):
        write(tmp_path / "new", "second")
    remove_leftovers(tmp_path)
    assert (tmp_path / ".new.partial" / "file").read_text() == "first", "it is no leftover yet"
    write(tmp_path / "other", "next to it")
    kill(process)
    write(tmp_path / "new", "second")
    assert (tmp_path / "new" / "file").read_text() == "second"
    assert sorted(os.listdir(tmp_path)) == ["new", "other"]


def test_the_second_writer_waits_for_the_first(tmp_path: Path) -> None:
    process = holding(tmp_path / "new", 0.3)
    write(tmp_path / "new", "second")
    assert (tmp_path / "new" / "file").read_text() == "second"
    assert ended(process) == 0
    assert os.listdir(tmp_path) == ["new"]


def test_what_killed_writers_left_is_removed_and_the_own_lock_kept(tmp_path: Path) -> None:
    kill(holding(tmp_path / "new"))
    with sole_writer(tmp_path / "stages.json"):
        remove_leftovers(tmp_path, own=tmp_path / "stages.json")
        assert os.listdir(tmp_path) == [".stages.json.lock.partial"]
        process = start(lambda: FolderLocks(tmp_path / ".stages.json.lock.partial").take(0) and os._exit(3))
        assert ended(process) == 0, "the lock was dropped"
    assert not os.listdir(tmp_path)


def test_a_disk_that_gave_a_lock_has_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file server that runs out of locks must not make them free for all."""
    def refused(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    locks = FolderLocks(tmp_path / "locks")
    assert locks.take(0)
    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "lockf", refused)
        with pytest.raises(UserError, match=r"locks cannot be locked \(No locks available\); choose an --out on anoth"):
            locks.take(1)
    locks.drop(0)
    process = start(lambda: FolderLocks(tmp_path / "locks").take(0) and os._exit(3))
    assert ended(process) == 3, "the first lock was not dropped"


def test_there_is_no_moment_without_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, seen, renaming = tmp_path / "new", list[bool](), Path.rename

    def watched(function: Callable[..., object]) -> Callable[..., object]:
        def call(*given: object) -> object:
            found = function(*given)
            seen.append((folder / "file").exists())
            return found
        return call

    write(folder, "first")
    monkeypatch.setattr(Path, "rename", watched(renaming))
    monkeypatch.setattr(folders, "_exchanged", watched(folders._exchanged))
    write(folder, "second")
    assert seen == [True]
    # A disk that exchanges nothing: the former one is put back at the next start, which another test shows.
    monkeypatch.setattr(folders, "_exchanged", lambda *_: False)
    write(folder, "third")
    assert (folder / "file").read_text() == "third"
    assert os.listdir(tmp_path) == ["new"]
