"""Files that appear whole or not at all: written beside their place, forced to disk, then renamed into it."""

import os
from collections.abc import Callable
from contextlib import suppress
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


def to_disk(path: Path) -> None:
    """Force a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def cannot_write(path: Path, error: OSError | SafetensorError) -> UserError:
    """What to tell the user about a place that cannot be written."""
    reason = (isinstance(error, OSError) and error.strerror) or str(error)
    return UserError(f"cannot write {path}: {reason}; make room or choose another folder that you may write to, then "
                     "start again: finished work is kept")
