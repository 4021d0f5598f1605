"""One call of a command before the files of the command are imported: its words, the recipe, help, misspelt keys."""

from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from ...modules import UserError
from ...modules.files.json_records import kind_in_words
from ..terminal.terminal_text import say
from .help_text import HelpText, asked_help
from .key_checks import OPTION, KeyChecks
from .key_page import command_keys
from .recipe_files import BY_FAMILY, check_plain, check_word, layers, merge, recipe_path

SECTIONS = ("out", "family", "drafter", "train", "target", "template", "prompts", "distill", "data", "references",
            "batch", "tree", "evaluate", "retarget")
"""Top-level keys of a recipe. A command that has no use for one accepts it in a recipe all the same."""
TRUST = "trust"


class CommandLine:
    """One call of a command: its options, the recipe that they name, and the keys that it knows for its family.

    Args:
        name: of the command.
        arguments: words of the command line after the command's name.

    Raises:
        UserError: if a recipe cannot be read, or the family is unknown.
    """

    def __init__(self, name: str, arguments: Sequence[str]) -> None:
        self.known = command_keys(name)
        given: list[dict[str, Any]] = []
        words = []
        rest = iter(arguments)
        check_plain(list(arguments), "the command line")
        for word in rest:
            option_name, _, value = word.partition("=")
            if option_name == "--config":
                if not (file := value or next(rest, "")) or file.startswith("--"):
                    raise UserError("--config names no recipe; give the path of a YAML file or the name of a shipped "
                                    "recipe, such as --config quickstart")
                given += layers(recipe_path(file))
            elif (option := OPTION.fullmatch(word)) is not None:
                # Written with dashes, as in other programs, an option is the same key.
                words.append(f"--{option[1].replace('-', '_')}{option[2] or ''}")
            else:
                words.append(word)
        self.family: str | None = None
        """The family whose keys are known; None without one."""
        self.trusted = f"--{TRUST}=true" in self._switched_on(words)
        """Whether code outside the package may be imported."""
        if self.known.families:
            # The family of the command line, else the recipe's; of another one the recipe's drafter is left out.
            for place, word in enumerate(words):
                if word.startswith("--family="):
                    given.append({"family": word.partition("=")[2]})
                elif word == "--family" and place + 1 < len(words):
                    given.append({"family": words[place + 1]})
        self.content = merge(*given)
        """The recipe: those given, with what they extend and the family of the command line."""
        if known := self.known.families:
            for key in (str(key) for one in given for key in one.get(BY_FAMILY, {})):
                if key not in known and "." not in key:
                    raise UserError(f"by_family names an unknown family {key!r}; choose one of {', '.join(known)}")
            if (family := self.content.get("family")) is not None:
                self.family = str(family)
                self.known = self.known.of_family(self.family, trust=self.trusted)
        self.words = self._switched_on([self._at_home(word) for word in words])
        """The command line without the recipe, every key with its section."""
        self.checks = KeyChecks(name, self.known.keys, [one for one in SECTIONS if one not in self.known.top])
        """The keys that the command knows for this family, and the sections of recipes that it passes over."""

    def _at_home(self, word: str) -> str:
        """An option of the home section with the section's name."""
        option, home = OPTION.fullmatch(word), self.known.home
        known = option is not None and option[1] not in self.known.top and f"{home}.{option[1]}" in self.known.keys
        return f"--{home}.{word[2:]}" if known else word

    def _switched_on(self, words: Sequence[str]) -> list[str]:
        """The words with `=true` after each switch that has no value."""
        switch = kind_in_words(bool)
        switches = {f"--{name}" for name, key in self.known.keys.items() if key.kind == switch and "." not in name}
        return [f"{word}=true" if word in switches and following.lower() not in ("true", "false") else word
                for word, following in zip_longest(words, words[1:], fillvalue="")]

    def check(self) -> None:
        """Refuse misspelt keys; end the command where help is asked for. Raises UserError."""
        if (asked := asked_help(self.words)) is not None:
            say(HelpText(self.known, self.family).text(asked))
            raise SystemExit(0)
        if self.known.families and self.family is None:
            raise UserError(f"{self.known.command} needs a family; set family in the recipe, or --family, to one of "
                            f"{', '.join(self.known.families)}")
        self.checks.check(self.content, self.words)
        for word, following in zip_longest(self.words, self.words[1:], fillvalue=""):
            # Values that the parser could not read within its memory; text is taken as it is.
            option = OPTION.fullmatch(word)
            key = None if option is None else self.checks.keys.get(option[1])
            if option is not None and (key is None or key.kind not in (kind_in_words(str), kind_in_words(Path))):
                check_word(option[2][1:] if option[2] else following)
