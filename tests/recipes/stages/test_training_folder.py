"""Folder of a training: whose it is, when it goes on, and sentences on its curve."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draftsmith.data import Manifest
from draftsmith.modules import MeasuredStep
from draftsmith.recipes.__main__ import main
from draftsmith.recipes.stages.training_folder import SETTINGS_FILE, outcome
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
    assert (f'error: {copied_run / "train"} was started with "num_heads": 3, now it is "num_heads": 2; delete it to '
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
    assert 'was started with "max_minutes": 1e-06, now it is "max_minutes": 1e-07' in capsys.readouterr().err
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
