"""The table of families and engines in export/README.md: it is the generated one, and a failed case is not in it."""

from typing import Any

import pytest
from draftsmith.modules import UserError
from serving.engine_table import README, engine_table, figures, product, with_engines
from serving.prove import ENGINES


def test_the_readme_holds_the_generated_table() -> None:
    text = README.read_text()
    assert with_engines(text, figures()) == text, \
        "write them again with record(figures()) of serving.engine_table"
    with pytest.raises(UserError, match=r"need the lines <!-- engines --> and <!-- /engines -->; add them"):
        with_engines("", figures())


def test_every_case_is_recorded_and_holds() -> None:
    recorded = {(product(one["engine"]).lower(), one["name"], one["layout"], one["weights"], one["wrong"]): one
                for one in figures()}
    known = {(engine, case.name, case.layout, case.weights, case.wrong): case
             for engine, (_, cases) in ENGINES.items() for case in cases}
    assert recorded.keys() == known.keys()
    for key, one in recorded.items():
        assert one["holds"]
        assert one["equal"] == one["answers"] > 0
        assert (one["accepted"] >= known[key].least * one["drafted"]) != bool(one["wrong"])


def cells(outcomes: list[dict[str, Any]], family: str, layout: str) -> dict[str, str]:
    """The cells of a family's format that are not empty, by engine."""
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in engine_table(outcomes).splitlines()]
    found = next(row for row in rows if row[0].startswith(family) and row[1] == f"`{layout}`")
    return {product(engine): cell for engine, cell in zip(rows[0][2:], found[2:], strict=True) if cell}


def test_an_engine_runs_what_was_proven_alone() -> None:
    assert cells(figures(), "EAGLE-3", "eagle") == {
        "vLLM": "runs", **dict.fromkeys(("SGLang", "TensorRT-LLM", "llama.cpp"), "checked")}
    assert cells(figures(), "EAGLE-3", "openvino") == {"OpenVINO GenAI": "runs"}
    assert cells(figures(), "draft language model", "openvino") == {"OpenVINO GenAI": "runs"}
    assert cells(figures(), "EAGLE-3", "gguf") == {"llama.cpp": "runs"}
    assert cells(figures(), "EAGLE-1", "eagle") == {"vLLM": "runs; vLLM drops the bias"}
    assert cells(figures(), "EAGLE-1", "eagle-sglang") == {"SGLang": "checked"}
    assert cells(figures(), "Hydra", "hydra") == {}
    failed = [{**one, "holds": one["name"] != "eagle3, two layers"} for one in figures()]
    assert "vLLM" not in cells(failed, "EAGLE-3", "eagle")
    controls = [one for one in figures() if one["wrong"]]
    assert "vLLM" not in cells(controls, "EAGLE-3", "eagle")
    assert product("llama.cpp b11549") == product("llama.cpp") == "llama.cpp"
    assert product("OpenVINO GenAI 2026.4") == "OpenVINO GenAI"
