"""From the command line and a recipe file to a command's arguments, by jsonargparse."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Any, Generic, TypeVar

from jsonargparse import ArgumentParser, Namespace, set_parsing_settings

from ..modules import UserError

T = TypeVar("T")
SECTIONS = ("out", "target", "template", "prompts", "distill", "data", "references", "batch", "model", "tree",
            "evaluate")
"""Top-level keys of a recipe. A command that has no use for one accepts it in a recipe all the same."""
HIDDEN = "==SUPPRESS=="


@dataclass(frozen=True, kw_only=True)
class Parsed(Generic[T]):
    """A command's arguments in two forms."""

    values: T
    """Ready to use: dataclasses, paths, factories."""
    settings: dict[str, Any]
    """The same as plain JSON values: what provenance records and stages compare."""


@dataclass(frozen=True, kw_only=True)
class Command(Generic[T]):
    """One command: a function of its arguments, which are the fields of a dataclass."""

    name: str
    """Name on the command line."""
    arguments: type[T]
    """Frozen dataclass of the arguments; its field docstrings are the help."""
    run: Callable[[Parsed[T]], None]
    """What it does."""
    home: tuple[str, type[Any]] | None = None
    """A section and its dataclass whose keys may be written without the section: --batch_size, --max_steps."""

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of the arguments."""
        return tuple(field.name for field in fields(self.arguments))  # type: ignore[arg-type]

    def execute(self, arguments: Sequence[str]) -> None:
        """Parse and run. Raises as `parse` does."""
        self.run(self.parse(arguments))

    def parse(self, arguments: Sequence[str]) -> Parsed[T]:
        """The arguments in force. Raises UserError or jsonargparse's ArgumentError for what the user got wrong."""
        parser = self.parser()
        config = parser.parse_args(self.expand(arguments))
        ready = self._instantiate(parser, config)
        values = self.arguments(**{name: ready[name] for name in self.keys})
        settings = {name: config.as_dict()[name] for name in self.keys}
        return Parsed(values=values, settings=plain(settings))

    def _instantiate(self, parser: ArgumentParser, config: Namespace) -> Namespace:
        """Make the configuration's dataclasses. A check that fails in one of them tells its own sentence, unwrapped."""
        try:
            ready: Namespace = parser.instantiate(config)
            return ready
        except ValueError as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, UserError):
                cause = cause.__cause__
            if cause is None:
                raise
            raise cause from None

    def parser(self) -> ArgumentParser:
        """The parser of this command: its arguments, --config, and the recipe sections that it passes over."""
        set_parsing_settings(docstring_parse_attribute_docstrings=True)
        # Without abbreviations: a misspelt key that is the beginning of another would be taken for it.
        parser = ArgumentParser(prog=f"draftsmith {self.name}", exit_on_error=False, allow_abbrev=False,
                                description=self.description())
        parser.add_argument("--config", action="config", help="Recipe: a YAML file or a shipped one's name.")
        parser.add_class_arguments(self.arguments)
        for section in SECTIONS:
            if section not in self.keys:
                parser.add_argument(f"--{section}", type=str | dict[str, Any] | None, help=HIDDEN)
        return parser

    def description(self) -> str:
        """What the command does: the docstring of its function."""
        text = " ".join((self.run.__doc__ or "").split())
        if self.home is not None:
            text += f" Keys of {self.home[0]} may be written without it, as in --{fields(self.home[1])[0].name}."
        return text

    def expand(self, arguments: Sequence[str]) -> list[str]:
        """Dashes in keys become underscores, keys of the home section get its name, shipped recipes their path, and a
        switch without a value is switched on."""
        words = [self._expand_key(word) for word in arguments]
        known = fields(self.arguments)  # type: ignore[arg-type]
        switches = {f"--{field.name}" for field in known if field.type is bool}
        for place, word in enumerate(words):
            if word == "--config" and place + 1 < len(words):
                words[place + 1] = recipe_path(words[place + 1])
            elif word.startswith("--config="):
                words[place] = f"--config={recipe_path(word.removeprefix('--config='))}"
            elif word in switches and words[place + 1 : place + 2] not in (["true"], ["false"]):
                words[place] = f"{word}=true"
        return words

    def _expand_key(self, word: str) -> str:
        match = re.fullmatch(r"--([A-Za-z][\w.-]*)(=.*)?", word, flags=re.DOTALL)
        if match is None:
            return word
        key, value = match[1].replace("-", "_"), match[2] or ""
        if self.home is not None and key not in self.keys and key in {field.name for field in fields(self.home[1])}:
            key = f"{self.home[0]}.{key}"
        return f"--{key}{value}"


def recipe_path(name: str) -> str:
    """`name` itself when such a file exists, else the shipped recipe of that name.

    Raises:
        UserError: if there is neither.
    """
    if Path(name).is_file():
        return name
    shipped = {entry.name: str(entry) for entry in files(__package__).iterdir() if entry.name.endswith(".yaml")}
    found = shipped.get(name) or shipped.get(f"{name}.yaml")
    if found is None:
        names = ", ".join(sorted(file.removesuffix(".yaml") for file in shipped))
        raise UserError(f"there is no recipe {name!r}; give the path of a YAML file or a shipped recipe ({names})")
    return found


def plain(value: Any) -> Any:
    """A parsed configuration as JSON values: paths become text, tuples lists."""
    if isinstance(value, dict):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
