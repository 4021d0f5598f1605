"""Files read within bounds (of size, of waiting time for pipes and devices, of what JSON may hold), and the one reader
of settings and records: every value is compared with its annotated type before anything uses it."""

import atexit
import json
import os
import select
import stat
import types
import typing
from codecs import BOM_UTF8
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import lru_cache
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Annotated, Any, Literal, NotRequired, TypeVar, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError
from typing_extensions import TypedDict, is_typeddict

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
    """The text of UTF-8 without its byte order mark. Raises as `read_bounded` does, and UnicodeDecodeError."""
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


T = TypeVar("T")
MOST = 2**63 - 1  # The largest whole number that a tensor can hold
PLAIN_NAMES: dict[object, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "text",
                                  Path: "a path", type(None): "null", dict: "a mapping", Any: "any value"}
BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}  # Pydantic's names of bounds, in words
LOWER = "; lower it"
APART = {"missing": "lacks", "extra_forbidden": "has the unknown", "unexpected_keyword_argument": "has the unknown"}
"""Pydantic's names of what is wrong with the keys of a mapping, in words."""
# A record is its fields and no others; its numbers are those of JSON, which has neither NaN nor infinity.
STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class MistypedError(ValueError):
    """A field that is missing, unknown, of the wrong kind or out of its bounds; the message names it."""

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.remedy = remedy  # End of the sentence where the field is a setting; a damaged file has a remedy of its own


def read_json(file: Path, remedy: str, most: int = SETTINGS_BYTES) -> Any:
    """The content of a JSON file of at most so many bytes; `remedy` says what to do about a damaged one. Raises
    UserError if it cannot be read, is larger, or is not JSON."""
    try:
        content = read_bounded(file, most)
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}; {remedy}") from error
    return parse_json(content, str(file), remedy)


def read_object(file: Path, remedy: str) -> dict[str, Any]:
    """The object in a JSON file. Raises UserError as `read_json` and `record_of` do."""
    return record_of(dict[str, Any], read_json(file, remedy), str(file), remedy)


def parse_json(text: str | bytes, where: str, remedy: str) -> Any:
    """The value of a JSON text. Raises UserError naming `where` it stands if it is none."""
    try:
        return bounded_json(text)
    except ValueError as error:
        raise UserError(f"{where} cannot be read as JSON ({problem(error)}); {remedy}") from error


def problem(error: ValueError) -> str:
    """The reason why a text is not JSON, with its place."""
    if isinstance(error, json.JSONDecodeError):
        place = f"column {error.colno}" if error.lineno == 1 else f"line {error.lineno}, column {error.colno}"
        return f"{error.msg.removesuffix(' at')} at {place}"
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8, {error.reason} at byte {error.start}"
    return str(error)


def read_record(kind: type[T], file: Path, remedy: str) -> T:
    """A dataclass read from a JSON file. Raises UserError as `read_json` and `record_of` do."""
    return record_of(kind, read_json(file, remedy), str(file), remedy)


def record_of(kind: type[T], value: Any, where: str, remedy: str) -> T:
    """A value of JSON, from the place `where`, as a dataclass or any other annotated type. Raises UserError if a field
    is missing, unknown, of the wrong kind or out of its bounds."""
    try:
        found: T = typed(value, kind)
        return found
    except ValueError as error:
        raise UserError(f"{where} is damaged: {error}; {remedy}") from error


def typed(value: Any, kind: Any, name: str = "its content") -> Any:
    """A value of JSON or YAML converted to an annotated type: mappings become dataclasses, lists tuples, text paths. A
    kind is a dataclass, int, float, bool, str, None, Path, Any, Literal, a union, or a list, tuple or dict of such,
    `Annotated` with the bounds of pydantic's `Field` or with `Such`. Raises MistypedError if it is of another kind, or
    out of its bounds, and ValueError as the checks of a dataclass do."""
    check_numbers(value, name)
    # In a list: else pydantic takes only the settings that a dataclass has for itself.
    text = json.dumps([value], default=str)
    try:
        return _reader(kind).validate_json(text)[0]
    except ValidationError as error:
        raise explained(error, json.loads(text)[0], kind, name) from None


@lru_cache(maxsize=256)
def _reader(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(tuple[kind], config=STRICT)


def explained(error: ValidationError, value: Any, kind: Any, name: str) -> ValueError:
    """The sentence about what pydantic refused: key, kind or bound, and value."""
    found = error.errors(include_url=False)
    first, context = found[0], found[0].get("ctx", {})
    if isinstance(own := context.get("error"), ValueError):
        return own
    if first["type"] == "json_invalid":
        return MistypedError(f"{name} holds text that is not UTF-8")
    loc = first["loc"][1:]
    if (what := APART.get(first["type"])) is not None:
        names = ", ".join(str(one["loc"][-1]) for one in found
                          if one["type"] == first["type"] and one["loc"][:-1] == first["loc"][:-1])
        return MistypedError(f"{place(kind, loc[:-1], name)[0]} {what} "
                             f"{names if len(names) <= 200 else f'{names[:197]}...'}")
    where, kind, depth = place(kind, loc, name)
    for part in loc[:depth]:
        value = value[part]
    # Of the kinds of a union the one counts to which the value belongs: it is out of that one's bounds.
    for one in found:
        bound = next((key for key in BOUNDS if key in one.get("ctx", {})), None)
        if bound is not None and one["loc"][1:depth + 1] == loc[:depth]:
            return MistypedError(f"{where} must be {BOUNDS[bound]} {in_digits(one['ctx'][bound])}, got "
                                 f"{shortened(one['input'])}", LOWER if bound in ("le", "lt") else "")
    return MistypedError(f"{where} must be {kind_in_words(kind)}, got {shortened(value)}")


def place(kind: Any, path: Sequence[int | str], name: str = "") -> tuple[str, Any, int]:
    """The dotted name and the annotated type of what lies at a place inside a type, and how many steps lead there: a
    union, whose kinds share the place, ends the way."""
    for depth, part in enumerate(path):
        inner = unannotated(kind)
        if get_origin(inner) in (types.UnionType, typing.Union):
            some = [one for one in get_args(inner) if one is not type(None)]
            if len(some) > 1:
                return name, kind, depth
            inner = unannotated(some[0])
        origin, parts = get_origin(inner) or inner, get_args(inner)
        if is_dataclass(origin) or is_typeddict(origin):
            # The name of the whole content would only lengthen those of its fields.
            hints = get_type_hints(inner, include_extras=True)
            if part not in hints:
                return name, Any, depth
            name, kind = str(part) if name in ("", "its content") else f"{name}.{part}", hints[str(part)]
        elif origin in (list, tuple):
            name, kind = f"{name}[{part}]", parts[0] if parts else Any
        elif origin is dict:
            name, kind = f"{name}.{part}", parts[1] if parts else Any
        else:
            return name, kind, depth
    return name, kind, len(path)


def unannotated(kind: Any) -> Any:
    """A type without its bounds, and without the mark of a key that may be left out."""
    while get_origin(kind) in (Annotated, NotRequired):
        kind = get_args(kind)[0]
    return kind


def check_numbers(value: Any, name: str) -> None:
    """Refuse whole numbers that no tensor can hold, wherever they stand. Raises MistypedError."""
    if type(value) is int and abs(value) > MOST:
        raise MistypedError(f"{name} must be at most {MOST:,}, got {shortened(value)}", LOWER)
    parts = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, part in parts:
        inside = f"{name}[{key}]" if isinstance(value, list | tuple) else f"{name}.{key}"
        check_numbers(part, str(key) if name == "its content" else inside)


def kinds_of(config: type) -> dict[str, Any]:
    """The annotated types of a dataclass's fields, bounds included."""
    hints = get_type_hints(config, include_extras=True)
    return {one.name: hints[one.name] for one in fields(config)}


def typed_fields(value: Any, kinds: Mapping[str, Any], optional: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A mapping of JSON with each field converted to its type, as `typed` does, those that may be missing too."""
    left_out = {name: NotRequired[kind] for name, kind in (optional or {}).items()}
    found: dict[str, Any] = typed(value, TypedDict("Fields", {**kinds, **left_out}))  # type: ignore[operator]
    return found


def shortened(value: Any, most: int = 60) -> str:
    """A value as JSON writes it, text in single quotes, in at most so many characters."""
    text = repr(value) if isinstance(value, str | float) else json.dumps(value, default=str)
    return text if len(text) <= most else f"{text[:most - 3]}..."


def in_digits(bound: float) -> str:
    """A bound as a reader writes it: 65,536 or 0.001."""
    return f"{bound:,}" if isinstance(bound, int) else f"{bound:g}"


def kind_in_words(kind: Any) -> str:
    """A type annotation in readable words: "a whole number from 1 to 32", "one of hard, soft"."""
    if get_origin(kind) is Annotated:
        plain, *notes = get_args(kind)
        if said := [note.words for note in notes if hasattr(note, "words")]:
            return str(said[0])
        marks = [mark for note in notes for mark in getattr(note, "metadata", [note])]
        # Upper bounds far above any use are left out here.
        bounds = {key: in_digits(bound) for key in BOUNDS for mark in marks
                  if (bound := getattr(mark, key, None)) is not None and not (key == "le" and bound > 2**20)}
        if bounds.keys() == {"ge", "le"}:
            return f"{kind_in_words(plain)} from {bounds['ge']} to {bounds['le']}"
        limits = " and ".join(f"{BOUNDS[key]} {bound}" for key, bound in bounds.items())
        return f"{kind_in_words(plain)} {'of ' if limits.startswith('at') else ''}{limits}"
    if get_origin(kind) is NotRequired:
        return kind_in_words(get_args(kind)[0])
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    if get_origin(kind) in (types.UnionType, typing.Union):
        return " or ".join(kind_in_words(one) for one in get_args(kind))
    if get_origin(kind) is dict and get_origin(keys := get_args(kind)[0]) is Literal:
        return f"a mapping from {kind_in_words(keys)} to {kind_in_words(get_args(kind)[1])}"
    if get_origin(kind) in (tuple, list):
        return f"a list, each {kind_in_words(get_args(kind)[0])}"
    if is_dataclass(kind):
        return PLAIN_NAMES[dict]
    return PLAIN_NAMES.get(get_origin(kind) or kind, getattr(kind, "__name__", str(kind)))
