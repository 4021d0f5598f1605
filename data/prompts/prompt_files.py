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
from ...modules.files.bounded_reading import PROMPT_BYTES, SETTINGS_BYTES, bounded_json, read_bounded
from ...modules.files.json_records import problem

ROW_BYTES = SETTINGS_BYTES
PIECE = 2**20
"""Bytes of a JSON array that are looked at together, at least."""
MARK, GZIP, PARQUET = b"\xef\xbb\xbf", b"\x1f\x8b", b"PAR1"
"""First bytes: the byte order mark of UTF-8, and those of two kinds of file."""
TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*+("?)|[\[\]{},]', re.DOTALL)
"""Tokens that decide where an element of a JSON array ends: texts, whose group is empty where they go on, and brackets
and commas outside of them."""


def file_rows(file: Path, seed: int | None = None) -> Iterator[tuple[str, Any]]:
    """(place, row) of every row: the file's name with the line, or in arrays and Parquet with the number of the row.

    A row of JSON is text that `decoded` reads. Memory holds one row (of Parquet one group of rows), and where rows are
    shuffled three numbers of each.
    Without a seed the order is the file's. Raises UserError if it cannot be read, or has more than `PROMPT_BYTES`.
    """
    with _explained(file), _opened(file) as stream, tempfile.TemporaryFile() as copy:
        kind, rows = _rows(stream)
        if seed is None:
            for number, _, row in rows:
                yield f"{file.name}:{number}", row
            return
        # In packed files no row can be found by its place: they are unpacked into a file without a name.
        source = copy if isinstance(stream.raw, gzip.GzipFile) or kind == "Parquet" else stream
        numbers, starts, lengths = array("Q"), array("Q"), array("Q")
        for number, start, row in rows:
            data = row if isinstance(row, bytes) else json.dumps(row, default=str).encode()
            if source is copy:
                start = copy.tell()
                copy.write(data)
            for column, value in ((numbers, number), (starts, start), (lengths, len(data))):
                column.append(value)
        order = array("Q", range(len(numbers)))
        random.Random(seed).shuffle(order)
        for place in order:
            source.seek(starts[place])
            yield f"{file.name}:{numbers[place]}", source.read(lengths[place])


def decoded(row: Any) -> Any:
    """The value of a row, without the nulls of tables, which have every key in every row. Raises UserError."""
    if not isinstance(row, bytes):
        return _without_null(row)
    try:
        if len(row) > ROW_BYTES:
            raise UserError(f"the row has more than {ROW_BYTES:,} bytes; shorten it")
        return bounded_json(row.decode())
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


def _rows(stream: BufferedReader) -> tuple[str, Iterator[tuple[int, int, Any]]]:
    """(the kind of file, (line or number, first byte, row) of every row)."""
    if stream.peek(4)[:4] == PARQUET:
        try:
            import pyarrow.parquet
        except ImportError as error:
            raise UserError("Parquet files need the package datasets; pip install 'draftsmith[train]'") from error
        batches = pyarrow.parquet.ParquetFile(stream).iter_batches(batch_size=64)
        rows = (row for batch in batches for row in batch.to_pylist())
        return "Parquet", ((number, 0, row) for number, row in enumerate(rows, 1))
    start = stream.tell()
    if stream.peek(3)[:3] == MARK:
        start += len(stream.read(len(MARK)))
    if stream.peek(PIECE).lstrip()[:1] == b"[":
        return "an array", _elements(stream, start)
    return "lines", _lines(stream, start)


def _lines(stream: BufferedReader, start: int) -> Iterator[tuple[int, int, bytes]]:
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
            yield number, first, line


def _elements(stream: BufferedReader, start: int) -> Iterator[tuple[int, int, bytes]]:
    """The elements of an array, by counting brackets: memory holds the one that is being read."""
    number, depth, held, scanned, first, size = 0, 0, b"", 0, 0, PIECE
    while piece := stream.read(size):
        held, size = held + piece, 2 * size
        for token in TOKEN.finditer(held, scanned):
            if token[1] == b"":
                # A text that goes on in the next piece is looked at again.
                break
            scanned, sign = token.end(), token[0]
            if depth == 1 and sign in (b",", b"]"):
                number += 1
                if held[first : token.start()].strip() or sign == b",":
                    yield number, start + first, held[first : token.start()]
                first = scanned
            elif depth == 0 and sign == b"[":
                first = scanned
            depth += (sign in (b"[", b"{")) - (sign in (b"]", b"}"))
        if first:
            start, held, scanned, first, size = start + first, held[first:], scanned - first, 0, PIECE
        if len(held) > ROW_BYTES or start > PROMPT_BYTES:
            raise UserError(f"row {number + 1} of the prompts ends after more than {ROW_BYTES:,} bytes of its own or "
                            f"{PROMPT_BYTES:,} of the file; split it")
    # What stands after the list, or in a list that does not end, is no row.
    if held.strip():
        yield number + 1, start, held
