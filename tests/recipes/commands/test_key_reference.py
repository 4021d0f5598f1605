"""The reference of all recipe keys, recipes/keys.md, and its parts."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from draftsmith.modules.files.json_records import kind_in_words
from draftsmith.recipes.commands.key_reference import FILES, reference
from draftsmith.recipes.reading.command_line import SECTIONS
from draftsmith.recipes.reading.key_page import PAGE, command_keys
from draftsmith.recipes.reading.parsing import Command
from draftsmith.recipes.reading.recipe_keys import keys_of
from draftsmith.trainers.families import family_configs, family_names

GUIDE = Path(__file__).resolve().parents[3] / "recipes/guides/your-model-and-data.md"
COMMANDS: dict[str, Command[Any]] = {name: command for file in FILES for name, command in file.COMMANDS.items()}


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
    assert PAGE.read_text(encoding="utf-8") == reference(), "run python -m draftsmith.recipes.commands.key_reference"


def test_every_key_has_a_meaning_and_every_section_a_table() -> None:
    rows = [line.split(" | ") for line in reference().splitlines() if line.startswith("| `")]
    assert len(rows) > 100
    assert [row[0] for row in rows if len(row[-1].strip(" |")) < 10] == []
    assert {one for command in COMMANDS.values() for one in command_keys(command.name).top} == {
        *(field.name for command in COMMANDS.values() for field in fields(command.arguments)), "drafter"}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_has_the_keys_of_its_dataclass(name: str) -> None:
    command, known = COMMANDS[name], command_keys(name)
    if not command.trains:
        assert dict(known.keys) == keys_of(command.arguments)
        return
    common = keys_of(command.arguments, skip=("train",))
    for family in family_names():
        configs, keys = family_configs(family), known.of_family(family, trust=False).keys
        assert keys == common | keys_of(configs.drafter, "drafter.") | keys_of(configs.train, "train.",
                                                                               skip=("drafter",))


def test_keys_of_a_dataclass() -> None:
    keys = keys_of(Own, "own.")
    assert list(keys) == ["own.name", "own.size", "own.inner.rate"]
    assert keys["own.size"].meaning == "Size | of this one."
    assert keys["own.inner.rate"].meaning == "Rate of something."
    assert [key.default for key in keys.values()] == ["required", "3", "0.5"]
    assert "own.name" not in keys_of(Own, "own.", skip=("name",))


@pytest.mark.parametrize(("kind", "words"), [
    (int, "a whole number"), (int | None, "a whole number or null"), (Literal["a", "b"], "one of a, b"),
    (tuple[float, ...], "a list, each a number"), (float | tuple[float, ...], "a number or a list, each a number"),
    (dict[str, float], "a mapping"), (Path, "a path"), (bool, "true or false"),
    (Literal["max"] | int | None, "one of max or a whole number or null"),
])
def test_types_in_words(kind: Any, words: str) -> None:
    assert kind_in_words(kind) == words


def test_the_example_in_the_guide_is_a_recipe(tmp_path: Path) -> None:
    block, = (block.split("```")[0] for block in GUIDE.read_text().split("```yaml\n")[1:])
    assert set(yaml.safe_load(block)) <= {"extends", *SECTIONS}
