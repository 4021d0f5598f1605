"""Falcon's training of the official code: inputs replaced by true later ones, a share of hard labels, dropout."""

from typing import Any

import pytest
import torch
from draftsmith.modules import FalconConfig, Features, Target, UserError
from draftsmith.modules.drafters.parts.segment_steps import SegmentSteps
from draftsmith.trainers import FalconModule, FalconTrainConfig
from draftsmith.trainers.losses.objectives import Objective, hard, soft, teacher_output_of
from torch import Tensor

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


def reads(made: FalconModule, batch: Features, glanced_BL: Tensor | None) -> Tensor:
    """Inputs of the recurrent network, [B, L, 2 D]."""
    found: list[Tensor] = []
    first = made.drafter.lstm.layers[0]
    hook = first.register_forward_pre_hook(lambda _module, given: found.append(given[0].detach()))
    made.drafter(batch, glanced_BL)
    hook.remove()
    return SegmentSteps(batch.segments_BL).join(found[0])


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_glance_shows_the_state_and_the_token_a_block_later(size: int, tiny_target_f64: Target) -> None:
    made, batch = module(tiny_target_f64, drafter=FalconConfig(block_size=size)), features(tiny_target_f64)
    glanced_BL = torch.zeros_like(SEGMENTS, dtype=torch.bool)
    glanced_BL[0, [2, 11]] = glanced_BL[1, 5] = True
    plain, changed = reads(made, batch, None), reads(made, batch, glanced_BL)
    assert torch.equal(plain[~glanced_BL], changed[~glanced_BL])
    for row, place in glanced_BL.nonzero().tolist():
        embedded = tiny_target_f64.embed(batch.tokens_BL[row, place + size + 1])
        expected = torch.cat([embedded, batch.final()[row, place + size]])
        torch.testing.assert_close(changed[row, place], expected)


def test_as_many_positions_are_glanced_at_as_guesses_are_wrong_by_a_share(
    tiny_target_f64: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, batch = module(tiny_target_f64, glancing=True), features(tiny_target_f64)
    labels_BL, valid_BL = batch.labels(3)
    wrong = {0: 9, 1: 3}
    guessed_BL = labels_BL.clone()
    for row, count in wrong.items():
        guessed_BL[row, valid_BL[row].nonzero()[:count, 0]] += 1
    monkeypatch.setattr(made, "_guessed", lambda _estimate: guessed_BL)
    seen = set()
    for seed in range(20):
        torch.manual_seed(seed)
        glanced_BL = made.glanced(batch)
        assert glanced_BL.sum(1).tolist() == [4, 1], "0.45 of nine and of three wrong guesses, rounded down"
        assert not (glanced_BL & ~valid_BL).any(), "a place is glanced at that predicts no label"
        for row in range(2):
            places = valid_BL[row].nonzero()[:, 0].tolist()
            assert {places.index(place) % 2 for place in glanced_BL[row].nonzero()[:, 0].tolist()} == {0}
        seen.add(str(glanced_BL.tolist()))
    assert len(seen) > 5, "places are not drawn"
    guessed_BL = labels_BL
    assert not made.glanced(batch).any(), "all guesses are right, and there is nothing to show"


def test_guesses_are_compared_as_target_tokens(tiny_target_f64: Target) -> None:
    ids_Q = torch.tensor([0, 1, 2, 7, 9, 30])
    counts_V = torch.zeros(tiny_target_f64.vocab_size)
    counts_V[ids_Q] = 1
    made = FalconModule(tiny_target_f64, FalconTrainConfig(drafter=FalconConfig(vocabulary_size=6)),
                        token_counts=counts_V)
    made.configure_model()
    made.drafter.to(torch.float64)
    guessed = made._guessed(features(tiny_target_f64).final())
    assert set(guessed.unique().tolist()) <= set(ids_Q.tolist())


def test_glancing_changes_training_alone(tiny_target_f64: Target) -> None:
    batch = features(tiny_target_f64)
    glancing, plain = module(tiny_target_f64, glancing=True), module(tiny_target_f64)
    glancing.drafter.load_state_dict(plain.drafter.state_dict())
    torch.manual_seed(0)
    assert float(glancing.loss(batch).total) != float(plain.loss(batch).total)
    for made in (glancing, plain):
        made.eval()
    assert float(glancing.loss(batch).total) == float(plain.loss(batch).total)


def test_hard_labels_have_their_share() -> None:
    generator = torch.Generator().manual_seed(2)
    logits, target = (torch.randn(5, 7, generator=generator) for _ in range(2))
    labels, teacher = torch.tensor([0, 1, 2, 3, 6]), teacher_output_of(target, None)
    found = Objective(name="soft", hard_share=0.1)(logits, labels, teacher)
    torch.testing.assert_close(found, 0.9 * soft(logits, teacher) + 0.1 * hard(logits, labels))
    assert FalconTrainConfig(hard_share=0.1).objective_settings() == Objective(name="soft", hard_share=0.1)
    with pytest.raises(UserError, match=r"hard_share must lie between 0 and 1, got 1\.5"):
        FalconTrainConfig(hard_share=1.5)


def test_dropout_is_between_the_recurrent_layers_in_training(tiny_target_f64: Target) -> None:
    made = module(tiny_target_f64, drafter=FalconConfig(dropout=0.5, skip=False))
    lstm, batch = made.drafter.lstm, features(tiny_target_f64)
    read = torch.randn(2, 16, 2 * tiny_target_f64.hidden_size, dtype=torch.float64)
    first, second = (lstm(read, lstm.zero_memory(2))[0] for _ in range(2))
    assert torch.equal(first[0], second[0]), "the input of the first layer is whole"
    assert not torch.equal(first[1], second[1])
    made.eval()
    first, second = (lstm(read, lstm.zero_memory(2))[0] for _ in range(2))
    assert torch.equal(first, second)
    assert bool(torch.isfinite(made.loss(batch).total))
    with pytest.raises(UserError, match=r"dropout must be at least 0 and below 1, got 1\.0"):
        FalconConfig(dropout=1.0)
