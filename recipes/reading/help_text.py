"""Help of a command, written from its keys: those that most runs set, with examples, then the others by section.

The parser's own help prints annotations of Python and one list of all keys, 500 lines for `run`.
"""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass

from ...modules import UserError
from ...modules.files.json_records import kind_in_words
from .recipe_keys import Key, default_in_words

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


@dataclass(frozen=True, kw_only=True)
class HelpText:
    """The help of a command."""

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
    families: Sequence[str]
    """Families whose keys --family adds; none for a command that trains nothing, and once a family is named."""
    recipe: bool
    """Whether its keys are those of a recipe."""

    def text(self, asked: str) -> str:
        """The help as lines.

        Args:
            asked: of `asked_help`.

        Raises:
            UserError: for a section that the command does not have.
        """
        sections = list(dict.fromkeys(name.partition(".")[0] for name in self.keys if "." in name))
        top = [name for name in self.keys if "." not in name]
        lines = [f"usage: draftsmith {self.command} [--config FILE] [--KEY VALUE ...]", "",
                 *textwrap.wrap(self.summary, WIDTH), ""]
        if asked and asked != "all" and asked not in sections:
            raise UserError(f"there is no help on {asked!r}; choose --help, --help=all or --help.SECTION with one of "
                            f"{', '.join(sections)}")
        if not asked:
            lines += self._short(top, sections)
        elif asked == "all":
            lines += [*self._entry("config", "FILE", CONFIG),
                      *(line for name in top for line in self._described(name)), ""]
        for section in sections if asked == "all" else [asked] if asked else []:
            lines += [f"{section}: {self.meanings.get(section, 'Shape of the drafter.')}", ""]
            inside = [name for name in self.keys if name.startswith(f"{section}.")]
            lines += [*(line for name in inside for line in self._described(name)), ""]
        if self.families and asked in ("all", "drafter", "train"):
            lines += self._of_families()
        return "\n".join(lines).rstrip()

    def _short(self, top: Sequence[str], sections: Sequence[str]) -> Iterator[str]:
        """The keys that most calls set, and the ways to the others."""
        if self.recipe:
            yield "The keys that most runs set, each with an example. A recipe has them in sections, train: {lr: 1e-3}."
            yield from ("", *self._entry("config", "quickstart", CONFIG))
            for name in EXAMPLES:
                if name in self.keys:
                    # The first sentence says what it is; --help.SECTION has the rest.
                    first = self.keys[name].meaning.partition(". ")[0]
                    yield from self._entry(name, EXAMPLES[name], f"{first.rstrip('.')}.")
        else:
            yield from self._entry("config", "FILE", CONFIG)
            for name in (*top, *(name for name in self.keys if name.partition(".")[0] == self.home)):
                yield from self._described(name)
        yield ""
        if self.home is not None:
            example = next(name for name in self.keys if name.startswith(f"{self.home}."))
            yield f"Keys of {self.home} may be written without it: --{example.partition('.')[2]} for --{example}."
        if sections:
            yield from textwrap.wrap(f"draftsmith {self.command} --help.SECTION lists the keys of a section: "
                                     f"{', '.join(sections)}.", WIDTH, break_on_hyphens=False)
            yield f"draftsmith {self.command} --help=all lists all keys."
        if self.families:
            yield from self._of_families()
        yield f"draftsmith {self.command} ... --print_config prints the whole configuration in force."

    def _of_families(self) -> list[str]:
        text = (f"draftsmith {self.command} --family NAME --help.drafter and --help.train list the keys of a family "
                f"too: {', '.join(self.families)}.")
        return textwrap.wrap(text, WIDTH, break_on_hyphens=False)

    def _described(self, name: str) -> list[str]:
        """A key with its allowed values, its default and its meaning."""
        key = self.keys[name]
        default = "required" if key.default is MISSING else f"default {default_in_words(key)}"
        return self._entry(name, f"({kind_in_words(key.kind)}; {default})", key.meaning)

    def _entry(self, name: str, value: str, meaning: str) -> list[str]:
        inside = textwrap.wrap(meaning, WIDTH - 8, break_on_hyphens=False)
        return [f"  --{name} {value}", *(f"        {line}" for line in inside)]
