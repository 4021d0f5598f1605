"""Files that appear whole or not at all: written next to their place, forced to disk, then renamed into it;
and hashes by which a later run notices that what it reads is no longer what was read.

What a killed process was writing is a leftover: a hidden folder `.NAME.partial` next to NAME, a hidden file with more
letters before `.partial`, or `.tmp` and six letters or digits, by which safetensors names a file that it is writing."""

import errno
import hashlib
import json
import os
import re
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError

from ..errors import UserError

LARGE = 2**24  # Bytes of a file that counts by its size and the time of its last change: weights take minutes to read
_CACHE = re.compile(r"cache-[0-9a-f]+(_\d+_of_\d+)?\.arrow")  # A file in which `datasets` keeps what it made
_SAFETENSORS = re.compile(r"\.tmp[0-9A-Za-z]{6}")


def write_atomically(path: Path, write: Callable[[Path], object]) -> Path:
    """Let `write` fill a file that then becomes `path`; whoever reads `path` sees the old file or the whole new one.
    Folders above it are made where they are missing. Of two processes that write it at once, the last one stays. Raises
    UserError if the disk is full or the folder may not be written; nothing half-written stays."""
    # A name of its own for each writer: of two with one name, the second would find its file renamed away.
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(partial)
        share(partial)
        # Renamed before its bytes are on the disk, a file could be empty after a power cut.
        to_disk(partial)
        partial.replace(path)
        to_disk(path.parent)
    except (OSError, SafetensorError) as error:
        raise cannot_write(path, error) from error
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
    return path


def is_leftover(path: Path) -> bool:
    """True for the name of a file or folder that a killed process left half-written."""
    return path.match(".?*.partial") or _SAFETENSORS.fullmatch(path.name) is not None


def make_folder(path: Path) -> None:
    """Make a folder and those above it. Raises UserError where that is not allowed."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(path, error) from error


def share(path: Path) -> None:
    """Give a file the rights that the user's umask gives new files: safetensors writes for the owner alone."""
    # The umask can be read only by setting it.
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
    number, reason = (error.errno, error.strerror) if isinstance(error, OSError) else (None, None)
    remedy = "make room or choose another folder that you may write to"
    if number in (errno.ENOTDIR, errno.EEXIST, errno.EISDIR):
        remedy = "something else is in the way: move it or choose another folder"
    elif number in (errno.EACCES, errno.EPERM, errno.EROFS):
        remedy = "choose another folder that you may write to"
    return UserError(f"cannot write {path}: {reason or error}; {remedy}, then start again: finished work is kept")


def write_file(path: Path, content: str) -> Path:
    """Write text; returns the path. Raises UserError as `write_atomically` does."""
    return write_atomically(path, lambda partial: partial.write_text(content, encoding="utf-8"))


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hex. Raises OSError if it cannot be read."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def files_digest(path: Path, patterns: Sequence[str] = ("*",), *, whole: bool = True) -> str:
    """Hash of the names, sizes and contents of the files in a folder that the patterns find, or of one file, whatever
    its name. Place and time of writing do not enter, but for large files where not the `whole` is read; where nothing
    is, the hash is that of an empty folder. What is hidden, or in a hidden folder, and the caches that `datasets`
    leaves in a folder are passed over. Raises UserError if a file cannot be read."""
    digest = hashlib.sha256()
    found = {file for pattern in patterns for file in path.glob(pattern) if not _CACHE.fullmatch(file.name)
             and not any(part.startswith(".") for part in file.relative_to(path).parts)}
    for file in [path] if path.is_file() else sorted(file for file in found if file.is_file()):
        try:
            stat = file.stat()
            content = file_sha256(file) if whole or stat.st_size <= LARGE else str(stat.st_mtime_ns)
        except OSError as error:
            raise UserError(f"{file} cannot be read ({error.strerror}); copy it again") from error
        digest.update(json.dumps([str(file.relative_to(path)), stat.st_size, content]).encode())
    return digest.hexdigest()
