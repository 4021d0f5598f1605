"""From the command line and a recipe file to a command's arguments, by jsonargparse."""

import json
import math
from argparse import SUPPRESS
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from jsonargparse import ArgumentError, ArgumentParser, Namespace, set_parsing_settings

from ...modules import UserError
from .command_line import TRUST, CommandLine
from .key_checks import options

if TYPE_CHECKING:
    from ...trainers.families import FamilyConfigs

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
        parser, config, configs = self.namespace(line)
        names = [*(field.name for field in fields(self.arguments)),  # type: ignore[arg-type]
                 *(() if configs is None else ("drafter",))]
        settings = {name: plain(config.as_dict()[name]) for name in names}
        for key in LINE_ONLY:
            section, _, name = key.rpartition(".")
            (settings.get(section, {}) if section else settings).pop(name, None)
        return Parsed(values=self._values(parser, config, configs), settings=settings)

    def namespace(self, line: CommandLine) -> "tuple[ArgumentParser, Namespace, FamilyConfigs | None]":
        """The parser of a call, what it read, and the dataclasses of the call's family. Raises UserError."""
        configs = None
        if line.family is not None:
            # Commands that train nothing start a second sooner without what training imports.
            from ...trainers.families import family_configs

            configs = family_configs(line.family, trust=line.trusted)
        parser = self._parser(line, configs)
        return parser, read_words(parser, line), configs

    def _parser(self, line: CommandLine, configs: "FamilyConfigs | None") -> ArgumentParser:
        """The parser of the command: its arguments, --config, and the recipe sections that it passes over."""
        set_parsing_settings(docstring_parse_attribute_docstrings=True)
        # Without abbreviations: a misspelt key that is the start of another would be taken for it.
        parser = ArgumentParser(prog=f"draftsmith {self.name}", exit_on_error=False, allow_abbrev=False)
        parser.add_argument("--config", action="config")
        parser.add_class_arguments(self.arguments, skip=None if configs is None else {"train"})
        if configs is not None:
            parser.add_class_arguments(configs.drafter, "drafter", instantiate=False)
            parser.add_class_arguments(configs.train, "train", skip={"drafter"}, instantiate=False)
        for section in line.checks.passed_over:
            parser.add_argument(f"--{section}", type=str | dict[str, Any] | None, help=SUPPRESS)
        return parser

    def _values(self, parser: ArgumentParser, config: Namespace, configs: "FamilyConfigs | None") -> T:
        """The command's arguments from the parsed ones. Raises UserError when a value is out of its bounds."""
        try:
            ready = parser.instantiate(config)
        except ValueError as error:
            # A check that failed in one of the dataclasses gives its own sentence, unwrapped.
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, UserError):
                cause = cause.__cause__
            raise cause or error from None
        given = {field.name: ready[field.name] for field in fields(self.arguments)  # type: ignore[arg-type]
                 if configs is None or field.name != "train"}
        if configs is not None:
            drafter = configs.drafter(**vars(ready["drafter"]))
            given["train"] = configs.train(**vars(ready["train"]), drafter=drafter)
        return self.arguments(**given)


def read_words(parser: ArgumentParser, line: CommandLine) -> Namespace:
    """The parsed recipe and words of a command line. Raises UserError."""
    words = ["--config", json.dumps(line.content), *line.words] if line.content else line.words
    try:
        config: Namespace = parser.parse_args(words)
    except ArgumentError as error:
        sentence = line.checks.explain(str(error), line.content, line.words)
        raise UserError(sentence or f"{error}; see draftsmith {line.known.command} --help") from error
    for name in LINE_ONLY:
        # A recipe may come from anybody.
        if config.get(name) and name not in options(line.words):
            raise UserError(f"{name} lets code of others run, which no file may ask for; remove it from the recipe "
                            f"and, if you trust that code, add --{name} true to the command line")
    check_finite(config.as_dict())
    return config


def check_finite(value: Any, name: str = "") -> None:
    """Refuse numbers that are infinite or none, wherever they stand. Raises UserError naming the key."""
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{name} must be a finite number, got {value}")
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, part in parts:
        check_finite(part, f"{name}.{key}" if name else str(key))


def plain(value: Any) -> Any:
    """A parsed configuration as JSON values: paths become text, tuples lists."""
    if isinstance(value, dict):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
