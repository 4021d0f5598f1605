"""EAGLE-3's loss mask: labels inside the draft vocabulary, or places where the target would choose one inside it."""

from typing import Any

import pytest
import torch
from draftsmith.modules import Eagle3Config, Features, Target, UserError
from draftsmith.trainers import Eagle3Module, Eagle3TrainConfig
from draftsmith.trainers.losses.metrics import COLUMNS

IDS = torch.arange(3, 99, 2)


def module(target: Target, **changes: Any) -> Eagle3Module:
    shape = Eagle3Config(steps=2, vocabulary_size=len(IDS))
    counts = torch.zeros(target.vocab_size)
    counts[IDS] = 1.0
    made = Eagle3Module(target, Eagle3TrainConfig(drafter=shape, decay=0.5, **changes), token_counts=counts)
    made.configure_model()
    return made.train()


def text(target: Target) -> Features:
    """Tokens that the target seldom finds most probable, some unsupervised."""
    tokens = torch.randint(4, target.vocab_size, (2, 20), generator=torch.Generator().manual_seed(3)).tolist()
    return Features.from_rows([(row, [place % 5 > 0 for place in range(20)]) for row in tokens])


def test_the_mask_follows_the_targets_choice(tiny_target_f64: Target) -> None:
    made = module(tiny_target_f64, loss_mask="argmax")
    features = made.encoded(text(tiny_target_f64))
    ids = made.drafter.token_ids_Q
    assert ids is not None
    learned, drafts = made.loss(features), made.drafter(features)
    p_BLV = tiny_target_f64.logits(features.final()).softmax(-1)
    total, count, other = torch.zeros((), dtype=torch.float64), [0, 0], [0, 0]
    for row, place, step in [(row, place, step) for row in range(2) for place in range(18) for step in range(2)]:
        there = place + 2 + step
        if there >= 20 or not features.supervised_BL[row, there]:
            continue
        p_V = p_BLV[row, there - 1]
        other[step] += int(features.tokens_BL[row, there] in ids)
        if int(p_V.argmax()) in ids:
            log_q = made.drafter.project(drafts.hidden_BLKD[row, place, step], step).log_softmax(-1)
            total = total - 0.5**step * (p_V[ids] / p_V[ids].sum() * log_q).sum()
            count[step] += 1
    torch.testing.assert_close(learned.total, total, atol=1e-9, rtol=1e-9)
    found = dict(zip(COLUMNS, learned.sums_KC.T.tolist(), strict=True))
    assert found["count"] == count != other, "the two masks must differ on this text"
    # A label that cannot be drafted is never among the best guesses.
    assert all(hits < places for hits, places in zip(found["top10"], found["count"], strict=True))


def test_labels_decide_by_default(tiny_target_f64: Target) -> None:
    made = module(tiny_target_f64)
    features = made.encoded(text(tiny_target_f64))
    assert made.deciding_tokens(features) is None
    inside = torch.isin(features.tokens_BL, IDS) & features.labels(1)[1].roll(1, 1)
    assert made.loss(features).sums_KC[0, 0] == inside[:, 2:].sum()


@pytest.mark.parametrize(("changes", "told"), [
    ({"loss_mask": "target"}, "loss_mask must be 'label' or 'argmax', got 'target'"),
    ({"loss_mask": "argmax", "objective": "hard"},
     "loss_mask is 'argmax', but objective is 'hard', which learns labels alone; set objective to soft"),
    ({"loss_mask": "argmax", "drafter": Eagle3Config()},
     "loss_mask is 'argmax', but vocabulary_size is null, .* set vocabulary_size, or loss_mask to label"),
])
def test_masks_that_mean_nothing_are_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        Eagle3TrainConfig(**{"drafter": Eagle3Config(vocabulary_size=8), **changes})
