"""One call of a command before the files of the command are imported: its options, the recipe, help, misspelt keys."""

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ...modules import UserError
from ...modules.files.json_records import kind_in_words
from ..terminal.terminal_text import say
from .help_text import HelpText, asked_help
from .key_page import command_keys
from .recipe_files import BY_FAMILY, check_plain, flat, layers, merge, recipe_path

SECTIONS = ("out", "family", "drafter", "train", "target", "template", "prompts", "distill", "data", "references",
            "batch", "tree", "evaluate", "retarget")
"""Top-level keys of a recipe. A command that has no use for one accepts it in a recipe all the same."""
TRUST, PRINT = "trust", "print_config"
OPTION = re.compile(r"--([A-Za-z][\w.-]*)(?:=(.*))?", flags=re.DOTALL)
NAMES = frozenset(("chat_template", "column", "draft", "engine", "folder", "name", "path", "prompts", "repository",
                   "revision", "split", "subset", "tools"))
"""Keys, without their sections, whose text names a file, a folder, an address or something on the Hub; keys of other
texts have a list to choose from, or may be empty."""


class CommandLine:
    """One call of a command: its options, the recipe that they name, and the keys that it knows for its family.

    Raises:
        UserError: if a recipe cannot be read, or the family is unknown.
    """

    def __init__(self, name: str, arguments: Sequence[str]) -> None:
        self.known = command_keys(name)
        self.asked = asked_help(arguments)
        """The part of the help that is asked for, as `asked_help` has it."""
        self.strays: list[str] = []
        """Words that belong to no option."""
        check_plain(list(arguments), "the command line")
        switches = {key for key, one in self.known.keys.items() if one.kind == kind_in_words(bool) and "." not in key}
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
                value = words.pop(0) if words and words[0].lower() in ("true", "false") else "true"
            elif value is None and key != PRINT and words and OPTION.fullmatch(words[0]) is None:
                value = words.pop(0)
            if key != "config":
                options.append((key, value))
            elif value:
                given += layers(recipe_path(value))
            else:
                raise UserError("--config names no recipe; give the path of a YAML file or the name of a shipped "
                                "recipe, such as --config quickstart")
        self.trusted = (TRUST, "true") in options
        """Whether code outside the package may be imported."""
        self.family: str | None = None
        """The family whose keys are known; None without one."""
        known = self.known.families
        if known:
            # The family of the command line, else the recipe's; of another one the recipe's drafter is left out.
            given += [{"family": value} for key, value in options if key == "family" and value is not None]
        self.content = merge(*given)
        """The recipe: those given, with what they extend and the family of the command line."""
        if known:
            for key in (str(key) for one in given for key in one.get(BY_FAMILY, {})):
                if key not in known and "." not in key:
                    raise UserError(f"by_family names an unknown family {key!r}; choose one of {', '.join(known)}")
            if (family := self.content.get("family")) is not None:
                self.family = str(family)
                self.known = self.known.of_family(self.family, trust=self.trusted)
        self.keys, top, home = self.known.keys, self.known.top, self.known.home
        """All keys that the command knows for this family, by dotted name."""
        self.prints = (PRINT, None) in options
        """Whether the configuration in force is to be printed."""
        self.options = [(f"{home}.{key}" if key not in top and f"{home}.{key}" in self.keys else key, value)
                        for key, value in options if key != PRINT]
        """Keys of the command line with their texts, each with its section; None where the text is missing."""
        self.sections = {key[:place] for key in self.keys for place, sign in enumerate(key) if sign == "."}

    def check(self) -> None:
        """Refuse misspelt keys; end the command where help is asked for. Raises UserError."""
        if self.asked is not None:
            say(HelpText(self.known, self.family).text(self.asked))
            raise SystemExit(0)
        if self.known.families and self.family is None:
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
