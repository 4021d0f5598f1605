"""The tables of families and engines in export/README.md, written by `make test-serving SERVING=--record`.

They are made from the families' own cards, the figures of that command (figures.json) and the contracts of
`support/engine_contracts.py`.
"""

import json
from pathlib import Path
from typing import Any

from draftsmith.modules import DRAFTERS, Drafter
from draftsmith.modules.atomic_files import write_file
from draftsmith.recipes.method_table import filled
from support.engine_contracts import CONTRACTS

FIGURES = Path(__file__).with_name("figures.json")
ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "export" / "README.md"
MARKERS = ("<!-- engines -->", "<!-- /engines -->")
"""Lines of the README before and after the tables."""
RUNS, CHECKED, NOBODY = "runs", "checked", ""
ENGINES = tuple(dict.fromkeys(engine for _, _, engine in CONTRACTS))
"""Engines whose contracts are checked."""


def figures() -> list[dict[str, Any]]:
    """The cases of the last `make test-serving` that was recorded."""
    found: list[dict[str, Any]] = json.loads(FIGURES.read_text())
    return found


def family_of(name: str) -> str:
    """The family of a case, whose name may go on with what is special about it."""
    return name.split(",")[0].split(".")[0]


def proven(family: str, layout: str, outcomes: list[dict[str, Any]]) -> bool:
    """True if vLLM accepted every draft of every case of this family and format."""
    cases = [one for one in outcomes if (family_of(one["name"]), one["layout"]) == (family, layout)]
    return any(not one["wrong"] for one in cases) and all(one["holds"] for one in cases)


def row(family: type[Drafter], layout: str, outcomes: list[dict[str, Any]]) -> list[str]:
    """Cells of a family's format."""
    cells = [RUNS if proven(family.family, layout, outcomes) else NOBODY]
    cells += [CHECKED if (family.family, layout, engine) in CONTRACTS else NOBODY for engine in ENGINES]
    # `make test` decodes with it as assistant_model.
    return [family.card.name, f"`{layout}`", *cells, RUNS if layout == "huggingface" else NOBODY]


def assistant() -> str:
    """transformers, in the version of the main environment."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return next(line for line in lines if line.startswith("transformers==")).replace("==", " ")


def engine_table(outcomes: list[dict[str, Any]]) -> str:
    """Families and formats by engine."""
    head = ["family", "format", *sorted({one["engine"] for one in outcomes}), *ENGINES, assistant()]
    body = [row(family, layout, outcomes) for family in DRAFTERS for layout in family.card.exports]
    body += [[family.card.name, "", *[NOBODY] * (len(head) - 2)] for family in DRAFTERS if not family.card.exports]
    return "\n".join(f"| {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |")
                     for cells in (head, ["---"] * len(head), *body))


def acceptance_table(outcomes: list[dict[str, Any]]) -> str:
    """The recorded cases."""
    lines = ["| drafter | format | equal answers | drafts | drafted tokens accepted |", "|---|---|---|---|---|"]
    for one in outcomes:
        name = one["name"] + (f", control: {one['wrong']}" if one["wrong"] else "")
        lines.append(f"| {name} | `{one['layout']}` | {one['equal']} of {one['answers']} | {one['drafts']} | "
                     f"{one['accepted']} of {one['drafted']} |")
    return "\n".join(lines)


def with_tables(text: str, outcomes: list[dict[str, Any]]) -> str:
    """A README with the generated tables between its markers.

    Raises:
        UserError: if a marker is missing.
    """
    return filled(text, MARKERS, f"{engine_table(outcomes)}\n\n{acceptance_table(outcomes)}")


def record(outcomes: list[dict[str, Any]]) -> None:
    """Write the figures and the tables made from them."""
    FIGURES.write_text(json.dumps(outcomes, indent=1) + "\n")
    write_file(README, with_tables(README.read_text(encoding="utf-8"), outcomes))
