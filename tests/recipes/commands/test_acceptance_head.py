"""The command specdec: heads in a finished artifact, equal after an equal run, and what it refuses."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.data import Manifest
from draftsmith.export import load_artifact, save_artifact
from draftsmith.modules import Drafter, Examples, Rollouts, Target, TargetConfig, Topology, load_target, rollouts
from draftsmith.recipes.__main__ import main
from draftsmith.recipes.commands import acceptance_head
from draftsmith.recipes.commands.acceptance_head import COMMANDS
from support.families import CASES, randomised

SMALL = ("--length", "3", "--examples", "90", "--max-new-tokens", "8")


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target(TargetConfig(name="tiny-random"))


def made(folder: Path, target: Target, data: Path, family: str = "draft-lm") -> Path:
    """An artifact next to the data of a run, as `draftsmith run` leaves them."""
    shutil.copytree(data, folder / "data")
    return save_artifact(folder / "artifact", randomised(CASES[family].make(target)), target.identity, {},
                         Topology.chain(2))


def test_the_command_puts_heads_into_the_artifact(
    tmp_path: Path, tiny_run: Path, target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    artifact = made(tmp_path / "a", target, tiny_run / "data")
    words = ["specdec", "--artifact", str(artifact), "--temperatures", "[0,0.7]"]
    files = []
    for _ in range(2):
        assert main([*words, *SMALL]) == 0
        files.append({path.relative_to(artifact): path.read_bytes() for path in artifact.rglob("*") if path.is_file()})
    assert files[0] == files[1]
    printed = capsys.readouterr().out
    assert "acceptance head for temperature 0.7" in printed
    heads = load_artifact(artifact, target).heads
    assert heads.keys() == {0.0, 0.7}
    assert (heads[0.0].threshold, heads[0.0].least, heads[0.0].most) == (0.7, 2, 3)
    facts = json.loads((artifact / "acceptance_heads" / "0.7" / "config.json").read_text())["provenance"]["fitted"]
    assert facts["examples"] == 90
    for stored in heads.values():
        found = stored.measurements
        assert found is not None
        assert (found.drafts, found.length, found.calibration.guesses) == (8, 3, 24)
        assert 0 <= found.calibration.expected_calibration_error <= 1
        assert len(found.fixed) == 2
        assert 2 <= found.policy.by_rule["acceptance head"] <= 3
    assert main(["generate", "--artifact", str(artifact), "--prompt", "Hi", "--max-new-tokens", "6",
                 "--policy", "specdec-0.5"]) == 0


def test_the_figures_are_measured_on_prompts_that_nothing_was_trained_on(
    tmp_path: Path, tiny_run: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[tuple[int, ...]]] = []

    def noting(target: Target, drafter: Drafter, prompts: list[list[int]], *rest: Any, **settings: Any) -> Rollouts:
        seen.append([tuple(prompt) for prompt in prompts])
        assert len(prompts) == len(set(seen[-1])), "no prompt is asked twice"
        return rollouts(target, drafter, prompts, *rest, **settings)

    monkeypatch.setattr(acceptance_head, "rollouts", noting)
    artifact = made(tmp_path / "a", target, tiny_run / "data")
    assert main(["specdec", "--artifact", str(artifact), *SMALL, "--temperatures", "[0]"]) == 0
    learned, measured = seen
    assert measured
    assert not set(learned) & set(measured)
    manifest = Manifest.load(tiny_run / "data")
    rows = [row for row, _ in acceptance_head.data_rows(tiny_run / "data", manifest, "train")]
    trained = [any(tuple(row[: len(prompt)]) == prompt for row in rows) for prompt in learned]
    assert not trained[0]
    assert trained == sorted(trained), "prompts that the drafter was not trained on come first"
    assert not any(tuple(row[: len(prompt)]) == prompt for row in rows for prompt in measured)


def test_examples_that_choose_the_head_come_from_the_first_prompts() -> None:
    examples = Examples(states_ED=torch.arange(10.0)[:, None], chances_E=torch.arange(10.0))
    learned, chosen_by = acceptance_head.split(examples, 0.2)
    assert (learned.chances_E.tolist(), chosen_by.chances_E.tolist()) == (list(range(2, 10)), [0, 1])


def test_without_held_out_prompts_a_head_has_no_figures(
    tmp_path: Path, tiny_run: Path, target: Target, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    split = Manifest.split
    monkeypatch.setattr(Manifest, "split", lambda manifest, name: split(manifest, name) if name == "train" else ())
    artifact = made(tmp_path / "a", target, tiny_run / "data")
    assert main(["specdec", "--artifact", str(artifact), *SMALL, "--temperatures", "[0]"]) == 0
    assert "the data hold out no prompts (distill.validation_prompts is 0)" in capsys.readouterr().out
    assert load_artifact(artifact, target).heads[0.0].measurements is None


@pytest.mark.long
def test_an_evaluation_reports_the_heads_for_its_answers(tmp_path: Path, tiny_run: Path, target: Target) -> None:
    artifact = made(tmp_path / "a", target, tiny_run / "data")
    assert main(["specdec", "--artifact", str(artifact), *SMALL]) == 0
    words = ["evaluate", "--artifact", str(artifact), "--limit", "1", "--max-new-tokens", "4", "--speed-prompts", "0"]
    for given, temperatures in ((["--temperatures", "[0,1]"], [0.0, 1.0]), (["--temperatures", "1"], [1.0]),
                                (["--temperatures", "0.5"], []), (["--temperatures", "[0,1]", "--top-k", "5"], [0.0])):
        out = tmp_path / "out"
        assert main([*words, "--out", str(out), *given]) == 0
        heads = json.loads((out / "evaluation.json").read_text())["acceptance_heads"]
        assert [head["setting"]["temperature"] for head in heads] == temperatures
        for name in ("report.md", "report.html"):
            text = (out / name).read_text()
            assert text.count("end at a risk above 0.7") == len(temperatures)
            assert ("Acceptance heads" in text) == bool(temperatures)


def test_drafters_without_states_and_data_of_others_are_refused(
    tmp_path: Path, tiny_run: Path, target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    artifact = made(tmp_path / "a", target, tiny_run / "data", "medusa")
    words = ["specdec", "--artifact", str(artifact), *SMALL]
    assert main([*words, "--length", "1", "--rule.least", "1"]) == 2
    assert "of which Medusa shows none; choose another policy" in capsys.readouterr().err
    shutil.rmtree(artifact.parent / "data")
    assert main(words) == 2
    assert "manifest" in capsys.readouterr().err


@pytest.mark.parametrize(("words", "message"), [
    (("--length", "0"), "labels.length must be a whole number of at least 1, got 0"),
    (("--length", "1025"), "labels.length must be at most 1,024, got 1025; lower it"),
    (("--temperatures", "[-1]"), r"labels.temperatures must each be 0 \(greedy\) or from"),
    (("--rule.least", "0"), "rule.least must be a whole number of at least 1, got 0"),
    (("--rule.least", "4"), "rule.least must be at most labels.length 3, got 4: .*; lower it, or raise labels.length"),
    (("--rule.threshold", "1"), "threshold must be above 0 and below 1, got 1.0; choose a risk such as 0.7"),
])
def test_settings_out_of_range_are_refused(
    tmp_path: Path, words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["specdec", "--artifact", str(tmp_path), *SMALL, *words]) == 2
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize("words", [[], ["--config", "eight_billion"]])
def test_the_shipped_recipes_are_arguments_of_the_command(words: list[str]) -> None:
    given = COMMANDS["specdec"].parse(["--config", "specdec", *words]).values
    assert given.artifact.name == "artifact"
    assert given.rule.least <= given.labels.length
