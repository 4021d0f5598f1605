"""Locks that processes share through a folder, on one machine or on several with the same disk.

They are byte ranges of one file (POSIX record locks): the system drops those of a process however it ends, and file
servers know them (NFS from version 4). Nothing has to be refreshed, and no clock is compared.
"""

import errno
import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...modules import UserError
from ...modules.files.atomic_files import cannot_write, make_folder

TAKEN = (errno.EAGAIN, errno.EACCES)
"""Errors of a lock that another process holds."""


class FolderLocks:
    """Numbered locks of a folder.

    A process opens them once: its own locks never exclude each other, and closing the file drops them all.

    Args:
        file: of the locks, made where it is missing; it stays empty.

    Raises:
        UserError: if it cannot be written.
    """

    def __init__(self, file: Path) -> None:
        self.path = file
        make_folder(file.parent)
        try:
            # For appending: record locks need a file open for writing, and nothing of it may be cut.
            self._file = file.open("ab")
        except OSError as error:
            raise cannot_write(file, error) from error

    def take(self, number: int, count: int = 1, *, wait: bool = False) -> bool:
        """Take the locks number to number + count - 1 together; False where another process holds one of them.

        Args:
            number: of the first.
            count: how many; 0 takes all from `number` on.
            wait: until they are free.

        Raises:
            UserError: if the file system has no locks.
        """
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB), count, number)
        except OSError as error:
            if error.errno in TAKEN:
                return False
            raise UserError(f"{self.path} cannot be locked ({error.strerror}), and without locks processes share no "
                            "folder; choose an --out on another disk") from error
        return True

    def drop(self, number: int, count: int = 1) -> None:
        """Give locks back."""
        fcntl.lockf(self._file, fcntl.LOCK_UN, count, number)

    @contextmanager
    def holding(self, number: int) -> Iterator[None]:
        """Context that waits for a lock and holds it."""
        self.take(number, wait=True)
        try:
            yield
        finally:
            self.drop(number)

    def close(self) -> None:
        """Drop all locks of this process."""
        self._file.close()
