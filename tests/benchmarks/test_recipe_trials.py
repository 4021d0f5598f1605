"""Trials of a recipe run on the tiny target: equal seconds, exact accepted lengths, finished ones skipped."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import recipe_trials
from draftsmith.modules import DecodeSettings, Features, Request, Target, decode
from draftsmith.recipes.commands import pipeline
from support.answers import replay
from support.families import CASES, randomised

ROOT = Path(__file__).resolve().parents[2]


def words(run: Path, out: Path, *more: str) -> list[str]:
    return ["--recipe", str(ROOT / "recipes" / "tiny.yaml"), "--data", str(run / "data"), "--out", str(out),
            "--seconds", "0.3", "--prompts", "3", "--longest", "8", *more]


@pytest.mark.long
def test_trials_of_all_seeds_take_turns_and_finished_ones_are_skipped(
    copied_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch
) -> None:
    given = words(copied_run, tmp_path, "--trial", "recipe:", "--trial", "slow: train.lr=1e-6 drafter.num_heads=1",
                  "--seeds", "0", "1")
    recipe_trials.main(given)
    found = json.loads((tmp_path / "trials.json").read_text())
    assert [(one["trial"], one["seed"]) for one in found] == [("recipe", 0), ("slow", 0), ("slow", 1), ("recipe", 1)]
    assert all(one["seconds"] >= 0.3 for one in found), "a training must end by its seconds"
    assert all(min(one["own"], one["before_loops"], one["handwritten"]) >= 1 and one["steps"] > 0 for one in found)
    assert found[0]["parameters"] > found[1]["parameters"], "the overrides did not arrive"
    lines = (tmp_path / "trials.md").read_text().splitlines()
    assert lines[2].startswith("| recipe | as in the recipe | 2 |")
    assert lines[2].endswith("| 1.000 | 1.000 | 1.000 |")
    assert lines[3].startswith("| slow | `train.lr=1e-6` `drafter.num_heads=1` | 2 |")

    def again(*_: Any, **__: Any) -> None:
        raise AssertionError("a finished trial was trained again")

    monkeypatch.setattr(pipeline, "fit", again)
    capsys.readouterr()
    recipe_trials.main(given)
    assert capsys.readouterr().out.count("already finished, skipped") == 4
    # Of an unmeasured training only the measurement is made again.
    (tmp_path / "trials.json").write_text(json.dumps(found[1:]))
    recipe_trials.main(given)
    remade = next(one for one in json.loads((tmp_path / "trials.json").read_text())
                  if (one["trial"], one["seed"]) == ("recipe", 0))
    assert remade == found[0]


def test_trials_of_equal_steps_end_by_their_steps(copied_run: Path, tmp_path: Path) -> None:
    given = [word for word in words(copied_run, tmp_path) if word not in ("--seconds", "0.3")]
    recipe_trials.main([*given, "--steps", "7", "--seeds", "0", "--trial", "recipe:", "--trial", "slow: train.lr=1e-6"])
    assert [one["steps"] for one in json.loads((tmp_path / "trials.json").read_text())] == [7, 7]


def test_steps_exclude_seconds_and_must_be_positive(copied_run: Path, tmp_path: Path) -> None:
    given = words(copied_run, tmp_path, "--trial", "recipe:")
    with pytest.raises(SystemExit, match="2"):
        recipe_trials.main([*given, "--steps", "7"])
    with pytest.raises(SystemExit, match="--steps must be at least 1, got 0"):
        recipe_trials.main([*(word for word in given if word not in ("--seconds", "0.3")), "--steps", "0"])


def test_accepted_lengths_are_those_of_decoding(tiny_target_f64: Target) -> None:
    case = CASES["eagle3"]
    torch.manual_seed(7)
    drafter = randomised(case.make(tiny_target_f64).to(torch.float64))
    requests = [Request((5, 20 + at, 7), at, 30) for at in range(6)]
    written = decode(tiny_target_f64, requests, DecodeSettings(batch_size=6)).generations
    texts = [([*one.request.tokens, *one.tokens], [False] * 3 + [True] * len(one.tokens)) for one in written]
    rows = [tiny_target_f64.encode(Features.from_rows([text]), drafter.taps) for text in texts]
    own, others = rows[:4], rows[4:]
    found = recipe_trials.accepted_lengths(drafter, own, others)
    trees = [recipe_trials.best_tree([recipe_trials.ranked_text(drafter, own[start::2])]) for start in (0, 1)]
    counted = [replay(drafter, tiny_target_f64, own[1 - start :: 2], trees[start]) for start in (0, 1)]
    assert found[0] == sum(one.tokens for one in counted) / sum(one.passes for one in counted)
    whole = recipe_trials.best_tree([recipe_trials.ranked_text(drafter, own)])
    assert found[1] == replay(drafter, tiny_target_f64, others, whole).accepted_length


def test_the_ratio_is_taken_over_the_seeds_that_both_have() -> None:
    def outcome(trial: str, seed: int, own: float) -> Any:
        return recipe_trials.Outcome(trial=trial, seed=seed, key="", steps=10, seconds=1.0, parameters=1,
                                 precision="32-true", own=own, before_loops=own, handwritten=1.0)

    trials = [recipe_trials.Trial.of("one:"), recipe_trials.Trial.of("two: train.lr=1")]
    found = [outcome("one", 0, 2.0), outcome("one", 1, 3.0), outcome("two", 1, 1.5)]
    lines = recipe_trials.table(trials, found).splitlines()
    assert lines[2] == ("| one | as in the recipe | 2 | 10 | 1 | 2.500 (2.000 to 3.000) | 2.500 (2.000 to 3.000) | "
                        "1.000 (1.000 to 1.000) |  | 1.000 | 1.000 | 1.000 |")
    assert lines[3] == "| two | `train.lr=1` | 1 | 10 | 1 | 1.500 | 1.500 | 1.000 |  | 0.500 | 0.500 | 1.000 |"


@pytest.mark.parametrize(("trial", "said"), [
    ("no colon", "must be 'NAME: KEY=VALUE ...' with the name of a folder, got 'no colon'"),
    ("../away:", "with the name of a folder"),
    ("more: distill.seed=1", "the trial more changes 'distill.seed=1'; give KEY=VALUE with a key of the sections"),
    ("longer: train.max_minutes=9", "the trial longer changes 'train.max_minutes=9'")])
def test_a_trial_that_would_compare_unequal_things_is_refused(tmp_path: Path, trial: str,
                                                              said: str) -> None:
    with pytest.raises(SystemExit, match=said.replace("(", r"\(")):
        recipe_trials.main(words(tmp_path, tmp_path / "out", "--trial", trial))
