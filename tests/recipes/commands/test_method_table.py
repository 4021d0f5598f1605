"""The README's table of methods is the one that the families give."""

from pathlib import Path

import pytest
from draftsmith.export.layouts.registry import EXPORT_FORMATS
from draftsmith.modules import DRAFTERS, UserError
from draftsmith.recipes.commands.method_table import MARKERS, cards, with_table

README = Path(__file__).resolve().parents[3] / "README.md"


def test_the_readme_has_the_table_of_the_families() -> None:
    text = README.read_text()
    assert text == with_table(text), "run: python -m draftsmith.recipes.commands.method_table README.md"


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
