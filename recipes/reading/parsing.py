"""From the command line and a recipe file to a command's arguments, by jsonargparse."""

import json
import math
from argparse import SUPPRESS
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, get_type_hints

from jsonargparse import ArgumentError, ArgumentParser, Namespace, set_parsing_settings

from ...modules import UserError
from ..terminal.terminal_text import say
from .help_text import HelpText, asked_help
from .key_checks import OPTION, KeyChecks, options
from .recipe_files import BY_FAMILY, check_plain, check_word, layers, merge, recipe_path
from .recipe_keys import field_docstrings, keys_of

if TYPE_CHECKING:
    # Commands that train nothing start a second sooner without what training imports.
    from ...trainers.families import FamilyConfigs

T = TypeVar("T")
SECTIONS = ("out", "family", "drafter", "train", "target", "template", "prompts", "distill", "data", "references",
            "batch", "tree", "evaluate", "retarget")
"""Top-level keys of a recipe. A command that has no use for one accepts it in a recipe all the same."""
TRUST = "trust"
LINE_ONLY = (TRUST, "target.trust_remote_code")
"""Keys that let code of others run: the command line alone can set them, and no record of a run holds them."""


class Families(Protocol):
    """The families that a command can train, as `trainers.families` names them."""

    def family_names(self) -> tuple[str, ...]:
        """Names of all families of the package."""

    def family_configs(self, name: str, *, trust: bool = False) -> "FamilyConfigs":
        """The dataclasses of a family's settings. Raises UserError for an unknown or an untrusted one."""


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
    home: tuple[str, type[Any]] | None = None
    """A section and its dataclass whose keys may be written without the section: --batch_size, --max_steps."""
    families: Families | None = None
    """For a command that trains: its arguments have the fields `family` and `train`, its recipes also `drafter`."""

    @property
    def keys(self) -> tuple[str, ...]:
        """Top-level keys of the arguments."""
        names = tuple(field.name for field in fields(self.arguments))  # type: ignore[arg-type]
        return names if self.families is None else (*names, "drafter")

    def parse(self, arguments: Sequence[str]) -> Parsed[T]:
        """The arguments in force. Raises UserError or jsonargparse's ArgumentError for what the user got wrong."""
        line = CommandLine(self, arguments)
        config = line.namespace()
        settings = {name: plain(config.as_dict()[name]) for name in self.keys}
        for key in LINE_ONLY:
            section, _, name = key.rpartition(".")
            (settings.get(section, {}) if section else settings).pop(name, None)
        return Parsed(values=line.values(config), settings=settings)


class CommandLine(Generic[T]):
    """One call of a command: its options, the recipe that they name, and the parser for the recipe's family.

    Args:
        command: called.
        arguments: words of the command line after the command's name.

    Raises:
        UserError: if a recipe cannot be read, or the family is unknown.
    """

    def __init__(self, command: Command[T], arguments: Sequence[str]) -> None:
        self.command = command
        given: list[dict[str, Any]] = []
        words = []
        rest = iter(arguments)
        check_plain(list(arguments), "the command line")
        for word in rest:
            name, _, value = word.partition("=")
            if name == "--config":
                if not (file := value or next(rest, "")) or file.startswith("--"):
                    raise UserError("--config names no recipe; give the path of a YAML file or the name of a shipped "
                                    "recipe, such as --config quickstart")
                given += layers(recipe_path(file))
            elif (option := OPTION.fullmatch(word)) is not None:
                # Written with dashes, as in other programs, an option is the same key.
                words.append(f"--{option[1].replace('-', '_')}{option[2] or ''}")
            else:
                words.append(word)
        self.configs: FamilyConfigs | None = None
        """Configs of the family's sections; None without a family."""
        if command.families is not None:
            # The family of the command line, else the recipe's; of another one the recipe's drafter is left out.
            for place, word in enumerate(words):
                if word.startswith("--family="):
                    given.append({"family": word.partition("=")[2]})
                elif word == "--family" and place + 1 < len(words):
                    given.append({"family": words[place + 1]})
        self.content = merge(*given)
        """The recipe: those given, with what they extend and the family of the command line."""
        if command.families is not None:
            known = command.families.family_names()
            for name in (str(name) for one in given for name in one.get(BY_FAMILY, {})):
                if name not in known and "." not in name:
                    raise UserError(f"by_family names an unknown family {name!r}; choose one of {', '.join(known)}")
            if (family := self.content.get("family")) is not None:
                trust = f"--{TRUST}=true" in self._switched_on(words)
                self.configs = command.families.family_configs(str(family), trust=trust)
        self.words = self._switched_on([self._at_home(word) for word in words])
        """The command line without the recipe, every key with its section."""

    def _at_home(self, word: str) -> str:
        """An option of the home section with the section's name."""
        option, home = OPTION.fullmatch(word), self.command.home
        if option is None or home is None or option[1] in self.command.keys:
            return word
        config = self.configs.train if self.configs is not None and home[0] == "train" else home[1]
        known = option[1] in {field.name for field in fields(config)}
        return f"--{home[0]}.{word[2:]}" if known else word

    def _switched_on(self, words: Sequence[str]) -> list[str]:
        """The words with `=true` after each switch that has no value."""
        known = fields(self.command.arguments)  # type: ignore[arg-type]
        switches = {f"--{field.name}" for field in known if field.type is bool}
        return [f"{word}=true" if word in switches and following.lower() not in ("true", "false") else word
                for word, following in zip_longest(words, words[1:], fillvalue="")]

    @cached_property
    def checks(self) -> KeyChecks:
        """The keys that the command knows for this family."""
        keys = keys_of(self.command.arguments, skip=() if self.command.families is None else ("train",))
        if self.command.families is not None:
            # Without a family, the keys that all of them share.
            train = get_type_hints(self.command.arguments)["train"] if self.configs is None else self.configs.train
            drafter = get_type_hints(train)["drafter"] if self.configs is None else self.configs.drafter
            keys |= keys_of(drafter, "drafter.") | keys_of(train, "train.", skip=("drafter",))
        over = [name for name in SECTIONS if name not in self.command.keys]
        return KeyChecks(self.command.name, keys, over)

    def namespace(self) -> Namespace:
        """The parsed arguments; ends the command where help is asked for. Raises UserError or ArgumentError."""
        if (asked := asked_help(self.words)) is not None:
            command, families = self.command, self.command.families
            say(HelpText(
                command=command.name, summary=" ".join((command.run.__doc__ or "").split()), keys=self.checks.keys,
                meanings=field_docstrings(command.arguments), home=None if command.home is None else command.home[0],
                families=() if families is None or self.configs is not None else families.family_names(),
                recipe=families is not None).text(asked))
            raise SystemExit(0)
        if self.command.families is not None and self.configs is None:
            raise UserError(f"{self.command.name} needs a family; set family in the recipe, or --family, to one of "
                            f"{', '.join(self.command.families.family_names())}")
        self.checks.check(self.content, self.words)
        for word, following in zip_longest(self.words, self.words[1:], fillvalue=""):
            # Values that the parser could not read within its memory; text is taken as it is.
            option = OPTION.fullmatch(word)
            key = None if option is None else self.checks.keys.get(option[1])
            if option is not None and (key is None or key.kind not in (str, Path)):
                check_word(option[2][1:] if option[2] else following)
        words = ["--config", json.dumps(self.content), *self.words] if self.content else self.words
        try:
            config: Namespace = self.parser.parse_args(words)
        except ArgumentError as error:
            if sentence := self.checks.explain(str(error), self.content, self.words):
                raise UserError(sentence) from error
            raise
        for name in LINE_ONLY:
            # A recipe may come from anybody.
            if config.get(name) and name not in options(self.words):
                raise UserError(f"{name} lets code of others run, which no file may ask for; remove it from the recipe "
                                f"and, if you trust that code, add --{name} true to the command line")
        check_finite(config.as_dict())
        return config

    @cached_property
    def parser(self) -> ArgumentParser:
        """The parser of the command: its arguments, --config, and the recipe sections that it passes over."""
        set_parsing_settings(docstring_parse_attribute_docstrings=True)
        # Without abbreviations: a misspelt key that is the start of another would be taken for it.
        parser = ArgumentParser(prog=f"draftsmith {self.command.name}", exit_on_error=False, allow_abbrev=False)
        parser.add_argument("--config", action="config")
        parser.add_class_arguments(self.command.arguments, skip=None if self.command.families is None else {"train"})
        if self.configs is not None:
            parser.add_class_arguments(self.configs.drafter, "drafter", instantiate=False)
            parser.add_class_arguments(self.configs.train, "train", skip={"drafter"}, instantiate=False)
        for section in SECTIONS:
            if section not in self.command.keys:
                parser.add_argument(f"--{section}", type=str | dict[str, Any] | None, help=SUPPRESS)
        return parser

    def values(self, config: Namespace) -> T:
        """The command's arguments from the parsed ones. Raises UserError when a value is out of its bounds."""
        try:
            ready = self.parser.instantiate(config)
        except ValueError as error:
            # A check that failed in one of the dataclasses gives its own sentence, unwrapped.
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, UserError):
                cause = cause.__cause__
            raise cause or error from None
        given = {name: ready[name] for name in self.command.keys if name not in ("drafter", "train")}
        if self.configs is not None:
            drafter = self.configs.drafter(**vars(ready["drafter"]))
            given["train"] = self.configs.train(**vars(ready["train"]), drafter=drafter)
        return self.command.arguments(**given)


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
