"""Clumsy and hostile input on the command line: what is given, and what must come of it."""

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from draftsmith.recipes.__main__ import main

ERROR = "draftsmith: error: "
REMEDIES = ("add", "allow", "ask", "call", "change", "check", "choose", "close", "copy", "correct", "decode", "delete",
            "did you mean", "distil", "evaluate", "export", "free", "give", "install", "keep", "leave", "load", "lower",
            "make", "move", "must", "name", "put", "raise", "remove", "rename", "run", "save", "see", "set", "shorten",
            "split", "start", "train", "use", "write")
"""Words by which a sentence says what to do."""


@dataclass
class Place:
    """The folder of one case, in which the command is called, and what it prints."""

    folder: Path
    tiny_run: Path
    capfd: pytest.CaptureFixture[str]

    @property
    def run(self) -> Path:
        """A copy of the finished tiny run, made when it is first asked for."""
        copy = self.folder / "run"
        if not copy.exists():
            shutil.copytree(self.tiny_run, copy)
        return copy

    @property
    def artifact(self) -> Path:
        """The artifact of the copied run."""
        return self.run / "artifact"

    def write(self, name: str, content: str | bytes) -> Path:
        """Write a file of the case, below run/ one of the copied run."""
        file = self.run / name.removeprefix("run/") if name.startswith("run/") else self.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content.encode() if isinstance(content, str) else content)
        return file

    def fingerprints(self) -> dict[str, str]:
        """Contents of all files and goals of all links, by path."""
        found = {}
        for path in sorted(self.folder.rglob("*")):
            if path.is_symlink():
                found[str(path.relative_to(self.folder))] = f"link to {path.readlink()}"
            elif path.is_file():
                found[str(path.relative_to(self.folder))] = hashlib.sha256(path.read_bytes()).hexdigest()
        return found


def flip(file: Path, at: int) -> None:
    """Flip one bit of a file, in the byte at this place."""
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


def nothing(_place: Place) -> None:
    """No preparation."""


def written(name: str, content: str | bytes) -> Callable[[Place], object]:
    """A preparation that writes a file."""
    return lambda place: place.write(name, content)


def edited(edit: Callable[[Any], object], name: str = "artifact/config.json") -> Callable[[Place], object]:
    """A preparation that changes a JSON file of the run."""
    def prepare(place: Place) -> None:
        file = place.run / name
        content = json.loads(file.read_text())
        edit(content)
        file.write_text(json.dumps(content))

    return prepare


@dataclass(frozen=True)
class Fault:
    """One wrong input.

    The words are formatted: {here} is the case's folder, {run} a copy of a finished run of the tiny recipe, {artifact}
    its artifact, {tiny} that recipe.
    """

    name: str
    words: str  # The command line after `draftsmith`, split at spaces; `given` adds words that hold spaces
    says: str  # A regular expression that the error sentence must match: the value and the remedy
    prepare: Callable[[Place], object] = nothing  # Writes the files of the case
    given: tuple[str, ...] = ()  # Further words
    code: int = 2  # The exit code
    leaves: tuple[str, ...] = field(default=())
    """Patterns of files that may be new or changed afterwards; none by default."""


def ids(faults: list[Fault]) -> list[str]:
    """Names of cases, each once."""
    names = [fault.name for fault in faults]
    twice = {name for name in names if names.count(name) > 1}
    assert not twice, f"cases of one name: {sorted(twice)}"
    return names


def check(fault: Fault, place: Place) -> None:
    """Call the command: exit code, one sentence with value and remedy, no traceback, no file lost or half-written."""
    fault.prepare(place)
    recipe = Path(__file__).resolve().parents[2] / "recipes" / "tiny.yaml"
    places = {"here": str(place.folder), "tiny": str(recipe)}
    for name in ("run", "artifact"):
        if any(f"{{{name}}}" in word for word in (fault.words, *fault.given)):
            places[name] = str(getattr(place, name))
    words = [word.format(**places) for word in fault.words.split()] + [
        word.format(**places) if "{" in word and "}" in word and any(f"{{{name}}}" in word for name in places) else word
        for word in fault.given]
    before = place.fingerprints()
    code = main(words)
    shown = place.capfd.readouterr()
    lines = [line for line in re.split(r"[\r\n]", shown.err) if line.startswith(ERROR)]
    assert code == fault.code, f"exit code {code}, and on stderr: {shown.err[-2000:]}"
    assert "Traceback" not in shown.err + shown.out
    assert len(lines) == 1, f"{len(lines)} sentences: {shown.err[-2000:]}"
    assert re.search(fault.says, lines[0]), f"{lines[0]!r} does not match {fault.says!r}"
    assert lines[0].isprintable(), f"unprintable characters in {lines[0]!r}"
    assert len(lines[0]) < 600, f"a sentence of {len(lines[0])} characters: {lines[0]!r}"
    assert re.search(rf"\b({'|'.join(REMEDIES)})", lines[0].lower()), f"no remedy in {lines[0]!r}"
    unchanged(before, place.fingerprints(), fault.leaves)


def unchanged(before: dict[str, str], after: dict[str, str], leaves: tuple[str, ...]) -> None:
    """Check that no file was lost, changed or added but those that may be."""
    different = [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)
                 and not any(Path(name).match(pattern) for pattern in leaves)]
    assert not different, f"lost, changed or new: {sorted(different)}"
