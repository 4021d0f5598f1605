"""Folders that processes share, on one machine or on several with the same disk: their locks, and their replacement as
a whole, only if nothing in them is anybody else's.

Locks are byte ranges of one file (POSIX record locks): the system drops those of a process however it ends, and file
servers know them (NFS from version 4). Nothing has to be refreshed, and no clock is compared. A folder that was written
here as a whole holds a marker with the hash of each of its files, and is replaced as long as every file in it is in the
marker and unchanged."""

import ctypes
import errno
import fcntl
import json
import os
import shutil
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from ..errors import UserError
from .atomic_files import cannot_write, file_sha256, is_leftover, make_folder, share, to_disk, write_file
from .json_records import bounded_json, read_bounded_text

PATIENCE = 60.0  # Seconds for which the writer of a place waits for another: most folders are written in less
WRITING = ".lock.partial"  # End of the hidden file's name whose lock the one writer of a place holds
TAKEN = (errno.EAGAIN, errno.EACCES)  # Errors of a lock that another process holds
ABSENT = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)  # Errors of a file system without locks


class FolderLocks:
    """Numbered locks of a folder by an empty file, which is made where it is missing. A process opens them once: its
    own locks never exclude each other, and closing the file drops them all. In a file system without locks each is
    free, with a warning: a process alone needs none. Raises UserError for a pipe, a device or an unwritable file."""

    def __init__(self, file: Path) -> None:
        self.path, self.work = file, True  # Its file, and False once the file system is known to have no locks
        self._locked = False  # True once it is known to have some
        make_folder(file.parent)
        # A pipe would be opened only once somebody reads from it.
        if file.exists() and not file.is_file():
            raise UserError(f"{file} is no ordinary file, and processes would share its locks; move it away")
        try:
            # For appending: record locks need a file open for writing, and nothing of it may be cut.
            self._file = file.open("ab")
        except OSError as error:
            raise cannot_write(file, error) from error

    def take(self, number: int, count: int = 1, *, wait: bool = False) -> bool:
        """Take the locks number to number + count - 1 together (all from `number` on where count is 0); False where
        another process holds one of them and this one does not wait. Raises UserError if the file cannot be locked on a
        file system that has locks."""
        if not self.work:
            return True
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB), count, number)
            self._locked = True
        except OSError as error:
            if error.errno in TAKEN:
                self._locked = True
                return False
            # After a first lock they mean that the server is out of locks, and others may hold this one.
            if error.errno not in ABSENT or self._locked:
                raise UserError(f"{self.path} cannot be locked ({error.strerror}); choose an --out on another disk"
                                ) from error
            self.work = False
            # In the same words for each file: they are shown once.
            warnings.warn(f"this disk has no locks ({error.strerror}): start no other process in the same --out, which "
                          "would overwrite what this one writes", stacklevel=2)
        return True

    def drop(self, number: int, count: int = 1) -> None:
        """Give locks back."""
        if self.work:
            fcntl.lockf(self._file, fcntl.LOCK_UN, count, number)

    @contextmanager
    def holding(self, number: int) -> Iterator[None]:
        """Context that waits for a lock and holds it."""
        self.take(number, wait=True)
        try:
            yield
        finally:
            self.drop(number)

    @property
    def current(self) -> bool:
        """True while the file is at its place; otherwise its locks exclude nobody who opens that place now."""
        with suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(self._file.fileno()), self.path.stat())
        return False

    def close(self) -> None:
        """Drop all locks of this process."""
        self._file.close()


@contextmanager
def sole_writer(place: Path, *, wait: bool = True) -> Iterator[None]:
    """Context in which no other process writes this file or folder. A process must not enter it twice for one place.
    Without `wait` the place stands for its folder, in which one command works at a time. The hidden file of its lock is
    gone afterwards; one that a killed process has left is taken over. Raises UserError if another process writes it,
    with `wait` still after `PATIENCE` seconds, or it cannot be written."""
    file, end = _lock_of(place), time.monotonic() + PATIENCE * wait
    while True:
        locks = FolderLocks(file)
        # The one before may have removed the file after it was opened here.
        if (free := locks.take(0)) and locks.current:
            break
        locks.close()
        if not free and time.monotonic() > end:
            doing = f"process is writing {place}" if wait else f"command works in {place.parent}"
            raise UserError(f"another {doing}; start again when it has ended, or choose another folder")
        time.sleep(0.05)
    with closing(locks):
        try:
            yield
        finally:
            file.unlink(missing_ok=True)


def has_locks(folder: Path) -> bool:
    """False if the file system of a folder has no locks, so that no several processes can share the folder."""
    with closing(FolderLocks(_lock_of(folder / "trial"))) as locks:
        locks.take(0)
    locks.path.unlink(missing_ok=True)
    return locks.work


def _lock_of(place: Path) -> Path:
    return place.parent / f".{place.name}{WRITING}"


def remove_leftovers(folder: Path, shared: Path | None = None, own: Path | None = None) -> None:
    """Remove everything half-written in a folder and below it. No other process may be writing there, but in places of
    which it is the `sole_writer`, and in the folder `shared`: those are left as they are, as is the lock of the place
    `own`, which this process writes."""
    # Closing the file of its lock would drop that.
    mine = own and _lock_of(own)
    # Listed first: a folder that vanishes while it is walked would stop the walk.
    found = [path for path in folder.rglob(".*") if is_leftover(path) and shared not in path.parents and path != mine]
    kept = set[Path]()
    for path in found:
        if path.name.endswith(WRITING) and path.is_file():
            with closing(FolderLocks(path)) as locks:
                if locks.take(0):
                    path.unlink(missing_ok=True)
                    continue
                place = path.with_name(path.name.removesuffix(WRITING)[1:])
                # Whoever writes a place has half-written files next to it, by names that safetensors chose.
                kept |= {place, path.parent} - {folder} | {one for one in found if one.parent == path.parent}
    for path in found:
        if kept.isdisjoint((path, *path.parents)):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


MARKER = ".draftsmith.json"  # The file that says what a folder is and which files were written into it
NAMED = 3  # Number of foreign files that a refusal names
_HERE, _EXCHANGE = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux


@contextmanager
def whole_folder(folder: Path, kind: str, *, changing: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Give a hidden folder to fill; when the block ends well it takes the place of `folder`, else it vanishes. An
    existing `folder` is replaced if it is empty, or all it holds was written here as the same kind ("artifact") and is
    unchanged, but for names that may be `changing` later: in one step where the system has one, so that a killed
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
    """Every file and link below a folder but leftovers of killed processes; files before what lies deeper."""
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
