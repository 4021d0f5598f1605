"""Falcon's dropout in training."""

from typing import Any

import pytest
import torch
from draftsmith.modules import FalconConfig, Features, Target, UserError
from draftsmith.trainers import FalconModule, FalconTrainConfig
from support.families import randomised

SEGMENTS = torch.tensor([[0] * 9 + [1] * 7, [0] * 14 + [-1] * 2])


def features(target: Target) -> Features:
    positions = torch.tensor([[row[:place].count(segment) for place, segment in enumerate(row)]
                              for row in SEGMENTS.tolist()])
    tokens = torch.randint(4, target.vocab_size, SEGMENTS.shape, generator=torch.Generator().manual_seed(1))
    return target.encode(Features(tokens_BL=tokens, segments_BL=SEGMENTS, positions_BL=positions,
                                  supervised_BL=(SEGMENTS >= 0) & (positions > 1)))


def module(target: Target, **changes: Any) -> FalconModule:
    made = FalconModule(target, FalconTrainConfig(max_steps=4, **changes))
    made.configure_model()
    made.drafter.to(target.dtype)
    return made.train()


def test_dropout_is_between_the_recurrent_layers_in_training(tiny_target_f64: Target) -> None:
    made = module(tiny_target_f64, drafter=FalconConfig(dropout=0.5))
    # A new drafter's last recurrent layer gives zeros, dropped or not.
    lstm, batch = randomised(made.drafter).train().lstm, features(tiny_target_f64)
    read = torch.randn(2, 16, 2 * tiny_target_f64.hidden_size, dtype=torch.float64)
    first, second = (lstm(read, lstm.zero_memory(2))[0] for _ in range(2))
    assert torch.equal(first[0], second[0]), "the input of the first layer is whole"
    assert not torch.equal(first[1], second[1])
    made.eval()
    first, second = (lstm(read, lstm.zero_memory(2))[0] for _ in range(2))
    assert torch.equal(first, second)
    assert bool(torch.isfinite(made.loss(batch).total))
    with pytest.raises(UserError, match=r"dropout must be below 1, got 1\.0; lower it"):
        FalconConfig(dropout=1.0)
