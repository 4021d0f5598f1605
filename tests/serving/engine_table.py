"""The table of families and engines in export/README.md, written by `make test-serving SERVING=--record`,
`make test-llamacpp SERVING=--record` and `make test-openvino SERVING=--record`.

It is made from the export formats, the families' own cards, the figures of those commands (figures.json) and the
contracts of `serving/engine_contracts.py`.
"""

import json
import re
from pathlib import Path
from typing import Any

from draftsmith.export.layouts.parts.export_format import ExportFormat
from draftsmith.export.layouts.registry import EXPORT_FORMATS
from draftsmith.modules import DRAFTERS, Drafter
from draftsmith.modules.files.atomic_files import write_file
from draftsmith.recipes.commands.written_pages import filled
from serving.engine_contracts import CONTRACTS

FIGURES = Path(__file__).with_name("figures.json")
ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "export" / "README.md"
MARKERS = ("<!-- engines -->", "<!-- /engines -->")  # Lines of the README before and after the table
RUNS, CHECKED, NOBODY = "runs", "checked", ""
_VERSION = re.compile(r" b?\d[\w.]*$")


def product(engine: str) -> str:
    """The name of an engine without its version."""
    return _VERSION.sub("", engine)


def figures() -> list[dict[str, Any]]:
    """The cases of each engine's last proof that was recorded."""
    found: list[dict[str, Any]] = json.loads(FIGURES.read_text())
    return found


def family_of(name: str) -> str:
    """The family of a case, whose name may go on with what is special about it."""
    return name.split(",")[0].split(".")[0]


def engines(outcomes: list[dict[str, Any]]) -> list[str]:
    """Engines that were run and those whose contracts are checked, each once, with their versions."""
    named = [one["engine"] for one in outcomes] + [engine for _, _, engine in CONTRACTS]
    found: dict[str, str] = {}
    for engine in named:
        found.setdefault(product(engine), engine)
    return sorted(found.values(), key=str.lower)


def cell(family: str, layout: str, engine: str, outcomes: list[dict[str, Any]]) -> str:
    """The cell of an engine in the row of a family's format: it runs where every case came out as it must."""
    own = [one for one in outcomes if one["engine"] == engine and family_of(one["name"]) == family
           and one["layout"] == layout]
    if any(not one["wrong"] for one in own) and all(one["holds"] for one in own):
        return "; ".join([RUNS, *filter(None, dict.fromkeys(one["loses"] for one in own))])
    contracts = {(name, of, product(checked)) for name, of, checked in CONTRACTS}
    return CHECKED if (family, layout, product(engine)) in contracts else NOBODY


def row(family: type[Drafter], layout: ExportFormat[Any], outcomes: list[dict[str, Any]]) -> list[str]:
    """Cells of a family's format."""
    cells = [cell(family.family, layout.name, engine, outcomes) for engine in engines(outcomes)]
    # `make test` decodes with it as assistant_model.
    return [family.card.name, f"`{layout.name}`", *cells, RUNS if "transformers" in layout.readers else NOBODY]


def engine_table(outcomes: list[dict[str, Any]]) -> str:
    """Families and formats by engine."""
    # transformers, in the version of the main environment.
    assistant = next(line for line in (ROOT / "constraints.txt").read_text().splitlines()
                     if line.startswith("transformers==")).replace("==", " ")
    head = ["family", "format", *engines(outcomes), assistant]
    held = {family: [one for one in EXPORT_FORMATS if family in one.families] for family in DRAFTERS}
    body = [row(family, layout, outcomes) for family, layouts in held.items() for layout in layouts]
    body += [[family.card.name, "", *[NOBODY] * (len(head) - 2)] for family, layouts in held.items() if not layouts]
    return "\n".join(f"| {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |")
                     for cells in (head, ["---"] * len(head), *body))


def with_engines(text: str, outcomes: list[dict[str, Any]]) -> str:
    """A README with the generated table between its markers."""
    return filled(text, MARKERS, engine_table(outcomes))


def _case(one: dict[str, Any]) -> tuple[str, ...]:
    """The case of an outcome, by which tables are sorted: the engine, the format, the drafter and what is special."""
    return tuple(str(one[key]).lower() for key in ("engine", "layout", "name", "weights", "wrong"))


def record(outcomes: list[dict[str, Any]]) -> None:
    """Write the figures of cases in place of their former ones, and the table made from all. The figures of an engine
    in another version go."""
    versions = {product(one["engine"]): one["engine"] for one in outcomes}
    found = {_case(one): one for one in figures()
             if versions.get(product(one["engine"]), one["engine"]) == one["engine"]}
    kept = sorted((found | {_case(one): one for one in outcomes}).values(), key=_case)
    FIGURES.write_text(json.dumps(kept, indent=1) + "\n")
    write_file(README, with_engines(README.read_text(encoding="utf-8"), kept))
