"""Standard English in docstrings, messages, comments and README files, as far as a program can tell."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS_IN_PLAIN_WORDS = ("data", "export", "modules", "recipes", "tests", "trainers", "README.md", "CHANGELOG.md",
                        "CONTRIBUTING.md", "Dockerfile", "Makefile")
"""Folders and files that are held to plain words; a folder includes everything in it."""
ALLOWED: frozenset[tuple[str, str]] = frozenset()  # (file, text) of the places where a word stays
NO_DEFINITION = re.compile(r"(What|Where|Whose|How|Who|Whether|Which|When|Why)\b")
"""First words of a docstring that does not say what the thing is."""
PRIVATE = re.compile(r"\b(behind|beside|begun|(?:is|are|was|were|be|been) told)\b", flags=re.IGNORECASE)
"""Words for which standard English has another: after, next to or with, started, reported."""
PADDING = re.compile(r"\b(padd\w*|pads?|hidden|hides?|hiding)\b", flags=re.IGNORECASE)
"""Words of a line in which "behind" may stay."""


def first_lines(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, first line) of the docstrings of a module, its classes and its functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield node.body[0].lineno, text.splitlines()[0]


def written(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of every line of the strings and comments of a Python file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            for place, text in enumerate(node.value.splitlines()):
                yield node.lineno + place, text
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def lines(file: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of all that people read in a file."""
    source = file.read_text(encoding="utf-8")
    if file.suffix == ".py":
        yield from written(source)
    elif file.suffix == ".yaml":
        yield from ((number, line.partition("#")[2]) for number, line in enumerate(source.splitlines(), start=1))
    else:
        yield from enumerate(source.splitlines(), start=1)


def offences(file: Path) -> list[str]:
    """Places of a file where plain words are missing."""
    name = file.relative_to(ROOT).as_posix() if file.is_relative_to(ROOT) else file.name
    source = file.read_text(encoding="utf-8")
    # A file without such a word anywhere need not be taken apart.
    found = [(number, text) for number, text in (lines(file) if PRIVATE.search(source) else ())
             if any(match[1].lower() != "behind" or not PADDING.search(text) for match in PRIVATE.finditer(text))]
    if file.suffix == ".py":
        found += [(number, text) for number, text in first_lines(ast.parse(source)) if NO_DEFINITION.match(text)]
    return [f"{name}:{number}: {text.strip()}" for number, text in sorted(set(found))
            if (name, text.strip()) not in ALLOWED]


def files(room: str) -> list[Path]:
    """The files of a folder that people read, or the one file of that name."""
    place = ROOT / room
    if place.is_file():
        return [place]
    return sorted(path for path in place.rglob("*")
                  if path.suffix in (".py", ".yaml", ".md") and path != Path(__file__))


@pytest.mark.parametrize("room", ROOMS_IN_PLAIN_WORDS)
def test_a_room_is_in_plain_words(room: str) -> None:
    assert files(room)
    assert not [place for file in files(room) for place in offences(file)]


@pytest.mark.parametrize(("name", "source", "count"), [
    ("a.py", '"""What a pass took."""', 1),
    ("a.py", '"""Seconds of a pass."""\n\n\nclass A:\n    """How long it takes."""', 1),
    ("a.py", 'def f():\n    """Whether it fits."""', 1),
    ("a.py", '"""Seconds of a pass.\n\nWhat it costs is measured.\n"""', 0),
    ("a.py", 'raise ValueError(f"{1} stands beside it")', 1),
    ("a.py", "x = 1  # begun before", 1),
    ("a.py", "# tokens behind the padding", 0),
    ("a.py", "# tokens behind the text", 1),
    ("a.py", "begun = behind", 0),
    ("a.py", '"""The user is told."""', 1),
    ("a.yaml", "# held behind it\nbehind: 1", 1),
    ("README.md", "It stands beside others.", 1),
])
def test_the_test_of_words_can_fail_and_pass(name: str, source: str, count: int, tmp_path: Path) -> None:
    (tmp_path / name).write_text(source + "\n", encoding="utf-8")
    assert len(offences(tmp_path / name)) == count
