"""Rows on equal terms: one data folder, one table, nothing done twice. On the tiny recipe."""

import json
from pathlib import Path

import pytest
import yaml
from draftsmith.data.store.feature_store import Encoding
from draftsmith.recipes.__main__ import main
from draftsmith.recipes.commands import compare_families
from draftsmith.recipes.commands.compare_families import workspace_of

ROOT = Path(__file__).resolve().parents[3]

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two Medusa rows and a baseline on the tiny target."""
    folder = tmp_path_factory.mktemp("families")
    tiny = yaml.safe_load((ROOT / "recipes" / "tiny.yaml").read_text())
    tiny["train"]["precision"] = "32-true"
    for name, heads in (("two", 2), ("three", 3)):
        tiny["drafter"]["num_heads"] = heads
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(tiny))
    shared = {name: tiny[name] for name in ("target", "prompts", "distill", "tree")}
    content = {"out": str(folder / "out"), "minutes": 0.02, "precision": "bf16-mixed", **shared,
               "rows": ["prompt_lookup", str(folder / "two.yaml"), str(folder / "three.yaml")],
               "evaluate": {"max_new_tokens": 12, "temperatures": [0.0, 1.0], "speed_prompts": 1, "limit": 2}}
    (folder / "families.yaml").write_text(yaml.safe_dump(content))
    return folder / "families.yaml"


@pytest.fixture(scope="module")
def finished(recipe: Path) -> Path:
    assert main(["families", "--config", str(recipe)]) == 0
    return recipe.parent / "out"


def test_the_table_has_a_row_for_each(finished: Path) -> None:
    content = json.loads((finished / "families.json").read_text())
    lookup, two, three = content["rows"]
    assert [row["name"] for row in (lookup, two, three)] == ["prompt_lookup", "two", "three"]
    assert lookup["parameters"] is None
    # The target answered once for all rows: at most each prompt at each temperature.
    assert 0 < len(json.loads((finished / "references.json").read_text())["answers"]) <= lookup["answers"]
    assert 2 * three["parameters"] == 3 * two["parameters"]
    for row in (two, three):
        assert row["training_seconds"] > 0
        assert row["peak_memory_bytes"] > 2**25
        assert row["precision"] == "bf16-mixed", "what the comparison asks for goes before what the row's recipe does"
        assert row["untrained_accepted_length"] >= 1.0
        assert set(row["accepted_length"]) == {"own, 0", "own, 1", "handwritten, 0", "handwritten, 1"}
        assert row["identical"] + row["near_ties"] == row["answers"] == 8
    table = (finished / "families.md").read_text()
    assert table.count("\n| two |") == table.count("\n| three |") == table.count("\n| prompt_lookup |") == 1
    assert (finished / "families.svg").read_text().startswith("<svg")


def test_all_rows_trained_on_the_same_data(finished: Path) -> None:
    made = [json.loads((finished / name / "artifact" / "config.json").read_text()) for name in ("two", "three")]
    assert made[0]["provenance"]["data_manifest"] == made[1]["provenance"]["data_manifest"]
    assert not (finished / "two" / "data").exists()


def test_nothing_is_done_twice(recipe: Path, finished: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = {file: file.stat().st_mtime_ns for file in finished.rglob("*.safetensors")}
    assert main(["families", "--config", str(recipe), "--only", "three"]) == 0
    message = capfd.readouterr().out
    assert message.count("already complete, skipped") == 5
    assert "== row 1/1: three" in message
    assert {file: file.stat().st_mtime_ns for file in finished.rglob("*.safetensors")} == before


def test_the_states_of_all_rows_are_kept_while_the_target_answers(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that read different layers share the data: each finds all its states stored."""
    content, row = (yaml.safe_load((recipe.parent / name).read_text()) for name in (recipe.name, "two.yaml"))
    for layer in (0, 1):
        row |= {"family": "eagle3", "drafter": {"taps": [layer]}}
        (tmp_path / f"tap{layer}.yaml").write_text(yaml.safe_dump(row))
    content |= {"out": str(tmp_path / "out"), "rows": [str(tmp_path / f"tap{layer}.yaml") for layer in (0, 1)]}
    (tmp_path / "families.yaml").write_text(yaml.safe_dump(content))
    left: dict[tuple[int, ...], int] = {}

    def noted(_name: str, file: Path, _trust: object) -> None:
        workspace = workspace_of(file)
        [wanted] = workspace.wanted_states()
        left[wanted.taps] = Encoding(workspace.target, workspace.data, wanted.taps).tokens

    monkeypatch.setattr(compare_families, "run_row", noted)
    assert main(["families", "--config", str(tmp_path / "families.yaml")]) == 0
    assert left == {(0,): 0, (1,): 0}


def test_a_baseline_alone_has_the_data_distilled_for_it(recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(["families", "--config", str(recipe), "--out", str(out), "--only", "prompt_lookup"]) == 0
    assert (out / "data" / "manifest.json").is_file()
    assert [row["name"] for row in json.loads((out / "families.json").read_text())["rows"]] == ["prompt_lookup"]


@pytest.mark.parametrize(("words", "message"), [
    (["--rows", "[medusa, medusa+specdec]"], "there is no recipe 'medusa+specdec'"),
    (["--only", "four"], "only names 'four'; choose one of prompt_lookup, two, three"),
    (["--minutes", "0"], "minutes must be above 0, got 0"),
    (["--rows", "[medusa, medusa]"], "rows must be one or more different recipes or baselines"),
    (["--rows", "[nonsense]"], "there is no recipe 'nonsense'"),
    (["--rows", "[families]"], "names no family and cannot be a row"),
])
def test_what_cannot_be_compared_is_refused(
    recipe: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["families", "--config", str(recipe), *words]) == 2
    assert message in capsys.readouterr().err
