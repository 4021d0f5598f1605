"""Files read within bounds: of size, of waiting time for pipes and devices, and of what JSON may hold."""

import json
import os
import select
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import UserError

SETTINGS_BYTES = 64 * 2**20
"""Largest file of settings or records."""
PROMPT_BYTES = 4 * 2**30
"""Largest file of prompts."""
STREAM_BYTES = 256 * 2**20
"""Most that is read from a pipe or a device, which do not say how much they hold."""
SILENCE = 120.0
"""Seconds without a byte after which a pipe or a device is given up."""
DEPTH = 100
"""Most levels of lists and objects inside one another."""


def read_bounded(file: Path, most: int = SETTINGS_BYTES) -> bytes:
    """The bytes of a file, a pipe or a device.

    Args:
        file: its path.
        most: largest size, in bytes; of a pipe or a device at most `STREAM_BYTES` are read.

    Raises:
        UserError: if there is more, or a pipe or a device is silent for `SILENCE` seconds.
        OSError: if it cannot be read.
    """
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb", buffering=0) as opened:
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode):
            if status.st_size > most:
                raise UserError(f"{file} has {status.st_size:,} bytes, more than {most:,}; split or shorten it")
            return opened.read()
        return b"".join(_pieces(descriptor, file, min(most, STREAM_BYTES)))


def _pieces(descriptor: int, file: Path, most: int) -> Iterator[bytes]:
    """The pieces that a pipe or a device gives, up to its end."""
    total = 0
    while True:
        if not select.select([descriptor], [], [], SILENCE)[0]:
            raise UserError(f"nothing came from {file} for {SILENCE:g} s; write to it, or give an ordinary file")
        piece = os.read(descriptor, 2**20)
        total += len(piece)
        if not piece:
            return
        if total > most:
            raise UserError(f"{file} is no ordinary file and gives more than {most:,} bytes; write what you need of it "
                            "into a file")
        yield piece


def read_bounded_text(file: Path, most: int = SETTINGS_BYTES) -> str:
    """The text of a UTF-8 file, a pipe or a device. Raises as `read_bounded` does, and UnicodeDecodeError."""
    return read_bounded(file, most).decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")


def require_ordinary(file: Path) -> None:
    """Refuse a pipe or a device, which would be waited for or could not be read twice. Raises UserError."""
    if file.exists() and not file.is_file() and not file.is_dir():
        raise UserError(f"{file} is no ordinary file; give one, since it may be read several times")


def bounded_json(text: str | bytes) -> Any:
    """The value of a JSON text.

    Raises:
        json.JSONDecodeError: if it is none, is nested more than `DEPTH` levels deep, or has a number of more digits
            than Python converts.
    """
    try:
        value = json.loads(text)
        too_deep = _is_deeper(value, DEPTH)
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except RecursionError:
        too_deep = True
    except ValueError as error:
        raise json.JSONDecodeError("a number of too many digits", "", 0) from error
    if too_deep:
        raise json.JSONDecodeError(f"nested more than {DEPTH} levels deep", "", 0)
    return value


def _is_deeper(value: Any, levels: int) -> bool:
    """True if lists and objects stand inside one another on more levels; found without recursion."""
    found = [value]
    for _ in range(levels + 1):
        found = [part for one in found if isinstance(one, dict | list)
                 for part in (one.values() if isinstance(one, dict) else one) if isinstance(part, dict | list)]
        if not found:
            return False
    return True
