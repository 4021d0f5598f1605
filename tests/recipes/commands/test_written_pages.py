"""The pages that the code writes: the reference of all keys with its parts, and the README's table of methods."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from draftsmith.export.layouts.registry import EXPORT_FORMATS
from draftsmith.modules import DRAFTERS, UserError
from draftsmith.modules.files.json_records import kind_in_words
from draftsmith.recipes.commands.written_pages import FILES, MARKERS, cards, reference, with_table
from draftsmith.recipes.reading.command_line import SECTIONS, Command
from draftsmith.recipes.reading.keys import PAGE, command_keys, keys_of
from draftsmith.trainers.families import family_configs, family_names

ROOT = Path(__file__).resolve().parents[3]
GUIDE = ROOT / "recipes/guides/your-model-and-data.md"
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
    assert PAGE.read_text(encoding="utf-8") == reference(), "run python -m draftsmith.recipes.commands.written_pages"


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


def test_the_readme_has_the_table_of_the_families() -> None:
    text = (ROOT / "README.md").read_text()
    assert text == with_table(text), "run: python -m draftsmith.recipes.commands.written_pages README.md"


def test_every_method_has_one_row() -> None:
    names = [card.name for card, _ in cards()]
    assert len(names) == len(set(names)) == len(DRAFTERS) + 3
    for card, _ in cards():
        assert all((card.guesses, card.cost)), card.name
        assert "|" not in card.guesses + card.cost, card.name


def test_only_a_family_without_a_format_refuses_to_be_exported() -> None:
    assert {family.family for family in DRAFTERS if family.export_refusal is not None} == {
        family.family for family in DRAFTERS if not any(family in one.families for one in EXPORT_FORMATS)}


def test_a_readme_without_markers_is_refused() -> None:
    with pytest.raises(UserError, match=f"need the lines {MARKERS[0]}"):
        with_table("# A project\n")
