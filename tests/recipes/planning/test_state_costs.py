"""`batch.states: auto` takes what is predicted to be cheaper, says why, and keeps it for the whole run."""

import json
import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from draftsmith.data import Manifest, PromptConfig, encode
from draftsmith.data.batches.datamodule import BatchConfig, DraftDataModule
from draftsmith.modules import Target, UserError
from draftsmith.modules.target.loading.loading import sketch_target
from draftsmith.recipes.__main__ import main
from draftsmith.recipes.commands.pipeline import COMMANDS, batches_for, provenance, stored_states
from draftsmith.recipes.planning import state_costs
from draftsmith.recipes.planning.device_rates import DiskRates, Rates
from draftsmith.recipes.planning.dry_run import dry_run
from draftsmith.recipes.planning.state_costs import (
    DeviceRates,
    StateCosts,
    choose_states,
    data_amount,
    expected_answers,
)
from draftsmith.recipes.reading.parsing import Parsed
from draftsmith.recipes.stages import workspace
from draftsmith.recipes.stages.training_folder import read_result
from draftsmith.recipes.stages.workspace import Workspace

AUTO = ("--batch.states", "auto")
RATES = Rates(flops=1e12, bandwidth=1e11, origin="as stated")
DISK = DiskRates(write=1e8, read=4e8)
COSTS = StateCosts(tokens=1000, passes=3.0, reading=50.0, unread=0.0, size=4 * 10**9, kept=4 * 10**9, free=10**12,
                   disk=DISK)
Disk = namedtuple("Disk", "total used free")


def parsed(*words: str) -> Parsed[Any]:
    return COMMANDS["run"].parse(["--config", "tiny", *AUTO, *words])


def test_costs_written_out() -> None:
    assert COSTS.stored == pytest.approx(40 + 3 * 10)
    assert COSTS.computed == pytest.approx(150)
    assert COSTS.choice == "stored"
    assert replace(COSTS, readers=3).choice == "computed", "three processes compute at once, one writes"
    assert replace(COSTS, unread=1.0).stored == pytest.approx(50 + 40 + 30)
    assert replace(COSTS, size=0).stored == pytest.approx(30), "states that are there already are only read"
    assert replace(COSTS, passes=0.5).choice == "computed"


@pytest.mark.parametrize(("changes", "message"), [
    ({}, "auto takes stored: for 3 passes over 1,000 tokens it is predicted to take 70 s to write 3.7 GiB of states "
         "and to read them, and 2.5 min to compute them in every step (disk: 100 MB/s written, 400 MB/s read, "
         "931.3 GiB free)"),
    ({"passes": 0.25}, "auto takes computed: for 0.25 passes over 1,000 tokens it is predicted to take 42 s to write"),
    ({"free": 4 * 10**9}, "auto takes computed: stored states of 1,000 tokens would take 3.7 GiB, and the disk has "
                          "3.7 GiB free"),
])
def test_the_reason_is_said(changes: dict[str, Any], message: str) -> None:
    assert f"batch.states {message}" in replace(COSTS, **changes).sentence


def test_costs_follow_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DiskRates, "measured", lambda _folder: DISK)
    found: list[StateCosts] = []
    original = state_costs.state_costs

    def kept(*given: Any) -> StateCosts:
        found.append(original(*given))
        return found[-1]

    monkeypatch.setattr(state_costs, "state_costs", kept)
    for words in ([], ["--train.max_steps", "60"], ["--distill.budget_tokens", "2400"],
                  ["--batch.states_format", "int8"], ["--train.accumulate", "2"]):
        choose_states(parsed("--out", str(tmp_path), *words).values, tmp_path / "data", RATES)
    once, longer, more, bytewise, accumulated = found
    assert longer.computed == pytest.approx(2 * once.computed)
    assert longer.stored < 2 * once.stored
    assert accumulated.passes == pytest.approx(2 * once.passes)
    assert (more.size, more.passes) == (2 * once.size, pytest.approx(once.passes / 2))
    assert more.computed == pytest.approx(once.computed)
    assert bytewise.size == once.size * (32 + 4) // (32 * 4)
    # 30 steps of 4 rows of 128 tokens; a prompt of up to 96 tokens and the template's with answers of up to 96.
    assert once.tokens == 1200 * (96 + 32 + 96) // 96
    assert once.passes == pytest.approx(30 * 4 * 128 / once.tokens)
    assert once.unread == 0.0


def test_answers_are_counted_by_the_nearest_limit(tmp_path: Path) -> None:
    device, file = DeviceRates(RATES, False), tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "Tell me."}\n' * 5)
    recipe = parsed("--out", str(tmp_path)).values
    endless = replace(recipe, distill=replace(recipe.distill, budget_tokens=None))
    from_file = replace(endless, prompts=PromptConfig(origin="file", path=str(file)))
    assert expected_answers(recipe, device) == 1200
    assert expected_answers(endless, device) is None
    assert expected_answers(from_file, device) == 5 * 96
    assert expected_answers(replace(from_file, prompts=replace(from_file.prompts, limit=3)), device) == 3 * 96
    minutes, twice = (expected_answers(replace(endless, distill=replace(endless.distill, budget_minutes=limit)), device)
                      for limit in (0.01, 0.02))
    assert minutes is not None
    assert minutes > 0
    assert twice == pytest.approx(2 * minutes)


def test_of_finished_data_only_what_is_missing_is_written(copied_run: Path, tiny_target: Target) -> None:
    data, device = copied_run / "data", DeviceRates(RATES, False)
    every = sum(record.tokens for record in Manifest.load(data).shards)
    for words, missing in (([], 0), (["--family", "eagle", "--drafter", "{}"], 0),
                           (["--batch.states_format", "int8"], every)):
        recipe = parsed("--out", str(copied_run), *words).values
        sketch = sketch_target(recipe.target)
        found = data_amount(recipe, sketch, dry_run(recipe, sketch), data, device)
        assert found is not None
        assert (found.tokens, found.missing, found.unread) == (every, missing, missing)
    encode(tiny_target, data, form="int8", progress=False)
    recipe = parsed("--out", str(copied_run), "--batch.states_format", "int8").values
    sketch = sketch_target(recipe.target)
    found = data_amount(recipe, sketch, dry_run(recipe, sketch), data, device)
    assert found is not None
    assert found.missing == 0


@pytest.mark.parametrize(("words", "reason"), [
    (["--family", "medusa2"], "training changes the target, and its states with it"),
    (["--family", "draft_lm", "--drafter", "{}"], "training reads tokens alone"),
])
def test_states_that_no_training_can_read_are_not_stored(words: list[str], reason: str, tmp_path: Path) -> None:
    assert choose_states(parsed("--out", str(tmp_path), *words).values, tmp_path, RATES) == (
        "computed", f"batch.states auto takes computed: {reason}")


def test_a_disk_without_room_and_unlimited_answers_mean_computed(tmp_path: Path,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _folder: Disk(2**50, 0, 1000))
    monkeypatch.setattr(DiskRates, "measured", lambda _folder: DISK)
    choice, reason = choose_states(parsed("--out", str(tmp_path)).values, tmp_path / "data", RATES)
    assert choice == "computed"
    assert "would take" in reason
    assert "the disk has 1.0 KiB free" in reason
    recipe = parsed("--out", str(tmp_path)).values
    endless = replace(recipe, distill=replace(recipe.distill, budget_tokens=None))
    assert "set distill.budget_tokens, or batch.states: stored" in choose_states(endless, tmp_path / "data", RATES)[1]


def chosen(monkeypatch: pytest.MonkeyPatch, choice: str) -> None:
    monkeypatch.setattr(workspace, "choose_states", lambda *_given: (choice, f"auto takes {choice}: by a test"))


@pytest.mark.parametrize("choice", ["stored", "computed"])
def test_a_run_keeps_its_choice_and_is_that_of_the_named_one(
    choice: str, copied_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*words: str) -> Workspace:
        given = COMMANDS["run"].parse(["--config", "tiny", "--out", str(copied_run), *words])
        return Workspace(given.values, given.settings)

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
    data = batches_for(auto, auto.module())
    assert (data.micro_batch(0).final_BLD is not None) == (choice == "stored")
    assert "by a test" not in capsys.readouterr().out


def test_the_plan_says_the_choice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--config", "tiny", "--out", str(tmp_path / "out"), *AUTO]) == 0
    said = capsys.readouterr().out
    assert "batch.states auto takes " in said
    assert "passes over 2,800 tokens it is predicted to take" in said
    assert not (tmp_path / "out").exists()


def test_processes_that_train_together_do_not_choose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"batch\.states auto is chosen by draftsmith\.recipes; name stored or"):
        DraftDataModule(tmp_path, BatchConfig(states="auto"))
    for name, value in (("TORCHELASTIC_RUN_ID", "x"), ("RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    given = parsed("--out", str(tmp_path))
    with pytest.raises(UserError, match=r"machine\.json does not say yet what this run takes for batch\.states auto; "
                                        r"run draftsmith distill with this recipe without torchrun"):
        _ = Workspace(given.values, given.settings).batch


def test_a_disk_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    found = DiskRates.measured(tmp_path)
    assert found.write > 1e5
    assert found.read > 1e5
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match=r"cannot write to \S+gone to measure its disk: No such file .*; choose"):
        DiskRates.measured(tmp_path / "gone")
