"""The comparison of stopping rules: each stops where its chain does, and tokens are read off between two points."""

from dataclasses import replace

import pytest
import torch
from draftsmith.modules import (
    EarlyExit,
    MaxProbability,
    PathProbability,
    RejectionRisk,
    Rollouts,
    SamplingSetting,
    StoppedChain,
    StoppingRule,
)
from draftsmith.modules.tuning.drafted_tokens import (
    FIXED,
    HEAD,
    PRODUCT,
    at_fixed_numbers,
    at_head,
    drafted_at,
    kept_by_head,
    point,
    rules,
)
from support.tables import DepthDrafter
from torch import Tensor

PEAKS = [0.9, 0.8, 0.4, 0.95, 0.7, 0.9]
ESTIMATES = [0.9, 0.7, 0.95, 0.4, 0.9, 0.9]
EXPECTED = {"max q before", "max q after", PRODUCT, HEAD, FIXED}


class Stated(DepthDrafter):
    """The state at each token is the log of its estimated acceptance."""

    def expand(self, state, frontier):  # type: ignore[no-untyped-def]
        states = torch.tensor([1.0, *ESTIMATES[:-1]]).log()
        return replace(super().expand(state, frontier), states_BFHD=states[None, None, :, None])


def first_component(state_BD: Tensor) -> Tensor:
    return state_BD[:, 0]


def drafted_by(rule: StoppingRule, most: int) -> int:
    """Tokens that a chain of at most `most` drafts under a rule."""
    tables = torch.stack([torch.full((8,), (1 - peak) / 7) for peak in PEAKS])
    tables[:, 3] = torch.tensor(PEAKS)
    drafter = Stated(tables.log())
    tree = StoppedChain(most, rule).grow(drafter, drafter.start(1, 64), torch.tensor([7]))
    return int(tree.real_BN.sum()) - 1


def risk(threshold: float, least: int) -> RejectionRisk:
    return RejectionRisk(first_component, SamplingSetting(), threshold, least)


def made(bound: float) -> dict[str, StoppingRule]:
    return {"max q before": MaxProbability(bound), "max q after": EarlyExit(bound),
            PRODUCT: PathProbability(bound), HEAD: risk(1 - bound, 1)}


@pytest.mark.parametrize("bound", [0.02, 0.3, 0.45, 0.75, 0.85, 0.97])
def test_rules_stop_where_their_chains_stop(bound: float) -> None:
    chains = Rollouts(states_CTD=torch.zeros(1, 6, 1), chances_CT=torch.ones(1, 6),
                      log_probs_CT=torch.tensor([PEAKS]).log(), peaks_CT=torch.tensor([PEAKS]).log())
    found = rules(chains, torch.tensor([ESTIMATES]))
    for name, rule in made(bound).items():
        assert int(found[name](bound)) == drafted_by(rule, 6), name


@pytest.mark.parametrize(("least", "most"), [(1, 3), (1, 6), (2, 3), (2, 5), (4, 5), (4, 6), (6, 6)])
@pytest.mark.parametrize("threshold", [0.05, 0.35, 0.5, 0.9])
def test_a_heads_own_policy_keeps_its_least_and_most(least: int, most: int, threshold: float) -> None:
    found = kept_by_head(torch.tensor([ESTIMATES]), 1 - threshold, least=least, most=most)
    assert int(found) == drafted_by(risk(threshold, least), most)


def test_accepted_lengths_and_tokens_between_two_points() -> None:
    chances = torch.tensor([[1.0, 0.5, 0.5], [0.5, 0.5, 0.0]])
    assert point(chances, torch.tensor([3, 1])) == pytest.approx((1 + (1 + 0.5 + 0.25 + 0.5) / 2, 2))
    assert point(chances, torch.tensor([0, 0])) == (1.0, 0.0)
    points = [(1.5, 2.0), (1.5, 1.0), (2.0, 4.0), (2.0, 3.0)]
    assert drafted_at(points, 1.5) == pytest.approx(1.0)
    assert drafted_at(points, 1.75) == pytest.approx(2.0)
    assert drafted_at(points, 2.0) == pytest.approx(3.0)
    assert drafted_at(points, 2.1) is None
    assert drafted_at(points, 1.4) is None


def two_kinds() -> Rollouts:
    """Chains of three tokens whose second one is always or never accepted, which the draft's own confidence hides."""
    chances_CT = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]])
    probs_CT = torch.full((2, 3), 0.5)
    return Rollouts(states_CTD=torch.zeros(2, 3, 1), chances_CT=chances_CT, log_probs_CT=probs_CT.log(),
                    peaks_CT=probs_CT.log())


def test_a_head_that_knows_drafts_fewer_tokens_and_a_product_that_knows_wins() -> None:
    chains = two_kinds()
    known = chains.chances_CT.clamp(0.01, 0.99)
    row = at_head(chains, known, 0.5, 1, 3)
    assert row.by_rule.keys() == EXPECTED
    # The first chain is drafted whole, the second one until the rejected token has been read.
    assert (row.expected_accepted_length, row.by_rule[HEAD]) == pytest.approx((3.0, 3.0))
    cut = at_head(chains, known, 0.5, 1, 2)
    assert (cut.expected_accepted_length, cut.by_rule[HEAD], cut.by_rule[FIXED]) == pytest.approx((2.5, 2.0, 2.0))
    sure = replace(chains, log_probs_CT=known.log(), peaks_CT=known.log())
    blind = at_head(sure, torch.full((2, 3), 0.9), 0.5, 1, 3)
    assert blind.by_rule[HEAD] == pytest.approx(3.0)
    assert blind.by_rule[PRODUCT] == pytest.approx(2.5)


def test_every_rule_is_read_off_at_the_lengths_of_fixed_numbers() -> None:
    chains = two_kinds()
    found = at_fixed_numbers(chains, rules(chains, chains.chances_CT))
    assert [row.expected_accepted_length for row in found] == pytest.approx([2.0, 2.5])
    assert [row.by_rule[FIXED] for row in found] == pytest.approx([1.0, 2.0])
    assert all(row.by_rule.keys() == EXPECTED for row in found)
    assert found[1].by_rule[HEAD] == pytest.approx(2.0)
