"""XPress's refiner: its bias by the formula, the rounds of engines, which reach the guesses made one by one, and its
loss."""


import pytest
import torch
from draftsmith.modules import BlockDraft, BlockDraftConfig, Features, Target
from draftsmith.trainers import draft_module, train_config
from families.block.reference import plain_refiner, plain_slots
from support.families import randomised
from torch import Tensor

from .test_corrections import branches, features_of

CONFIG = BlockDraftConfig(block_size=5, num_layers=1, aligned="same", causal=False, correction="refiner", rank=6)


def made(target: Target) -> BlockDraft:
    drafter = randomised(BlockDraft.create(CONFIG, target).double())
    # So large that guesses depend on it.
    drafter.correction.w2.weight.data *= 40
    return drafter


def block_of(drafter: BlockDraft, features: Features) -> tuple[int, Tensor]:
    """(root, states of all slots) after the sixth token of the text."""
    root = int(features.tokens_BL[0, 6])
    taps = {layer: states[0] for layer, states in features.taps.items()}
    return root, plain_slots(drafter, taps, root, 5, whole=True)


def guesses(drafter: BlockDraft, target: Target, block_SD: Tensor, before: list[list[int]]) -> list[Tensor]:
    """Logits of each guess after these tokens."""
    return [target.logits(block_SD[place + 1]) + plain_refiner(drafter.correction, block_SD, tokens)
            for place, tokens in enumerate(before)]


@torch.no_grad()
def test_a_bias_is_that_of_the_formula(tiny_target_f64: Target) -> None:
    """In training along the true tokens, and in decoding along the branches of a tree."""
    drafter = made(tiny_target_f64)
    features = features_of(tiny_target_f64, drafter)
    _, block_SD = block_of(drafter, features)
    text = features.tokens_BL[0].tolist()
    hidden_KX = drafter(features).hidden_BLKD[0, 5]
    for step, wanted in enumerate(guesses(drafter, tiny_target_f64, block_SD, [text[6 : 7 + n] for n in range(4)])):
        torch.testing.assert_close(drafter.project(hidden_KX[step], step), wanted, atol=1e-9, rtol=1e-9)
    for path, found in branches(drafter, features):
        wanted = guesses(drafter, tiny_target_f64, block_SD, [path[: n + 1] for n in range(len(path))])[-1]
        torch.testing.assert_close(found, wanted.log_softmax(-1), atol=1e-9, rtol=1e-9)


@torch.no_grad()
def test_rounds_over_a_whole_block_reach_the_guesses_made_one_by_one(tiny_target_f64: Target) -> None:
    """Engines guess a block at once, again and again, each time after the guesses of the round before: after n rounds
    the first n are those of the walk."""
    drafter = made(tiny_target_f64)
    features = features_of(tiny_target_f64, drafter)
    root, block_SD = block_of(drafter, features)
    walk = [root]
    for _ in range(4):
        found = guesses(drafter, tiny_target_f64, block_SD, [walk[: n + 1] for n in range(len(walk))])
        walk.append(int(found[-1].argmax()))
    block = [int(tiny_target_f64.logits(block_SD[place]).argmax()) for place in range(1, 5)]
    assert block != walk[1:]
    for rounds in range(1, 6):
        told = [root, *block]
        block = [int(one.argmax()) for one in guesses(drafter, tiny_target_f64, block_SD,
                                                      [told[: n + 1] for n in range(4)])]
        assert block[:rounds] == walk[1 : rounds + 1]
    other = [[root, 5, 6, 7][: n + 1] for n in range(4)]
    changed = [[root, 5, 9, 7][: n + 1] for n in range(4)]
    apart = [float((one - two).abs().max()) for one, two in zip(
        *(guesses(drafter, tiny_target_f64, block_SD, told) for told in (other, changed)), strict=True)]
    assert apart[:2] == [0, 0]
    assert min(apart[2:]) > 0


def test_slots_learn_to_guess_alone_too(tiny_target_f64: Target) -> None:
    """With six tenths of the weight; a new refiner adds nothing."""
    module = draft_module(BlockDraft)(tiny_target_f64, train_config(BlockDraft)(
        objective="hard", step_weights=0.5, drafter=CONFIG))
    module.configure_model()
    drafter = module.drafter.double().train()
    features = features_of(tiny_target_f64, drafter)
    with torch.no_grad():
        state = drafter(features).hidden_BLKD[0, 5]
        assert torch.equal(drafter.project(state[1], 1), drafter.project(state[5], 5))
    drafter = made(tiny_target_f64).train()
    module.drafter = drafter
    learned, hidden = module.loss(features), drafter(features).hidden_BLKD
    assert learned.weights == pytest.approx((1.0, 0.5, 0.25, 0.125, 0.6, 0.3, 0.15, 0.075))
    expected = torch.zeros((), dtype=torch.float64)
    for step in range(4):
        for place in range(10 - step):
            label = int(features.tokens_BL[0, place + 2 + step])
            alone = tiny_target_f64.logits(hidden[0, place, step, : tiny_target_f64.hidden_size])
            for weight, logits in ((1.0, drafter.project(hidden[0, place, step], step)), (0.6, alone)):
                expected = expected - weight * 0.5**step * logits.log_softmax(-1)[label]
    torch.testing.assert_close(learned.total, expected, atol=1e-9, rtol=1e-9)
