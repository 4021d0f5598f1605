"""Prompts of a dataset or a file (JSON Lines, one JSON array or Parquet, each plain or gzipped): which rows are read,
which are skipped, and why."""

import gzip
import json
import random
import re
import tempfile
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import BufferedReader, BytesIO
from itertools import islice
from pathlib import Path
from typing import Any, cast

from ...modules import UserError
from ...modules.files.json_records import PROMPT_BYTES, SETTINGS_BYTES, bounded_json, problem, read_bounded
from .prompt import LeftOutError, Prompt, parse_prompt
from .sources import OwnPrompts, PromptConfig, Skipped, Taken

STREAM_BUFFER = 10_000  # Rows a streamed dataset is shuffled among; of one without limit looked at beforehand
ROW_BYTES = SETTINGS_BYTES
PIECE = 2**20  # Bytes of a JSON array that are looked at together, at least
MARK, GZIP, PARQUET = b"\xef\xbb\xbf", b"\x1f\x8b", b"PAR1"  # First bytes: UTF-8's order mark, and two kinds of file
OBJECT = re.compile(rb"^\s*[{\[]", re.MULTILINE)  # A line that may be a row, or the start of an array
TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*+("?)|[\[\]{},]', re.DOTALL)
"""Tokens that decide where an element of a JSON array ends: texts, whose group is empty where they go on, and brackets
and commas outside of them."""


class ReadPrompts:
    """Candidates from a file or dataset: its rows, in an order that is a pure function of the settings and the seed.
    `check` raises UserError for the number and the prompt of one that cannot be used; `whole` is True where all rows
    are used, and False where a budget may end the work before."""

    def __init__(self, config: PromptConfig, seed: int, check: Callable[[int, Prompt], None] = lambda *_: None,
                 whole: bool = True) -> None:
        self.config, self.seed, self.check = config, seed, check
        endless = config.origin == "dataset" and config.streaming and config.limit is None
        self.looked = STREAM_BUFFER if endless or not whole else None  # Rows looked at before an answer; None: all
        self.checked, self.bad = 0, dict[int, Skipped]()  # Rows that `skipped` has looked at, and the unusable ones
        self.position = 0
        self.rest = self._rows()
        self.total = config.limit  # Largest number of candidates, where that is known
        # To count a dataset's rows may mean to download all of it.
        if config.origin == "file":
            self.total = sum(1 for _ in islice(file_rows(Path(config.path or "")), config.limit))

    def _rows(self) -> Iterator[tuple[str, Any]]:
        config = self.config
        rows = (file_rows(Path(config.path or ""), self.seed if config.shuffle else None) if config.origin == "file"
                else _dataset_rows(config, self.seed))
        return islice(rows, config.limit)

    def _prompt(self, number: int, place: str, row: Any) -> Prompt | Skipped:
        if number in self.bad:
            return self.bad[number]
        try:
            prompt = read_row(row, place, self.config.column)
            if number >= self.checked:
                self.check(number, prompt)
        except UserError as error:
            return Skipped(row=place, reason=str(error).removeprefix(f"{place}: "),
                           wanted=isinstance(error, LeftOutError))
        return prompt

    def take(self, start: int, count: int) -> Taken:
        """Candidates start to start + count - 1, without those to be skipped; going back reads from the start again."""
        # Shards come in any order where other processes take some; a source only goes forward.
        if start < self.position:
            self.rest, self.position = self._rows(), 0
        for _ in islice(self.rest, start - self.position):
            self.position += 1
        found = [self._prompt(start + place, *row) for place, row in enumerate(islice(self.rest, count))]
        self.position += len(found)
        prompts = [(start + place, one) for place, one in enumerate(found) if isinstance(one, Prompt)]
        late = () if self.looked is None else tuple(
            one for place, one in enumerate(found, start) if isinstance(one, Skipped) and place >= self.looked)
        return Taken(prompts=prompts, read=len(found), skipped=late)

    def skipped(self) -> list[Skipped]:
        """The rows that are not used, of all rows, or of the first 10,000 where it is open how many are read. Raises
        UserError if the source cannot be read or holds no row, or as `require_few` does."""
        found, number = dict[int, Skipped](), 0
        for number, row in enumerate(islice(self._rows(), self.looked), 1):
            if isinstance(one := self._prompt(number - 1, *row), Skipped):
                found[number - 1] = one
                if not self.config.most_skipped and not one.wanted:
                    break
        if not number:
            raise UserError(f'{self.config.path} holds no prompt; write one JSON object a line, such as '
                            '{"prompt": "..."}')
        self.require_few([*found.values()], number)
        self.checked, self.bad = number, found
        return [*found.values()]

    def require_few(self, found: Sequence[Skipped], rows: int) -> None:
        """Refuse a source of which more of its `rows` are to be skipped, those `found`, than the recipe allows. Raises
        UserError."""
        most, bad = self.config.most_skipped, [one for one in found if not one.wanted]
        if len(bad) > most * rows:
            kinds = Counter(one.kind for one in bad).most_common(3)
            first = {one.kind: one for one in reversed(bad)}
            reasons = "; ".join(f"{count:,} like {first[kind].row}: {first[kind].reason}" for kind, count in kinds)
            raise UserError(f"{len(bad):,} of {rows:,} rows of {self.config.path} cannot be used, and "
                            f"prompts.most_skipped {most:g} allows fewer: {reasons}")


def read_row(row: Any, place: str, column: str | None = None) -> Prompt:
    """The prompt of a row as its source gives it. Raises UserError naming its place."""
    try:
        value = decoded(row)
    except UserError as error:
        raise UserError(f"{place}: {error}") from error
    return parse_prompt(value, place, column)


def read_prompts(path: str | Path) -> list[Prompt]:
    """Read a file of prompts, all of them usable. Raises UserError if the file is missing, unreadable or empty, or a
    row is malformed (the message says which)."""
    prompts = [read_row(row, place) for place, row in file_rows(Path(path))]
    if not prompts:
        raise UserError(f'{path} holds no prompt; write one JSON object a line, such as {{"prompt": "..."}}')
    return prompts


Source = OwnPrompts | ReadPrompts  # Numbered candidates for prompts; candidate n is the same whenever it is asked for


def _dataset_rows(config: PromptConfig, seed: int) -> Iterator[tuple[str, Any]]:
    # Prompts of one's own and of files need no such package, which is large.
    try:
        import datasets
    except ImportError as error:
        raise UserError("prompts.origin dataset needs the package datasets; pip install 'draftsmith[train]'") from error
    name = str(config.path)
    from datasets.exceptions import DatasetsError

    try:
        # A folder that `save_to_disk` wrote; `load_dataset` would read its files as data of another kind.
        if any((Path(name) / mark).exists() for mark in ("state.json", "dataset_dict.json")):
            saved = datasets.load_from_disk(name)
            data: Any = saved[config.split] if isinstance(saved, datasets.DatasetDict) else saved
        else:
            data = datasets.load_dataset(name, config.subset, split=config.split, streaming=config.streaming,
                                         revision=config.revision)
        if config.shuffle:
            data = data.shuffle(seed=seed, buffer_size=STREAM_BUFFER) if config.streaming else data.shuffle(seed=seed)
        # A streamed dataset fails only when its rows are read.
        for number, row in enumerate(data):
            yield f"{name}[{config.split}]:{number}", row
    except UserError:
        raise
    except (DatasetsError, OSError, ValueError, KeyError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"cannot load the dataset {config.path!r}, split {config.split!r}: {reason}; "
                        "check prompts.path, prompts.subset and prompts.split") from error


# Rows of a file -------------------------------------------------------------------------------------------------------


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
