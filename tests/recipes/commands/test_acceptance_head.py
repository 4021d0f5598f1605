"""The command specdec: heads in a finished artifact, equal after an equal run, and what it refuses."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.data import Manifest
from draftsmith.export import load_artifact, save_artifact
from draftsmith.modules import Drafter, Examples, Target, TargetConfig, Topology, load_target, rollouts
from draftsmith.recipes.__main__ import main
from draftsmith.recipes.commands import acceptance_head
from draftsmith.recipes.commands.acceptance_head import COMMANDS
from draftsmith.trainers.acceptance_head import HELD_OUT, fit_head
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
    rule = heads[0.0].rule
    assert (rule.threshold, rule.least, rule.most) == (0.7, 2, 3)
    assert heads[0.7].rule.provenance["fitted"]["examples"] == 90
    assert re.search(r"fitted to 81 drafted tokens; its loss is \d\.\d+ nats on 9 others, of which the target", printed)
    assert main(["generate", "--artifact", str(artifact), "--prompt", "Hi", "--max-new-tokens", "6",
                 "--policy", "specdec-0.5"]) == 0


def test_prompts_that_the_drafter_was_not_trained_on_come_first(
    tmp_path: Path, tiny_run: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They choose the head."""
    seen, made_of, parts = list[tuple[int, ...]](), list[Examples](), list[Examples]()

    def noting(target: Target, drafter: Drafter, prompts: list[list[int]], *rest: Any, **settings: Any) -> Examples:
        seen.extend(tuple(prompt) for prompt in prompts)
        found = rollouts(target, drafter, prompts, *rest, **settings)
        made_of.append(found)
        return found

    def fitting(learned: Examples, held_out: Examples, *rest: Any) -> Any:
        parts.extend((held_out, learned))
        return fit_head(learned, held_out, *rest)

    monkeypatch.setattr(acceptance_head, "rollouts", noting)
    monkeypatch.setattr(acceptance_head, "fit_head", fitting)
    artifact = made(tmp_path / "a", target, tiny_run / "data")
    assert main(["specdec", "--artifact", str(artifact), *SMALL, "--temperatures", "[0]"]) == 0
    assert len(seen) == len(set(seen)), "no prompt is asked twice"
    manifest = Manifest.load(tiny_run / "data")
    known = {tuple(prompt) for prompt in acceptance_head.opened(tiny_run / "data", manifest, "train")}
    trained = [prompt in known for prompt in seen]
    assert not trained[0]
    assert trained == sorted(trained)
    for name in ("states_ED", "chances_E"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(made_of[0], name))
    assert len(parts[0].chances_E) == max(1, round(HELD_OUT * len(made_of[0].chances_E)))


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
    (("--length", "0"), "labels.length must be at least 1, got 0"),
    (("--length", "1025"), "labels.length must be at most 1,024, got 1025; lower it"),
    (("--temperatures", "[-1]"), r"labels.temperatures\[0\] must be 0 \(greedy\) or from"),
    (("--rule.least", "0"), "rule.least must be at least 1, got 0"),
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
