"""Help of a command, written from its keys: those that most runs set, with examples, then the others by section.

The parser's own help prints annotations of Python and one list of all keys, 500 lines for `run`.
"""

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...modules import UserError
from .key_page import CommandKeys

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
"""Keys of a recipe that most runs set, with an example of each."""
USES = {
    "distill": ("--config quickstart --out runs/mine --budget_tokens 200000 --max_new_tokens 256", (
        "out", "family", "target", "template", "prompts", "distill", "batch", "drafter")),
    "train": ("--config eagle3 --out runs/eagle3 --data runs/mine/data --max_minutes 10", (
        "out", "family", "data", "retarget", "target", "template", "drafter", "train", "batch", "tree")),
    "plan": ("--config eagle3 --config eight_billion --out runs/large --target.device cuda", (
        "out", "family", "data", "target", "drafter", "train", "batch", "tree", "prompts", "distill", "evaluate")),
}
"""Commands that read a part of a recipe: a complete call of each, and the keys and sections that it reads."""
CONFIG = ("Recipe: a YAML file, or the name of a shipped one. Keys given after it win, and so do those of a second "
          "one: --config eagle3 --config eight_billion.")
WIDTH = 100
"""Columns of the text."""


def asked_help(words: Sequence[str]) -> str | None:
    """The part of the help that a command line asks for: "" the short one, "all", or a section; None for no help."""
    for word in words:
        if word in ("-h", "--help"):
            return ""
        if word.startswith(("--help=", "--help.")):
            return word[len("--help="):]
    return None


@dataclass(frozen=True)
class HelpText:
    """The help of a command."""

    known: CommandKeys
    """The command, and all its keys."""
    family: str | None
    """The family whose keys are among them; None without one."""

    def text(self, asked: str) -> str:
        """The help that `asked_help` found. Raises UserError for a section that the command does not have."""
        sections = list(dict.fromkeys(name.partition(".")[0] for name in self.known.keys if "." in name))
        top = [name for name in self.known.keys if "." not in name]
        lines = [f"usage: draftsmith {self.known.command} [--config FILE] [--KEY VALUE ...]", "",
                 *textwrap.wrap(self.known.summary, WIDTH), ""]
        if asked and asked != "all" and asked not in sections:
            raise UserError(f"there is no help on {asked!r}; choose --help, --help=all or --help.SECTION with one of "
                            f"{', '.join(sections)}")
        if not asked:
            lines += self._short(top, sections)
        elif asked == "all":
            lines += [*self._entry("config", "FILE", CONFIG),
                      *(line for name in top for line in self._described(name)), ""]
        for section in sections if asked == "all" else [asked] if asked else []:
            lines += [f"{section}: {self.known.meanings[section]}", ""]
            inside = [name for name in self.known.keys if name.startswith(f"{section}.")]
            lines += [*(line for name in inside for line in self._described(name)), ""]
        if self.family is None and asked in ("all", "drafter", "train"):
            lines += self._of_families()
        return "\n".join(lines).rstrip()

    def _short(self, top: Sequence[str], sections: Sequence[str]) -> Iterator[str]:
        """The keys that most calls set, and the ways to the others."""
        call, uses = USES.get(self.known.command, ("", (*top, *sections)))
        if call:
            yield from (f"Example: draftsmith {self.known.command} {call}", "")
        if self.known.families:
            yield "The keys that most runs set, each with an example. A recipe has them in sections, train: {lr: 1e-3}."
            yield from ("", *self._entry("config", "quickstart", CONFIG))
            for name in EXAMPLES:
                if name in self.known.keys and name.partition(".")[0] in uses:
                    yield from self._entry(name, EXAMPLES[name], self._first_sentence(name))
            if more := [name for name in self._at_home() if name not in EXAMPLES]:
                yield from ("", f"The other keys of {self.known.home}, each with its default:", "")
            for name in more:
                yield from self._entry(name, self.known.keys[name].default, self._first_sentence(name))
        else:
            yield from self._entry("config", "FILE", CONFIG)
            for name in (*top, *self._at_home()):
                yield from self._described(name)
        yield ""
        if self.known.home is not None:
            example = self._at_home()[0]
            yield f"Keys of {self.known.home} may be written without it: --{example.partition('.')[2]} for --{example}."
        if sections:
            used = [name for name in sections if name in uses]
            yield from textwrap.wrap(f"draftsmith {self.known.command} --help.SECTION lists the keys of a section: "
                                     f"{', '.join(used)}.", WIDTH, break_on_hyphens=False)
            yield f"draftsmith {self.known.command} --help=all lists all keys."
        yield from self._of_families()
        yield f"draftsmith {self.known.command} ... --print_config prints the whole configuration in force."

    def _at_home(self) -> list[str]:
        """Keys that may be written without their section."""
        return [name for name in self.known.keys if name.partition(".")[0] == self.known.home]

    def _first_sentence(self, name: str) -> str:
        """The first sentence on a key; --help.SECTION has the rest."""
        return f"{self.known.keys[name].meaning.partition('. ')[0].rstrip('.')}."

    def _of_families(self) -> list[str]:
        if self.family is not None or not self.known.families:
            return []
        text = (f"draftsmith {self.known.command} --family NAME --help.drafter and --help.train list the keys of a "
                f"family too: {', '.join(self.known.families)}.")
        return textwrap.wrap(text, WIDTH, break_on_hyphens=False)

    def _described(self, name: str) -> list[str]:
        """A key with its allowed values, its default and its meaning."""
        key = self.known.keys[name]
        default = key.default if key.default == "required" else f"default {key.default}"
        return self._entry(name, f"({key.kind}; {default})", key.meaning)

    def _entry(self, name: str, value: str, meaning: str) -> list[str]:
        inside = textwrap.wrap(meaning, WIDTH - 8, break_on_hyphens=False)
        key = textwrap.wrap(f"--{name} {value}", WIDTH - 2, subsequent_indent="  ", break_on_hyphens=False)
        return [f"  {line}" for line in key] + [f"        {line}" for line in inside]
