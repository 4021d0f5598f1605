"""Keys of recipes and commands: name, type, default and meaning of each, read from the dataclasses that hold them."""

import ast
import inspect
import re
import textwrap
import typing
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from itertools import pairwise
from typing import Any

from ...modules.files.json_records import kind_in_words, kinds_of


@dataclass(frozen=True, kw_only=True)
class Key:
    """A setting of a recipe or a command."""

    name: str
    """With its section: distill.seed."""
    kind: str
    """Its allowed values, in words."""
    default: str
    """Its default value as YAML writes it; "required" where one must be given."""
    meaning: str
    """Its docstring, in one line."""


def keys_of(config: type[Any], prefix: str = "", skip: tuple[str, ...] = ()) -> dict[str, Key]:
    """Keys of a dataclass by name, some left out; fields that are dataclasses themselves become sections."""
    found: dict[str, Key] = {}
    hints, meanings = kinds_of(config), field_docstrings(config)
    for field in fields(config):
        name, kind = f"{prefix}{field.name}", hints[field.name]
        if field.name in skip:
            continue
        if is_dataclass(kind) and inspect.isclass(kind):
            found |= keys_of(kind, f"{name}.")
        else:
            default = field.default if field.default_factory is MISSING else field.default_factory()
            # Names that a table of the code holds are read from it.
            choices = f" One of {', '.join(field.metadata['choices'])}." if "choices" in field.metadata else ""
            found[name] = Key(name=name, kind=kind_in_words(kind), default=default_in_words(default),
                              meaning=meanings.get(field.name, "") + choices)
    return found


def field_docstrings(config: type[Any]) -> dict[str, str]:
    """The docstring under each field of a dataclass, in one line; a subclass's own come before its parents'."""
    found: dict[str, str] = {}
    for one in reversed(config.__mro__):
        if not is_dataclass(one):
            continue
        try:
            source = inspect.getsource(one)
        except OSError:
            # A class that `train_config` made, for other defaults of what all families have.
            found |= dict.fromkeys(one.__annotations__, "As for all families.")
            continue
        body = typing.cast(ast.ClassDef, ast.parse(textwrap.dedent(source)).body[0]).body
        for field, text in pairwise(body):
            if (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr)
                    and isinstance(text.value, ast.Constant)):
                # The code's None is null in a recipe.
                found[field.target.id] = re.sub(r"\bNone\b", "null", " ".join(str(text.value.value).split()))
    return found


def default_in_words(value: Any) -> str:
    """A key's default as YAML writes it; "required" where there is none."""
    if value is MISSING:
        return "required"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(str, value))}]"
    if isinstance(value, Mapping):
        return "{}" if not value else str(value)
    return str(value) if value != "" else "''"


def markdown_table(keys: Mapping[str, Key]) -> str:
    """The keys as a Markdown table: name, default, allowed values and meaning."""
    rows = [" | ".join([f"| `{key.name}`", f"`{key.default}`", key.kind,
                        key.meaning.replace("|", "\\|")]) for key in keys.values()]
    return "\n".join(["| key | default | value | meaning |", "|---|---|---|---|", *(f"{row} |" for row in rows)])
