"""The reference of all recipe keys, recipes/keys.md, and its parts."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from draftsmith.modules.files.json_records import kind_in_words
from draftsmith.recipes.commands.acceptance_head import SpecdecArguments
from draftsmith.recipes.commands.key_reference import KEYS, reference
from draftsmith.recipes.reading.parsing import SECTIONS
from draftsmith.recipes.reading.recipe_keys import allows_null, default_in_words, keys_of

README = Path(__file__).resolve().parents[3] / "recipes" / "README.md"


@dataclass(frozen=True, kw_only=True)
class Inner:
    """A section."""

    rate: float = 0.5
    """Rate of
    something."""


@dataclass(frozen=True, kw_only=True)
class Base:
    """Settings of all."""

    name: str
    """Name."""
    size: int | None = None
    """Size in general."""
    inner: Inner = field(default_factory=Inner)
    """The section."""


@dataclass(frozen=True, kw_only=True)
class Own(Base):
    """Settings of one."""

    size: int | None = 3
    """Size | of this one."""


def test_the_file_has_the_keys_of_the_code() -> None:
    assert KEYS.read_text(encoding="utf-8") == reference(), "run python -m draftsmith.recipes.commands.key_reference"


def test_every_key_has_a_meaning_and_every_section_a_table() -> None:
    rows = [line.split(" | ") for line in reference().splitlines() if line.startswith("| `")]
    assert len(rows) > 100
    assert [row[0] for row in rows if len(row[-1].strip(" |")) < 10] == []
    named = {row[0].strip("| `").partition(".")[0] for row in rows}
    assert named == {*SECTIONS, *(field.name for field in fields(SpecdecArguments))}


def test_keys_of_a_dataclass() -> None:
    keys = keys_of(Own, "own.")
    assert list(keys) == ["own.name", "own.size", "own.inner.rate"]
    assert keys["own.size"].meaning == "Size | of this one."
    assert keys["own.inner.rate"].meaning == "Rate of something."
    assert [default_in_words(key) for key in keys.values()] == ["required", "3", "0.5"]
    assert "own.name" not in keys_of(Own, "own.", skip=("name",))


@pytest.mark.parametrize(("kind", "words"), [
    (int, "a whole number"), (int | None, "a whole number or null"), (Literal["a", "b"], "one of a, b"),
    (tuple[float, ...], "a list, each a number"), (float | tuple[float, ...], "a number or a list, each a number"),
    (dict[str, float], "a mapping"), (Path, "a path"), (bool, "true or false"),
    (Literal["max"] | int | None, "one of max or a whole number or null"),
])
def test_types_in_words(kind: Any, words: str) -> None:
    assert kind_in_words(kind) == words
    assert allows_null(kind) == ("null" in words)


def test_the_examples_in_the_readme_are_recipes(tmp_path: Path) -> None:
    blocks = [block.split("```")[0] for block in README.read_text().split("```yaml\n")[1:]]
    assert len(blocks) == 2
    for block in blocks:
        assert set(yaml.safe_load(block)) <= {"extends", *SECTIONS}
