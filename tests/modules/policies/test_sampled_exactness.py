"""Sampling policies at low and high temperatures, with flat and with confident drafts: the target's distribution."""

import pytest
import torch
from draftsmith.modules import Chain, MaxProbability, Policy, Rejection, SampledChain, SampledTree, StaticTree, Topology
from draftsmith.modules.policies import ensemble
from draftsmith.modules.policies.ensemble import Ensemble, Union, whole_size
from draftsmith.modules.policies.trees import BeamTree, DySpecTree
from references import wrong_rules
from support.drafters import CandidateDrafter, DepthDrafter, TableDrafter, random_log_probs
from support.policies import FixedLength, branching, chi2_bound, pass_statistic
from support.tiers import others_long, some_long
from torch import Tensor

pytestmark = pytest.mark.usefixtures("on_device")

SIZE, ROWS = 5, 20_000
CHANCE = 1e-5  # Probability of a false alarm of one of the two hundred tests below
TEMPERATURES = (0.1, 0.3, 0.7, 1.0, 1.2)
POLICIES: dict[str, Policy] = {
    "tree": SampledTree(Topology((-1, 0, 0, 0, 1, 1, 2), (0, 0, 1, 2, 0, 1, 0))),
    "tempered tree": branching(2, 2, temperature=0.5),
    "dyspec": DySpecTree(4, 2, 3),
    "large dyspec": DySpecTree(9, 2, 3),
    "beam": BeamTree(3, 2),
    "narrow beam": BeamTree(2, 2),
    "chain": SampledTree(Topology.chain(2)),
    "stopped chain": SampledChain(2, FixedLength(2)),
    "unsure chain": SampledChain(2, MaxProbability(0.4)),
}


def flat(rows: int) -> Tensor:
    return random_log_probs(rows, SIZE, seed=2)


def confident(rows: int) -> Tensor:
    """The favourite has a probability of 0.987 at temperature 1."""
    scores = 0.3 * random_log_probs(rows, SIZE, seed=2)
    scores[torch.arange(rows), torch.arange(rows) % SIZE] = scores.exp().sum(-1).log() + 4.3
    return scores.log_softmax(-1)


def certain(rows: int) -> Tensor:
    """The favourite is 12 nats ahead: at temperature 0.1 every other probability is 0 in float32."""
    scores = 0.1 * random_log_probs(rows, SIZE, seed=2)
    scores[torch.arange(rows), torch.arange(rows) % SIZE] = scores.amax(-1) + 12
    return scores.log_softmax(-1)


DRAFTS = {"flat": flat, "confident": confident, "certain": certain}
TARGET = random_log_probs(SIZE, SIZE, seed=1).double().softmax(-1)


@pytest.mark.parametrize("temperature", some_long(TEMPERATURES, 4))
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("name", POLICIES)
def test_the_targets_distribution_at_every_temperature(name: str, draft: str, temperature: float) -> None:
    drafter = TableDrafter(DRAFTS[draft](SIZE))
    statistic, cells = pass_statistic(POLICIES[name], drafter, TARGET, temperature, rows=ROWS)
    assert statistic < chi2_bound(cells, CHANCE)


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("name", ["tree", "dyspec"])
def test_one_shot_families_and_candidates_at_a_low_temperature(name: str, draft: str) -> None:
    for drafter in (DepthDrafter(DRAFTS[draft](2)), CandidateDrafter(DRAFTS[draft](SIZE))):
        statistic, cells = pass_statistic(POLICIES[name], drafter, TARGET, 0.1, rows=ROWS)
        assert statistic < chi2_bound(cells, CHANCE)


def detected(policy: Policy, draft: str, temperature: float) -> bool:
    drafter = TableDrafter(DRAFTS[draft](SIZE))
    statistic, cells = pass_statistic(policy, drafter, TARGET, temperature, rows=ROWS, rule=Rejection())
    return statistic > chi2_bound(cells, CHANCE)


@pytest.mark.parametrize("temperature", some_long(TEMPERATURES, 4))
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("name", POLICIES)
def test_the_tests_have_power_at_every_temperature(name: str, draft: str, temperature: float) -> None:
    """A rule that draws from p after a rejection is seen wherever something is drafted."""
    if (name, draft) == ("unsure chain", "flat"):
        pytest.skip("nothing is drafted: no guess is sure enough")
    with wrong_rules.rejecting_by(wrong_rules.no_residual):
        assert detected(POLICIES[name], draft, temperature)


@pytest.mark.parametrize("draft", ["confident", "certain"])
def test_a_q_that_underflows_is_seen(draft: str) -> None:
    with wrong_rules.rejecting_by(wrong_rules.underflowing_q):
        assert detected(POLICIES["tree"], draft, 0.1) == (draft == "certain")
        assert not detected(POLICIES["tree"], draft, 1.0)


def test_a_place_ranked_by_its_own_draw_is_seen() -> None:
    assert detected(wrong_rules.InclusiveSums(4, 2, 3), "confident", 0.3)
    assert not detected(wrong_rules.InclusiveSums(4, 2, 3), "flat", 1.0)


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_dropping_samples_by_their_own_probability_is_seen(temperature: float) -> None:
    tempered = POLICIES["tempered tree"]
    assert detected(wrong_rules.DropsUnlikely(tempered, 0.2), "flat", temperature)
    assert not detected(wrong_rules.DropsUnlikely(tempered, 0.0), "flat", temperature)


COPIES: dict[str, Policy] = {"chain": Chain(2), "tree": StaticTree(Topology((-1, 0, 0, 1, 2), (0, 0, 1, 0, 0)))}
"""Trees of point masses that stand before the sampled ones."""


def union(copied: str, name: str) -> Union:
    policies = [COPIES[copied], POLICIES[name]]
    return Union(policies, whole_size(policies))


def ensemble_of(draft: str, *, candidates: bool = False) -> Ensemble:
    """A draft next to a drafter that guesses other tokens than its likeliest."""
    sampled = (CandidateDrafter if candidates else TableDrafter)(DRAFTS[draft](SIZE))
    return Ensemble([TableDrafter(random_log_probs(SIZE, SIZE, seed=7)), sampled])


@pytest.mark.parametrize(("copied", "temperature"), some_long(
    [("chain", 0.7), ("chain", 0.1), ("chain", 1.2), ("tree", 0.7)], 9))
@pytest.mark.parametrize("name", others_long(POLICIES, ("tree", "dyspec", "stopped chain")))
def test_point_masses_beside_samples_leave_the_targets_distribution(name: str, copied: str, temperature: float) -> None:
    for drafter in (ensemble_of("flat"), ensemble_of("confident"), ensemble_of("flat", candidates=True)):
        statistic, cells = pass_statistic(union(copied, name), drafter, TARGET, temperature, rows=ROWS)
        assert statistic < chi2_bound(cells, CHANCE)


@pytest.mark.parametrize("name", ["tree", "dyspec", "chain"])
def test_samples_merged_with_point_masses_and_judged_as_before_are_seen(name: str,
                                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    """The samples that remain were not drawn from all of q."""
    monkeypatch.setattr(ensemble, "_without_children",
                        lambda tree, drawn: ensemble.spread(drawn.log_q_BIQ, drawn.inner_BN))
    statistic, cells = pass_statistic(union("chain", name), ensemble_of("flat"), TARGET, 0.7, rows=ROWS)
    assert statistic > chi2_bound(cells, CHANCE)


def test_the_samples_of_a_union_are_never_cut() -> None:
    with pytest.raises(ValueError, match="whose last part samples needs room for all 9 nodes, got size 8"):
        Union([Chain(2), POLICIES["tree"]], 8)
    assert union("chain", "tree").samples
    assert not Union([POLICIES["tree"], Chain(2)], 4).samples
