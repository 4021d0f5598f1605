"""Choice of the checkpoint, times of writing, the progress line, and atomic writing."""

import dataclasses
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.modules import Medusa, MedusaConfig, Target, UserError
from draftsmith.trainers import draft_module, fit, fitting, train_config
from draftsmith.trainers.checkpoints import load_weights, save_weights
from safetensors.torch import load_file
from support.cases import CycleData, cycle_target, interrupted

SETTINGS = train_config(Medusa)(max_steps=7, lr=1e-2, warmup_steps=1, validate_every=2, validation_nodes=4,
                             checkpoint_every=3, drafter=MedusaConfig(num_heads=2), precision="32-true",
                             accelerator="cpu")


@dataclasses.dataclass
class Told:
    accepted_length: float
    by_position: tuple[float, ...] = (0.5,)
    tokens: int = 2000


@pytest.fixture(scope="module")
def target() -> Target:
    return cycle_target()


def scripted(monkeypatch: pytest.MonkeyPatch, lengths: list[float], **changes: Any) -> list[dict[str, torch.Tensor]]:
    """Replace validation by these lengths in order; the validated weights are collected."""
    seen: list[dict[str, torch.Tensor]] = []

    def held_out_acceptance(drafter: Any, rows: Any, nodes: int, _processes: Any) -> Told:
        assert nodes == SETTINGS.validation_nodes
        assert all(row.final_BLD is not None for row in rows)
        seen.append({name: tensor.clone() for name, tensor in drafter.state_dict().items()})
        return Told(lengths[len(seen) - 1], **changes)

    monkeypatch.setattr(fitting, "held_out_acceptance", held_out_acceptance)
    return seen


def test_the_greatest_accepted_length_wins_and_a_tie_goes_to_the_earlier(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = scripted(monkeypatch, [1.0, 1.1, 1.4, 1.4, 1.2])
    module = draft_module(Medusa)(target, SETTINGS)
    result = fit(module, CycleData(), tmp_path, progress=False)
    assert len(seen) == 5, "before the first step, after steps 2, 4, 6, and after the last one"
    assert (result.step, result.accepted_length, result.steps) == (4, 1.4, 7)
    assert result.curve[0].accepted_length == 1.0
    assert all(torch.equal(tensor, draft_module(Medusa)(target, SETTINGS).build_drafter().state_dict()[name])
               for name, tensor in seen[0].items())
    for found in (load_file(result.checkpoint), module.drafter.state_dict()):
        assert all(torch.equal(found[name], tensor) for name, tensor in seen[2].items())
    assert not all(torch.equal(seen[3][name], tensor) for name, tensor in seen[2].items())


def test_the_best_so_far_survives_an_interruption(target: Target, tmp_path: Path,
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, [1.0, 1.1, 1.4, 1.3])
    with interrupted(draft_module(Medusa), 6):
        fit(draft_module(Medusa)(target, SETTINGS), CycleData(), tmp_path, progress=False)
    seen = scripted(monkeypatch, [1.4, 1.3, 1.2])
    result = fit(draft_module(Medusa)(target, SETTINGS), CycleData(), tmp_path, progress=False)
    # The checkpoint of step 6 has the measurements of 2, 4 and 6; only the last step is left.
    assert len(seen) == 1
    assert (result.step, result.accepted_length) == (4, 1.4)


def test_a_run_interrupted_three_times_has_the_curve_of_one_that_was_not(target: Target, tmp_path: Path) -> None:
    """Killed after a measurement that no checkpoint holds, and between two measurements: no step counts twice."""
    whole = fit(draft_module(Medusa)(target, SETTINGS), CycleData(), tmp_path / "whole", progress=False)
    assert [one.step for one in whole.curve] == [0, 2, 4, 6, 7]
    assert whole.curve[0].loss is None
    labels = [one.labels for one in whole.curve]
    assert labels == sorted(set(labels))
    assert whole.accepted_length == max(one.accepted_length for one in whole.curve[1:])
    assert all(0 <= one.accuracy <= 1 <= one.expected_accepted_length for one in whole.curve[1:])
    for last in (4, 5, 6):
        with interrupted(draft_module(Medusa), last):
            fit(draft_module(Medusa)(target, SETTINGS), CycleData(), tmp_path / "parts", progress=False)
    parts = fit(draft_module(Medusa)(target, SETTINGS), CycleData(), tmp_path / "parts", progress=False)
    assert parts.curve == whole.curve


def test_few_held_out_tokens_give_one_warning(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, [1.0, 1.1, 1.2, 1.3, 1.4], tokens=999)
    with pytest.warns(UserWarning, match="decodes only 999 tokens") as told:
        fit(draft_module(Medusa)(target, SETTINGS), CycleData(), tmp_path, progress=False)
    assert len([one for one in told if "decodes only" in str(one.message)]) == 1


def test_a_run_shows_one_tidy_line(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                   capfd: pytest.CaptureFixture[str]) -> None:
    scripted(monkeypatch, [1.0, 1.1, 1.4, 1.4, 1.2])
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "200")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(draft_module(Medusa)(target, SETTINGS), CycleData(), tmp_path, progress=True)
    out, line = capfd.readouterr()
    assert out == ""
    assert line.count("\n") == 1
    final = line.rstrip("\n").rsplit("\r", 1)[-1]
    assert re.match(r"train: 7 of 7 step in \d+:\d\d, 0:00 left, .*step.*, loss \d.*, accepted 1\.20", final), final


def test_weights_are_written_as_the_same_bytes_and_damage_is_reported(tmp_path: Path) -> None:
    module = torch.nn.Linear(4, 4)
    first, second = (save_weights(tmp_path / name, module.state_dict()) for name in ("a", "b"))
    assert first == second
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert load_weights(tmp_path / "a", first).keys() == module.state_dict().keys()
    (tmp_path / "b").write_bytes((tmp_path / "b").read_bytes()[:-1] + b"?")
    for name, reason in (("b", "they are not the ones that training saved"), ("missing", "No such file")):
        with pytest.raises(UserError, match=rf"cannot be read \(.*{reason}.* train again"):
            load_weights(tmp_path / name, first)
