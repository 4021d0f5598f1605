"""The README's table of methods: `python -m draftsmith.recipes.commands.method_table README.md` writes it."""

import sys
from pathlib import Path

from ...export.layouts.registry import EXPORT_FORMATS
from ...export.page import Table, as_markdown
from ...modules import BASELINES, DRAFTERS, Eagle2Tree, UserError
from ...modules.files.atomic_files import write_file
from ...modules.interfaces.drafter import FamilyCard
from ...trainers.families import VARIANTS, family_module

MARKERS = ("<!-- families -->", "<!-- /families -->")
"""Lines of the README before and after the table."""


def cards() -> list[tuple[FamilyCard, tuple[str, ...]]]:
    """Cards of all drafter families, training variants and tree policies, and of drafting without training, each with
    the export formats that can hold it."""
    families = [(family.card, tuple(one.name for one in EXPORT_FORMATS if family in one.families))
                for family in DRAFTERS]
    # A variant that changes its target is exported with it.
    adapted = tuple(one.name for one in EXPORT_FORMATS if one.write_adapted is not None)
    variants = [(module.card, adapted if module.changes_target else ())
                for module in map(family_module, VARIANTS) if module.card is not None]
    training_free = FamilyCard(
        name="without training", guesses=", ".join(f"`{name}`" for name in BASELINES), needs_export=False,
        cost="no training; baselines of every evaluation, or next to a draft: `--policy static+lookup`",
    )
    return [*families, *variants, (Eagle2Tree.card, ()), (training_free, ())]


def with_table(text: str) -> str:
    """A README with the generated table between its markers. Raises UserError if a marker is missing."""
    rows = []
    for card, exports in cards():
        papers = ", ".join(f"[{paper}](https://arxiv.org/abs/{paper})" for paper in card.papers)
        # An empty cell would leave open whether an artifact exists that no engine reads.
        nothing = "no serving engine" if card.needs_export else "nothing to export"
        rows.append((card.name, card.guesses + (f" ({papers})" if papers else ""), card.cost,
                     ", ".join(f"`{name}`" for name in exports) or nothing))
    table = as_markdown([Table(("method", "how it guesses", "cost", "exports to"), rows, "words")])
    return filled(text, MARKERS, table.rstrip())


def filled(text: str, markers: tuple[str, str], content: str) -> str:
    """A README with generated content between two lines. Raises UserError if one is missing."""
    before, first, rest = text.partition(markers[0])
    _, last, after = rest.partition(markers[1])
    if not (first and last):
        raise UserError(f"generated tables need the lines {markers[0]} and {markers[1]}; add them")
    return f"{before}{first}\n{content}\n{last}{after}"


if __name__ == "__main__":
    file = Path(sys.argv[1])
    write_file(file, with_table(file.read_text(encoding="utf-8")))
