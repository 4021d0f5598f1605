"""Files read within bounds: of size, of waiting time for pipes and devices, and of what JSON may hold."""

import atexit
import json
import os
import select
import stat
from codecs import BOM_UTF8
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

from ..errors import UserError

SETTINGS_BYTES = 64 * 2**20  # Largest file of settings or records
PROMPT_BYTES = 4 * 2**30  # Largest file of prompts
STREAM_BYTES = 256 * 2**20  # Most that is read from a pipe or a device, which do not say how much they hold
SILENCE = 120.0  # Seconds without a byte after which a pipe or a device is given up
_TEMPLATES = "additional_chat_templates"  # Subfolder of a model with further chat templates
DEPTH = 100  # Most levels of lists and objects inside one another


def read_bounded(file: Path, most: int = SETTINGS_BYTES) -> bytes:
    """The bytes of a file, or of a pipe or a device, of which at most `STREAM_BYTES` are read. Raises UserError if
    there are more than `most`, or a pipe or a device is silent for `SILENCE` seconds; OSError if it cannot be read."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb", buffering=0) as opened:
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode):
            if status.st_size > most:
                raise UserError(f"{file} has {status.st_size:,} bytes, more than {most:,}; split or shorten it")
            return opened.read()
        # A pipe or a device says neither how much it holds nor when the next bytes come: both are bounded.
        pieces: list[bytes] = []
        most, total = min(most, STREAM_BYTES), 0
        while select.select([descriptor], [], [], SILENCE)[0]:
            if not (piece := os.read(descriptor, 2**20)):
                return b"".join(pieces)
            pieces.append(piece)
            total += len(piece)
            if total > most:
                raise UserError(f"{file} is no ordinary file and gives more than {most:,} bytes; write what you need "
                                "of it into a file")
        raise UserError(f"nothing came from {file} for {SILENCE:g} s; write to it, or give an ordinary file")


def read_bounded_text(file: Path, most: int = SETTINGS_BYTES) -> str:
    """The text of a UTF-8 file, a pipe or a device, without its byte order mark. Raises as `read_bounded` does, and
    UnicodeDecodeError."""
    return read_bounded(file, most).decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")


def without_marks(folder: Path) -> Path:
    """A model's folder for readers that know no byte order marks: the folder itself, or where a text file begins with
    one, a folder of its texts without marks and links to its other files, which lasts as long as this process."""
    marked = {file for pattern in ("*.json", "*.jinja", "*.txt", f"{_TEMPLATES}/*.jinja")
              for file in folder.glob(pattern) if file.is_file() and _marked(file)}
    if not marked:
        return folder
    view = Path(mkdtemp())
    atexit.register(rmtree, view, ignore_errors=True)
    for file in (*folder.iterdir(), *folder.glob(f"{_TEMPLATES}/*")):
        place = view / file.relative_to(folder)
        if file in marked:
            place.write_bytes(read_bounded(file).removeprefix(BOM_UTF8))
        elif file == folder / _TEMPLATES and file.is_dir():
            place.mkdir()
        else:
            place.symlink_to(file.resolve())
    return view


def _marked(file: Path) -> bool:
    with file.open("rb") as opened:
        return opened.read(len(BOM_UTF8)) == BOM_UTF8


def require_ordinary(file: Path) -> None:
    """Refuse a pipe or a device, which would be waited for or could not be read twice. Raises UserError."""
    if file.exists() and not file.is_file() and not file.is_dir():
        raise UserError(f"{file} is no ordinary file; give one, since it may be read several times")


def bounded_json(text: str | bytes) -> Any:
    """The value of a JSON text. Raises json.JSONDecodeError if it is none, is nested more than `DEPTH` levels deep, or
    has a number of more digits than Python converts."""
    too_deep = json.JSONDecodeError(f"nested more than {DEPTH} levels deep", "", 0)
    try:
        value = json.loads(text)
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except RecursionError as error:
        raise too_deep from error
    except ValueError as error:
        raise json.JSONDecodeError("a number of too many digits", "", 0) from error
    # Level by level: a value that json could still read may exhaust the stack of a recursive check.
    found = [value]
    for _ in range(DEPTH + 1):
        found = [part for one in found if isinstance(one, dict | list)
                 for part in (one.values() if isinstance(one, dict) else one) if isinstance(part, dict | list)]
        if not found:
            return value
    raise too_deep
