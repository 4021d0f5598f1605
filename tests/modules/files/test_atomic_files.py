"""Files and folders that are written completely or not at all."""

import errno
import os
import stat
from pathlib import Path

import pytest
from draftsmith.modules import UserError
from draftsmith.modules.files.atomic_files import cannot_write, make_folder, write_atomically


def test_a_writer_that_dies_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def dies(partial: Path) -> None:
        partial.write_text("ne")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, dies)
    assert path.read_text() == "old"
    assert write_atomically(path, lambda partial: partial.write_text("new")) == path
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["file"]


def test_a_full_disk_is_reported_and_leaves_nothing(tmp_path: Path) -> None:
    def fills(partial: Path) -> None:
        partial.write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match=r"cannot write .*: No space left on device; make room or choose another"):
        write_atomically(tmp_path / "file", fills)
    assert not os.listdir(tmp_path)


def test_names_are_forced_to_disk_after_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power failure may come at any moment: the file before its name, the name before the call returns."""
    seen: list[tuple[bool, bool]] = []
    sync = os.fsync

    def watched(handle: int) -> None:
        seen.append((stat.S_ISDIR(os.fstat(handle).st_mode), (tmp_path / "file").exists()))
        sync(handle)

    monkeypatch.setattr(os, "fsync", watched)
    write_atomically(tmp_path / "file", lambda partial: partial.write_text("new"))
    assert seen == [(False, False), (True, True)]


def test_folders_are_made_or_named(tmp_path: Path) -> None:
    write_atomically(tmp_path / "a" / "b", lambda partial: partial.write_text(""))
    make_folder(tmp_path / "c" / "d")
    assert (tmp_path / "c" / "d").is_dir()
    for writes in (lambda: make_folder(tmp_path / "a" / "b" / "c"),
                   lambda: write_atomically(tmp_path / "a" / "b" / "c", lambda partial: partial.write_text(""))):
        with pytest.raises(UserError, match=r"cannot write .*b/c: (Not a directory|File exists)"):
            writes()


def test_a_written_file_has_the_rights_of_other_new_files(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("")
    private = write_atomically(tmp_path / "weights", lambda partial: (partial.write_text("x"), partial.chmod(0o600)))
    assert private.stat().st_mode == plain.stat().st_mode


@pytest.mark.parametrize(("number", "says"), [
    (errno.ENOTDIR, "something else is in the way: move it or choose another folder, then start again"),
    (errno.EEXIST, "something else is in the way"), (errno.EISDIR, "something else is in the way"),
    (errno.EACCES, "denied; choose another folder that you may write to, then"),
    (errno.EROFS, "; choose another folder"),
    (errno.EFBIG, "make room or choose another folder"), (errno.EDQUOT, "make room or choose another folder"),
])
def test_the_remedy_fits_the_reason(number: int, says: str) -> None:
    sentence = str(cannot_write(Path("there"), OSError(number, os.strerror(number))))
    assert sentence.startswith(f"cannot write there: {os.strerror(number)}; ")
    assert says in sentence
    assert ("make room" in sentence) == ("make room" in says)
