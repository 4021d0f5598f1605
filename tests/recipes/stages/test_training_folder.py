"""Folder of a training: whose it is, when it goes on, sentences on its curve, and the work that stages left out."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from draftsmith.data import Manifest
from draftsmith.modules import MeasuredStep
from draftsmith.recipes.__main__ import main
from draftsmith.recipes.commands.pipeline import COMMANDS
from draftsmith.recipes.stages.training_folder import SETTINGS_FILE, left_out, outcome
from draftsmith.recipes.stages.workspace import Workspace
from draftsmith.trainers.base import LEAST_STEPS


def found(lengths: list[float], labels: int, *, max_steps: int | None = 400, steps: int = 400,
            budget: int | None = 14_000, start: str | None = None, held: int = 24) -> str:
    """The sentences on a curve whose measurements come every 100 steps, of a text of 14,000 labels."""
    curve = tuple(MeasuredStep(step=100 * place, accepted_length=length, labels=labels * place // (len(lengths) - 1))
                  for place, length in enumerate(lengths))
    # A draft that is continued may have been best before.
    best = max(curve[0 if start else 1:], key=lambda one: one.accepted_length)
    workspace: Any = SimpleNamespace(
        label_weights=torch.tensor([10_000, 4_000]),
        recipe=SimpleNamespace(train=SimpleNamespace(max_steps=max_steps, start=start),
                               distill=SimpleNamespace(budget_tokens=budget, budget_minutes=None,
                                                       validation_prompts=held)),
        manifest=lambda: SimpleNamespace(total=lambda *_: 14_000))
    result: Any = SimpleNamespace(curve=curve, step=best.step, steps=steps, accepted_length=best.accepted_length)
    return outcome(workspace, result)


@pytest.mark.parametrize(("lengths", "labels", "more", "said"), [
    ([1.0, 1.5, 1.7, 1.71, 1.7], 210_000, {},
     "Short of data: 14,000 tokens seen 15 times; more answers (distill.budget_tokens) will help. Best at step 300 of "
     "400: 1.71 tokens per pass of held-out text."),
    ([1.0, 1.5, 1.7, 1.71, 1.72], 210_000, {"budget": 20_000},
     "Short of data: 14,000 tokens seen 15 times; more prompts will help. Best at step 400 of 400: 1.72 tokens per "
     "pass of held-out text."),
    ([1.0, 1.5, 1.7, 1.71, 1.72], 210_000, {"budget": None},
     "Short of data: 14,000 tokens seen 15 times; more prompts will help. Best at step 400 of 400: 1.72 tokens per "
     "pass of held-out text."),
    ([1.0, 1.5, 1.7, 1.71, 1.72], 210_000, {"budget": 20_000, "held": 15_000},
     "Short of data: 14,000 tokens seen 15 times; more prompts, or a lower distill.validation_prompts, will help. Best "
     "at step 400 of 400: 1.72 tokens per pass of held-out text."),
    ([1.0, 1.2, 1.4, 1.6, 1.8], 28_000, {},
     "Still rising at the end: more steps (train.max_steps) will help. Best at step 400 of 400: 1.80 tokens per pass "
     "of held-out text, by 14,000 tokens seen 2 times."),
    ([1.0, 1.2, 1.4, 1.6, 1.8], 20_000, {"max_steps": None},
     "Still rising at the end: more minutes (train.max_minutes) will help. Best at step 400 of 400: 1.80 tokens per "
     "pass of held-out text, by 14,000 tokens, not seen twice."),
    ([1.0, 1.2, 1.4, 1.6, 1.8], 210_000, {"max_steps": 500},
     "Still rising at the end: more minutes (train.max_minutes) will help, and more answers (distill.budget_tokens) "
     "too. Best at step 400 of 400: 1.80 tokens per pass of held-out text, by 14,000 tokens seen 15 times."),
    ([1.0, 1.5, 1.7, 1.71, 1.7], 28_000, {},
     "Best at step 300 of 400: 1.71 tokens per pass of held-out text, by 14,000 tokens seen 2 times, and level by the "
     "end: more steps (train.max_steps) alone will hardly help."),
    ([1.3, 1.4, 1.5, 1.6, 1.8], 28_000, {"start": "runs/tiny/artifact"},
     "Still rising at the end: more steps (train.max_steps) will help. Best at step 400 of 400: 1.80 tokens per pass "
     "of held-out text, 1.30 before this training, by 14,000 tokens seen 2 times."),
    ([1.9, 1.4, 1.5], 28_000, {"start": "runs/tiny/artifact", "steps": 200},
     "Best at step 0 of 200: 1.90 tokens per pass of held-out text, 1.90 before this training, which has not made the "
     "drafter of train.start better; lower train.lr, or take more data."),
    ([1.0, 1.5], 210_000, {"steps": 100},
     "Best at step 100 of 100: 1.50 tokens per pass of held-out text; measured too seldom to say more "
     "(train.validate_every)."),
])
def test_a_curve_says_what_would_help(lengths: list[float], labels: int, more: dict[str, Any], said: str) -> None:
    assert found(lengths, labels, **more) == said


def run(out: Path, *words: str) -> int:
    """The exit code of a run of the tiny recipe that evaluates little."""
    return main(["run", "--config", "tiny", "--out", str(out), "--evaluate.limit", "1", *words])


def test_the_folder_of_another_family_is_refused_by_that(copied_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not by advice on the data, which the other recipe would let grow."""
    before = {file: file.read_bytes() for file in copied_run.rglob("*") if file.is_file()}
    assert run(copied_run, "--family", "hydra", "--distill.budget_tokens", "1600") == 2
    said = capsys.readouterr().err
    assert f"error: {copied_run} holds a run of family medusa, and this recipe is of family hydra; choose" in said
    assert "would grow" not in said
    assert run(copied_run, "--drafter.num_heads", "2", "--distill.budget_tokens", "1600") == 2
    assert (f'error: {copied_run / "train"} was started with drafter.num_heads 3, now it is 2; delete it to '
            "train anew, or choose another --out") in capsys.readouterr().err
    assert {file: file.read_bytes() for file in copied_run.rglob("*") if file.is_file()} == before


@pytest.mark.long
def test_a_training_goes_on_with_more_minutes(tiny_run: Path, tmp_path: Path,
                                              capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--data", str(tiny_run / "data"), "--train.max_minutes"]
    assert run(tmp_path, *words, "1e-6") == 0
    short = json.loads((tmp_path / "train" / "result.json").read_text())
    assert short["steps"] == LEAST_STEPS
    assert run(tmp_path, *words, "1e-7") == 2
    assert "was started with train.max_minutes 1e-06, now it is 1e-07" in capsys.readouterr().err
    assert run(tmp_path, *words, "600") == 0
    assert "[2/4] the drafter is trained, again: train.max_minutes changed since" in capsys.readouterr().out
    found = json.loads((tmp_path / "train" / "result.json").read_text())
    assert found["steps"] == 30
    assert found["curve"][: len(short["curve"])] == short["curve"], "it went on from its last checkpoint"
    assert "What was left out" not in capsys.readouterr().out


@pytest.mark.long
def test_more_minutes_for_answers_let_them_grow_and_keep_the_former_training(
    copied_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As if the minutes of the first run had ended its answers."""
    manifest, settings = Manifest.load(copied_run / "data"), copied_run / "train" / SETTINGS_FILE
    limits = {"budget_tokens": 2400, "budget_minutes": 0.01}
    short = replace(manifest, recipe={**manifest.recipe, "distill": {**manifest.recipe["distill"], **limits}})
    short.save(copied_run / "data")
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "data": short.hash}))
    trained = {file.name: file.read_bytes() for file in (copied_run / "train").iterdir() if file.is_file()}
    assert run(copied_run, "--distill.budget_tokens", "2400", "--distill.budget_minutes", "600") == 0
    assert f"the former training is kept in {copied_run / 'train-1'}, a new one starts" in capsys.readouterr().out
    assert Manifest.load(copied_run / "data").total("train", "supervised") >= 2400
    kept = {file.name: file.read_bytes() for file in (copied_run / "train-1").iterdir() if file.is_file()}
    assert kept == trained
    assert json.loads((copied_run / "train" / "result.json").read_text())["steps"] == 30


def workspace(run: Path, *words: str) -> Workspace:
    return Workspace(COMMANDS["run"].parse(["--config", "tiny", "--out", str(run), *words]))


def manifest(tokens: int, origin: str = "own", **distill: Any) -> Any:
    return SimpleNamespace(recipe={"distill": distill, "prompts": {"origin": origin}},
                           split=lambda _split: [], skipped={}, unwritten={}, repeated=0, candidates=50,
                           total=lambda split, count: tokens if (split, count) == ("train", "supervised") else 0)


def test_a_whole_run_left_nothing_out_and_says_how_long_training_waited(tiny_run: Path) -> None:
    assert left_out(workspace(tiny_run)) == ()
    assert json.loads((tiny_run / "evaluation.json").read_text())["left_out"] == []
    assert "left out" not in (tiny_run / "report.html").read_text()
    stats = json.loads((tiny_run / "train" / "stats.json").read_text())
    said = f"(30 steps); {stats['data_wait']:.1%} of that went by waiting for data"
    assert 0 < stats["data_wait"] < 1
    for name in ("report.md", "report.html", "evaluation.json"):
        assert said in (tiny_run / name).read_text()


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


SKIPPED = {"skipped": {"not JSON": 1, "no user message": 2}, "unwritten": {"tools": 9}, "repeated": 3}


@pytest.mark.parametrize(("settings", "facts", "counts", "said"), [
    ({"budget_tokens": 1200, "budget_minutes": None}, {}, {}, ()),
    ({"budget_tokens": None, "budget_minutes": 1.0}, {}, {}, ()),
    ({"budget_tokens": 900, "budget_minutes": 1.0, "validation_prompts": 24}, {}, {"prompts": 24}, ()),
    ({"budget_tokens": 900, "budget_minutes": 1.0, "validation_prompts": 24}, {}, {"prompts": 12}, (
        "held-out answers: 12 of 24 validation prompts were answered; the rest did not fit into distill.budget_minutes "
        "1",)),
    ({}, SKIPPED, {"full": 1, "prompts": 40}, (
        "prompts: rows were skipped, which data/skipped.jsonl lists: 1 × not JSON; 2 × no user message",
        "prompts: the chat template leaves out the tools of 9 rows", "prompts: 3 of 50 repeat others and were left out",
        "training text: 1 of 40 conversations end early because the target's context does")),
])
def test_what_answers_lack_is_counted(tiny_run: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any],
                                      facts: dict[str, Any], counts: dict[str, int], said: tuple[str, ...]) -> None:
    """Held-out prompts without an answer, and rows that were skipped or repeat others; nothing without a budget."""
    here, found = workspace(tiny_run), manifest(900, **settings)
    vars(found).update(facts, total=lambda _split, count: {"supervised": 900, **counts}.get(count, 0))
    monkeypatch.setattr(here, "manifest", lambda: found)
    assert left_out(here) == said


def test_a_training_without_a_number_of_steps_says_that_it_made_the_fewest(tiny_run: Path) -> None:
    here = workspace(tiny_run, "--train.max_steps", "null", "--train.max_minutes", "0.05")
    assert left_out(here) == ()
    with patch("draftsmith.recipes.stages.training_folder.read_result", lambda _: SimpleNamespace(steps=LEAST_STEPS)):
        assert left_out(here) == ("training: 4 steps, the fewest; the rest did not fit into train.max_minutes 0.05",)


@pytest.mark.long
def test_a_run_that_is_short_of_time_ends_and_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "short"
    assert main(["run", "--config", "tiny", "--out", str(out), "--train.max_minutes", "1e-5",
                 "--evaluate.budget_minutes", "1e-5"]) == 0
    said = json.loads((out / "evaluation.json").read_text())["left_out"]
    assert said[0] == "training: 4 of 30 steps; the rest did not fit into train.max_minutes 1e-05"
    assert said[1].startswith("evaluation: 2 of 8 prompts were decoded (1 of 4 own, 1 of 4 handwritten;")
    printed = capsys.readouterr().out
    assert "What does not fit into evaluate.budget_minutes 1e-05 is left out" in printed
    for text in (printed, (out / "report.md").read_text(), (out / "report.html").read_text()):
        assert "What was left out" in text
        assert "2 of 8 prompts" in text
