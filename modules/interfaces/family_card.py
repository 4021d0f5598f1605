"""The table of methods for choosing one: a row for each drafter family, training variant and tree policy."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class FamilyCard:
    """One method in plain words; each family states its own."""

    name: str  # Name in papers, such as EAGLE-3
    guesses: str  # The way it guesses, in one line
    cost: str  # Cost of training or drafting, in one phrase
    papers: tuple[str, ...] = ()  # arXiv numbers, the method's own first
    needs_export: bool = True  # Whether there is an artifact to export; not for policies and drafting without training


def method_table(cards: Iterable[tuple[FamilyCard, Sequence[str]]]) -> str:
    """The cards, each with its export formats, as a Markdown table, in the given order."""
    rows = ["| method | how it guesses | cost | exports to |", "|---|---|---|---|"]
    for card, exports in cards:
        papers = ", ".join(f"[{paper}](https://arxiv.org/abs/{paper})" for paper in card.papers)
        # An empty cell would leave open whether an artifact exists that no engine reads.
        nothing = "no serving engine" if card.needs_export else "nothing to export"
        formats = ", ".join(f"`{name}`" for name in exports) or nothing
        rows.append(f"| {card.name} | {card.guesses}{f' ({papers})' if papers else ''} | {card.cost} | {formats} |")
    return "\n".join(rows)
