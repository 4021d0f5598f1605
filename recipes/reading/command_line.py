"""One call of a command: its options, the recipe, help and misspelt keys before the files of the command are imported;
then its arguments, by the one reader of settings."""

import difflib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml

from ...modules import UserError
from ...modules.files.json_records import MistypedError, kind_in_words, kinds_of, place, typed, typed_fields
from ..terminal import say
from .keys import command_keys
from .recipe_files import BY_FAMILY, check_plain, flat, layers, merge, recipe_path, word_value

T = TypeVar("T")
# Top-level keys of a recipe. A command that has no use for one accepts it in a recipe all the same.
SECTIONS = ("out", "family", "drafter", "train", "target", "template", "prompts", "distill", "data", "references",
            "batch", "tree", "evaluate", "retarget")
TRUST, PRINT = "trust", "print_config"
# Keys that let code of others run: the command line alone can set them, and no record of a run holds them.
LINE_ONLY = (TRUST, "target.trust_remote_code")
OPTION = re.compile(r"--([A-Za-z][\w.-]*)(?:=(.*))?", flags=re.DOTALL)
# Keys, without their sections, whose text names a file, a folder, an address or something on the Hub; keys of other
# texts have a list to choose from, or may be empty.
NAMES = frozenset(("adapter", "chat_template", "column", "draft", "engine", "folder", "kept_layers", "name", "path",
                   "prompts", "repository", "revision", "split", "subset", "tools"))


class CommandLine:
    """One call of a command: its options, the recipe that they name, and the keys that it knows for its family. Raises
    UserError if a recipe cannot be read, or the family is unknown."""

    def __init__(self, name: str, arguments: Sequence[str]) -> None:
        self.known = command_keys(name)
        # The part of the help that is asked for, as `CommandKeys.help` has it; None for no help.
        self.asked = next(("" if word in ("-h", "--help") else word[len("--help="):] for word in arguments
                           if word in ("-h", "--help") or word.startswith(("--help=", "--help."))), None)
        self.strays: list[str] = []  # Words that belong to no option
        check_plain(list(arguments), "the command line")
        kinds = kind_in_words(bool), kind_in_words(bool | None)
        switches = {key for key, one in self.known.keys.items() if one.kind in kinds and "." not in key}
        given: list[dict[str, Any]] = []
        options: list[tuple[str, str | None]] = []
        words = list(arguments)
        while words:
            if (option := OPTION.fullmatch(word := words.pop(0))) is None:
                self.strays.append(word)
                continue
            # Written with dashes, as in other programs, an option is the same key.
            key, value = option[1].replace("-", "_"), option[2]
            if value is None and key in switches:
                value = words.pop(0) if words and words[0].lower() in ("true", "false", "null") else "true"
            elif value is None and key != PRINT and words and OPTION.fullmatch(words[0]) is None:
                value = words.pop(0)
            if key != "config":
                options.append((key, value))
            elif value:
                given += layers(recipe_path(value))
            else:
                raise UserError("--config names no recipe; give the path of a YAML file or the name of a shipped "
                                "recipe, such as --config quickstart")
        self.trusted = (TRUST, "true") in options  # Whether code outside the package may be imported
        if known := self.known.families:
            # The family of the command line, else the recipe's; of another one the recipe's drafter is left out.
            given += [{"family": value} for key, value in options if key == "family" and value is not None]
        self.content = merge(*given)  # The recipe, with the family of the command line
        if known:
            for key in (str(key) for one in given for key in one.get(BY_FAMILY, {})):
                if key not in known and "." not in key:
                    raise UserError(f"by_family names an unknown family {key!r}; choose one of {', '.join(known)}")
            if (family := self.content.get("family")) is not None:
                self.known = self.known.of_family(str(family), trust=self.trusted)
        self.keys, top, home = self.known.keys, self.known.top, self.known.home
        self.prints = (PRINT, None) in options  # Whether the configuration in force is to be printed
        self.options = [(f"{home}.{key}" if key not in top and f"{home}.{key}" in self.keys else key, value)
                        for key, value in options if key != PRINT]
        """Keys of the command line with their texts, each with its section; None where the text is missing."""
        self.sections = {key[:place] for key in self.keys for place, sign in enumerate(key) if sign == "."}

    def check(self) -> None:
        """Refuse misspelt keys; end the command where help is asked for. Raises UserError."""
        if self.asked is not None:
            say(self.known.help(self.asked))
            raise SystemExit(0)
        if self.known.families and self.known.family is None:
            raise UserError(f"{self.known.command} needs a family; set family in the recipe, or --family, to one of "
                            f"{', '.join(self.known.families)}")
        used = [(key, value) for key, value in flat(self.content) if not self._is_free(key)]
        for name, value in used:
            self.check_name(name)
            if name in self.sections and not isinstance(value, Mapping):
                inside = (key.removeprefix(f"{name}.") for key in self.keys if key.startswith(f"{name}."))
                names = dict.fromkeys(key.partition(".")[0] for key in inside)
                raise UserError(f"{name} is a section with the keys {', '.join(names)}, got "
                                f"{'null' if value is None else repr(value)}; write {name}: and the keys below it")
        see = f"see draftsmith {self.known.command} --help"
        for name, text in self.options:
            if not self._is_free(name):
                self.check_name(name)
            if text is None:
                raise UserError(f"--{name} needs a value; {see}")
        if self.strays:
            raise UserError(f"{self.strays[0]!r} belongs to no option; {see}")
        # Read on, an empty name or path would be the current folder to some keys and nothing at all to others.
        for name in (name for name, value in [*used, *self.options] if value == "" and name in self.keys):
            if "a path" in self.keys[name].kind or name.rpartition(".")[2] in NAMES:
                raise UserError(f"{name} is empty; give it a value")

    def _is_free(self, name: str) -> bool:
        """True for a key in a section that is passed over, or inside a value, such as a mapping of shares."""
        inside = any(name[:place] in self.keys for place, sign in enumerate(name) if sign == ".")
        top = name.partition(".")[0]
        return inside or (top in SECTIONS and top not in self.known.top)

    def check_name(self, name: str) -> None:
        """Refuse an unknown key, naming the closest one or those of its section. Raises UserError."""
        if name in self.keys or name in self.sections:
            return
        known = [*self.keys, *self.sections]
        section, _, last = name.rpartition(".")
        siblings = {one.rpartition(".")[2]: one for one in known if one.rpartition(".")[0] == section}
        close = ([siblings[one] for one in difflib.get_close_matches(last, siblings, n=1)]
                 or [one for one in known if one.endswith(f".{last}")] or difflib.get_close_matches(name, known, n=1))
        if close:
            hint = f"did you mean {close[0]}?"
        elif siblings:
            where = f"the section {section}" if section else self.known.command
            hint = f"choose one that {where} has: {', '.join(sorted(siblings))}"
        else:
            hint = f"draftsmith {self.known.command} --help=all lists all keys"
        raise UserError(f"unknown key {name}: {hint}")


@dataclass(frozen=True, kw_only=True)
class Parsed(Generic[T]):
    """A command's arguments in two forms."""

    values: T  # Ready to use: dataclasses and paths
    settings: dict[str, Any]  # The same as plain JSON values: what provenance records and stages compare


@dataclass(frozen=True, kw_only=True)
class Command(Generic[T]):
    """One command: a function of its arguments, which are the fields of a dataclass."""

    name: str  # Name on the command line
    arguments: type[T]  # Frozen dataclass of the arguments; the docstrings of its fields are the help
    run: Callable[[Parsed[T]], None]
    home: str | None = None  # A section whose keys may be written without it: --batch_size, --max_steps
    trains: bool = False  # Whether its arguments have the fields `family` and `train`, and its recipes also `drafter`

    def parse(self, arguments: Sequence[str]) -> Parsed[T]:
        """The arguments in force. Raises UserError for what the user got wrong; ends the command for help."""
        line = CommandLine(self.name, arguments)
        line.check()
        return self.parsed(line)

    def parsed(self, line: CommandLine) -> Parsed[T]:
        """The arguments in force of a call whose keys have been checked. Raises UserError."""
        kinds = kinds_of(self.arguments)
        if line.known.family is not None:
            # Commands that train nothing start a second sooner without what training imports.
            from ...trainers.families import family_configs

            configs = family_configs(line.known.family, trust=line.trusted)
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
    """The recipe and the command line in one, without the sections that the command passes over."""
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


def trust_words(given: Any) -> list[str]:
    """Words of the command line for the code that a command's arguments trust, which no recipe can hold."""
    return [f"--{TRUST}={str(given.trust).lower()}",
            f"--target.trust_remote_code={str(given.target.trust_remote_code).lower()}"]


def process_words(command: str, recipe: str, trust: Sequence[str]) -> list[str]:
    """The words that start one of these commands, with the recipe in a file, in a process of its own."""
    # -P: the working folder, which may hold anybody's files, is not where it imports from.
    return [sys.executable, "-P", "-m", "draftsmith.recipes", command, "--config", recipe, *trust]
