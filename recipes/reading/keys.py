"""The keys of every command as `recipes/keys.md` lists them, how they are read from dataclasses, and the help.

The dataclasses' files import torch: seconds for a page of text. So help, written from the keys, and the refusal of a
misspelt one read the page, which the dataclasses wrote."""

import ast
import inspect
import json
import re
import textwrap
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from ...modules import UserError
from ...modules.files.json_records import kind_in_words, kinds_of

PAGE = Path(__file__).parents[1] / "keys.md"
# Headings of the page, or their starts: keys of a recipe without a section, those of a family, and of a command.
TOP, FAMILY, COMMAND = "Top level", "family: ", "draftsmith "
# Sentences under a command, or their starts.
WHOLE, SHARED, HOME = "With all keys of a recipe.", "With a recipe's sections ", "Without its name go the keys of "
ROW = re.compile(r"\| `(?P<name>.+?)` \| `(?P<default>.*?)` \| (?P<kind>.*?) \| (?P<meaning>.*) \|")
# Keys of a recipe that most runs set, with an example of each.
EXAMPLES = {
    "out": "runs/mine",
    "family": "medusa",
    "target.name": "Qwen/Qwen3-0.6B",
    "target.dtype": "bfloat16",
    "prompts.origin": "file",
    "prompts.path": "prompts.jsonl",
    "prompts.split": "train_sft",
    "prompts.limit": "1000",
    "prompts.column": "messages",
    "distill.budget_tokens": "200000",
    "distill.budget_minutes": "10",
    "distill.max_new_tokens": "256",
    "distill.temperatures": "[0,1]",
    "distill.workers": "auto",
    "drafter.vocabulary_size": "32000",
    "train.max_minutes": "10",
    "train.max_steps": "2000",
    "train.lr": "1e-3",
    "train.devices": "2",
    "tree.used_nodes": "16",
    "evaluate.budget_minutes": "5",
}
# Commands that read a part of a recipe: a complete call of each, and the keys and sections that it reads.
USES = {
    "distill": ("--config quickstart --out runs/mine --budget_tokens 200000 --max_new_tokens 256", (
        "out", "family", "target", "template", "prompts", "distill", "batch", "drafter")),
    "train": ("--config eagle3 --out runs/eagle3 --data runs/mine/data --max_minutes 10", (
        "out", "family", "data", "retarget", "target", "template", "drafter", "train", "batch", "tree")),
    "plan": ("--config eagle3 --config eight_billion --out runs/large --target.device cuda", (
        "out", "family", "data", "target", "drafter", "train", "batch", "tree", "prompts", "distill", "evaluate")),
}
CONFIG = ("Recipe: a YAML file, or the name of a shipped one. Keys given after it win, and so do those of a second "
          "one: --config eagle3 --config eight_billion.")
WIDTH = 100  # Columns of the help


@dataclass(frozen=True, kw_only=True)
class Key:
    """A setting of a recipe or a command."""

    name: str  # With its section: distill.seed
    kind: str  # Its allowed values, in words
    default: str  # Its default value as YAML writes it; "required" where one must be given
    meaning: str  # Its docstring, in one line


def sections(keys: Mapping[str, Key]) -> list[str]:
    """The sections of keys, in order."""
    return list(dict.fromkeys(name.partition(".")[0] for name in keys if "." in name))


def inside(keys: Mapping[str, Key], section: str) -> dict[str, Key]:
    """The keys of a section; "" for those without one."""
    return {name: key for name, key in keys.items() if name.rpartition(".")[0].partition(".")[0] == section}


def keys_of(config: type[Any], prefix: str = "", skip: tuple[str, ...] = ()) -> dict[str, Key]:
    """Keys of a dataclass by name, some left out; fields that are dataclasses themselves become sections."""
    found: dict[str, Key] = {}
    hints, meanings = kinds_of(config), field_docstrings(config)
    for one in fields(config):
        name, kind = f"{prefix}{one.name}", hints[one.name]
        if one.name in skip:
            continue
        if is_dataclass(kind) and inspect.isclass(kind):
            found |= keys_of(kind, f"{name}.")
        else:
            default = one.default if one.default_factory is MISSING else one.default_factory()
            # Names that a table of the code holds are read from it.
            choices = f" One of {', '.join(one.metadata['choices'])}." if "choices" in one.metadata else ""
            found[name] = Key(name=name, kind=kind_in_words(kind), default=default_in_words(default),
                              meaning=meanings.get(one.name, "") + choices)
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
        for line, text in pairwise(body):
            if (isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and isinstance(text, ast.Expr)
                    and isinstance(text.value, ast.Constant)):
                # The code's None is null in a recipe.
                found[line.target.id] = re.sub(r"\bNone\b", "null", " ".join(str(text.value.value).split()))
    return found


def default_in_words(value: Any) -> str:
    """A key's default as YAML writes it; "required" where there is none."""
    if value is MISSING:
        return "required"
    if value is None or isinstance(value, bool | Mapping):
        return json.dumps(value)
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(str, value))}]"
    return str(value) if value != "" else "''"


def markdown_table(keys: Mapping[str, Key]) -> str:
    """The keys as a Markdown table: name, default, allowed values and meaning."""
    rows = [" | ".join([f"| `{key.name}`", f"`{key.default}`", key.kind,
                        key.meaning.replace("|", "\\|")]) for key in keys.values()]
    return "\n".join(["| key | default | value | meaning |", "|---|---|---|---|", *(f"{row} |" for row in rows)])


@dataclass(frozen=True, kw_only=True)
class Part:
    """The text and the tables under a heading of the page."""

    text: list[str] = field(default_factory=list)  # Its sentences, a paragraph each
    meanings: dict[str, str] = field(default_factory=dict)  # Sections of a command, with what they mean there
    keys: dict[str, Key] = field(default_factory=dict)  # Rows of its tables, by name

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
    """The keys of a command, and its help."""

    command: str  # Its name
    summary: str  # Its work, in one paragraph
    keys: Mapping[str, Key]  # All its keys by dotted name
    meanings: Mapping[str, str]  # Meaning of each section
    home: str | None  # The section whose keys may be written without it; None without one
    families: tuple[str, ...]  # The families of the package, for a command that trains one
    family: str | None = None  # The family whose keys are among them; None without one

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
        return replace(self, keys=shared | own, family=name)

    def help(self, asked: str) -> str:
        """The help: "" the short one, "all", or a section. Raises UserError for one that the command does not have."""
        known = sections(self.keys)
        if asked and asked != "all" and asked not in known:
            raise UserError(f"there is no help on {asked!r}; choose --help, --help=all or --help.SECTION with one of "
                            f"{', '.join(known)}")
        lines = [f"usage: draftsmith {self.command} [--config FILE] [--KEY VALUE ...]", "",
                 *textwrap.wrap(self.summary, WIDTH), ""]
        if not asked:
            lines += self._short(known)
        elif asked == "all":
            lines += [*entry("config", "FILE", CONFIG), *self._described(inside(self.keys, "")), ""]
        for section in known if asked == "all" else [asked] if asked else []:
            lines += [f"{section}: {self.meanings[section]}", "", *self._described(inside(self.keys, section)), ""]
        if asked in ("all", "drafter", "train"):
            lines += self._of_families()
        return "\n".join(lines).rstrip()

    def _short(self, known: Sequence[str]) -> Iterator[str]:
        """The keys that most calls set, and the ways to the others; of a command with these sections."""
        home = inside(self.keys, self.home) if self.home else {}
        call, uses = USES.get(self.command, ("", tuple(self.top)))
        if call:
            yield from (f"Example: draftsmith {self.command} {call}", "")
        if self.families:
            yield "The keys that most runs set, each with an example. A recipe has them in sections, train: {lr: 1e-3}."
            yield from ("", *entry("config", "quickstart", CONFIG))
            shown = {name: example for name, example in EXAMPLES.items()
                     if name in self.keys and name.partition(".")[0] in uses}
            more = {name: key.default for name, key in home.items() if name not in EXAMPLES}
            for title, listed in (("", shown), (f"The other keys of {self.home}, each with its default:", more)):
                if title and listed:
                    yield from ("", title, "")
                for name, value in listed.items():
                    # --help.SECTION has the rest of what a key means.
                    yield from entry(name, value, f"{self.keys[name].meaning.partition('. ')[0].rstrip('.')}.")
        else:
            yield from entry("config", "FILE", CONFIG)
            yield from self._described({**inside(self.keys, ""), **home})
        yield ""
        if home:
            example = next(iter(home))
            yield f"Keys of {self.home} may be written without it: --{example.partition('.')[2]} for --{example}."
        if known:
            used = [name for name in known if name in uses]
            yield from textwrap.wrap(f"draftsmith {self.command} --help.SECTION lists the keys of a section: "
                                     f"{', '.join(used)}.", WIDTH, break_on_hyphens=False)
            yield f"draftsmith {self.command} --help=all lists all keys."
        yield from self._of_families()
        yield f"draftsmith {self.command} ... --print_config prints the whole configuration in force."

    def _of_families(self) -> list[str]:
        if self.family is not None or not self.families:
            return []
        text = (f"draftsmith {self.command} --family NAME --help.drafter and --help.train list the keys of a family "
                f"too: {', '.join(self.families)}.")
        return textwrap.wrap(text, WIDTH, break_on_hyphens=False)

    def _described(self, keys: Mapping[str, Key]) -> Iterator[str]:
        """Keys with their allowed values, their defaults and their meanings."""
        for name, key in keys.items():
            default = key.default if key.default == "required" else f"default {key.default}"
            yield from entry(name, f"({key.kind}; {default})", key.meaning)


def entry(name: str, value: str, meaning: str) -> list[str]:
    """The lines of a key in the help."""
    key = textwrap.wrap(f"--{name} {value}", WIDTH - 2, subsequent_indent="  ", break_on_hyphens=False)
    said = textwrap.wrap(meaning, WIDTH - 8, break_on_hyphens=False)
    return [f"  {line}" for line in key] + [f"        {line}" for line in said]


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
