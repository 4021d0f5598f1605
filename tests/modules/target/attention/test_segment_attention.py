"""Attention inside segments against the mask of all positions: windows, chunks, capped scores, sinks, groups, values of
their own width, a key in front."""

import pytest
import torch
from draftsmith.modules import Features, UserError
from draftsmith.modules.target.attention import segment_attention
from draftsmith.modules.target.attention.segment_attention import AttentionForm, Segments, attend_inside, visible_text
from draftsmith.modules.target.attention.tree_attention import tree_attention
from support.targets import random_target
from torch import Tensor


def rows(lengths: tuple[tuple[int, ...], ...] = ((9, 14), (19, 4))) -> Features:
    """Rows of these segments, padded on both sides."""
    segments = torch.full((len(lengths), 2 + max(map(sum, lengths)) + 1), -1)
    positions = torch.zeros_like(segments)
    for row, sizes in enumerate(lengths):
        start = 2
        for number, size in enumerate(sizes):
            segments[row, start : start + size], positions[row, start : start + size] = number, torch.arange(size)
            start += size
    tokens = torch.randint(4, 100, segments.shape, generator=torch.Generator().manual_seed(1))
    return Features(tokens_BL=tokens, supervised_BL=segments >= 0, segments_BL=segments, positions_BL=positions)


def masked(form: AttentionForm, first: tuple[Tensor, ...], features: Features, *states: Tensor) -> Tensor:
    """The plain twin: one softmax over written-out scores."""
    query, key, value = (one.repeat_interleave(4 // one.shape[1], 1) for one in states)
    visible, place = features.visible(), torch.arange(features.tokens_BL.shape[1])
    if form.window is not None:
        visible = visible & (place[:, None] - place < form.window)
    if form.chunk is not None:
        chunk = features.positions_BL // form.chunk
        visible = visible & (chunk[:, :, None] == chunk[:, None])
    if first:
        extra = [one.repeat_interleave(2, 1) for one in first]
        key, value = torch.cat([extra[0], key], 2), torch.cat([extra[1], value], 2)
        visible = torch.nn.functional.pad(visible, (1, 0), value=True)
    scores = query @ key.mT * (form.scaling or query.shape[-1] ** -0.5)
    scores = scores if form.softcap is None else form.softcap * torch.tanh(scores / form.softcap)
    scores = scores.masked_fill(~visible[:, None], -1e30)
    if form.sinks_H is not None:
        scores = torch.cat([scores, form.sinks_H[:, None, None].expand(*scores.shape[:-1], 1)], -1)
    return scores.softmax(-1)[..., : key.shape[2]] @ value


SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)


@pytest.mark.parametrize(("form", "before", "wide"), [
    (AttentionForm(), 0, 8), (AttentionForm(scaling=0.7), 0, 8), (AttentionForm(window=4), 0, 8),
    (AttentionForm(window=300), 0, 8), (AttentionForm(softcap=2.0), 0, 8),
    (AttentionForm(window=5, softcap=1.5, scaling=0.4), 0, 8), (AttentionForm(), 1, 8), (AttentionForm(window=4), 1, 8),
    (AttentionForm(chunk=4), 0, 8),
    (AttentionForm(sinks_H=SINKS), 0, 8), (AttentionForm(window=5, sinks_H=SINKS), 0, 5), (AttentionForm(), 0, 5),
], ids=["plain", "scaled", "window", "wide window", "capped", "capped window", "first key", "first key, window",
        "chunk", "sinks", "window, sinks, narrow values", "narrow values"])
@pytest.mark.parametrize("block", [3, 256])
def test_values_and_gradients_equal_those_of_a_mask(form: AttentionForm, before: int, wide: int, block: int,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftsmith.modules.target.attention.segment_attention.QUERIES", block)
    first = (torch.randn(2, 2, 1, 8).double(), torch.randn(2, 2, 1, 8).double()) if before else None
    features = rows()
    length = features.tokens_BL.shape[1]
    states = [torch.randn(2, heads, length, size, dtype=torch.float64, requires_grad=True)
              for heads, size in ((4, 8), (2, 8), (2, wide))]
    real = (features.segments_BL >= 0)[:, None, :, None]
    weight = torch.randn(2, 4, length, wide, dtype=torch.float64)
    found = attend_inside(*states, Segments.of(features), form, first)
    expected = masked(form, first or (), features, *states)
    torch.testing.assert_close(found * real, expected * real, atol=1e-12, rtol=1e-12)
    assert not found[~real.expand_as(found)].any()
    ours, theirs = (torch.autograd.grad((one * weight * real).sum(), states) for one in (found, expected))
    for mine, plain in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, plain, atol=1e-12, rtol=1e-12)


def test_a_target_with_windows_and_capped_scores_reads_long_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    target = random_target(4, sliding_window=4, attn_logit_softcapping=5.0, head_dim=8, query_pre_attn_scalar=8)
    features = rows()
    expected = target.encode(features, (1,))
    monkeypatch.setattr("draftsmith.modules.target.attention.segment_attention.DENSE_LENGTH", 0)
    found, real = target.encode(features, (1,)), features.segments_BL >= 0
    torch.testing.assert_close(found.final()[real], expected.final()[real], atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(found.taps[1][real], expected.taps[1][real], atol=1e-9, rtol=1e-9)


def test_rows_change_to_segments_above_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    features = rows()
    length = features.tokens_BL.shape[1]
    monkeypatch.setattr("draftsmith.modules.target.attention.segment_attention.DENSE_LENGTH", length)
    assert isinstance(visible_text(features), Tensor)
    monkeypatch.setattr("draftsmith.modules.target.attention.segment_attention.DENSE_LENGTH", length - 1)
    assert visible_text(features) == Segments(
        lengths=((2, 9, 14, 1), (2, 19, 4, 1)), padding=((True, False, False, True),) * 2)


def test_a_scattered_segment_is_refused() -> None:
    features = rows()
    features.segments_BL[0, 3] = 1
    with pytest.raises(ValueError, match="not adjacent in their row; pack each as one piece"):
        Segments.of(features)


def test_a_model_that_drops_the_segments_is_refused() -> None:
    """Its attention would see whole rows, the future included."""
    query = torch.randn(1, 2, 5, 8)
    segments = Segments(lengths=((5,),), padding=((False,),))
    blank = segment_attention.mask_arguments(segments, None, query)["attention_mask"]
    with pytest.raises(UserError, match="Linear does not hand on the segments of a row of 5 tokens; set row_length to"):
        tree_attention(torch.nn.Linear(1, 1), query, query, query, blank)
