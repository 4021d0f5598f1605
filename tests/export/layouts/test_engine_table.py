"""The table of families and engines in export/README.md: it is the generated one, and a failed case is not in it."""

from typing import Any

import pytest
from draftsmith.modules import UserError
from serving.engine_table import README, engine_table, figures, with_tables
from serving.prove import CASES


def test_the_readme_holds_the_generated_tables() -> None:
    text = README.read_text()
    assert with_tables(text, figures()) == text, \
        "write them again with record(figures()) of serving.engine_table"
    with pytest.raises(UserError, match=r"need the lines <!-- engines --> and <!-- /engines -->; add them"):
        with_tables("", figures())


def test_every_case_is_recorded_and_holds() -> None:
    recorded = {(one["name"], one["layout"], one["wrong"]): one for one in figures()}
    assert recorded.keys() == {(case.name, case.layout, case.wrong) for case in CASES}
    for one in recorded.values():
        assert one["holds"]
        assert one["equal"] == one["answers"] > 0
        assert (one["accepted"] == one["drafted"]) != bool(one["wrong"])


def line(outcomes: list[dict[str, Any]], family: str, layout: str) -> list[str]:
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in engine_table(outcomes).splitlines()]
    return next(cells[2:] for cells in rows if cells[0].startswith(family) and cells[1] == f"`{layout}`")


def test_an_engine_runs_what_was_proven_alone() -> None:
    assert line(figures(), "EAGLE-3", "eagle") == ["runs", *["checked"] * 4, "", ""]
    assert line(figures(), "EAGLE-1", "eagle-sglang") == ["", "checked", "", "", "", "", ""]
    assert line(figures(), "Hydra", "hydra") == [""] * 7
    failed = [{**one, "holds": one["name"] != "eagle3, two layers"} for one in figures()]
    assert line(failed, "EAGLE-3", "eagle")[0] == ""
    controls = [one for one in figures() if one["wrong"]]
    assert line(controls, "EAGLE-3", "eagle")[0] == ""
