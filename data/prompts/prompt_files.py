"""Rows of a prompt file, one after the other: JSON Lines, one JSON array or Parquet, each plain or gzipped."""

import gzip
import json
import random
import re
import tempfile
import zlib
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader, BytesIO
from pathlib import Path
from typing import Any, cast

from ...modules import UserError
from ...modules.files.json_records import PROMPT_BYTES, SETTINGS_BYTES, bounded_json, problem, read_bounded

ROW_BYTES = SETTINGS_BYTES
PIECE = 2**20  # Bytes of a JSON array that are looked at together, at least
MARK, GZIP, PARQUET = b"\xef\xbb\xbf", b"\x1f\x8b", b"PAR1"  # First bytes: UTF-8's order mark, and two kinds of file
OBJECT = re.compile(rb"^\s*[{\[]", re.MULTILINE)  # A line that may be a row, or the start of an array
TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*+("?)|[\[\]{},]', re.DOTALL)
"""Tokens that decide where an element of a JSON array ends: texts, whose group is empty where they go on, and brackets
and commas outside of them."""


def file_rows(file: Path, seed: int | None = None) -> Iterator[tuple[str, bytes]]:
    """(place, row) of every row as JSON, which `decoded` reads. The place is the file's name with the line in which the
    row starts, in arrays with its number too, and in Parquet with its number alone.

    Memory holds one row (of Parquet one group of rows), and where rows are shuffled four numbers of each.
    Without a seed the order is the file's. Raises UserError if it cannot be read, or has more than `PROMPT_BYTES`."""
    with _explained(file), _opened(file) as stream, tempfile.TemporaryFile() as copy:
        kind, rows = _rows(file, stream)
        if seed is None:
            for line, number, _, row in rows:
                yield f"{file.name}:{line}" + f" (row {number})" * (kind == "array"), row
            return
        # In packed files no row can be found by its place: they are unpacked into a file without a name.
        source = copy if isinstance(stream.raw, gzip.GzipFile) or kind == "Parquet" else stream
        columns = lines, numbers, starts, lengths = array("Q"), array("Q"), array("Q"), array("Q")
        for line, number, start, row in rows:
            if source is copy:
                start = copy.tell()
                copy.write(row)
            for column, value in zip(columns, (line, number, start, len(row)), strict=True):
                column.append(value)
        order = array("Q", range(len(numbers)))
        random.Random(seed).shuffle(order)
        for one in order:
            source.seek(starts[one])
            place = f"{file.name}:{lines[one]}" + f" (row {numbers[one]})" * (kind == "array")
            yield place, source.read(lengths[one])


def decoded(row: Any) -> Any:
    """The value of a row, without the nulls of tables, which have every key in every row. Raises UserError."""
    if not isinstance(row, bytes):
        return _without_null(row)
    try:
        if len(row) > ROW_BYTES:
            raise UserError(f"the row has more than {ROW_BYTES:,} bytes; shorten it")
        return bounded_json(row.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UserError(f"the row is not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8"
                        ) from error
    except ValueError as error:
        raise UserError(f"not JSON ({problem(error)}); write one object a line") from error


def _without_null(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_null(one) for key, one in value.items() if one is not None}
    return [_without_null(one) for one in value] if isinstance(value, list | tuple) else value


@contextmanager
def _explained(file: Path) -> Iterator[None]:
    """A block in which the reasons why a file cannot be read or unpacked become one sentence."""
    try:
        yield
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"cannot read the prompts {file}: {error.strerror or error}; check the path") from error
    except (EOFError, zlib.error, ValueError, NotImplementedError) as error:
        raise UserError(f"{file} is damaged ({' '.join(str(error).split())}); write it anew") from error


@contextmanager
def _opened(file: Path) -> Iterator[BufferedReader]:
    """The bytes of a file, unpacked. Pipes and devices are read whole, within their bounds."""
    if file.is_file() and file.stat().st_size > PROMPT_BYTES:
        raise UserError(f"{file} has {file.stat().st_size:,} bytes, more than {PROMPT_BYTES:,}; split or shorten it")
    special = file.exists() and not file.is_file() and not file.is_dir()
    raw = cast(BufferedReader, BytesIO(read_bounded(file, PROMPT_BYTES))) if special else None
    with BufferedReader(cast(Any, raw)) if raw is not None else file.open("rb") as stream:
        if stream.peek(2)[:2] != GZIP:
            yield stream
            return
        with BufferedReader(cast(Any, gzip.GzipFile(fileobj=stream))) as unpacked:
            yield unpacked


def _rows(file: Path, stream: BufferedReader) -> tuple[str, Iterator[tuple[int, int, int, bytes]]]:
    """(the kind of file, (line, number, first byte, JSON) of every row)."""
    if stream.peek(4)[:4] == PARQUET:
        try:
            import pyarrow.parquet
        except ImportError as error:
            raise UserError("Parquet files need the package datasets; pip install 'draftsmith[train]'") from error
        batches = pyarrow.parquet.ParquetFile(stream).iter_batches(batch_size=64)
        # As JSON, so that a table reads alike in any order. Bytes are pictures or sounds, which are not read.
        rows = (json.dumps(_without_null(row), default=lambda one: None if isinstance(one, bytes) else str(one))
                for batch in batches for row in batch.to_pylist())
        return "Parquet", ((number, number, 0, row.encode()) for number, row in enumerate(rows, 1))
    start = stream.tell()
    if stream.peek(3)[:3] == MARK:
        start += len(stream.read(len(MARK)))
    first = stream.peek(PIECE)
    if first.strip() and not OBJECT.search(first):
        raise UserError(f"{file} is neither JSON Lines nor a JSON array in UTF-8, nor Parquet, and CSV and plain text "
                        "are not read; write each row as a JSON object on a line of its own")
    if first.lstrip()[:1] == b"[":
        return "array", _elements(stream, start)
    return "lines", _lines(stream, start)


def _lines(stream: BufferedReader, start: int) -> Iterator[tuple[int, int, int, bytes]]:
    number = 0
    # Only "\n" ends a line: JSON texts may hold U+2028.
    while line := stream.readline(ROW_BYTES + 1):
        number, first, rest = number + 1, start, line
        start += len(line)
        while rest and not rest.endswith(b"\n") and start <= PROMPT_BYTES:
            rest = stream.readline(ROW_BYTES)
            start += len(rest)
        if start > PROMPT_BYTES:
            raise UserError(f"line {number} of the prompts ends after more than {PROMPT_BYTES:,} bytes; split the file")
        if line.strip():
            yield number, number, first, line


def _elements(stream: BufferedReader, start: int) -> Iterator[tuple[int, int, int, bytes]]:
    """The elements of an array, by counting brackets: memory holds the one that is being read."""
    line, number, depth, held, scanned, first, size = 1, 0, 0, b"", 0, 0, PIECE
    while piece := stream.read(size):
        held, size = held + piece, 2 * size
        for token in TOKEN.finditer(held, scanned):
            if token[1] == b"":
                # A text that goes on in the next piece is looked at again.
                break
            scanned, sign = token.end(), token[0]
            if depth == 1 and sign in (b",", b"]"):
                number, row = number + 1, held[first : token.start()]
                if row.strip() or sign == b",":
                    yield line + row[: len(row) - len(row.lstrip())].count(b"\n"), number, start + first, row
                line, first = line + row.count(b"\n"), scanned
            elif depth == 0 and number:
                raise ValueError("there is text after its list")
            elif depth == 0:
                line, first = line + held[:scanned].count(b"\n"), scanned
            depth += (sign in (b"[", b"{")) - (sign in (b"]", b"}"))
        if first:
            start, held, scanned, first, size = start + first, held[first:], scanned - first, 0, PIECE
        if len(held) > ROW_BYTES or start > PROMPT_BYTES:
            raise UserError(f"row {number + 1} of the prompts ends after more than {ROW_BYTES:,} bytes of its own or "
                            f"{PROMPT_BYTES:,} of the file; split it")
    # A cut file has lost rows, perhaps most of them.
    if depth or held.strip():
        raise ValueError("its list has no end" if depth else "there is text after its list")
