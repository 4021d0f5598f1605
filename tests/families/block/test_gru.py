"""Domino's recurrent bias: by the formula in training and along the branches of a tree, none for the first guess, and a
loss that goes from the slots' own guesses to the corrected ones."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.modules import BlockDraft, BlockDraftConfig, Features, Target
from draftsmith.trainers import draft_module, fit, train_config
from families.block.reference import plain_gru, plain_slots
from support.cycle import CYCLE, CycleData, cycle_target
from support.families import randomised
from torch import Tensor

from .test_corrections import branches, features_of, scores

CONFIG = BlockDraftConfig(block_size=4, num_layers=1, causal=False, correction="gru", rank=3)
ALIGNED: list[dict[str, Any]] = [{"aligned": "next"}, {"aligned": "same", "block_size": 5}]
"""The two alignments, with four guesses each."""


def made(target: Target, **settings: Any) -> BlockDraft:
    drafter = randomised(BlockDraft.create(replace(CONFIG, **settings), target).double())
    # So large that guesses depend on it.
    drafter.correction.embed_proj[2].weight.data *= 40
    return drafter


@pytest.mark.parametrize("settings", ALIGNED)
@torch.no_grad()
def test_a_bias_is_that_of_the_formula(tiny_target_f64: Target, settings: dict[str, Any]) -> None:
    """In training along the true tokens, and in decoding, where a node's state is that of a fresh run over its path."""
    drafter = made(tiny_target_f64, **settings)
    features = features_of(tiny_target_f64, drafter)
    text, table_VD = features.tokens_BL[0].tolist(), tiny_target_f64.model.get_input_embeddings().weight
    taps = {layer: states[0] for layer, states in features.taps.items()}
    slots_KD = plain_slots(drafter, taps, text[6], 5)

    def guess(path: list[int]) -> Tensor:
        slot_D = slots_KD[len(path) - 1]
        return tiny_target_f64.logits(slot_D) + plain_gru(drafter.correction, slot_D, [table_VD[one] for one in path])

    hidden_KX = drafter(features).hidden_BLKD[0, 5]
    for step in range(4):
        torch.testing.assert_close(drafter.project(hidden_KX[step], step), guess(text[6 : 7 + step]), atol=1e-9,
                                   rtol=1e-9)
    for path, found in branches(drafter, features):
        torch.testing.assert_close(found, guess(path).log_softmax(-1), atol=1e-9, rtol=1e-9)


@torch.no_grad()
def test_the_first_guess_is_the_slots_own_and_later_ones_read_the_whole_path(tiny_target_f64: Target) -> None:
    drafter = made(tiny_target_f64)
    features = features_of(tiny_target_f64, drafter)
    plain = BlockDraft.create(replace(CONFIG, correction="none"), tiny_target_f64).double().eval()
    plain.load_state_dict({key: value for key, value in drafter.state_dict().items() if key in plain.state_dict()})
    alone = plain.project(plain(features).hidden_BLKD[0, 5], 0).log_softmax(-1)
    torch.testing.assert_close(scores(drafter, features, ()), alone[0], atol=1e-12, rtol=0)
    one, other = scores(drafter, features, (44, 61, 7)), scores(drafter, features, (50, 61, 7))
    assert float((one - other).abs().max()) > 1e-3
    assert float((one - alone[3]).abs().max()) > 1e-3


@pytest.mark.parametrize(("progress", "alone"), [(0.0, 1.0), (0.125, 0.75), (0.5, 0.0), (0.9, 0.0)])
def test_the_loss_goes_from_the_slots_own_guesses_to_the_corrected_ones(
    tiny_target_f64: Target, monkeypatch: pytest.MonkeyPatch, progress: float, alone: float
) -> None:
    """(1 - l) of the corrected guesses and l of the slots alone, with l from 1 to 0 in the first half."""
    module = draft_module(BlockDraft)(tiny_target_f64, train_config(BlockDraft)(
        objective="hard", step_weights=0.5, drafter=CONFIG))
    module.configure_model()
    module.drafter = drafter = made(tiny_target_f64).train()
    monkeypatch.setattr(module, "progress_at", lambda step: progress)
    features = features_of(tiny_target_f64, drafter)
    learned, hidden = module.loss(features), drafter(features).hidden_BLKD
    decay = [1.0, 0.5, 0.25, 0.125]
    assert learned.weights == pytest.approx([share * one for share in (1 - alone, alone) for one in decay])
    # Of guesses without weight no logits are made.
    counts = [10, 9, 8, 7]
    assert learned.sums_KC[:, 0].tolist() == [*(counts if alone < 1 else [0] * 4), *(counts if alone else [0] * 4)]
    assert "expected_accepted_length" in module.describe(learned.sums_KC, learned.weights, learned.offsets)
    expected = torch.zeros((), dtype=torch.float64)
    for step in range(4):
        for place in range(10 - step):
            label, state = int(features.tokens_BL[0, place + 2 + step]), hidden[0, place, step]
            own = tiny_target_f64.logits(state[: tiny_target_f64.hidden_size])
            for weight, logits in ((1 - alone, drafter.project(state, step)), (alone, own)):
                expected = expected - weight * decay[step] * logits.log_softmax(-1)[label]
    torch.testing.assert_close(learned.total, expected, atol=1e-9, rtol=1e-9)


@pytest.mark.long
def test_both_alignments_propose_the_same(tmp_path: Path) -> None:
    """After a training on a text that goes round a cycle."""
    proposed = []
    for number, settings in enumerate(ALIGNED):
        module = draft_module(BlockDraft)(cycle_target(), train_config(BlockDraft)(
            objective="hard", drafter=replace(CONFIG, **settings), max_steps=200, lr=1.5e-2, warmup_steps=2,
            validate_every=200, checkpoint_every=200, validation_nodes=4, accelerator="cpu"))
        fit(module, CycleData(), tmp_path / str(number), progress=False)
        module.drafter.bind(module.target)
        text = [CYCLE[place % len(CYCLE)] for place in range(12)]
        features = module.target.encode(Features.from_rows([(text, [True] * 12)]), module.drafter.taps)
        path: tuple[int, ...] = ()
        for _ in range(4):
            path = (*path, int(scores(module.drafter.eval(), features, path).argmax()))
        proposed.append(path)
    assert proposed == [tuple(CYCLE[7:11])] * 2
