"""Folders that are replaced as a whole: only those that were written here and are unchanged."""

import os
from pathlib import Path

import pytest
from draftsmith.modules import UserError
from draftsmith.modules.files.atomic_files import write_file
from draftsmith.modules.files.folders import MARKER, remove_leftovers, whole_folder


def write(folder: Path, content: str = "ours", kind: str = "export") -> Path:
    """A folder with a file and a file in a folder."""
    with whole_folder(folder, kind, changing=frozenset({"later"})) as partial:
        write_file(partial / "file", content)
        write_file(partial / "deep" / "file", content)
    return folder


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
