"""Folders that one process writes at a time, and that are replaced as a whole while they are as they were written."""

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
from draftsmith.modules.files.folders import MARKER, FolderLocks, remove_leftovers, sole_writer, whole_folder
from support.processes import ended, kill, start


def write(folder: Path, content: str = "ours", kind: str = "export") -> Path:
    """A folder with a file and a file in a folder."""
    with whole_folder(folder, kind, changing=frozenset({"later"})) as partial:
        write_file(partial / "file", content)
        write_file(partial / "deep" / "file", content)
    return folder


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


def test_a_folder_is_replaced_while_it_is_as_it_was_written(tmp_path: Path) -> None:
    folder = write(tmp_path / "new")
    (folder / "later").write_text("may be added")
    write(folder, "again")
    assert {path.name for path in folder.iterdir()} == {MARKER, "file", "deep"}
    assert (folder / "deep" / "file").read_text() == "again"
    (tmp_path / "empty").mkdir()
    assert (write(tmp_path / "empty") / "file").read_text() == "ours"
    assert {path.name for path in tmp_path.iterdir()} == {"new", "empty"}


@pytest.mark.parametrize("name", ["file", "other"])
def test_a_file_that_is_put_there_meanwhile_forbids_it(name: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "new")

    def replace() -> None:
        with whole_folder(folder, "export") as partial:
            write_file(partial / "file", "next")
            (folder / name).write_text("mine")

    with pytest.raises(UserError, match="was changed while its next export was written; start again"):
        replace()
    assert (folder / name).read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {"new"}


@pytest.mark.parametrize("name", ["file", "deep/file", "other", "deep/other"])
def test_a_changed_or_other_file_forbids_it(name: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "new")
    (folder / name).write_text("mine")
    with pytest.raises(UserError, match=rf"new holds other files \({name}\) than an unchanged export .*; choose"):
        write(folder)
    assert (folder / name).read_text() == "mine"


def test_another_kind_a_link_and_a_broken_marker_forbid_it(tmp_path: Path) -> None:
    folder = write(tmp_path / "new", kind="artifact")
    with pytest.raises(UserError, match=r"new holds other files \(\.draftsmith\.json, file, deep/file\) than an"):
        write(folder)
    write(folder, kind="artifact")
    (folder / "file").unlink()
    (folder / "file").symlink_to(folder / "deep" / "file")
    with pytest.raises(UserError, match=r"holds other files \(file\)"):
        write(folder, kind="artifact")
    (folder / "file").unlink()
    for broken in ("", "[1]", '{"written_by": "draftsmith", "kind": "artifact", "files": 3}'):
        (folder / MARKER).write_text(broken)
        with pytest.raises(UserError, match=r"holds other files \(\.draftsmith\.json, deep/file\)"):
            write(folder, kind="artifact")


def test_links_files_and_the_current_folder_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(UserError, match=r"link is a link to real and would be replaced by a folder; give the path"):
        write(tmp_path / "link")
    (tmp_path / "file").write_text("text")
    with pytest.raises(UserError, match=r"is a file, a folder was expected"):
        write(tmp_path / "file")
    monkeypatch.chdir(tmp_path / "real")
    with pytest.raises(UserError, match=r"is the current folder, which cannot be replaced; choose another"):
        write(Path())
    with pytest.raises(UserError, match=r"^(/ holds other files|cannot write /)"):
        write(Path("/"))


def test_a_replacement_killed_between_its_renamings_is_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "new", "old")
    # What a kill leaves: the former folder moved away, the next one not yet in its place.
    folder.rename(tmp_path / ".new.former")
    with pytest.raises(KeyError), whole_folder(folder, "export"):
        raise KeyError
    assert (folder / "file").read_text() == "old"
    write(folder, "next")
    assert os.listdir(tmp_path) == ["new"]


def test_leftovers_are_removed_at_any_depth_and_nothing_else(tmp_path: Path) -> None:
    folder = write(tmp_path / "new")
    for name in (".file.partial", ".tree.partial/a/b", "deep/.x.partial", "kept.partial", ".partial", ".other",
                 "deep/.tmpzARN0g", ".tmpfile", "tmpzARN0g"):
        write_file(folder / name, "half")
    (tmp_path / ".link.partial").symlink_to(folder)
    remove_leftovers(tmp_path)
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert found == {MARKER, "file", "deep/file", "kept.partial", ".partial", ".other", ".tmpfile", "tmpzARN0g"}
    assert os.listdir(tmp_path) == ["new"]


def test_a_folder_of_ones_own_inside_another_is_foreign_to_it(tmp_path: Path) -> None:
    outer = tmp_path / "artifact"

    def write() -> None:
        with whole_folder(outer, "artifact") as partial:
            write_file(partial / "weights", "1")

    write()
    with whole_folder(outer / "heads", "artifact") as partial:
        write_file(partial / "weights", "2")
    with pytest.raises(UserError, match=rf"holds other files \(heads/{MARKER}, heads/weights\)"):
        write()
    assert (outer / "heads" / "weights").read_text() == "2"
