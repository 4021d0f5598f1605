"""P-EAGLE: its pass against one with a dense mask, what it keeps for backward, what is refused."""

from typing import Any

import pytest
import torch
from draftsmith.modules import Eagle3Config, Features, PEagle, PEagleConfig, Target, UserError
from draftsmith.modules.families.p_eagle import drafter as p_eagle
from draftsmith.modules.interfaces.drafter import Drafts
from draftsmith.modules.parts.causal_drafter import by_depth, conditional_drop, pack, useful, visible
from draftsmith.modules.parts.decoder_block import AttentionContext
from draftsmith.modules.parts.shared_embeddings import shifted
from draftsmith.trainers.train_config import continued_settings
from support.answers import frontier
from support.families import randomised
from torch import Tensor

STEPS = 4


def made(target: Target, **settings: Any) -> PEagle:
    return randomised(PEagle.create(PEagleConfig(**{"steps": STEPS, "num_layers": 2, **settings}), target))


def texts(target: Target, drafter: PEagle) -> Features:
    """Two packed rows of conversations with prompts and answers, and padding after the second."""
    generator, rows = torch.Generator().manual_seed(2), []
    for lengths in ((11, 17, 12), (23, 9, 0)):
        parts = [(number, place) for number, length in enumerate(lengths) for place in range(length)]
        parts += [(-1, 0)] * (40 - len(parts))
        rows.append(parts)
    places = torch.tensor(rows)
    return target.encode(Features(
        tokens_BL=torch.randint(4, 60, (2, 40), generator=generator), supervised_BL=places[..., 1] >= 3,
        segments_BL=places[..., 0], positions_BL=places[..., 1]), drafter.taps)


def with_a_dense_mask(drafter: PEagle, features: Features, kept_BLK: Tensor) -> Tensor:
    """States [B, L, K, D] of one pass over text and kept masks with a mask [B, L + M, L + M]."""
    slots, (embedded, state) = pack(kept_BLK), drafter.masks()
    size = (*slots.anchors_BS.shape, -1)
    positions_BM = torch.cat([features.positions_BL,
                              features.positions_BL.gather(1, slots.anchors_BS) + slots.depths_BS], dim=1)
    near_BMM = positions_BM[:, :, None] - positions_BM[:, None] < (drafter.window or 1_000)
    states = drafter.step(
        torch.cat([shifted(drafter.embed(features.tokens_BL), features, 1), embedded.expand(*size)], dim=1),
        torch.cat([drafter.fuse(features.final(), features.taps), state.expand(*size)], dim=1),
        AttentionContext(positions_BN=positions_BM, visible_BNW=visible(features, slots) & near_BMM))
    return by_depth(drafter.finish(states), slots, features.tokens_BL.shape[1], STEPS)


@pytest.mark.parametrize(("training", "window"), [(True, None), (True, 7), (False, 6), (False, None)])
def test_a_pass_is_that_of_a_dense_mask(tiny_target: Target, training: bool, window: int | None,
                                        monkeypatch: pytest.MonkeyPatch) -> None:
    """States and gradients; nothing as large as the dense mask is kept for backward."""
    drafter = made(tiny_target, window=window).train(training)
    features = texts(tiny_target, drafter)
    torch.manual_seed(5)
    kept_BLK = conditional_drop(useful(features, 1 + STEPS)[..., 1:])
    monkeypatch.setattr(p_eagle, "conditional_drop", lambda _: kept_BLK)
    if not training:
        kept_BLK = torch.ones_like(kept_BLK)
    assert 0 < int(kept_BLK[..., 3].sum()) < int(kept_BLK[..., 1].sum()) or not training
    learned_BLK = kept_BLK & (features.segments_BL >= 0)[..., None]
    saved, gradients = list[int](), list[list[Tensor]]()

    def noted(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    def learn(states_BLKD: Tensor) -> Tensor:
        found = states_BLKD[learned_BLK]
        gradients.append(list(torch.autograd.grad(found.square().sum(), [*drafter.parameters()], allow_unused=True)))
        return found.detach()

    with torch.autograd.graph.saved_tensors_hooks(noted, lambda tensor: tensor):
        drafts: Drafts = drafter(features)
    ours, wanted = learn(drafts.hidden_BLKD), learn(with_a_dense_mask(drafter, features, kept_BLK))
    torch.testing.assert_close(ours, wanted, atol=1e-5, rtol=1e-5)
    for mine, theirs in zip(*gradients, strict=True):
        if theirs is not None:
            torch.testing.assert_close(mine, theirs, atol=1e-3, rtol=1e-4)
    assert (drafts.valid_BLK is not None) == training
    assert drafts.offsets == (2, 3, 4, 5)
    if not training:
        assert max(saved) < (40 * STEPS) ** 2


def test_every_level_comes_from_the_root_alone(tiny_target: Target) -> None:
    drafter = made(tiny_target)
    state = drafter.start(1, 64)
    scores = drafter.expand(state, frontier([0], [-1], [[5]]))
    assert scores.log_probs_BFHQ.shape[1:3] == (1, STEPS)
    with pytest.raises(ValueError, match="scores every level from the root at once"):
        drafter.expand(state, frontier([1], [0], [[6]]))
    assert drafter.reach == STEPS


def test_further_taps_change_nothing(tiny_target: Target) -> None:
    start = made(tiny_target, taps=(1,))
    wider = PEagle.create(PEagleConfig(steps=STEPS, num_layers=2, taps=(0, 1)), tiny_target, start=start).eval()
    features = texts(tiny_target, wider)
    with torch.no_grad():
        torch.testing.assert_close(wider(features).hidden_BLKD, start(features).hidden_BLKD, atol=1e-5, rtol=1e-5)


def test_settings_that_do_not_fit_are_refused(tiny_target: Target) -> None:
    with pytest.raises(UserError, match="norm_output is true, but no guess of a P-EAGLE drafter reads the state of"):
        PEagleConfig(norm_output=True)
    with pytest.raises(UserError, match=r"mask_token_id must lie between 0 and \d+, .* got -1; leave it out for"):
        made(tiny_target, mask_token_id=-1)
    assert made(tiny_target).config.mask_token_id == tiny_target.eos_ids[0]
    assert Eagle3Config().steps != PEagleConfig().steps
    start = made(tiny_target).config
    assert continued_settings(PEagleConfig(num_layers=2), start).steps == STEPS  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=r"drafter.steps is 5, and the drafter of train.start has 4, .*; set drafter"):
        continued_settings(PEagleConfig(num_layers=2, steps=5), start)
