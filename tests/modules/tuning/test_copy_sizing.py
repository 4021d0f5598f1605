"""Sizes of a copied chain next to a tree: replays equal decodings, and the cost model decides."""

from dataclasses import replace

import pytest
import torch
from draftsmith.modules import (
    CopySizing,
    CopyTrial,
    CostModel,
    DecodeSettings,
    Drafter,
    Request,
    Target,
    Topology,
    decode,
    parse_joined,
    proposed_text,
    size_copies,
)
from draftsmith.modules.baselines.joined_policies import copying, joined_drafter
from draftsmith.modules.policies.static_tree import StaticTree
from draftsmith.modules.tuning.copied_acceptance import CopiedText, Counted
from support.encoded_answers import encoded_answers
from support.families import CASES, randomised
from support.tiers import some_long

WIDE = Topology((-1, *[0] * 10, *[1] * 10, *[2] * 10), (0, *range(10), *range(10), *range(10)))
"""A tree that even a drafter of random weights is right with now and then, so that its guesses repeat copied ones."""


def cost(node: float, batch_knot: int = 64) -> CostModel:
    """A pass takes 0.1 s and `node` s for each token after the first; a draft 0.01 s."""
    return CostModel(knots=(1, batch_knot), pass_weights=(0.1, node, node, 0.0, 0.0), largest=8, context=32,
                     pass_error=0.0, draft_weights=(0.01, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0), draft_error=0.0)


def trial(copied: int, extra: int, length: float, nodes: float) -> CopyTrial:
    return CopyTrial(copied=copied, extra=extra, accepted_length=length, nodes=nodes)


SIZING = CopySizing(tree_size=6, alone=trial(0, 0, 1.3, 6.0), copy_seconds=0.001,
                    trials=(trial(4, 0, 1.5, 6.0), trial(7, 7, 1.7, 8.5)))


def decoded(target: Target, drafter: Drafter, requests: list[Request], sizes: CopyTrial) -> tuple[float, float]:
    """(tokens of a pass, nodes of a pass) of real decoding, row by row."""
    nodes: list[int] = []
    found = decode(target, requests, DecodeSettings(ignore_eos=True),
                   drafter=joined_drafter(parse_joined("static+lookup"), drafter, target),
                   policy=copying(StaticTree(WIDE), sizes.copied, sizes.extra),
                   observer=lambda tree, *_: nodes.append(tree.size))
    return found.accepted_length, sum(nodes) / len(nodes)


@pytest.mark.parametrize(("family", "repeating"), some_long([
    ("medusa-copy", True), ("hydra", True), ("eagle", True), ("falcon", True), ("draft-lm", True), ("eagle", False),
], 9))
def test_trials_are_what_decoding_counts(family: str, repeating: bool, tiny_target_f64: Target) -> None:
    target = tiny_target_f64
    drafter = randomised(CASES[family].make(target))
    prompt = (5, 9, 30, 5, 9) if repeating else (5, 9, 30)
    requests = [Request((*prompt, 40 + row), row, 4 if not repeating else 24) for row in range(4)]
    features = [target.encode(one, drafter.taps) for one in encoded_answers(target, requests)]
    sizing = size_copies(drafter, target, features, proposed_text(drafter, features), WIDE)
    for found in sizing.trials:
        length, nodes = decoded(target, drafter, requests, found)
        assert found.accepted_length == pytest.approx(length), found
        # Near the end of an answer a drafter guesses beyond the text, which a walk along it does not see.
        assert found.nodes == pytest.approx(nodes, rel=0.05), found
    assert {one.copied for one in sizing.trials} == {4, 7, 10}
    assert sizing.alone.nodes == WIDE.size
    assert sizing.alone.accepted_length > 1
    assert sizing.copy_seconds >= 0


def test_a_guess_that_the_copy_repeats_takes_no_node() -> None:
    """The draft guesses 7 8, the copy is 7 9, the text goes on with 7 9: of the draft only 8 is new."""
    text = CopiedText(proposals_PKR=torch.tensor([[[7], [8]]]), copies_PC=torch.tensor([[7, 9]]),
                      following_PF=torch.tensor([[7, 9, 3]]), left_P=torch.tensor([3]), rows_P=torch.tensor([0]))
    tree = Topology.chain(2)
    assert text.count(tree, 2, 2) == Counted(accepted_length=3.0, nodes=4.0, error=0.0, degrees=1.0)
    assert text.count(tree, 2, 0).nodes == 3.0, "a pass of three nodes has no room for the 8"
    assert text.count(tree, 0, 0) == Counted(accepted_length=2.0, nodes=3.0, error=0.0, degrees=1.0)


def test_a_dear_node_asks_for_a_small_pass_and_a_cheap_one_for_a_large() -> None:
    assert SIZING.best(cost(0.0001)) == SIZING.trials[1]
    assert SIZING.best(cost(0.05)) == SIZING.trials[0]
    cheap = cost(0.0001)
    wanted = 1.7 * 0.1 / (0.1 + 7.5 * 0.0001 + 0.01 + 0.001)
    assert SIZING.speedup(SIZING.trials[1], cheap) == pytest.approx(wanted)
    assert SIZING.speedup(SIZING.alone, cheap) == pytest.approx(1.3 * 0.1 / (0.1 + 5 * 0.0001 + 0.01))


def test_several_rows_pay_for_every_node_that_one_of_them_may_need() -> None:
    dear = cost(0.01)
    wanted = 1.7 * dear.pass_seconds(1, 4) / (dear.pass_seconds(13, 4) + dear.draft_seconds(6, 4) + 0.001)
    assert SIZING.speedup(SIZING.trials[1], dear, 4) == pytest.approx(wanted)


@pytest.mark.parametrize(("changes", "message"), [
    ({"copied": 11}, "copied of a trial must lie between 0 and 10, got 11"),
    ({"extra": -1}, "extra of a trial must lie between 0 and 1024, got -1"),
    ({"nodes": 0.0}, "nodes of a trial must lie between 1 and 2048"),
    ({"accepted_length": -3.0}, "accepted_length of a trial must lie between 1 and 2048, got -3.0"),
])
def test_impossible_trials_are_refused(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CopyTrial(**{"copied": 4, "extra": 2, "accepted_length": 1.5, "nodes": 6.0, **changes})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="some trials must copy, got 6 and 0 trials"):
        CopySizing(tree_size=6, alone=trial(0, 0, 1.5, 6.0), trials=(), copy_seconds=0.0)
    with pytest.raises(ValueError, match=r"copy_seconds must be at least 0, got -0\.1"):
        replace(SIZING, copy_seconds=-0.1)
