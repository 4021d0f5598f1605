"""Compiled losses and flex attention in training have the loss and the gradients of what they replace."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.data.store.collate import Piece, packed
from draftsmith.modules import Features, MedusaConfig, Target, compiler
from draftsmith.modules.compiler import Compiler
from draftsmith.modules.target.attention.flex_segments import FlexAttention
from draftsmith.modules.target.attention.tree_attention import DENSE_LENGTH
from draftsmith.trainers import MedusaModule, MedusaTrainConfig, fit
from draftsmith.trainers.steps.compiled_step import CompiledStep
from support.cycle import CycleData, cycle_target
from support.families import CASES
from support.flex import unfused_flex
from support.summed_gradients import gradients, module_of
from support.tiers import others_long

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
MASKED = ("draft-lm-depths",)
"""Cases whose training pass has a mask of its own."""


@pytest.fixture(autouse=True)
def _fresh_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def shared_rows() -> Features:
    """Conversations that share rows, and padding."""
    def piece(length: int) -> Piece:
        return Piece(tokens_N=torch.randint(4, 90, (length,)), supervised_N=torch.arange(length) >= 2)

    return packed([[piece(12), piece(9)], [piece(7), piece(8), piece(6)]], 24).to("cpu")


class Counted(FlexAttention):
    """Unfused flex attention that counts its calls."""

    calls = 0

    def __init__(self) -> None:
        super().__init__(None)
        attend = self.run

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return attend(*args, **kwargs)

        self.run = counted


@pytest.mark.parametrize("name", others_long(CASES))
def test_flex_attention_trains_every_family_as_masks_do(name: str, tiny_target_f64: Target) -> None:
    """The target's packed rows, and those of a drafter's layers with the keys of earlier draft steps."""
    module, batch = module_of(name, tiny_target_f64), shared_rows()
    loss, wanted = gradients(module, [batch])
    flex = Counted()
    with unfused_flex(), flex.used():
        found, others = gradients(module, [batch])
    torch.testing.assert_close(found, loss)
    assert others.keys() == wanted.keys()
    for key, gradient in wanted.items():
        torch.testing.assert_close(others[key], gradient)
    assert flex.calls > 0 or name in MASKED


def test_a_row_of_any_length_has_no_mask_with_flex_attention(
    tiny_target_f64: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No dense mask is asked for, neither by the target nor by the drafter."""
    module = module_of("eagle3", tiny_target_f64)
    monkeypatch.setattr(Features, "visible", lambda _self: pytest.fail("a mask of all positions was made"))
    with unfused_flex(), FlexAttention(None).used():
        gradients(module, [shared_rows()])
    assert shared_rows().tokens_BL.shape[1] <= DENSE_LENGTH


@pytest.mark.parametrize(("setting", "device", "compiles"), [
    ("auto", CPU, False), ("auto", CUDA, True), (True, CPU, True), (False, CUDA, False),
])
def test_cuda_compiles_unless_it_is_told_not_to(setting: Any, device: torch.device, *, compiles: bool) -> None:
    step = CompiledStep.on(device, setting)
    assert (step.compiler is not None) == compiles
    assert step.refusals == ()


@pytest.mark.filterwarnings("ignore:validation decodes only")
def test_a_run_shows_that_it_compiles_and_ends_as_one_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compiler, "BACKEND", "eager")
    found = {}
    for compiles in (False, True):
        config = MedusaTrainConfig(max_steps=2, warmup_steps=1, validation_nodes=4, drafter=MedusaConfig(num_heads=2),
                                   precision="32-true", accelerator="cpu", compile=compiles)
        module = MedusaModule(cycle_target(), config)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            fit(module, CycleData(), tmp_path / str(compiles))
        found[compiles] = module.trained(), [str(one.message) for one in warned], capsys.readouterr().err
    for name, weight in found[False][0].items():
        torch.testing.assert_close(found[True][0][name], weight)
    assert "compile:" in found[True][2]
    assert "compile:" not in found[False][2]
    assert sum("flex attention does not run here" in one for one in found[True][1]) == 1
    assert not any("train.compile" in one for one in found[False][1])


def test_attention_that_does_not_run_leaves_masks_and_a_warning(tiny_target: Target) -> None:
    """On a CPU, where torch has no gradient of flex attention."""
    step, module = CompiledStep(Compiler("eager")), module_of("eagle3", tiny_target)
    step.try_attention(tiny_target, module.drafter, CPU, torch.float32)
    assert len(step.refusals) == 1
    assert "does not support backward on CPU" in step.refusals[0]
    with pytest.warns(UserWarning, match="is not compiled: flex attention does not run here"):
        step.complain()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step.complain()
    with step.attention():
        loss = module.loss(shared_rows())
    assert float(loss.total.detach()) > 0


def test_heads_of_target_and_drafter_are_tried_out(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = list[Any]()
    monkeypatch.setattr(FlexAttention, "probe", lambda _self, *given: tried.append(given))
    step = CompiledStep(Compiler("eager"))
    step.try_attention(tiny_target, module_of("eagle3-narrow", tiny_target).drafter, CPU, torch.bfloat16)
    assert tried == [({(4, 2, 8, 8), (3, 1, 8, 8)}, CPU, torch.bfloat16)]
    step.try_attention(tiny_target, module_of("draft-lm", tiny_target).drafter, CPU, torch.float32)
    assert (4, 2, 8, 8) in tried.pop()[0]
    CompiledStep(None).try_attention(tiny_target, module_of("medusa", tiny_target).drafter, CPU, torch.float32)
    assert len(tried) == 1
