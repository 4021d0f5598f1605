"""The command specdec: heads in a finished artifact, equal after an equal run, and what it refuses."""

import json
import re
import shutil
from pathlib import Path

import pytest
from draftsmith.export import load_artifact, save_artifact
from draftsmith.modules import Target, TargetConfig, Topology, load_target
from draftsmith.recipes.__main__ import main
from draftsmith.recipes.acceptance_head import COMMANDS
from support.families import CASES, randomised

SMALL = ("--length", "3", "--examples", "90", "--max-new-tokens", "8", "--fit.epochs", "1", "--fit.batch_size", "16",
         "--rule.most", "4")


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target(TargetConfig(name="tiny-random"))


def made(folder: Path, target: Target, data: Path, family: str = "draft-lm") -> Path:
    """An artifact next to the data of a run, as `draftsmith run` leaves them."""
    shutil.copytree(data, folder / "data")
    return save_artifact(folder / "artifact", randomised(CASES[family].make(target)), target.identity, {},
                         Topology.chain(2))


@pytest.mark.parametrize("origin", ["rollouts", "mixing"])
def test_the_command_puts_heads_into_the_artifact(
    tmp_path: Path, tiny_run: Path, target: Target, capsys: pytest.CaptureFixture[str], origin: str
) -> None:
    artifact = made(tmp_path / "a", target, tiny_run / "data")
    words = ["specdec", "--artifact", str(artifact), "--origin", origin, "--temperatures", "[0,0.7]", "--top-p", "0.9"]
    files = []
    for _ in range(2):
        assert main([*words, *SMALL]) == 0
        files.append({path.relative_to(artifact): path.read_bytes() for path in artifact.rglob("*") if path.is_file()})
    assert files[0] == files[1]
    printed = capsys.readouterr().out
    assert "acceptance head for temperature 0.7, top_p 0.9" in printed
    heads = load_artifact(artifact, target).heads
    assert heads.keys() == {0.0, 0.7}
    assert (heads[0.7].setting.top_p, heads[0.0].setting.top_p) == (0.9, 1.0)
    assert (heads[0.0].threshold, heads[0.0].least, heads[0.0].most) == (0.7, 2, 4)
    facts = json.loads((artifact / "acceptance_heads" / "0.7" / "config.json").read_text())["provenance"]["held_out"]
    assert facts["examples"] == 9
    assert 0 <= facts["calibration_error"] <= 1
    assert main(["generate", "--artifact", str(artifact), "--prompt", "Hi", "--max-new-tokens", "6",
                 "--policy", "specdec-0.5"]) == 0


def test_drafters_without_states_and_data_of_others_are_refused(
    tmp_path: Path, tiny_run: Path, target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    artifact = made(tmp_path / "a", target, tiny_run / "data", "medusa")
    assert main(["specdec", "--artifact", str(artifact), *SMALL, "--length", "1"]) == 2
    assert "of which Medusa shows none; choose another policy" in capsys.readouterr().err
    shutil.rmtree(artifact.parent / "data")
    assert main(["specdec", "--artifact", str(artifact), *SMALL]) == 2
    assert "manifest" in capsys.readouterr().err


@pytest.mark.parametrize(("words", "message"), [
    (("--origin", "both"), "labels.origin must be one of rollouts, mixing"),
    (("--length", "0"), "labels.length must be a whole number of at least 1, got 0"),
    (("--temperatures", "[-1]"), r"labels.temperatures must each be 0 \(greedy\) or from"),
    (("--mixing-share", "2"), "labels.mixing_share must be from 0 to 1, got 2"),
    (("--rule.least", "9"), "least and most must satisfy 1 <= least <= most, got 9 and 4"),
])
def test_settings_out_of_range_are_refused(
    tmp_path: Path, words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["specdec", "--artifact", str(tmp_path), *SMALL, *words]) == 2
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize("name", ["specdec", "specdec_8b"])
def test_the_shipped_recipes_are_arguments_of_the_command(name: str) -> None:
    given = COMMANDS["specdec"].parse(["--config", name]).values
    assert given.artifact.name == "artifact"
    assert given.rule.most == given.labels.length
