"""Several processes train the same weights as one, each with the drafter, with a part of its weights, or with a part of
the target; a run is resumed by any number of them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.modules import Medusa, Target, TargetConfig, UserError, load_target, processes
from draftsmith.modules.target.loading.tiny_model import tiny_tokenizer
from draftsmith.trainers import FitResult, Medusa2Module, Medusa2TrainConfig, train_config
from draftsmith.trainers.fitting import require_devices
from draftsmith.trainers.train_config import ZERO_STAGES
from references.placed_target import Found, show, train
from safetensors.torch import load_file
from support.processes import python, torchrun
from transformers import MistralConfig, MistralForCausalLM


def checkpoint(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(out / "last.ckpt", weights_only=True)
    return found


TOGETHER = Path(__file__).resolve().parents[1] / "references" / "distributed_fit.py"


def trained_together(out: Path, accumulate: int, processes: int, *more: str) -> list[str]:
    """Output of each process."""
    command = [str(TOGETHER), str(out), str(accumulate), *more]
    answer = torchrun(processes, *command) if processes > 1 else python(*command)
    assert answer.returncode == 0, answer.stderr[-3000:]
    assert answer.stdout.count("joined at the end: False.") == processes, "Python may abort with them joined"
    # Two processes write to one pipe: their lines may be joined.
    return re.findall(r"step \d+, accepted length \d+\.\d{6}, \d+ steps", answer.stdout)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.long
def test_two_processes_equal_one_that_accumulates(tmp_path: Path) -> None:
    """The micro-batches are the same, two at a time here and one after another there; their label counts differ."""
    alone = trained_together(tmp_path / "one", 4, 1)
    together = trained_together(tmp_path / "two", 2, 2)
    stored = [checkpoint(tmp_path / name) for name in ("one", "two")]
    assert stored[0]["global_step"] == stored[1]["global_step"] == 6
    for name, tensor in stored[0]["state_dict"].items():
        torch.testing.assert_close(stored[1]["state_dict"][name], tensor, atol=2e-5, rtol=1e-4)
    assert (len(alone), len(together)) == (1, 2)
    assert len({*alone, *together}) == 1, f"every process knows the same best step: {alone} {together}"


@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.slow
def test_two_processes_end_by_time_at_the_same_step(tmp_path: Path) -> None:
    """Their clocks differ by days; if each used its own, one would wait for the other forever."""
    told = trained_together(tmp_path, 1, 2, "0.02")
    steps = checkpoint(tmp_path)["global_step"]
    assert len(told) == 2
    assert len(set(told)) == 1
    assert told[0].endswith(f" {steps} steps")
    assert steps > 2


@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.slow
def test_a_signal_to_one_process_ends_all_after_the_same_step(tmp_path: Path) -> None:
    """The others would wait for it forever, or end without a checkpoint."""
    assert not trained_together(tmp_path, 1, 2, "1", "signalled"), "a process told a result although it was stopped"
    assert checkpoint(tmp_path)["global_step"] == 3


SCRIPT = Path(__file__).resolve().parents[1] / "references" / "split_fit.py"
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
    one, other = (checkpoint(out / name) for out in (found, expected))
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
    alone = checkpoint(tmp_path / "alone" / "eagle3")["optimizer_states"][0]["state"]
    for stage in (1, 3):
        found = checkpoint(tmp_path / "zero" / f"deepspeed_stage_{stage}" / "eagle3")["optimizer_states"][0]["state"]
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
    assert checkpoint(tmp_path / "eagle3")["global_step"] == 4
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


PLACED = Path(__file__).resolve().parents[1] / "references" / "placed_target.py"
STATE_BOUND = 2e-5  # Largest difference of two states of size 1 in float32: products are summed in another order


@dataclass(frozen=True)
class Case:
    """A divided target, and what the same target computes and trains in one process."""

    placement: str
    offload: bool
    strategy: str
    processes: int
    folder: Path
    found: Found
    result: FitResult
    checkpoint: dict[str, Any]


@pytest.fixture(scope="module", params=[
    ("fully_sharded", "ddp", 2, True), ("tensor_parallel", "ddp", 4, False),
    ("zero3", "deepspeed_stage_3", 2, False),
    ("zero3 offload", "ddp", 2, True),
], ids=lambda given: "-".join(given[:2]))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A random model, its output layer tied to the embedding or not, with a sliding window: the check at load then
    reads an excerpt of it."""
    named, strategy, processes, tied = request.param
    placement, *offload = named.split()
    folder, out = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("alone")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = MistralForCausalLM(MistralConfig(
            vocab_size=len(tiny_tokenizer()), hidden_size=32, intermediate_size=64, num_hidden_layers=6,
            num_attention_heads=4, num_key_value_heads=2, sliding_window=16, max_position_embeddings=256,
            initializer_range=0.2, tie_word_embeddings=tied, pad_token_id=0, bos_token_id=1, eos_token_id=2))
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    target = load_target(TargetConfig(name=str(folder), device="cpu", pack=0))
    result = train(target, out, world=1)
    return Case(placement, bool(offload), strategy, processes, folder, show(target, list(range(processes))), result,
                checkpoint(out))


@pytest.mark.long
@pytest.mark.distributed
def test_a_divided_target_is_the_whole_one(case: Case, tmp_path: Path) -> None:
    """Each process reads rows of its own, of other shapes. Two processes hold a target: four of them hold two."""
    answer = torchrun(case.processes, str(PLACED), str(case.folder), case.placement, "2",
                      "offload" if case.offload else "keep", case.strategy, str(tmp_path))
    assert answer.returncode == 0, answer.stderr[-4000:]
    alone = case.found
    assert max(max(passes) for passes in alone.emitted) > 1, "no draft is accepted: nothing would be compared"
    for rank in range(case.processes):
        one = torch.load(tmp_path / f"process{rank}.pt", weights_only=True)
        for state, expected in zip(one["states"][rank], alone.states[rank], strict=True):
            torch.testing.assert_close(state, expected, atol=STATE_BOUND, rtol=STATE_BOUND)
        torch.testing.assert_close(one["sums"][rank], alone.sums[rank], atol=1e-4, rtol=1e-4)
        assert (one["answers"], one["emitted"]) == (alone.answers, alone.emitted)
        assert one["layer_bytes"] <= 0.55 * alone.layer_bytes
        assert (one["weights_hash"], one["architecture"]) == (alone.weights_hash, alone.architecture)
        assert (one["step"], one["accepted_length"], one["by_position"]) == (
            case.result.step, case.result.accepted_length, case.result.by_position)
    stored = checkpoint(tmp_path)
    assert stored["global_step"] == case.checkpoint["global_step"] == 4
    assert stored["state_dict"].keys() == case.checkpoint["state_dict"].keys()
    for name, tensor in case.checkpoint["state_dict"].items():
        torch.testing.assert_close(stored["state_dict"][name], tensor, atol=2e-4, rtol=1e-3)
