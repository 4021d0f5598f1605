"""Recipes tried on the target's shape alone; `batch.states: auto` stores what fits into nine tenths of the free disk,
says why, and keeps it for the whole run."""

import json
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
from draftsmith.data import Manifest
from draftsmith.data.datamodule import BatchConfig, DraftDataModule
from draftsmith.modules import Target, UserError
from draftsmith.modules.target.loading.loading import sketch_target
from draftsmith.recipes.__main__ import main
from draftsmith.recipes.commands.pipeline import (
    COMMANDS,
    batch_config,
    held_out_rows,
    provenance,
    stored_states,
)
from draftsmith.recipes.reading.command_line import Parsed
from draftsmith.recipes.recipe import choose_states, dry_run
from draftsmith.recipes.stages import workspace
from draftsmith.recipes.stages.training_folder import read_result
from draftsmith.recipes.stages.workspace import Workspace
from support.data.data_folders import encode

AUTO = ("--batch.states", "auto")
Disk = namedtuple("Disk", "total used free")
BYTES = 32 * 4  # Bytes of a token's states: of the final ones of the tiny target, 32 wide, in float32


def parsed(*words: str) -> Parsed[Any]:
    return COMMANDS["run"].parse(["--config", "tiny", *AUTO, *words])


def choice(data: Path, *words: str) -> tuple[str, str]:
    recipe = parsed("--out", str(data.parent), *words).values
    return choose_states(recipe, dry_run(recipe, sketch_target(recipe.target)), data)


@pytest.mark.parametrize(("words", "tokens"), [
    # A prompt of up to 96 tokens and the template's with answers of up to 96.
    ([], 1200 * (96 + 32 + 96) // 96),
    (["--distill.budget_tokens", "2400"], 2400 * (96 + 32 + 96) // 96),
    (["--prompts.limit", "3"], 3 * (96 + 32 + 96)),
    (["--prompts.origin", "file", "--prompts.path", "FILE"], 5 * (96 + 32 + 256)),
    (["--prompts.origin", "file", "--prompts.path", "FILE", "--prompts.limit", "2"], 2 * (96 + 32 + 256)),
])
def test_states_are_stored_if_they_fit_nine_tenths_of_the_disk(
    words: list[str], tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "Tell me."}\n' * 5)
    words = [word.replace("FILE", str(file)) for word in words]
    free = -(-tokens * BYTES * 10 // 9)
    for room, taken in ((free, "stored"), (free - 2, "computed")):
        monkeypatch.setattr(shutil, "disk_usage", lambda _folder, room=room: Disk(2**50, 0, room))
        found, reason = choice(tmp_path / "data", *words)
        assert (found, reason.startswith(f"batch.states auto takes {taken}: the states of {tokens:,} tokens would "
                                         "take ")) == (taken, True), reason
    assert choice(tmp_path / "data", *words, "--batch.states_format", "int8")[0] == "stored"


def test_of_finished_data_only_what_is_missing_is_written(copied_run: Path, tiny_target: Target) -> None:
    data, int8 = copied_run / "data", ("--batch.states_format", "int8")
    every = sum(record.tokens for record in Manifest.load(data).shards)
    for words, missing in (((), 0), (("--family", "eagle", "--drafter", "{}"), 0), (int8, every)):
        assert f"the states of {missing:,} tokens would take" in choice(data, *words)[1]
    encode(tiny_target, data, form="int8")
    assert "the states of 0 tokens would take" in choice(data, *int8)[1]


@pytest.mark.parametrize(("words", "reason"), [
    (["--distill.budget_tokens", "null", "--distill.budget_minutes", "1"],
     "nothing limits the answers before they are written, so that the size of their states is not known; set "
     "distill.budget_tokens, or batch.states: stored"),
    (["--family", "medusa2"], "training changes the target, and its states with it"),
    (["--family", "draft_lm", "--drafter", "{}"], "training reads tokens alone"),
])
def test_states_of_no_use_or_of_unknown_size_are_not_stored(words: list[str], reason: str, tmp_path: Path) -> None:
    assert choice(tmp_path, *words) == ("computed", f"batch.states auto takes computed: {reason}")


@pytest.mark.parametrize("policies", ["fastest", "[fastest,static]", "[static+lookup,chain-2]"])
def test_policies_that_an_evaluation_takes_are_accepted(policies: str, tmp_path: Path) -> None:
    recipe = parsed("--out", str(tmp_path), "--evaluate.policies", policies).values
    assert dry_run(recipe, sketch_target(recipe.target)).drafter.family == "medusa"


def chosen(monkeypatch: pytest.MonkeyPatch, choice: str) -> None:
    monkeypatch.setattr(workspace, "choose_states", lambda *_given: (choice, f"auto takes {choice}: by a test"))


@pytest.mark.parametrize("choice", ["stored", "computed"])
def test_a_run_keeps_its_choice_and_is_that_of_the_named_one(
    choice: str, copied_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*words: str) -> Workspace:
        return Workspace(COMMANDS["run"].parse(["--config", "tiny", "--out", str(copied_run), *words]))

    chosen(monkeypatch, choice)
    assert run(*AUTO).batch.states == choice
    assert f"auto takes {choice}: by a test; {copied_run / 'machine.json'} keeps that" in capsys.readouterr().out
    assert json.loads((copied_run / "machine.json").read_text()) == {"states": choice}
    # The machine would choose the other one now.
    chosen(monkeypatch, "computed" if choice == "stored" else "stored")
    auto, named = run(*AUTO), run("--batch.states", choice)
    assert auto.decisive == named.decisive
    assert auto.wanted_states() == named.wanted_states()
    assert bool(auto.wanted_states()) == (choice == "stored")
    assert bool(stored_states(auto)) == (choice == "stored")
    assert provenance(auto, read_result(auto.training), ()) == provenance(named, read_result(auto.training), ())
    module = auto.module()
    assert batch_config(auto, module).states == choice
    assert (held_out_rows(auto, module).whole()[0].final_BLD is not None) == (choice == "stored")
    assert "by a test" not in capsys.readouterr().out


def test_the_plan_says_the_choice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--config", "tiny", "--out", str(tmp_path / "out"), *AUTO]) == 0
    assert "batch.states auto takes stored: the states of 2,800 tokens would take" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_processes_that_train_together_do_not_choose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"batch\.states auto is chosen by draftsmith\.recipes; name stored or"):
        DraftDataModule(tmp_path, BatchConfig(states="auto"))
    for name, value in (("TORCHELASTIC_RUN_ID", "x"), ("RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    given = parsed("--out", str(tmp_path))
    with pytest.raises(UserError, match=r"machine\.json does not say yet what this run takes for batch\.states auto; "
                                        r"run draftsmith distill with this recipe without torchrun"):
        _ = Workspace(given).batch
