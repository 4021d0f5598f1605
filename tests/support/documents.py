"""Code blocks of the documents, and the commands in them."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("export/README.md", "modules/README.md", "recipes/README.md", "tests/README.md")
"""What lies where in a room, and why."""
GUIDES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "recipes/guides").glob("*.md"))  # One task a page
_FIRST = ("README.md", "recipes/guides/first-draft.md", "recipes/guides/your-model-and-data.md")
_OTHERS = (*GUIDES, *ROOMS, "tests/benchmarks/README.md", "CONTRIBUTING.md", "CHANGELOG.md")
DOCUMENTS = [*_FIRST, *(name for name in _OTHERS if name not in _FIRST)]
"""All documents that people write, those that most of them read first; recipes/keys.md is made from the code."""
MARKS = ("# needs a GPU", "# needs a network", "# needs an engine", "# needs a run of fastdraft")
"""First lines of blocks that are only parsed here."""
SEPARATORS = ("|", "||", "&&", ";", "&", ">", ">>", "<")


@dataclass(frozen=True)
class Block:
    """A fenced code block."""

    document: str
    line: int  # Line of the document in which the code starts
    language: str
    text: str

    @property
    def marked(self) -> bool:
        """True if it needs more than every machine has."""
        return self.text.split("\n", 1)[0].strip() in MARKS


@dataclass(frozen=True)
class Command:
    """One simple shell command, or lines that only a shell can run."""

    place: str
    words: tuple[str, ...]
    shell: str | None = None  # The text for a shell: a here-document, or a command with a redirection


def blocks(document: str) -> list[Block]:
    """The fenced blocks of a document, in order."""
    text = (ROOT / document).read_text(encoding="utf-8")
    fenced = re.finditer(r"^```([^\n`]*)\n(.*?)^```[ \t]*$", text, flags=re.MULTILINE | re.DOTALL)
    return [Block(document, text[: match.start()].count("\n") + 2, match[1].strip(), match[2]) for match in fenced]


def statements(block: Block) -> list[tuple[str, str]]:
    """(place, text) of each statement: continued lines, open quotes and here-documents joined, comments left out."""
    found: list[tuple[str, str]] = []
    lines = list(enumerate(block.text.splitlines(), start=block.line))
    while lines:
        number, text = lines.pop(0)
        if not text.strip() or text.lstrip().startswith("#"):
            continue
        end = re.search(r"<<-?\s*['\"]?(\w+)['\"]?", text)
        while (lines and end is not None and text.splitlines()[-1] != end[1]) or (lines and unfinished(text)):
            text += "\n" + lines.pop(0)[1]
        found.append((f"{block.document}:{number}", text))
    return found


def unfinished(text: str) -> bool:
    """True if the next line belongs to this statement."""
    if text.endswith("\\"):
        return True
    try:
        shlex.split(text)
    except ValueError:
        return "<<" not in text
    return False


def commands(block: Block) -> list[Command]:
    """The simple commands of a block of shell code, in order."""
    found: list[Command] = []
    for place, text in statements(block):
        if "<<" in text:
            found.append(Command(place, tuple(shlex.split(text.splitlines()[0])), shell=text))
            continue
        lexer = shlex.shlex(text.replace("\\\n", " "), posix=True, punctuation_chars="|&;<>")
        lexer.whitespace_split, lexer.commenters = True, ""
        words: list[str] = []
        redirected = False
        for word in [*lexer, ";"]:
            if word in SEPARATORS and not redirected and word in (">", ">>", "<"):
                redirected = True
            elif word in SEPARATORS:
                found.append(Command(place, tuple(words), shell=text if redirected else None))
                words, redirected = [], False
            elif not redirected:
                words.append(word)
    return [command for command in found if command.words]


def unquoted(text: str) -> str:
    """The characters of a statement that stand in no quotes, here-documents left out."""
    kept, quote = [], ""
    for place, character in enumerate(text.splitlines()[0] if "<<" in text else text):
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"" and text[place - 1 : place] != "\\":
            quote = character
        else:
            kept.append(character)
    return "".join(kept)


def unsafe_in_zsh(block: Block) -> list[str]:
    """Places where zsh would expand a pattern, or take a comment after a command for arguments."""
    found = []
    for place, text in statements(block):
        plain = unquoted(text)
        if set(plain) & set("[]*?"):
            found.append(f"{place}: quote the pattern in {text!r}")
        if re.search(r"\s#", plain):
            found.append(f"{place}: move the comment to a line of its own: {text!r}")
    for number, line in enumerate(block.text.splitlines(), start=block.line):
        if line.lstrip().startswith("#") and set(line) & set("[]*?'\"`()!;&|<>$"):
            found.append(f"{block.document}:{number}: zsh reads comments as commands; use plain words in {line!r}")
    return found
