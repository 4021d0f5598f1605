"""Folders that are replaced as a whole, and only if nothing in them is anybody else's.

A folder written here holds a marker with the hash of each of its files. It is replaced as long as every file in it is
in the marker and unchanged; a folder that holds anything else is refused.
"""

import ctypes
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from safetensors import SafetensorError

from ..errors import UserError
from .atomic_files import cannot_write, file_sha256, is_leftover, partial_of, share, to_disk, write_file
from .bounded_reading import bounded_json, read_bounded_text
from .folder_locks import sole_writer

MARKER = ".draftsmith.json"
"""The file that says what a folder is and which files were written into it."""
NAMED = 3
"""Number of foreign files that a refusal names."""
_HERE, _EXCHANGE = -100, 2
"""AT_FDCWD and RENAME_EXCHANGE of Linux."""


@contextmanager
def whole_folder(folder: Path, kind: str, *, changing: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Give a hidden folder to fill; when the block ends well it takes the place of `folder`, else it vanishes.

    An existing `folder` is replaced if it is empty, or all it holds was written here as the same kind and is unchanged:
    in one step where the system has one, so that a killed process leaves the one or the other.

    Args:
        folder: its place.
        kind: what it is, in its marker and in messages: "artifact".
        changing: names of files that may be added or changed later.

    Raises:
        UserError: if `folder` is a link, a file or the current folder, holds anything else, or cannot be written;
            or another process goes on writing it.
    """
    folder = Path(os.path.abspath(folder))
    with sole_writer(folder), _replacing(folder, kind, changing) as partial:
        yield partial


@contextmanager
def _replacing(folder: Path, kind: str, changing: frozenset[str]) -> Iterator[Path]:
    """Replacement of a folder, as `whole_folder` does it, by the only process that writes there."""
    former = folder.parent / f".{folder.name}.former"
    # A replacement that was killed between its two renamings has left the former folder at its hidden place.
    if (former / MARKER).is_file() and not os.path.lexists(folder):
        former.rename(folder)
    if folder.is_symlink():
        raise UserError(f"{folder} is a link to {folder.readlink()} and would be replaced by a folder; give the path "
                        "of a new folder")
    if folder.exists():
        if not folder.is_dir():
            raise UserError(f"{folder} is a file, a folder was expected; choose another place")
        if foreign := _foreign(folder, kind, changing):
            raise UserError(f"{folder} holds other files ({foreign}) than an unchanged {kind} of draftsmith and would "
                            "be replaced as a whole; choose another folder, or move them away")
        # The shell that started this would stand in a folder that is no longer there.
        if folder.samefile(Path.cwd()):
            raise UserError(f"{folder} is the current folder, which cannot be replaced; choose another one")
    partial, before = partial_of(folder), _listing(folder)
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        files = {str(path.relative_to(partial)): file_sha256(path)
                 for path in sorted(partial.rglob("*")) if path.is_file()}
        write_file(partial / MARKER, json.dumps({"written_by": "draftsmith", "kind": kind, "files": files}, indent=2,
                                                sort_keys=True) + "\n")
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
    """(kind, names of the files) of a folder that was written here and holds nothing else.

    Args:
        folder: the folder.
        kinds: what it may be.
        changing: names of files that may have been added or changed later.

    Raises:
        UserError: if it is none of the kinds, or holds another or a changed file.
    """
    kind = next((one for one in kinds if _written(folder, one) is not None), None)
    if kind is None:
        raise UserError(f"{folder} is no {' or '.join(kinds)} of draftsmith; give the folder of one")
    if foreign := _foreign(folder, kind, changing):
        raise UserError(f"{folder} holds other or changed files ({foreign}) than draftsmith wrote as an {kind}; move "
                        f"them away, or write the {kind} again")
    return kind, [str(path.relative_to(folder)) for path in _files(folder)]


def _foreign(folder: Path, kind: str, changing: frozenset[str]) -> str:
    """Names in a folder that were not written here as this kind, or were changed since; empty where there are none."""
    written, found = _written(folder, kind), []
    for path in _files(folder):
        name = str(path.relative_to(folder))
        known = name == MARKER or name in changing
        if not known and written is not None and name in written and path.is_file() and not path.is_symlink():
            known = file_sha256(path) == written[name]
        if written is None or not known:
            found.append(name)
        # No more than are named: it may be somebody's home.
        if len(found) > NAMED:
            return ", ".join([*found[:NAMED], "..."])
    return ", ".join(found)


def _files(folder: Path) -> Iterator[Path]:
    """Everything below a folder that is no folder, leftovers of killed processes apart."""
    for parent, folders, files in os.walk(folder, onerror=_raise):
        links = [name for name in folders if Path(parent, name).is_symlink()]
        folders[:] = sorted(name for name in folders if not is_leftover(Path(parent, name)))
        yield from (path for path in (Path(parent, name) for name in sorted([*files, *links])) if not is_leftover(path))


def _listing(folder: Path) -> list[tuple[Path, int, int]]:
    """Files of a folder with their sizes and times of change, in nanoseconds; empty where there is none."""
    states = [(path, path.lstat()) for path in _files(folder)] if folder.is_dir() else []
    return [(path, state.st_size, state.st_mtime_ns) for path, state in states]


def _raise(error: OSError) -> NoReturn:
    raise error


def _written(folder: Path, kind: str) -> dict[str, str] | None:
    """Hashes of the files that were written into a folder; None where they were not, or as another kind."""
    marker = folder / MARKER
    # A link could name the marker of another folder, whose files are not these.
    if not marker.is_file() or marker.is_symlink():
        return None
    try:
        content = bounded_json(read_bounded_text(marker))
    except (json.JSONDecodeError, UnicodeDecodeError):
        return None
    if not isinstance(content, dict) or content.get("written_by") != "draftsmith" or content.get("kind") != kind:
        return None
    files = content.get("files")
    return files if isinstance(files, dict) else None
