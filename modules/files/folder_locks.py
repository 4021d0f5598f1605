"""Locks that processes share through a folder, on one machine or on several with the same disk.

They are byte ranges of one file (POSIX record locks): the system drops those of a process however it ends, and file
servers know them (NFS from version 4). Nothing has to be refreshed, and no clock is compared."""

import errno
import fcntl
import os
import shutil
import time
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from ..errors import UserError
from .atomic_files import cannot_write, is_leftover, make_folder

PATIENCE = 60.0  # Seconds for which the writer of a place waits for another: most folders are written in less
WRITING = ".lock.partial"  # End of the hidden file's name whose lock the one writer of a place holds
TAKEN = (errno.EAGAIN, errno.EACCES)  # Errors of a lock that another process holds
ABSENT = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)  # Errors of a file system without locks


class FolderLocks:
    """Numbered locks of a folder by an empty file, which is made where it is missing.

    A process opens them once: its own locks never exclude each other, and closing the file drops them all. On a file
    system without locks every lock is free, with a warning: a process that works alone needs none. Raises UserError if
    the file cannot be written, or is a pipe or a device."""

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
    Without `wait` the place stands for its folder, in which one command works at a time.

    The hidden file of its lock is gone afterwards; one that a killed process has left is taken over. Raises UserError
    if another process writes it, with `wait` still after `PATIENCE` seconds, or it cannot be written."""
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
