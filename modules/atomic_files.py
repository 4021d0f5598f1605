"""Files that appear whole or not at all: written next to their place, forced to disk, then renamed into it."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from .errors import UserError


def write_atomically(path: Path, write: Callable[[Path], object]) -> Path:
    """Let `write` fill a file that then becomes `path`; whoever reads `path` sees the old file or the whole new one.

    Folders above it are made where they are missing.

    Raises:
        UserError: if the disk is full or the folder may not be written; nothing half-written stays.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(partial)
        _share(partial)
        to_disk(partial)
        partial.replace(path)
        to_disk(path.parent)
    except (OSError, SafetensorError) as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise cannot_write(path, error) from error
    return path


def make_folder(path: Path) -> None:
    """Make a folder and those above it. Raises UserError where that is not allowed."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(path, error) from error


def _share(path: Path) -> None:
    """Give a file the rights that the user's umask gives new files: safetensors writes for the owner alone."""
    umask = os.umask(0)
    os.umask(umask)
    path.chmod(0o666 & ~umask)


def to_disk(path: Path) -> None:
    """Force a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def cannot_write(path: Path, error: OSError | SafetensorError) -> UserError:
    """The error for a place that cannot be written."""
    reason = (isinstance(error, OSError) and error.strerror) or str(error)
    return UserError(f"cannot write {path}: {reason}; make room or choose another folder that you may write to, then "
                     "start again: finished work is kept")


def write_file(path: Path, content: str) -> Path:
    """Write text; see `write_atomically`. Returns the path.

    Raises:
        UserError: if the disk is full or the folder may not be written.
    """
    return write_atomically(path, lambda partial: partial.write_text(content, encoding="utf-8"))


@contextmanager
def whole_folder(folder: Path, owned: frozenset[str]) -> Iterator[Path]:
    """Give a hidden folder to fill; when the block ends well it takes the place of `folder`, else it vanishes.

    An existing `folder` is replaced if all it holds are files named in `owned`.

    Raises:
        UserError: if `folder` holds anything else, or cannot be written.
    """
    _refuse_foreign(folder, owned)
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        for path in partial.iterdir():
            if path.is_file():
                _share(path)
            to_disk(path)
        _swap(partial, folder)
    except (OSError, SafetensorError) as error:
        raise cannot_write(folder, error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _refuse_foreign(folder: Path, owned: frozenset[str]) -> None:
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file, a folder was expected; choose another place")
    foreign = sorted({path.name for path in folder.iterdir()} - owned) if folder.exists() else []
    if foreign:
        raise UserError(f"{folder} holds other files ({', '.join(foreign[:3])}) and would be replaced as a whole; "
                        "choose another folder or empty it")


def _swap(partial: Path, folder: Path) -> None:
    former = folder.with_name(f".{folder.name}.former")
    shutil.rmtree(former, ignore_errors=True)
    if folder.exists():
        folder.rename(former)
    partial.rename(folder)
    to_disk(folder.parent)
    shutil.rmtree(former, ignore_errors=True)
