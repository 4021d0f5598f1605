"""Calibration of confidence: tables of known calibration, a plain reference, every family."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from draftsmith.modules import (
    Confidence,
    ConfidenceCurve,
    Drafter,
    Features,
    Request,
    Target,
    Topology,
    replay,
    replay_noting,
)
from draftsmith.modules.tuning.confidence_calibration import BINS, ConfidenceTally
from references.confidence import Judged, judged
from support.encoded_answers import encoded_answers
from support.families import CASES, randomised
from support.tables import CandidateDrafter, DepthDrafter, TableDrafter
from support.tiers import DRAFTING, others_long
from support.tree_shapes import paths
from torch import Tensor

TREE = Topology.from_paths([(0,), (1,), (0, 0), (2,), (0, 1), (1, 0), (0, 0, 0), (1, 0, 1)])
WALK = (0.68, 0.21, 0.11)
"""Probabilities of the three tokens that may follow any token of the texts."""
PROMPT = 2


def followers(token: int) -> list[int]:
    return [20 + (3 * token + step) % 7 for step in range(3)]


def texts(count: int = 30, length: int = 60) -> list[list[int]]:
    """Random walks: what follows a token is drawn with the chances of WALK."""
    rng = random.Random(0)
    found = []
    for _ in range(count):
        text = [20, 21]
        while len(text) < length:
            text += rng.choices(followers(text[-1]), WALK)
        found.append(text)
    return found


def stored(target: Target, rows: list[list[int]]) -> list[Features]:
    """Texts as if the target had answered them: a replay reads nothing but their tokens here."""
    features = [Features.from_rows([(row, [False] * PROMPT + [True] * (len(row) - PROMPT))]) for row in rows]
    return [replace(one, final_BLD=torch.zeros(*one.tokens_BL.shape, target.hidden_size)) for one in features]


def table(vocab_size: int, chances: tuple[float, ...]) -> Tensor:
    """log q [V, V]: the followers of a token with these chances, nothing else."""
    log_q_VV = torch.full((vocab_size, vocab_size), -torch.inf)
    for token in range(vocab_size):
        log_q_VV[token, followers(token)] = torch.tensor(chances).log()
    return log_q_VV


def curves(target: Target, drafter: Drafter, rows: list[list[int]],
           tree: Topology = TREE) -> dict[str, ConfidenceCurve]:
    confidence, features = Confidence(), stored(target, rows)
    assert replay_noting(drafter, target, features, tree, confidence) == replay(drafter, target, features, tree)
    return confidence.curves()


def test_a_calibrated_draft_lies_on_the_diagonal(tiny_target: Target) -> None:
    found = curves(tiny_target, TableDrafter(table(tiny_target.vocab_size, WALK)), texts())
    for curve in found.values():
        assert curve.guesses > 2000
        assert curve.expected_calibration_error < 0.02
        assert curve.acceptance_rate == pytest.approx(curve.mean_confidence, abs=0.015)
    bins = found["token"].bins
    assert [place for place, one in enumerate(bins) if one.guesses] == [1, 2, 6]
    assert [bins[place].mean_confidence for place in (1, 2, 6)] == pytest.approx([0.11, 0.21, 0.68])
    assert bins[6].acceptance_rate == pytest.approx(0.68, abs=0.04)
    assert found["path"].bins[4].mean_confidence == pytest.approx(0.68**2), "the most probable token twice"


def test_an_overconfident_draft_lies_under_the_diagonal(tiny_target: Target) -> None:
    promised = (0.97, 0.02, 0.01)
    found = curves(tiny_target, TableDrafter(table(tiny_target.vocab_size, promised)), texts())
    top = found["token"].bins[-1]
    assert top.mean_confidence == pytest.approx(0.97)
    assert top.acceptance_rate == pytest.approx(0.68, abs=0.04)
    assert found["token"].expected_calibration_error > 0.15
    path = found["path"]
    assert path.mean_confidence > path.acceptance_rate + 0.05
    assert path.bins[-1].guesses > top.guesses, "0.97 twice and thrice is still above 0.9"


def binned(pairs: Judged) -> list[tuple[int, float, int]]:
    """(guesses, confidence, right ones) of each bin."""
    parts = [[pair for pair in pairs if min(int(pair[0] * BINS), BINS - 1) == place] for place in range(BINS)]
    return [(len(part), sum(chance for chance, _ in part), sum(right for _, right in part)) for part in parts]


def table_children(log_q_VV: Tensor) -> Callable[[int, int], list[tuple[int, float]]]:
    def children(token: int, depth: int) -> list[tuple[int, float]]:
        top = log_q_VV[token].topk(4)
        return list(zip(top.indices.tolist(), top.values.exp().tolist(), strict=True))

    return children


def depth_children(log_q_HV: Tensor) -> Callable[[int, int], list[tuple[int, float]]]:
    return lambda token, depth: table_children(log_q_HV)(depth, depth)


@pytest.mark.parametrize("kind", ["recurrent", "one-shot", "missing"])
def test_counts_equal_the_plain_reference(kind: str, tiny_target: Target) -> None:
    rows, vocab_size = texts(6, 25), tiny_target.vocab_size
    log_q = table(vocab_size, (0.65, 0.24, 0.11))
    if kind == "one-shot":
        log_q = torch.full((3, vocab_size), -9.0).index_copy(1, torch.arange(20, 27), torch.rand(3, 7)).log_softmax(-1)
    # The last tree has a fourth guess of the root, which the table does not have, nor anything below it.
    tree = Topology.from_paths([*paths(TREE)[1:], (3,), (3, 0)]) if kind == "missing" else TREE
    drafter = DepthDrafter(log_q) if kind == "one-shot" else TableDrafter(log_q)
    children = (depth_children if kind == "one-shot" else table_children)(log_q)
    confidence = Confidence()
    replay_noting(drafter, tiny_target, stored(tiny_target, rows), tree, confidence)
    found = [judged(row, PROMPT, paths(tree)[1:], children) for row in rows]
    for kept, place in ((confidence.token, 0), (confidence.path, 1)):
        wanted = binned([pair for pairs in found for pair in pairs[place]])
        assert sum(guesses for guesses, _, _ in wanted) > 100
        torch.testing.assert_close(kept.sums_C3, torch.tensor(wanted, dtype=torch.float64), rtol=1e-5, atol=1e-4)


def test_missing_guesses_are_not_counted(tiny_target: Target) -> None:
    """Its trees are cut down to the guesses there are."""
    log_q = torch.full((tiny_target.vocab_size, 2), -torch.inf)
    log_q[20:23, 1] = 0.0  # sure of the token that follows in number, and without a guess elsewhere
    found = curves(tiny_target, CandidateDrafter(log_q), [[20, 21, 22, 23, 30, 20, 30]] * 2, Topology.chain(2))
    # A pass after 22 (23 and nothing), one after 30 without a guess, one after 20 (21, wrong; 22 is after the end).
    assert [(one.guesses, one.acceptance_rate) for one in (found["token"], found["token"].bins[-1])] == [(4, 0.5)] * 2
    assert found["path"] == found["token"]


def test_guesses_after_the_end_of_the_answer_are_not_counted(tiny_target: Target) -> None:
    log_q = torch.full((tiny_target.vocab_size, tiny_target.vocab_size), -20.0).fill_diagonal_(0.0)
    found = curves(tiny_target, TableDrafter(log_q.roll(1, 1)), [[20, 21, 22, 23, 24]], Topology.chain(6))
    assert (found["token"].guesses, found["token"].acceptance_rate) == (2, 1.0)
    assert (found["path"].guesses, found["path"].acceptance_rate) == (2, 1.0)


@pytest.mark.parametrize("name", others_long(DRAFTING))
def test_the_confidence_of_every_family_is_counted(name: str, tiny_target_f64: Target) -> None:
    target = tiny_target_f64
    drafter = randomised(CASES[name].make(target).to(target.dtype))
    requests = [(5, 20 + index, 7, 9) for index in range(4)]
    features = encoded_for(target, drafter, requests)
    tree, confidence = Topology.from_paths([(0,), (1,), (0, 0), (1, 1)]), Confidence()
    noted = replay_noting(drafter, target, features, tree, confidence)
    assert noted == replay(drafter, target, features, tree)
    found = confidence.curves()
    # Every pass has two guesses at the root, and every accepted token is counted.
    assert found["path"].guesses >= 4 * noted.passes - 4 * len(requests)
    assert found["token"].guesses >= 2 * noted.passes - len(requests)
    accepted = noted.tokens - noted.passes
    right = found["path"].guesses * found["path"].acceptance_rate
    assert right == pytest.approx(found["token"].guesses * found["token"].acceptance_rate)
    # The last pass of an answer may be right further than it is read.
    assert accepted - 1e-9 <= right <= accepted + len(requests) + 1e-9


def encoded_for(target: Target, drafter: Drafter, prompts: list[tuple[int, ...]]) -> list[Features]:
    rows = encoded_answers(target, [Request(prompt, index, 25) for index, prompt in enumerate(prompts)])
    return [target.encode(row, drafter.taps) for row in rows]


def test_an_empty_tally_has_no_curve_and_one_is_in_the_last_bin() -> None:
    tally = ConfidenceTally()
    assert tally.curve() is None
    tally.add(torch.tensor([0.0, -0.1]), torch.tensor([True, False]))
    curve = tally.curve()
    assert curve is not None
    assert [one.guesses for one in curve.bins] == [0] * 9 + [2]
    assert curve.expected_calibration_error == pytest.approx((1 + 0.904837) / 2 - 0.5, abs=1e-5)
    assert curve.bins[0].acceptance_rate is None
