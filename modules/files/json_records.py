"""JSON files of this project: every field is compared with the type of its dataclass before anything uses it."""

import json
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from ..errors import UserError
from .bounded_reading import SETTINGS_BYTES, bounded_json, read_bounded

T = TypeVar("T")
MOST = 2**63 - 1
"""The largest whole number that a tensor can hold."""
PLAIN_NAMES: dict[object, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "text",
                                  Path: "a path", type(None): "null", dict: "a mapping", Any: "any value"}


class MistypedError(ValueError):
    """A field that is missing, unknown or of the wrong kind; the message names it."""


def read_json(file: Path, remedy: str, most: int = SETTINGS_BYTES) -> Any:
    """The content of a JSON file.

    Args:
        file: its path.
        remedy: what to do about a damaged one; ends the error's sentence.
        most: its largest size in bytes.

    Raises:
        UserError: if it cannot be read, is larger, or is not JSON.
    """
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
    """A value of JSON as a dataclass or any other annotated type.

    Args:
        kind: the type.
        value: what JSON gave.
        where: its place, for the error's sentence.
        remedy: ends the sentence.

    Raises:
        UserError: if a field is missing, unknown, of the wrong kind or out of its bounds.
    """
    try:
        found: T = typed(value, kind)
        return found
    except ValueError as error:
        raise UserError(f"{where} is damaged: {error}; {remedy}") from error


def typed(value: Any, kind: Any, name: str = "its content") -> Any:
    """A value of JSON converted to an annotated type: mappings become dataclasses, lists become tuples.

    Args:
        value: what JSON gave.
        kind: a dataclass, int, float, bool, str, None, Any, Literal, a union, or a list, tuple or dict of such.
        name: of the field.

    Raises:
        MistypedError: if it is of another kind.
        ValueError: as the checks of a dataclass do.
    """
    origin, inner = get_origin(kind) or kind, get_args(kind)
    if origin in (types.UnionType, typing.Union):
        for one in inner:
            # A dataclass that refuses its own values has been recognised: its ValueError says more than "no kind fits".
            try:
                return typed(value, one, name)
            except MistypedError:
                continue
    elif is_dataclass(origin):
        # The name of the whole content would only lengthen those of its fields.
        prefix, hints = "" if name == "its content" else f"{name}.", get_type_hints(kind)
        check_names(value, name, {field.name: field.default is MISSING and field.default_factory is MISSING
                                  for field in fields(kind)})
        return kind(**{key: typed(entry, hints[key], f"{prefix}{key}") for key, entry in value.items()})
    elif origin in (list, tuple) and isinstance(value, list | tuple):
        found = [typed(entry, inner[0] if inner else Any, f"{name}[{place}]") for place, entry in enumerate(value)]
        return found if origin is list else tuple(found)
    elif origin is dict and isinstance(value, dict):
        return {key: typed(entry, inner[1] if inner else Any, f"{name}.{key}") for key, entry in value.items()}
    # Types of values without parts are compared exactly: for Python True is an int, and JSON's numbers have no bound.
    elif origin is Literal:
        if value in inner and type(value) in map(type, inner):
            return value
    elif origin in (int, float):
        if type(value) is int and abs(value) <= MOST:
            return origin(value)
        # Python's JSON has NaN and Infinity, which no setting may be.
        if origin is float and type(value) is float and math.isfinite(value):
            return value
    elif origin is Any or (origin in (bool, str, type(None)) and type(value) is origin):
        return value
    raise MistypedError(f"{name} must be {kind_in_words(kind)}, got {shortened(value)}")


def typed_fields(value: Any, kinds: Mapping[str, Any], optional: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A mapping of JSON with each field converted to its type, as `typed` does.

    Args:
        value: what JSON gave.
        kinds: types of the fields that must be there.
        optional: types of those that may be there.

    Raises:
        MistypedError: if a field is missing, unknown or of another kind.
    """
    known = {**kinds, **(optional or {})}
    check_names(value, "its content", {name: name in kinds for name in known})
    return {name: typed(entry, known[name], name) for name, entry in value.items()}


def check_names(value: Any, name: str, known: Mapping[str, bool]) -> None:
    """Compare the keys of a mapping with the known ones, each with whether it must be there. Raises MistypedError."""
    if not isinstance(value, dict):
        raise MistypedError(f"{name} must be a mapping, got {shortened(value)}")
    if missing := [key for key, required in known.items() if required and key not in value]:
        raise MistypedError(f"{name} lacks {', '.join(missing)}")
    if unknown := sorted(value.keys() - known.keys()):
        raise MistypedError(f"{name} has the unknown {shortened(', '.join(unknown))}")


def shortened(value: Any) -> str:
    """A value as JSON writes it, in at most 60 characters."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def kind_in_words(kind: Any) -> str:
    """A type annotation in readable words: "a whole number", "one of hard, soft"."""
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    if get_origin(kind) in (types.UnionType, typing.Union):
        return " or ".join(kind_in_words(one) for one in get_args(kind))
    if get_origin(kind) in (tuple, list):
        return f"a list, each {kind_in_words(get_args(kind)[0])}"
    return PLAIN_NAMES.get(get_origin(kind) or kind, getattr(kind, "__name__", str(kind)))
