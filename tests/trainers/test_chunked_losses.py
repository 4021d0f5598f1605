"""The chunked loss against its plain twin, whatever the size of a chunk."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from draftsmith.modules import Drafts, Features, Medusa, MedusaConfig, Target, UserError
from draftsmith.modules.target.draft_vocabulary import draft_index
from draftsmith.trainers.chunked_losses import VocabularyLoss, supervise
from draftsmith.trainers.objectives import COLUMNS, NEEDS_MASS, RANKS, Teacher, describe, rank_hits, weighted_mean_loss
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from references.vocabulary_loss import plain_loss, supervised
from torch import Tensor

pytestmark = pytest.mark.usefixtures("on_device")
SHARED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]  # All examples of a test may be on the same device

WEIGHTS = (1.0, 0.8, 0.64)
IDS = torch.arange(5, 95, 3)
NAMES = ("hard", "argmax", "hard_tvd", "hard_soft", "soft", "reverse_kl", "jsd", "tvd", "lk_alpha", "lk_hybrid")


def ragged(target: Target, lengths: tuple[int, ...] = (9, 4, 12)) -> Features:
    """Encoded rows of several lengths with gaps in the supervision."""
    rows = [(torch.randint(4, target.vocab_size, (length,)).tolist(), (torch.rand(length) < 0.7).tolist())
            for length in lengths]
    return target.encode(Features.from_rows(rows))


def heads(target: Target, output: Any = "shared", ids: Tensor | None = None) -> Medusa:
    size = None if ids is None else len(ids)
    drafter = Medusa.create(MedusaConfig(num_heads=3, output=output, vocabulary_size=size), target, ids)
    for parameter in drafter.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return drafter


def chunked(drafter: Medusa, target: Target, name: Any, chunk_elements: int | None = None,
            **more: Any) -> VocabularyLoss:
    ids = drafter.token_ids_Q
    teacher = Teacher(target, ids, mass=name in NEEDS_MASS) if name != "hard" else None
    return VocabularyLoss(
        project=drafter.project, entries=target.vocab_size if ids is None else len(ids), weights=WEIGHTS,
        parameters=tuple(dict.fromkeys(weight for step in range(3) for weight in drafter.output_parameters(step))),
        objective=name, teacher=teacher, chunk_elements=chunk_elements, **more)


def run(drafter: Medusa, target: Target, features: Features, name: str, chunk_elements: int | None = None,
        alter: Callable[[Drafts], Drafts] = lambda drafts: drafts, **more: Any) -> Any:
    """(total, sums, gradients of the drafter's weights)."""
    drafter.zero_grad()
    ids = drafter.token_ids_Q
    index = None if ids is None else draft_index(ids, target.vocab_size)
    loss = chunked(drafter, target, name, chunk_elements, **more)
    total, sums = loss(alter(drafter(features)), features, index)
    total.backward()
    return total.detach(), sums, [parameter.grad.clone() for parameter in drafter.parameters()]


def compare(drafter: Medusa, target: Target, features: Features, name: str, found: Any,
            alter: Callable[[Drafts], Drafts] = lambda drafts: drafts, feature_weight: float = 0.0) -> None:
    """Total, count and gradients against the twin's."""
    total, sums, gradients = found
    drafter.zero_grad()
    expected, count = plain_loss(target, drafter.project, alter(drafter(features)), features, WEIGHTS, objective=name,
                                 ids=drafter.token_ids_Q, feature_weight=feature_weight)
    expected.backward()
    torch.testing.assert_close(total, expected.detach(), atol=1e-9, rtol=1e-9)
    found_total, found_count = weighted_mean_loss(sums, WEIGHTS)
    torch.testing.assert_close(found_total, expected.detach(), atol=1e-9, rtol=1e-9)
    assert float(found_count) == pytest.approx(count)
    for found_gradient, parameter in zip(gradients, drafter.parameters(), strict=True):
        torch.testing.assert_close(found_gradient, parameter.grad, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize(("name", "output"), [*((name, "shared") for name in NAMES), ("hard", "copy"), ("soft", "copy"),
                                              ("lk_hybrid", "copy"), ("hard", "one_copy"), ("soft", "one_copy")])
@pytest.mark.parametrize("ids", [None, IDS])
def test_loss_and_gradients_equal_the_plain_twins(name: str, output: str, ids: Tensor | None,
                                                  tiny_target_f64: Target) -> None:
    features, drafter = ragged(tiny_target_f64), heads(tiny_target_f64, output, ids)
    # Three rows of logits a chunk: many chunks, the last one not full.
    found = run(drafter, tiny_target_f64, features, name, 3 * (len(ids) if ids is not None else 99))
    compare(drafter, tiny_target_f64, features, name, found)


@pytest.mark.parametrize("name", ["soft", "hard"])
@pytest.mark.parametrize("more", [0, 7])
def test_a_known_number_of_labels_changes_nothing(more: int, name: str, tiny_target_f64: Target) -> None:
    """The places that are too many learn nothing, and no device is asked how many there are. They hold the first token
    of all, which lies outside the draft vocabulary here: as a label it would be out of bounds."""
    features, drafter = ragged(tiny_target_f64), heads(tiny_target_f64, "copy", IDS)
    features.tokens_BL[0, 0] = 4
    counted = dataclasses.replace(features, labels_at_most=int(features.supervised_BL.sum()) + more)
    wanted = run(drafter, tiny_target_f64, features, name, 4 * len(IDS), feature_weight=3.0)
    found = run(drafter, tiny_target_f64, counted, name, 4 * len(IDS), feature_weight=3.0)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)
    assert len(supervise(counted, (1, 2, 3)).labels_NK) == counted.labels_at_most


def test_a_number_of_labels_is_counted_where_rows_leave_the_host(tiny_target: Target) -> None:
    features = ragged(tiny_target)
    assert features.to("cpu").labels_at_most is None
    assert features.to("meta").labels_at_most == int(features.supervised_BL.sum())


def test_a_dropped_draft_step_neither_learns_nor_counts(tiny_target_f64: Target) -> None:
    features, drafter = ragged(tiny_target_f64), heads(tiny_target_f64, ids=IDS)
    valid = torch.rand(3, 12, 3) < 0.5

    def dropped(drafts: Drafts) -> Drafts:
        # The state of a dropped step must not matter.
        hidden = torch.where(valid[..., None], drafts.hidden_BLKD, 1e3)
        return dataclasses.replace(drafts, hidden_BLKD=hidden, valid_BLK=valid)

    found = run(drafter, tiny_target_f64, features, "soft", 200, dropped)
    compare(drafter, tiny_target_f64, features, "soft", found, dropped)
    whole = run(drafter, tiny_target_f64, features, "soft")[1]
    for column in ("count", "missed"):
        assert 0 < found[1][:, COLUMNS.index(column)].sum() < whole[:, COLUMNS.index(column)].sum()


def test_draft_steps_may_predict_the_same_token(tiny_target_f64: Target) -> None:
    features, drafter = ragged(tiny_target_f64), heads(tiny_target_f64)
    same = lambda drafts: dataclasses.replace(drafts, offsets=(1, 1, 1), estimates=None)  # noqa: E731
    found = run(drafter, tiny_target_f64, features, "soft", 300, same)
    compare(drafter, tiny_target_f64, features, "soft", found, same)
    assert len(set(found[1][:, 0].tolist())) == 1


@pytest.mark.parametrize("ids", [None, IDS])
def test_feature_loss_equals_the_plain_twin(ids: Tensor | None, tiny_target_f64: Target) -> None:
    features, drafter = ragged(tiny_target_f64), heads(tiny_target_f64, ids=ids)
    resembling = lambda drafts: dataclasses.replace(drafts, estimates=(1, 2, 3))  # noqa: E731
    found = run(drafter, tiny_target_f64, features, "soft", 200, resembling, feature_weight=10.0)
    compare(drafter, tiny_target_f64, features, "soft", found, resembling, feature_weight=10.0)
    plain = run(drafter, tiny_target_f64, features, "soft", 200)[1]
    added = found[1][:, COLUMNS.index("loss")] - plain[:, COLUMNS.index("loss")]
    torch.testing.assert_close(added, 10.0 * found[1][:, COLUMNS.index("feature")])
    other = run(drafter, tiny_target_f64, features, "soft", 200, feature_weight=10.0, alter=lambda drafts: (
        dataclasses.replace(drafts, estimates=(0, 1, 2))))
    assert not torch.allclose(other[1], found[1]), "another state must show"


def test_separate_estimates_are_compared_with_the_targets_states(tiny_target_f64: Target) -> None:
    """The states for the output layer are not compared with them."""
    features, drafter = ragged(tiny_target_f64), heads(tiny_target_f64)
    kept = torch.randn(3, 12, 3, 32, dtype=torch.float64, requires_grad=True)
    apart = lambda drafts: dataclasses.replace(drafts, estimates=(1, 2, 3), estimated_BLKD=kept)  # noqa: E731
    found = run(drafter, tiny_target_f64, features, "hard", 200, apart, feature_weight=10.0)
    compare(drafter, tiny_target_f64, features, "hard", found, apart, feature_weight=10.0)
    assert kept.grad is not None
    assert float(kept.grad.abs().sum()) > 0


def test_a_feature_loss_needs_estimated_states(tiny_target: Target) -> None:
    features, drafter = ragged(tiny_target), heads(tiny_target)
    with pytest.raises(UserError, match="feature_weight is above 0, but the states of this drafter estimate none"):
        run(drafter, tiny_target, features, "hard", feature_weight=1.0,
            alter=lambda drafts: dataclasses.replace(drafts, estimates=None))


@pytest.mark.parametrize(("changes", "told"), [
    ({"offsets": (1, 2)}, "offsets must have one entry for each of the 3 draft steps"),
    ({"estimates": (1,)}, "estimates must have one entry"),
    ({"estimates": (2, 2, 3)}, "predicts 2 tokens ahead cannot estimate the target's state 2 ahead"),
    ({"valid_BLK": torch.ones(3, 12, 2, dtype=torch.bool)}, "valid_BLK must have the shape"),
    ({"estimated_BLKD": torch.ones(3, 12, 2, 32)}, r"needs estimates and the shape \(3, 12, 3\) .* \(3, 12, 2, 32\)"),
    ({"estimated_BLKD": torch.ones(3, 12, 3, 32), "estimates": None}, "estimated_BLKD needs estimates .* got None"),
])
def test_impossible_drafts_are_refused(changes: dict[str, Any], told: str, tiny_target: Target) -> None:
    drafts = heads(tiny_target)(ragged(tiny_target))
    with pytest.raises(ValueError, match=told):
        dataclasses.replace(drafts, **changes)


@pytest.mark.parametrize("ids", [None, IDS])
def test_mean_acceptance_is_reported_where_it_is_known(ids: Tensor | None, tiny_target_f64: Target) -> None:
    features, drafter = ragged(tiny_target_f64), heads(tiny_target_f64, ids=ids)
    drafts = drafter(features)
    figures = {name: describe(run(drafter, tiny_target_f64, features, name)[1], WEIGHTS, drafts.offsets)
               for name in ("hard", "soft", "lk_alpha")}
    assert "head1/alpha" not in figures["hard"]
    assert ("head2/alpha" in figures["soft"]) == (ids is None), "the mass outside a reduced vocabulary costs too much"
    labels, valid = features.labels(3)
    if ids is not None:
        valid = valid & torch.isin(labels, ids)
    p = tiny_target_f64.logits(features.final().roll(-2, 1))[valid].softmax(-1)
    q = drafter.project(drafts.hidden_BLKD[:, :, 1][valid], 1).softmax(-1)
    alpha = torch.minimum(p if ids is None else p[:, ids], q).sum(-1).mean()
    assert figures["lk_alpha"]["head2/alpha"] == pytest.approx(float(alpha.detach()), rel=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_the_loss_without_gradient_is_the_same(name: str, tiny_target: Target) -> None:
    features, drafter = ragged(tiny_target), heads(tiny_target)
    total, sums, _ = run(drafter, tiny_target, features, name)
    with torch.no_grad():
        plain_total, plain_sums = chunked(drafter, tiny_target, name)(drafter(features), features)
    torch.testing.assert_close(plain_total, total)
    torch.testing.assert_close(plain_sums, sums)


@settings(max_examples=40, suppress_health_check=SHARED)
@given(st.data())
def test_supervision_equals_the_token_by_token_twin(data: st.DataObject) -> None:
    rows, length = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 8))
    grid = lambda low, high: data.draw(st.lists(  # noqa: E731
        st.lists(st.integers(low, high), min_size=length, max_size=length), min_size=rows, max_size=rows))
    features = Features(tokens_BL=torch.tensor(grid(0, 5)), supervised_BL=torch.tensor(grid(0, 1)).bool(),
                        segments_BL=torch.tensor(grid(-1, 1)).sort(dim=1).values,
                        positions_BL=torch.arange(length).expand(rows, length))
    offsets = data.draw(st.sampled_from([(2, 3, 4), (1,), (2, 2), (3, 1)]))
    index = torch.tensor([0, -1, 1, 2, -1, 3])
    found = supervise(features, offsets, index)
    pairs = {(int(source), step, int(label)) for sources, valid, label
             in zip(found.sources_NK, found.valid_NK, found.labels_NK[:, 0], strict=True)
             for step, (source, real) in enumerate(zip(sources, valid, strict=True)) if real}
    asked = [(row, place, step) for row in range(rows) for place in range(length) for step in range(len(offsets))
             if supervised(features, row, place, offsets[step])]
    entry = [int(index[features.tokens_BL[row, place + offsets[step]]]) for row, place, step in asked]
    assert pairs == {(row * length + place, step, label) for (row, place, step), label in zip(asked, entry, strict=True)
                     if label >= 0}
    outside = [step for (_, _, step), label in zip(asked, entry, strict=True) if label < 0]
    assert found.missed_PK.sum(0).tolist() == [outside.count(step) for step in range(len(offsets))]


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


def test_the_whole_output_layer_runs_once_for_a_position(tiny_target_f64: Target,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps after sampled places predict the same token several times: the mass there is that of one run."""
    features, drafter, log_sums, seen = ragged(tiny_target_f64), heads(tiny_target_f64, ids=IDS), Teacher.log_sums, []
    monkeypatch.setattr(Teacher, "log_sums", lambda self, final: (seen.append(len(final)), log_sums(self, final))[1])
    places = torch.arange(12).expand(3, 12).contiguous()
    sampled = lambda drafts: dataclasses.replace(drafts, indices_BL=places)  # noqa: E731
    wanted, alone = run(drafter, tiny_target_f64, features, "lk_alpha", 500), sum(seen)
    found = run(drafter, tiny_target_f64, features, "lk_alpha", 500, sampled)
    assert 0 < alone <= 36
    assert sum(seen) - alone == 36
    assert max(seen) <= 250 // tiny_target_f64.vocab_size
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    seen.clear()
    run(drafter, tiny_target_f64, features, "lk_alpha", 500, lambda drafts: dataclasses.replace(
        drafts, hidden_BLKD=drafts.hidden_BLKD[:, :2], indices_BL=places[:, :2]))
    assert sum(seen) == 3 * 2 * 3, "three steps after two places in each of three rows"


def test_an_acceptance_is_learned_where_the_vocabulary_has_not_the_label(tiny_target_f64: Target) -> None:
    target = tiny_target_f64
    features, drafter = ragged(target), heads(target, ids=IDS)
    places = torch.arange(12).expand(3, 12).contiguous()
    sampled = lambda drafts: dataclasses.replace(drafts, indices_BL=places)  # noqa: E731
    judge = lambda states, step: states[..., step]  # noqa: E731
    with_it, without = (run(drafter, target, features, "lk_alpha", 500, sampled, confidence=one)[0]
                        for one in (judge, None))
    expected, missed = torch.zeros((), dtype=torch.float64), 0
    with torch.no_grad():
        hidden = drafter(features).hidden_BLKD
        for step in range(3):
            labels, there = features.labels(step + 2)
            for row, place in there.nonzero().tolist():
                missed += int(labels[row, place]) not in IDS
                p = target.logits(features.final()[row, place + step + 1]).softmax(-1)[IDS]
                alpha = torch.minimum(p, drafter.project(hidden[row, place, step], step).softmax(-1)).sum()
                logit = hidden[row, place, step, step]
                expected += WEIGHTS[step] * torch.nn.functional.binary_cross_entropy_with_logits(logit, alpha)
    assert missed > 10
    torch.testing.assert_close(with_it - without, expected, rtol=1e-9, atol=1e-9)


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
    columns = {"count": 10.0, "missed": 10.0, "loss": 20.0, "share": 10.0, "top1": 8.0, "top5": 9.0}
    row = [columns.get(name, 0.0) for name in COLUMNS]
    figures = describe(torch.tensor([row, row], dtype=torch.float64), (1.0, 0.5), (2, 3))
    assert figures["loss"] == pytest.approx(2.0)
    assert figures["head2/top1"] == pytest.approx(0.8)
    assert figures["head1/coverage"] == pytest.approx(0.5)
    assert figures["expected_accepted_length"] == pytest.approx(1 + 0.4 + 0.16)
    assert "expected_accepted_length" not in describe(torch.tensor([row, row]), (1.0, 0.5), (1, 1)), "no chain"
    assert describe(torch.zeros(2, len(COLUMNS)), (1.0, 0.5), (2, 3)) == {}
