"""Checks of the keys in recipes and on the command line: one short sentence for an unknown or mistyped one."""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from ...modules import UserError
from .recipe_keys import Key

OPTION = re.compile(r"--([A-Za-z][\w.-]*)(=.*)?", flags=re.DOTALL)
NAMES = frozenset(("chat_template", "column", "draft", "engine", "folder", "name", "path", "prompts", "repository",
                   "revision", "split", "subset", "tools"))
"""Keys, without their sections, whose text names a file, a folder, an address or something on the Hub; keys of other
texts have a list to choose from, or may be empty."""
PARSER_OPTIONS = ("config", "help", "print_config")
"""Options of the parser itself."""


def flat(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of everything in nested sections, the sections included, outer ones first."""
    for key, value in content.items():
        yield f"{prefix}{key}", value
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")


def options(words: Sequence[str]) -> list[str]:
    """Names of the options on a command line."""
    return [option[1] for word in words if (option := OPTION.fullmatch(word))]


class KeyChecks:
    """The keys that a command knows, and the sections of recipes that it passes over.

    Args:
        command: its name, for messages.
        keys: all keys by dotted name.
        passed_over: sections that may hold anything.
    """

    def __init__(self, command: str, keys: Mapping[str, Key], passed_over: Sequence[str]) -> None:
        self.command, self.keys, self.passed_over = command, keys, tuple(passed_over)
        self.sections = {name[:place] for name in keys for place, sign in enumerate(name) if sign == "."}

    def check(self, content: Mapping[str, Any], words: Sequence[str]) -> None:
        """Refuse unknown keys of a recipe or a command line, and a recipe's values of the wrong kind.

        Args:
            content: of the recipe.
            words: of the command line, whose values the parser checks.

        Raises:
            UserError: naming the key.
        """
        for name, value in flat(content):
            if self._is_free(name):
                continue
            self.check_name(name)
            if name in self.sections and not isinstance(value, Mapping):
                inside = (key.removeprefix(f"{name}.") for key in self.keys if key.startswith(f"{name}."))
                names = dict.fromkeys(key.partition(".")[0] for key in inside)
                raise UserError(f"{name} is a section with the keys {', '.join(names)}, got "
                                f"{'null' if value is None else repr(value)}; write {name}: and the keys below it")
            if name in self.keys and value is None and not re.search("null|any value", self.keys[name].kind):
                raise UserError(f"{name} must be {self.keys[name].kind}, got null")
        for name in options(words):
            if name not in PARSER_OPTIONS and not self._is_free(name):
                self.check_name(name)
        # Read on, an empty name or path would be the current folder to some keys and nothing at all to others.
        given = [*words, *map("=".join, pairwise(words))]
        empty = [name for name, value in flat(content) if value == "" and not self._is_free(name)]
        empty += [word[2:-1] for word in given if OPTION.fullmatch(word) and word.find("=") == len(word) - 1]
        for key in (self.keys[name] for name in empty if name in self.keys):
            if "a path" in key.kind or key.name.rpartition(".")[2] in NAMES:
                raise UserError(f"{key.name} is empty; give it a value")

    def _is_free(self, name: str) -> bool:
        """True for a key in a section that is passed over, or inside a value, such as a mapping of shares."""
        inside = any(name[:place] in self.keys for place, sign in enumerate(name) if sign == ".")
        return inside or name.partition(".")[0] in self.passed_over

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
            where = f"the section {section}" if section else self.command
            hint = f"choose one that {where} has: {', '.join(sorted(siblings))}"
        else:
            hint = f"draftsmith {self.command} --help=all lists all keys"
        raise UserError(f"unknown key {name}: {hint}")

    def explain(self, message: str, content: Mapping[str, Any], words: Sequence[str]) -> str | None:
        """The parser's message about a value of the wrong type as one short sentence; None for any other message."""
        found = re.search(r'Parser key "([\w.]+)"', message)
        if found is None or (key := self.keys.get(found[1])) is None:
            return None
        # The last value of the command line comes before the recipe's.
        given = dict(flat(content)).get(key.name)
        for place, word in enumerate(words):
            if word.startswith(f"--{key.name}="):
                given = word.partition("=")[2]
            elif word == f"--{key.name}" and place + 1 < len(words):
                given = words[place + 1]
        return f"{key.name} must be {key.kind}, got {given!r}"
