"""The keys of every command as `recipes/keys.md` lists them: help, and the refusal of a misspelt key, need no more.

The page is written from the dataclasses that hold the keys, whose files import torch: seconds for a page of text.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from .recipe_keys import Key, keys_of

PAGE = Path(__file__).parents[1] / "keys.md"
TOP, FAMILY, COMMAND = "Top level", "family: ", "draftsmith "
"""Headings of the page, or their starts: keys of a recipe without a section, those of a family, and of a command."""
WHOLE, SHARED, HOME = "With all keys of a recipe.", "With a recipe's sections ", "Without its name go the keys of "
"""Sentences under a command, or their starts."""
ROW = re.compile(r"\| `(?P<name>.+?)` \| `(?P<default>.*?)` \| (?P<kind>.*?) \| (?P<meaning>.*) \|")


@dataclass(frozen=True, kw_only=True)
class Part:
    """The text and the tables under a heading of the page."""

    text: list[str] = field(default_factory=list)
    """Its sentences, a paragraph each."""
    meanings: dict[str, str] = field(default_factory=dict)
    """Sections of a command, with what they mean there."""
    keys: dict[str, Key] = field(default_factory=dict)
    """Rows of its tables, by name."""

    def named(self, start: str) -> list[str]:
        """The names that the sentence with this start gives; none without one."""
        return [name for text in self.text if text.startswith(start) for name in re.findall(r"`(\w+)`", text)]


@cache
def page() -> Mapping[str, Part]:
    """The parts of the page by heading."""
    parts, part = dict[str, Part](), Part()
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            part = parts[line[3:].strip("`")] = Part()
        elif row := ROW.fullmatch(line):
            part.keys[row["name"]] = Key(**{**row.groupdict(), "meaning": row["meaning"].replace("\\|", "|")})
        elif section := re.fullmatch(r"`(\w+)`: (.*)", line):
            part.meanings[section[1]] = section[2]
        elif line and not line.startswith("|"):
            part.text.append(line)
    return parts


@dataclass(frozen=True, kw_only=True)
class CommandKeys:
    """The keys of a command."""

    command: str
    """Its name."""
    summary: str
    """Its work, in one paragraph."""
    keys: Mapping[str, Key]
    """All its keys by dotted name."""
    meanings: Mapping[str, str]
    """Meaning of each section."""
    home: str | None
    """The section whose keys may be written without it; None without one."""
    families: tuple[str, ...]
    """The families of the package, for a command that trains one."""

    @property
    def top(self) -> set[str]:
        """Keys without a section, and sections."""
        return {name.partition(".")[0] for name in self.keys}

    def of_family(self, name: str, *, trust: bool) -> "CommandKeys":
        """The same with the keys of a family. Raises UserError for one that is unknown or not trusted."""
        if name in self.families:
            own = page()[f"{FAMILY}{name}"].keys
        else:
            # A class outside the package has its keys in its own file alone.
            from ...trainers.families import family_configs

            configs = family_configs(name, trust=trust)
            own = keys_of(configs.drafter, "drafter.") | keys_of(configs.train, "train.", skip=("drafter",))
        shared = {key: one for key, one in self.keys.items() if not key.startswith("drafter.")}
        return replace(self, keys=shared | own)


def command_keys(name: str) -> CommandKeys:
    """The keys of a command; of one that trains, those that all families share."""
    parts = page()
    part = parts[f"{COMMAND}{name}"]
    recipe = {title: one for title, one in parts.items() if title == TOP or title.isidentifier()}
    whole = WHOLE in part.text
    shared = recipe if whole else part.named(SHARED)
    # A row of the command's own comes before the recipe's of the same name: another default, or another meaning.
    keys = {**part.keys, **{name: part.keys.get(name, key) for one in shared for name, key in recipe[one].keys.items()}}
    return CommandKeys(
        command=name, summary=part.text[0], keys=keys, home=next(iter(part.named(HOME)), None),
        meanings={**{title: one.text[0] for title, one in recipe.items() if title != TOP}, **part.meanings},
        families=tuple(title.removeprefix(FAMILY) for title in parts if title.startswith(FAMILY)) if whole else ())
