"""Hashes of files and folders, by which a later run notices that what it reads is no longer what was read."""

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path

from ..errors import UserError
from .atomic_files import file_sha256

LARGE = 2**24
"""Bytes of a file that counts by its size and the time of its last change: weights take minutes to read."""
_CACHE = re.compile(r"cache-[0-9a-f]+(_\d+_of_\d+)?\.arrow")
"""Name of a file in which `datasets` keeps what it made of a folder."""


def files_digest(path: Path, patterns: Sequence[str] = ("*",), *, whole: bool = True) -> str:
    """Hash of the names, sizes and contents of a folder's files, or of one file, whatever its name.

    Place and time of writing do not enter; where nothing is, the hash is that of an empty folder. What is hidden, or in
    a hidden folder, and the caches that `datasets` leaves in a folder are passed over.

    Args:
        path: of the folder or file.
        patterns: of the files in a folder.
        whole: read large files too; else the time of writing stands for their content.

    Raises:
        UserError: if a file cannot be read.
    """
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
