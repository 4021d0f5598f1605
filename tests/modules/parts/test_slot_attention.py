"""Slots of a block attend to the text up to their block's place and to their block: against a plain softmax."""

import pytest
import torch
from draftsmith.modules import Features
from draftsmith.modules.parts.decoder_block import AttentionContext
from draftsmith.modules.parts.training_time_test import SlotAttention

SLOTS, HEADS, GROUPS, SIZE = 3, 4, 2, 8
SEGMENTS = torch.tensor([[0] * 5 + [1] * 6, [0] * 9 + [-1] * 2])
"""Of two rows with two texts, and with padding at the end."""


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "whole"])
@pytest.mark.parametrize("places", [None, [[0, 3, 4, 5, 10], [1, 2, 6, 7, 8]]], ids=["all", "sampled"])
def test_outputs_and_gradients_are_those_of_a_plain_softmax(places: list[list[int]] | None, causal: bool,
                                                            window: int | None) -> None:
    torch.manual_seed(0)
    rows, length = SEGMENTS.shape
    features = Features(tokens_BL=torch.zeros_like(SEGMENTS), supervised_BL=SEGMENTS >= 0, segments_BL=SEGMENTS,
                        positions_BL=torch.arange(length).expand(rows, length))
    index = None if places is None else torch.tensor(places)
    text = AttentionContext.training(features, window)
    context = SlotAttention.after(text, features, index, SLOTS, causal=causal)
    starts = torch.arange(length).expand(rows, length) if index is None else index
    count = starts.shape[1]
    keys, values = (torch.randn(rows, GROUPS, length, SIZE, dtype=torch.float64, requires_grad=True) for _ in range(2))
    own = [torch.randn(rows, heads, SLOTS * count, SIZE, dtype=torch.float64, requires_grad=True)
           for heads in (HEADS, GROUPS, GROUPS)]
    context.text[0] = keys, values
    found, wanted = context.attend(0, *own), []
    for row in range(rows):
        for head in range(HEADS):
            group = head // (HEADS // GROUPS)
            for slot in range(SLOTS):
                for place in range(count):
                    start, here = int(starts[row, place]), slot * count + place
                    seen = [at for at in range(start + 1) if SEGMENTS[row, at] == SEGMENTS[row, start]
                            and start + 1 + slot - at < (window or 99)]
                    block = [other * count + place for other in range(slot + 1 if causal else SLOTS)]
                    read_keys = torch.cat([keys[row, group, seen], own[1][row, group, block]])
                    read_values = torch.cat([values[row, group, seen], own[2][row, group, block]])
                    wanted.append((read_keys @ own[0][row, head, here] / SIZE**0.5).softmax(0) @ read_values)
    expected = torch.stack(wanted).view_as(found)
    # What padding reads is of no use to anybody.
    real = torch.cat([SEGMENTS.gather(1, starts) >= 0] * SLOTS, dim=1)[:, None, :, None]
    torch.testing.assert_close(found * real, expected * real, atol=1e-10, rtol=1e-10)
    weight = torch.randn_like(found) * real
    for one, other in zip(torch.autograd.grad((found * weight).sum(), [keys, values, *own]),
                          torch.autograd.grad((expected * weight).sum(), [keys, values, *own]), strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-10)
