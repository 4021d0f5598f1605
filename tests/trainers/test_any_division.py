"""The loss and the gradient of an optimizer step do not depend on how its conversations are divided: over rows, packed
or padded, over micro-batches, and over processes. One process stands for several; `test_distributed.py` starts two."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draftsmith.data.store.collate import Piece, packed, pad
from draftsmith.modules import Features, Medusa, Target, UserError
from draftsmith.trainers import DraftModule, draft_module, train_config
from support.cases import gradients, module_of
from support.families import CASES
from support.tiers import others_long
from torch import Tensor

LENGTHS = (16, 9, 12, 21, 8, 10)
Step = tuple[Tensor, dict[str, Tensor]]


def conversations(target: Target) -> list[Piece]:
    """Conversations of other lengths and other shares of labels; one is a window that starts amid its conversation."""
    made = torch.Generator().manual_seed(2)
    return [Piece(tokens_N=torch.randint(4, target.vocab_size, (length,), generator=made),
                  supervised_N=torch.arange(length) % (3 + place) > 1, first=5 if place == 1 else 0)
            for place, length in enumerate(LENGTHS)]


def equal(found: Step, expected: Step) -> None:
    """Both to nine digits; gradients relative to the largest of all, as what clipping sees."""
    torch.testing.assert_close(found[0], expected[0], atol=1e-9, rtol=1e-9)
    assert found[1].keys() == expected[1].keys()
    largest = max(float(gradient.abs().max()) for gradient in expected[1].values())
    for name, gradient in expected[1].items():
        torch.testing.assert_close(found[1][name], gradient, atol=1e-9 * max(1.0, largest), rtol=1e-9)


@pytest.mark.parametrize("name", others_long(CASES))
def test_rows_and_micro_batches_change_nothing(name: str, tiny_target_f64: Target) -> None:
    module, pieces = module_of(CASES[name], tiny_target_f64, training=False), conversations(tiny_target_f64)
    a, b, c, d, e, f = pieces
    expected = gradients(module, [pad(pieces)])
    equal(gradients(module, [pad([piece]) for piece in pieces]), expected)
    equal(gradients(module, [packed([[f, b, d], [e, a, c]], 48).to("cpu")]), expected)
    equal(gradients(module, [packed([[a, b, c, d, e, f]]).to("cpu")]), expected)
    equal(gradients(module, [packed([[d], [a, e]], 40).to("cpu"), packed([[c, f, b]], 32).to("cpu")]), expected)


def test_random_numbers_of_a_micro_batch_do_not_depend_on_the_processes() -> None:
    """Dropout and noise of global micro-batch 12 are the same whether one, two or three processes train."""
    drawn = []
    for world in (1, 2, 3):
        module = SimpleNamespace(config=SimpleNamespace(seed=7), trainer=SimpleNamespace(world_size=world),
                                 global_rank=12 % world)
        DraftModule.on_train_batch_start(module, Features.from_rows([([1], [True])]), 12 // world)
        drawn.append(torch.rand(3).tolist())
    assert drawn[0] == drawn[1] == drawn[2]


def test_a_run_is_resumed_by_any_processes_that_read_as_many_micro_batches(tiny_target: Target) -> None:
    """With as many the steps hold the same conversations, and the next micro-batch is counted as these processes read
    them; with others they would not."""
    def module(devices: int, accumulate: int, strategy: str = "ddp") -> DraftModule:
        made = draft_module(Medusa)(tiny_target, train_config(Medusa)(
            devices=devices, strategy=strategy, accumulate=accumulate))
        made.configure_model()
        return made

    read = {"ready": 24, "started": 24, "processed": 24, "completed": 23}
    loops = {"fit_loop": {"epoch_loop.batch_progress": {"total": dict(read), "current": dict(read)}}}
    checkpoint: dict[str, Any] = {"global_step": 12, "loops": loops, "state_dict": module(2, 2).state_dict()}
    module(2, 2).on_save_checkpoint(checkpoint)
    with pytest.raises(UserError, match=r"other settings \(config.accumulate \* devices \* num_nodes is 8, was 4\); "
                                        "choose another --out folder"):
        module(4, 2).on_load_checkpoint(checkpoint)
    assert loops["fit_loop"]["epoch_loop.batch_progress"]["total"] == read
    module(1, 4, "auto").on_load_checkpoint(checkpoint)
    expected = {"ready": 48, "started": 48, "processed": 48, "completed": 47}
    assert loops["fit_loop"]["epoch_loop.batch_progress"] == {"total": expected, "current": expected}
    module(4, 1, "deepspeed_stage_1").on_load_checkpoint(checkpoint)
    assert loops["fit_loop"]["epoch_loop.batch_progress"]["current"]["ready"] == 12
