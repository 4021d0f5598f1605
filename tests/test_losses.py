"""The chunked loss against its plain twin, and what must not change it: padding, packing, accumulation, chunk size."""

import dataclasses
from typing import Any

import pytest
import torch
from draftsmith.modules import Features, Target
from draftsmith.modules.drafter import Drafts
from draftsmith.modules.medusa import Medusa, MedusaConfig
from draftsmith.modules.vocabulary import OutputRows, draft_index
from draftsmith.trainers.losses import VocabularyLoss, supervise
from draftsmith.trainers.metrics import COLUMNS, RANKS, describe, rank_hits, weighted_mean_loss
from hypothesis import given, settings
from hypothesis import strategies as st
from references.vocabulary_loss import plain_loss, supervised
from torch import Tensor

WEIGHTS = (1.0, 0.8, 0.64)
IDS = torch.arange(5, 95, 3)


def ragged(target: Target, lengths: tuple[int, ...] = (9, 4, 12)) -> Features:
    """Encoded rows of several lengths with holes in the supervision."""
    rows = [(torch.randint(4, target.vocab_size, (length,)).tolist(), (torch.rand(length) < 0.7).tolist())
            for length in lengths]
    return target.encode(Features.from_rows(rows))


def heads(target: Target, output: Any = "shared", ids: Tensor | None = None) -> Medusa:
    size = None if ids is None else len(ids)
    drafter = Medusa.create(MedusaConfig(num_heads=3, output=output, vocabulary_size=size), target, ids)
    for parameter in drafter.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return drafter


def chunked(drafter: Medusa, target: Target, labels: str, chunk_elements: int | None = None) -> VocabularyLoss:
    ids = drafter.token_ids_Q
    return VocabularyLoss(
        project=drafter.project, entries=target.vocab_size if ids is None else len(ids), weights=WEIGHTS,
        parameters=tuple(weight for step in range(3) for weight in drafter.output_parameters(step)),
        teacher=OutputRows(target, ids) if labels == "soft" else None, chunk_elements=chunk_elements,
    )


def run(drafter: Medusa, target: Target, features: Features, labels: str, chunk_elements: int | None = None) -> Any:
    """(total, sums, gradients of the drafter's weights)."""
    drafter.zero_grad()
    ids = drafter.token_ids_Q
    index = None if ids is None else draft_index(ids, target.vocab_size)
    total, sums = chunked(drafter, target, labels, chunk_elements)(drafter(features), features, index)
    total.backward()
    return total.detach(), sums, [parameter.grad.clone() for parameter in drafter.parameters()]


@pytest.mark.parametrize("labels", ["hard", "soft"])
@pytest.mark.parametrize("output", ["shared", "copy"])
@pytest.mark.parametrize("ids", [None, IDS])
def test_loss_and_gradients_equal_the_plain_twins(
    labels: str, output: str, ids: Tensor | None, tiny_target_f64: Target
) -> None:
    target = tiny_target_f64
    features, drafter = ragged(target), heads(target, output, ids)
    # Three rows of logits a chunk: many chunks, the last one not full.
    total, sums, gradients = run(drafter, target, features, labels, 3 * (len(ids) if ids is not None else 99))
    drafter.zero_grad()
    index = None if ids is None else draft_index(ids, target.vocab_size).tolist()
    teacher = OutputRows(target, ids) if labels == "soft" else None
    expected, count = plain_loss(drafter.project, drafter(features), features, WEIGHTS, teacher=teacher,
                                 entry=(lambda token: token) if index is None else index.__getitem__)
    expected.backward()
    torch.testing.assert_close(total, expected.detach(), atol=1e-9, rtol=1e-9)
    found_total, found_count = weighted_mean_loss(sums, WEIGHTS)
    torch.testing.assert_close(found_total, expected.detach(), atol=1e-9, rtol=1e-9)
    assert float(found_count) == pytest.approx(count)
    for found, parameter in zip(gradients, drafter.parameters(), strict=True):
        torch.testing.assert_close(found, parameter.grad, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("labels", ["hard", "soft"])
def test_the_loss_without_gradient_is_the_same(labels: str, tiny_target: Target) -> None:
    features, drafter = ragged(tiny_target), heads(tiny_target)
    total, sums, _ = run(drafter, tiny_target, features, labels)
    with torch.no_grad():
        plain_total, plain_sums = chunked(drafter, tiny_target, labels)(drafter(features), features)
    torch.testing.assert_close(plain_total, total)
    torch.testing.assert_close(plain_sums, sums)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_supervision_equals_the_token_by_token_twin(data: st.DataObject) -> None:
    rows, length = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 8))
    grid = lambda low, high: data.draw(st.lists(  # noqa: E731
        st.lists(st.integers(low, high), min_size=length, max_size=length), min_size=rows, max_size=rows))
    features = Features(
        tokens_BL=torch.tensor(grid(0, 5)), supervised_BL=torch.tensor(grid(0, 1)).bool(),
        segments_BL=torch.tensor(grid(-1, 1)).sort(dim=1).values,
        positions_BL=torch.arange(length).expand(rows, length))
    offsets = data.draw(st.sampled_from([(2, 3, 4), (1,), (2, 2), (3, 1)]))
    index = torch.tensor([0, -1, 1, 2, -1, 3])
    found = supervise(features, offsets, index)
    pairs = {(int(source), step, int(label)) for sources, valid, label
             in zip(found.sources_NK, found.valid_NK, found.labels_N, strict=True)
             for step, (source, real) in enumerate(zip(sources, valid, strict=True)) if real}
    asked = [(row, place, step) for row in range(rows) for place in range(length) for step in range(len(offsets))
             if supervised(features, row, place, offsets[step])]
    entry = [int(index[features.tokens_BL[row, place + offsets[step]]]) for row, place, step in asked]
    assert pairs == {(row * length + place, step, label) for (row, place, step), label in zip(asked, entry, strict=True)
                     if label >= 0}
    outside = [step for (_, _, step), label in zip(asked, entry, strict=True) if label < 0]
    assert found.missed_K.tolist() == [outside.count(step) for step in range(len(offsets))]


def padded(features: Features, left: int, right: int) -> Features:
    """The same rows between padding whose states are nonsense."""
    def widen(tensor: Tensor, value: float) -> Tensor:
        shape = list(tensor.shape)
        pad = [torch.full([shape[0], width, *shape[2:]], value, dtype=tensor.dtype) for width in (left, right)]
        return torch.cat([pad[0], tensor, pad[1]], dim=1)

    return Features(
        tokens_BL=widen(features.tokens_BL, 7), supervised_BL=widen(features.supervised_BL, True),
        segments_BL=widen(features.segments_BL, -1), positions_BL=widen(features.positions_BL, 0),
        final_BLD=widen(features.final(), 1e3))


def packed(features: Features) -> Features:
    """All rows behind each other in one."""
    real = features.segments_BL >= 0
    rows = torch.arange(real.shape[0])[:, None].expand_as(real)
    return Features(
        tokens_BL=features.tokens_BL[real][None], supervised_BL=features.supervised_BL[real][None],
        segments_BL=rows[real][None], positions_BL=features.positions_BL[real][None],
        final_BLD=features.final()[real][None])


def rows_of(features: Features, rows: slice) -> Features:
    return Features(tokens_BL=features.tokens_BL[rows], supervised_BL=features.supervised_BL[rows],
                    segments_BL=features.segments_BL[rows], positions_BL=features.positions_BL[rows],
                    final_BLD=features.final()[rows])


@settings(max_examples=25, deadline=None)
@given(lengths=st.lists(st.integers(1, 14), min_size=2, max_size=4), left=st.integers(0, 3), right=st.integers(0, 3),
       cut=st.integers(1, 3), labels=st.sampled_from(["hard", "soft"]), seed=st.integers(0, 999))
def test_padding_packing_and_accumulation_change_nothing(
    tiny_target_f64: Target, lengths: list[int], left: int, right: int, cut: int, labels: str, seed: int
) -> None:
    torch.manual_seed(seed)
    target = tiny_target_f64
    features, drafter = ragged(target, tuple(lengths)), heads(target)
    whole = run(drafter, target, features, labels, 200)
    others = [run(drafter, target, other, labels, 300) for other in (padded(features, left, right), packed(features))]
    parts = [run(drafter, target, rows_of(features, rows), labels) for rows in (slice(0, cut), slice(cut, None))
             if len(features.tokens_BL[rows])]
    accumulated = [sum(part[0] for part in parts), sum(part[1] for part in parts),
                   [sum(gradients) for gradients in zip(*(part[2] for part in parts), strict=True)]]
    for other in (*others, accumulated):
        torch.testing.assert_close(list(other), list(whole), atol=1e-9, rtol=1e-9)


def test_a_batch_without_labels_gives_zero_and_still_reaches_every_weight(tiny_target: Target) -> None:
    features, drafter = ragged(tiny_target), heads(tiny_target, "copy")
    features = dataclasses.replace(features, supervised_BL=torch.zeros_like(features.supervised_BL))
    total, sums, gradients = run(drafter, tiny_target, features, "hard")
    assert float(total) == 0.0
    assert not sums.any()
    assert not any(gradient.any() for gradient in gradients)


def test_the_logits_alive_stay_within_the_budget(tiny_target: Target) -> None:
    features, drafter = ragged(tiny_target, (40, 40, 40)), heads(tiny_target)
    seen = []
    loss = dataclasses.replace(
        chunked(drafter, tiny_target, "hard", 10 * tiny_target.vocab_size),
        project=lambda hidden, step: (seen.append(len(hidden)), drafter.project(hidden, step))[1])
    loss(drafter(features), features)
    assert max(seen) == 10
    assert len(seen) > 9


def test_offsets_and_not_the_order_of_steps_decide_the_label(tiny_target: Target) -> None:
    features, drafter = ragged(tiny_target), heads(tiny_target)
    drafts = drafter(features)
    right = chunked(drafter, tiny_target, "hard")(drafts, features)[1]
    shifted = Drafts(hidden_BLKD=drafts.hidden_BLKD, offsets=(3, 4, 5))
    wrong = chunked(drafter, tiny_target, "hard")(shifted, features)[1]
    assert not torch.allclose(right[:, COLUMNS.index("loss")], wrong[:, COLUMNS.index("loss")])


def test_rank_hits_against_topk() -> None:
    logits, labels, valid = torch.randn(50, 30), torch.randint(30, (50,)), torch.rand(50) < 0.7
    expected = [float(((logits.topk(rank).indices == labels[:, None]).any(1) & valid).sum()) for rank in RANKS]
    assert rank_hits(logits, labels, valid).tolist() == expected


def test_figures_are_means_and_the_estimate_is_a_chain() -> None:
    columns = {"count": 10.0, "missed": 10.0, "loss": 20.0, "top1": 8.0, "top5": 9.0}
    row = [columns.get(name, 0.0) for name in COLUMNS]
    figures = describe(torch.tensor([row, row], dtype=torch.float64), (1.0, 0.5))
    assert figures["loss"] == pytest.approx(2.0)
    assert figures["head2/top1"] == pytest.approx(0.8)
    assert figures["head1/coverage"] == pytest.approx(0.5)
    assert figures["expected_accepted_length"] == pytest.approx(1 + 0.4 + 0.16)
    assert describe(torch.zeros(2, len(COLUMNS)), (1.0, 0.5)) == {}
