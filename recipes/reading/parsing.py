"""From the command line and a recipe file to a command's arguments, by the one reader of settings."""

from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml

from ...modules import UserError
from ...modules.files.json_records import MistypedError, kinds_of, place, typed, typed_fields
from ..terminal.terminal_text import say
from .command_line import TRUST, CommandLine
from .recipe_files import flat, word_value

T = TypeVar("T")
LINE_ONLY = (TRUST, "target.trust_remote_code")
"""Keys that let code of others run: the command line alone can set them, and no record of a run holds them."""


@dataclass(frozen=True, kw_only=True)
class Parsed(Generic[T]):
    """A command's arguments in two forms."""

    values: T
    """Ready to use: dataclasses and paths."""
    settings: dict[str, Any]
    """The same as plain JSON values: what provenance records and stages compare."""


@dataclass(frozen=True, kw_only=True)
class Command(Generic[T]):
    """One command: a function of its arguments, which are the fields of a dataclass."""

    name: str
    """Name on the command line."""
    arguments: type[T]
    """Frozen dataclass of the arguments; the docstrings of its fields are the help."""
    run: Callable[[Parsed[T]], None]
    """The function."""
    home: str | None = None
    """A section whose keys may be written without it: --batch_size, --max_steps."""
    trains: bool = False
    """Whether its arguments have the fields `family` and `train`, and its recipes also `drafter`."""

    def parse(self, arguments: Sequence[str]) -> Parsed[T]:
        """The arguments in force. Raises UserError for what the user got wrong; ends the command for help."""
        line = CommandLine(self.name, arguments)
        line.check()
        return self.parsed(line)

    def parsed(self, line: CommandLine) -> Parsed[T]:
        """The arguments in force of a call whose keys have been checked. Raises UserError."""
        kinds = kinds_of(self.arguments)
        if line.family is not None:
            # Commands that train nothing start a second sooner without what training imports.
            from ...trainers.families import family_configs

            configs = family_configs(line.family, trust=line.trusted)
            kinds |= {"train": configs.train, "drafter": configs.drafter}
        content = given_values(line, kinds)
        for one in fields(self.arguments):  # type: ignore[arg-type]
            default = one.default if one.default_factory is MISSING else one.default_factory()
            if is_dataclass(default):
                # A section's keys have their defaults in this command, which need not be those of its dataclass.
                content[one.name] = {**plain(default), **content.get(one.name, {})}
            elif default is not MISSING:
                content.setdefault(one.name, plain(default))
            elif one.name == "train":
                content["train"] = {**content.get("train", {}), "drafter": content.setdefault("drafter", {})}
            elif one.name not in content and line.prints:
                kinds.pop(one.name)
            elif one.name not in content:
                raise UserError(f"{self.name} needs {one.name}; give --{one.name}, see draftsmith {self.name} --help")
        try:
            if drafter := kinds.pop("drafter", None):
                # Before the section train, which holds it too, under a name that no user knows.
                typed(content.pop("drafter"), drafter, "drafter")
            ready = typed_fields(content, kinds)
        except MistypedError as error:
            raise UserError(f"{error}{error.remedy}") from error
        settings = plain(ready)
        if drafter:
            settings["drafter"] = settings["train"].pop("drafter")
        for key in LINE_ONLY:
            section, _, name = key.rpartition(".")
            (settings.get(section, {}) if section else settings).pop(name, None)
        if line.prints:
            say(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True).rstrip())
            raise SystemExit(0)
        return Parsed(values=self.arguments(**ready), settings=settings)


def given_values(line: CommandLine, kinds: dict[str, Any]) -> dict[str, Any]:
    """The recipe and the command line in one, without the sections that the command passes over.

    Raises:
        UserError: if a recipe asks for what the command line alone can, or a word is too deep.
    """
    content = {key: value for key, value in line.content.items() if key in kinds}
    for key, value in flat(content):
        # A recipe may come from anybody.
        if key in LINE_ONLY and value and key not in dict(line.options):
            raise UserError(f"{key} lets code of others run, which no file may ask for; remove it from the recipe "
                            f"and, if you trust that code, add --{key} true to the command line")
    for key, text in line.options:
        first, *path = key.split(".")
        if first not in kinds:
            continue
        found, kind, _ = place(kinds[first], path, first)
        # What lies inside a value, such as a share of `answered_by`, is read with the whole value.
        value = word_value(text or "", kind if found == key else Any)
        inner = content
        for part in (first, *path)[:-1]:
            # A copy: the recipe's own stays as it is.
            inner[part] = dict(inner[part]) if isinstance(inner.get(part), dict) else {}
            inner = inner[part]
        last = (first, *path)[-1]
        inner[last] = {**inner.get(last, {}), **value} if is_dataclass(kind) and isinstance(value, dict) else value
    return content


def plain(value: Any) -> Any:
    """A parsed configuration as JSON values: dataclasses become mappings, paths text, tuples lists."""
    if is_dataclass(value):
        return plain(vars(value))
    if isinstance(value, dict):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return str(value) if isinstance(value, Path) else value
