"""A drafter whose weights are split among processes trains what a whole one does, and is resumed as any other."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.modules import Medusa, Target, UserError, processes
from draftsmith.trainers import Medusa2Module, Medusa2TrainConfig, train_config
from draftsmith.trainers.fitting import require_devices
from draftsmith.trainers.train_config import ZERO_STAGES
from safetensors.torch import load_file
from support.processes import python, torchrun

SCRIPT = Path(__file__).resolve().parents[2] / "references" / "split_fit.py"
NAMES = ("medusa-copy", "hydra++", "eagle-fspad-reduced", "eagle3", "falcon", "kangaroo-reduced", "prompt-tokens",
         "hidden-transfer", "draft-lm-reduced", "draft-lm-depths")
"""A case of each family; of draft language models one with a frozen embedding and one with tied weights."""
FEW = ("medusa-copy", "eagle3")
"""One family without clipping and one with it, so that a gradient of another size shows: ZeRO's stages 1 and 2 leave
the weights whole, whatever their family."""
BOUND = 2e-5
"""Largest difference of two trained weights: after six steps at a rate of 0.01 gradients that were added up in another
order have changed none of a size of 1 by more."""


def run(out: Path, strategy: str, accumulate: int, processes: int, *more: str) -> str:
    """Output of a training, or of several."""
    command = [str(SCRIPT), str(out), strategy, str(accumulate), *more]
    answer = torchrun(processes, *command) if processes > 1 else python(*command)
    assert answer.returncode == 0, answer.stderr[-4000:]
    return answer.stdout


def checkpoint(out: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(out / name / "last.ckpt", weights_only=True)
    return found


def same(found: Any, expected: Any, path: str = "") -> None:
    """Equal structures, their tensors whole and within the bound."""
    if isinstance(expected, torch.Tensor):
        assert type(found) is torch.Tensor, path
        torch.testing.assert_close(found, expected, atol=BOUND, rtol=1e-4, msg=lambda said: f"{path}: {said}")
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), path
        for key in expected:
            same(found[key], expected[key], f"{path}/{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), path
        for place, (one, other) in enumerate(zip(found, expected, strict=True)):
            same(one, other, f"{path}/{place}")
    else:
        assert found == pytest.approx(expected), path


def same_training(found: Path, expected: Path, name: str) -> None:
    """The weights, the optimizer's states, the rates and the best weights of two trainings agree."""
    one, other = checkpoint(found, name), checkpoint(expected, name)
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "global_step"):
        same(one[part], other[part], f"{name}/{part}")
    best = [load_file(out / name / "best.safetensors") for out in (found, expected)]
    same(*best, f"{name}/best")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trainings of all families in one process, of four micro-batches a step."""
    out = tmp_path_factory.mktemp("alone")
    run(out, "auto", 4, 1, *NAMES)
    return out


SHARES = {"deepspeed_stage_1": (2.5 / 4, 1), "deepspeed_stage_2": (2.5 / 4, 0), "deepspeed_stage_3": (2 / 4, 0)}
"""Shares of each of two processes: of a weight, its copy in the optimizer's vector under ZeRO and its two moments, out
of four; and of gradients between the last micro-batch and the step, as those of weights."""


def check_strategies(alone: Path, out: Path, strategies: Sequence[str], names: Sequence[str]) -> None:
    """The trainings of two processes by each strategy are those of one process; each process holds its share."""
    said = run(out, ",".join(strategies), 2, 2, *names)
    told = re.findall(r"(\S+): rank \d: (step .*? weights), (\d+) numbers held, (\d+) of gradients", said)
    assert len(told) == 2 * len(strategies) * len(names)
    for strategy in strategies:
        for name in names:
            # The script makes no folder for one strategy alone.
            same_training(out / strategy if len(strategies) > 1 else out, alone, name)
    for name, result in {(name, result) for name, result, *_ in told}:
        # Every process knows the same result.
        assert sum((name, result) == one[:2] for one in told) % 2 == 0, (name, result)
    for place, (name, result, held, gradients) in enumerate(told):
        strategy = strategies[place // (2 * len(names))]
        share, kept = SHARES[strategy]
        weights = int(result.split()[-2])
        # Vectors are filled up to equal parts, and rows that do not divide leave one process a little more.
        assert int(held) <= 4 * weights * share + 0.1 * weights + 200, (strategy, name, held, weights)
        assert int(gradients) <= (kept and kept * weights + 200), (strategy, name, gradients, weights)


@pytest.mark.distributed
@pytest.mark.long
@pytest.mark.parametrize(("strategies", "names"), [
    (("deepspeed_stage_3",), NAMES), (("deepspeed_stage_1", "deepspeed_stage_2"), FEW)],
    ids=["split weights", "whole weights"])
def test_every_family_is_trained_by_every_strategy(strategies: tuple[str, ...], names: tuple[str, ...], alone: Path,
                                                   tmp_path: Path) -> None:
    """Families with trained output layers, layers applied several times, reduced vocabularies, virtual nodes."""
    check_strategies(alone, tmp_path, strategies, names)


@pytest.mark.distributed
@pytest.mark.long
@pytest.mark.parametrize("stage", [2, 3])
def test_zero_leaves_out_no_step_in_silence(stage: int, tmp_path: Path) -> None:
    answer = torchrun(2, str(SCRIPT), str(tmp_path), f"deepspeed_stage_{stage}", "2", "eagle3", "--overflow", "2")
    assert answer.returncode != 0
    assert "the gradient is not finite at optimizer step 2; lower lr (now 0.01) and train again" in answer.stderr


@pytest.mark.distributed
@pytest.mark.long
def test_the_gradient_of_zero_in_mixed_precision_is_that_of_one_process(tmp_path: Path) -> None:
    """Of one step: bfloat16 turns the last digits of its weights into other roundings of the next one."""
    more = ("eagle3", "--precision", "bf16-mixed", "--steps", "1")
    run(tmp_path / "alone", "auto", 4, 1, *more)
    run(tmp_path / "zero", "deepspeed_stage_1,deepspeed_stage_3", 2, 2, *more)
    alone = checkpoint(tmp_path / "alone", "eagle3")["optimizer_states"][0]["state"]
    for stage in (1, 3):
        found = checkpoint(tmp_path / "zero" / f"deepspeed_stage_{stage}", "eagle3")["optimizer_states"][0]["state"]
        assert found.keys() == alone.keys()
        for number, state in alone.items():
            moment = state["exp_avg"]
            assert float((found[number]["exp_avg"] - moment).norm()) <= 1e-5 * float(moment.norm()), (stage, number)
        assert any(bool(state["exp_avg"].any()) for state in alone.values())


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [
    pytest.param(("deepspeed_stage_1", 2, 2), ("auto", 4, 1), marks=pytest.mark.long),
    pytest.param(("deepspeed_stage_3", 2, 2), ("deepspeed_stage_2", 1, 4), marks=pytest.mark.long),
], ids=lambda given: given[0])
def test_a_run_is_resumed_by_another_strategy_and_number_of_processes(
    first: tuple[str, int, int], then: tuple[str, int, int], alone: Path, tmp_path: Path
) -> None:
    """It ends amid its fourth step, after a checkpoint that a signal asked for. The optimizer has two groups."""
    run(tmp_path, *first, "eagle3", "--end", "4")
    assert checkpoint(tmp_path, "eagle3")["global_step"] == 4
    run(tmp_path, *then, "eagle3")
    same_training(tmp_path, alone, "eagle3")


@pytest.mark.parametrize("strategy", ZERO_STAGES)
def test_a_changed_target_is_not_split(strategy: str, tiny_target: Target) -> None:
    with pytest.raises(UserError, match=rf"train\.strategy {strategy} splits the drafter's weights or their op.*, and "
                                        r"Medusa2Module trains weights of the target too; set train\.strategy: ddp"):
        Medusa2Module(tiny_target, Medusa2TrainConfig(strategy=strategy))


@pytest.mark.parametrize("stage", [1, 3])
def test_zero_does_not_step_pieces_of_a_matrix_with_muon(stage: int) -> None:
    with pytest.raises(UserError, match=rf"muon orthogonalises whole matrices, and train\.strategy deepspeed_stage_"
                                        rf"{stage} steps pieces .* train\.optimizer: adamw, or train\.strategy: ddp"):
        require_devices(train_config(Medusa)(strategy=f"deepspeed_stage_{stage}", optimizer="muon", accelerator="cpu"))


def test_zero_without_deepspeed_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"train\.strategy deepspeed_stage_2 needs DeepSpeed, which is not installed; "
                                        r"run pip install 'draftsmith\[deepspeed\]', or set train\.strategy: ddp"):
        require_devices(train_config(Medusa)(strategy="deepspeed_stage_2", accelerator="cpu"))


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp", "fsdp_cpu_offload", "deepspeed_stage_2_offload", "deepspeed",
                                      "ddp_spawn", "ddp_find_unused_parameters_true", "single_device", ""])
def test_strategies_that_would_learn_something_else_are_refused(strategy: str) -> None:
    with pytest.raises(UserError, match=r"train\.strategy must be one of auto, ddp, deepspeed_stage_1, .*got '"):
        require_devices(train_config(Medusa)(strategy=strategy, accelerator="cpu"))
