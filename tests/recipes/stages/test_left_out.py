"""Work that stages leave out for lack of time is found and reported."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from draftsmith.recipes.__main__ import main
from draftsmith.recipes.commands.pipeline import COMMANDS
from draftsmith.recipes.stages.left_out import left_out
from draftsmith.recipes.stages.workspace import Workspace
from draftsmith.trainers.base import LEAST_STEPS

RECIPE = Path(__file__).resolve().parents[3] / "recipes" / "tiny.yaml"


def workspace(run: Path, *words: str) -> Workspace:
    parsed = COMMANDS["run"].parse(["--config", str(RECIPE), "--out", str(run), *words])
    return Workspace(parsed.values, parsed.settings)


def manifest(tokens: int, origin: str = "own", **distill: Any) -> Any:
    return SimpleNamespace(recipe={"distill": distill, "prompts": {"origin": origin}},
                           split=lambda _split: [], skipped={}, unwritten={}, repeated=0, candidates=50,
                           total=lambda split, count: tokens if (split, count) == ("train", "supervised") else 0)


def test_a_whole_run_left_nothing_out(tiny_run: Path) -> None:
    assert left_out(workspace(tiny_run)) == ()
    assert json.loads((tiny_run / "evaluation.json").read_text())["left_out"] == []
    assert "left out" not in (tiny_run / "report.html").read_text()


@pytest.mark.parametrize(("found", "origin", "seconds", "said"), [
    (900, "own", 1.0, True), (1200, "own", 1.0, False), (900, "file", 59.0, False), (900, "file", 61.0, True)])
def test_answers_that_did_not_fit_are_counted(copied_run: Path, monkeypatch: pytest.MonkeyPatch, found: int,
                                              origin: str, seconds: float, said: bool) -> None:
    """Of prompts in a file, the last one may have come before the time was up."""
    here = workspace(copied_run)
    (copied_run / "data" / "stats.json").write_text(json.dumps({"seconds": seconds}))
    monkeypatch.setattr(here, "manifest", lambda: manifest(found, origin, budget_tokens=1200, budget_minutes=1.0))
    assert left_out(here) == (("answers: 900 of 1,200 tokens were distilled; the rest did not fit into "
                               "distill.budget_minutes 1",) if said else ())


def test_validation_prompts_without_an_answer_are_counted(tiny_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, found = workspace(tiny_run), manifest(900, budget_tokens=900, budget_minutes=1.0, validation_prompts=24)
    for answered, said in ((12, ("held-out answers: 12 of 24 validation prompts were answered; the rest did not fit "
                                 "into distill.budget_minutes 1",)), (24, ())):
        found.total = lambda split, count, answered=answered: {
            ("train", "supervised"): 900, ("validation", "prompts"): answered}.get((split, count), 0)
        monkeypatch.setattr(here, "manifest", lambda: found)
        assert left_out(here) == said


def test_without_a_budget_nothing_is_missing(tiny_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = workspace(tiny_run)
    for settings in ({"budget_tokens": 1200, "budget_minutes": None}, {"budget_tokens": None, "budget_minutes": 1.0}):
        monkeypatch.setattr(here, "manifest", lambda settings=settings: manifest(900, **settings))
        assert left_out(here) == ()


def test_rows_that_were_skipped_or_repeat_others_are_counted(tiny_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, found = workspace(tiny_run), manifest(900)
    found.skipped, found.unwritten, found.repeated = {"not JSON": 1, "no user message": 2}, {"tools": 9}, 3
    found.total = lambda _split, count: {"full": 1, "prompts": 40}.get(count, 0)
    monkeypatch.setattr(here, "manifest", lambda: found)
    assert left_out(here) == (
        "prompts: rows were skipped, which data/skipped.jsonl lists: 1 × not JSON; 2 × no user message",
        "prompts: the chat template leaves out the tools of 9 rows", "prompts: 3 of 50 repeat others and were left out",
        "training text: 1 of 40 conversations end early because the target's context does")


def test_a_training_without_a_number_of_steps_says_that_it_made_the_fewest(tiny_run: Path) -> None:
    here = workspace(tiny_run, "--train.max_steps", "null", "--train.max_minutes", "0.05")
    assert left_out(here) == ()
    with patch("draftsmith.recipes.stages.left_out.read_result", lambda _: SimpleNamespace(steps=LEAST_STEPS)):
        assert left_out(here) == ("training: 4 steps, the fewest; the rest did not fit into train.max_minutes 0.05",)


@pytest.mark.long
def test_a_run_that_is_short_of_time_ends_and_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "short"
    assert main(["run", "--config", str(RECIPE), "--out", str(out), "--train.max_minutes", "1e-5",
                 "--evaluate.budget_minutes", "1e-5"]) == 0
    said = json.loads((out / "evaluation.json").read_text())["left_out"]
    assert said[0] == "training: 4 of 30 steps; the rest did not fit into train.max_minutes 1e-05"
    assert said[1].startswith("evaluation: 2 of 8 prompts were decoded (1 of 4 own, 1 of 4 handwritten;")
    printed = capsys.readouterr().out
    assert "What does not fit into evaluate.budget_minutes 1e-05 is left out" in printed
    for text in (printed, (out / "report.md").read_text(), (out / "report.html").read_text()):
        assert "What was left out" in text
        assert "2 of 8 prompts" in text


def test_the_report_says_how_long_training_waited(tiny_run: Path) -> None:
    stats = json.loads((tiny_run / "train" / "stats.json").read_text())
    said = f"(30 steps); {stats['data_wait']:.1%} of that went by waiting for data"
    assert 0 < stats["data_wait"] < 1
    for name in ("report.md", "report.html", "evaluation.json"):
        assert said in (tiny_run / name).read_text()
