"""Folders that are replaced as a whole, and only if nothing in them is anybody else's.

A folder written here holds a marker with the hash of each of its files. It is replaced as long as every file in it is
in the marker and unchanged; a folder that holds anything else is refused."""

import ctypes
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from ..errors import UserError
from .atomic_files import cannot_write, file_sha256, is_leftover, share, to_disk, write_file
from .bounded_reading import bounded_json, read_bounded_text
from .folder_locks import sole_writer

MARKER = ".draftsmith.json"  # The file that says what a folder is and which files were written into it
NAMED = 3  # Number of foreign files that a refusal names
_HERE, _EXCHANGE = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux


@contextmanager
def whole_folder(folder: Path, kind: str, *, changing: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Give a hidden folder to fill; when the block ends well it takes the place of `folder`, else it vanishes.

    An existing `folder` is replaced if it is empty, or all it holds was written here as the same kind ("artifact") and
    is unchanged, but for names that may be `changing` later: in one step where the system has one, so that a killed
    process leaves the one or the other. Raises UserError if `folder` is a link, a file or the current folder, holds
    anything else, or cannot be written; or another process goes on writing it."""
    folder = Path(os.path.abspath(folder))
    with sole_writer(folder):
        former = folder.parent / f".{folder.name}.former"
        # A replacement that was killed between its two renamings has left the former folder at its hidden place.
        if (former / MARKER).is_file() and not os.path.lexists(folder):
            former.rename(folder)
        if folder.is_symlink():
            raise UserError(f"{folder} is a link to {folder.readlink()} and would be replaced by a folder; give the "
                            "path of a new folder")
        if folder.exists():
            if not folder.is_dir():
                raise UserError(f"{folder} is a file, a folder was expected; choose another place")
            if foreign := _foreign(folder, kind, changing):
                raise UserError(f"{folder} holds other files ({foreign}) than an unchanged {kind} of draftsmith and "
                                "would be replaced as a whole; choose another folder, or move them away")
            # The shell that started this would stand in a folder that is no longer there.
            if folder.samefile(Path.cwd()):
                raise UserError(f"{folder} is the current folder, which cannot be replaced; choose another one")
        partial, before = folder.with_name(f".{folder.name}.partial"), _listing(folder)
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            yield partial
            files = {str(path.relative_to(partial)): file_sha256(path)
                     for path in sorted(partial.rglob("*")) if path.is_file()}
            said = {"written_by": "draftsmith", "kind": kind, "files": files}
            write_file(partial / MARKER, json.dumps(said, indent=2, sort_keys=True) + "\n")
            for path in (*partial.rglob("*"), partial):
                # A file with another name elsewhere is somebody's, and so are its rights.
                if path.is_file() and path.stat().st_nlink == 1:
                    share(path)
                to_disk(path)
            if _listing(folder) != before:
                raise UserError(f"something in {folder} was changed while its next {kind} was written; start again")
            if not (folder.exists() and _exchanged(partial, folder)):
                # Two renamings, since a folder cannot be renamed over another that holds files.
                if folder.exists():
                    shutil.rmtree(former, ignore_errors=True)
                    folder.rename(former)
                partial.rename(folder)
            to_disk(folder.parent)
            shutil.rmtree(former, ignore_errors=True)
        except (OSError, SafetensorError) as error:
            raise cannot_write(folder, error) from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _exchanged(one: Path, other: Path) -> bool:
    """Exchange two folders in one step; False where the system or the disk has none."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    return rename is not None and not rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE)


def own_files(folder: Path, kinds: Sequence[str], *, changing: frozenset[str] = frozenset()) -> tuple[str, list[str]]:
    """(which of the kinds it is, names of the files) of a folder that was written here and holds nothing else, but for
    names that may be `changing`. Raises UserError if it is none of the kinds, or holds another or a changed file."""
    kind, _ = _written(folder)
    if kind not in kinds:
        raise UserError(f"{folder} is no {' or '.join(kinds)} of draftsmith; give the folder of one")
    if foreign := _foreign(folder, kind, changing):
        raise UserError(f"{folder} holds other or changed files ({foreign}) than draftsmith wrote as an {kind}; move "
                        f"them away, or write the {kind} again")
    return kind, [str(path.relative_to(folder)) for path in _files(folder)]


def _foreign(folder: Path, kind: str, changing: frozenset[str]) -> str:
    """Names in a folder that were not written here as this kind, or were changed since; empty where there are none."""
    (own, written), found = _written(folder), list[str]()
    for path in _files(folder):
        name = str(path.relative_to(folder))
        known = own == kind and (name == MARKER or name in changing)
        if not known and own == kind and name in written and path.is_file() and not path.is_symlink():
            known = file_sha256(path) == written[name]
        found += [] if known else [name]
        # No more than are named: it may be somebody's home.
        if len(found) > NAMED:
            return ", ".join([*found[:NAMED], "..."])
    return ", ".join(found)


def _files(folder: Path) -> Iterator[Path]:
    """Everything below a folder that is no folder, but for leftovers of killed processes; files before what lies
    deeper."""
    for deeper, path in sorted((path.is_dir() and not path.is_symlink(), path) for path in folder.iterdir()):
        if not is_leftover(path):
            yield from _files(path) if deeper else [path]


def _listing(folder: Path) -> list[tuple[Path, int, int]]:
    """Files of a folder with their sizes and times of change, in nanoseconds; empty where there is none."""
    states = [(path, path.lstat()) for path in _files(folder)] if folder.is_dir() else []
    return [(path, state.st_size, state.st_mtime_ns) for path, state in states]


def _written(folder: Path) -> tuple[str, dict[str, str]]:
    """(kind, hashes of the files) of a folder that was written here; empty where it was not."""
    marker = folder / MARKER
    # A link could name the marker of another folder, whose files are not these.
    if marker.is_file() and not marker.is_symlink():
        with suppress(json.JSONDecodeError, UnicodeDecodeError):
            found = bounded_json(read_bounded_text(marker))
            if isinstance(found, dict) and found.get("written_by") == "draftsmith" and isinstance(
                    found.get("files"), dict):
                return found.get("kind", ""), found["files"]
    return "", {}
