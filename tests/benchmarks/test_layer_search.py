"""The search of layers to copy: what is removed, and what the loss of an excerpt is."""

import pytest
import torch
from benchmarks.layer_search import excerpt_loss, search
from draftsmith.modules import DraftLM, DraftLMConfig, Features, UserError
from support.targets import random_target


def test_blocks_that_are_least_missed_go_first() -> None:
    worth, said = (5.0, 1.0, 1.0, 3.0, 0.5, 4.0), list[str]()
    kept = search(lambda left: -sum(worth[layer] for layer in left), 6, 2, 2, said.append)
    # Without 1 and 2, then without 3 and 4, neighbours by then.
    assert (kept, len(said)) == ((0, 5), 2)
    assert search(lambda left: -sum(left), 6, 3, 1, said.append) == (3, 4, 5)
    with pytest.raises(UserError, match="keep must lie between 1 and 6, the layers of the target, got 7"):
        search(lambda left: 0.0, 6, 7, 2)


def test_the_loss_is_that_of_the_untrained_copy() -> None:
    target = random_target(4)
    rows = [Features.from_rows([(list(range(5, 30)), [place > 6 for place in range(25)])])]
    drafter = DraftLM.create(DraftLMConfig(layers=(0, 2)), target).double()
    labels, valid = rows[0].labels(1)
    with torch.no_grad():
        logits = drafter.project(drafter(rows[0]).hidden_BLKD[:, :, 0], 0)[valid]
    expected = torch.nn.functional.cross_entropy(logits.float(), labels[valid])
    assert excerpt_loss(target, rows, (0, 2)) == pytest.approx(float(expected), rel=1e-5)
    assert excerpt_loss(target, rows, (0, 1, 2, 3)) != pytest.approx(float(expected), rel=1e-3)
