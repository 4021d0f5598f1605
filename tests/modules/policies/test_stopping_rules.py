"""Rules that stop drafting: what each does, that none looks ahead, and that sampled chains keep the target's law."""

from dataclasses import replace

import pytest
import torch
from draftsmith.modules import PathProbability, RejectionRisk, SampledChain, SamplingSetting, StoppedChain, UserError
from draftsmith.modules.policies.stopping_chains import EarlyExit, JudgedPath, MaxProbability, StoppingRule
from support.drafters import DepthDrafter, TableDrafter, draws_for, random_log_probs
from support.policies import FixedLength, chi2_bound, pass_statistic
from torch import Tensor

pytestmark = pytest.mark.usefixtures("on_device")


def first_component(state_BD: Tensor) -> Tensor:
    return state_BD[:, 0]


RULES: dict[str, StoppingRule] = {
    "fixed": FixedLength(3),
    "peak": MaxProbability(0.4),
    "product": PathProbability(0.2),
    "exit": EarlyExit(0.5),
    "risk": RejectionRisk(first_component, SamplingSetting(temperature=1.0), 0.6, 1),
    "judged": JudgedPath(lambda state_BD, step: 2 + state_BD[:, 0] - step, 0.5),
}


def peaked(*peaks: float) -> Tensor:
    """A distribution a depth whose likeliest token, depth's number, has the given probability."""
    rows = torch.stack([torch.full((8,), (1 - peak) / 7) for peak in peaks])
    rows[torch.arange(len(peaks)), torch.arange(len(peaks))] = torch.tensor(peaks)
    return rows.log()


def drafted(policy: StoppedChain, drafter: DepthDrafter) -> list[int]:
    """Tokens of the chain of one row."""
    tree = policy.grow(drafter, drafter.start(1, 64), torch.tensor([7]))
    return tree.tokens_BN[0][tree.real_BN[0]].tolist()[1:]


@pytest.mark.parametrize(("rule", "count"), [
    (FixedLength(2), 2),
    (FixedLength(0), 0),
    (FixedLength(9), 5),
    (MaxProbability(0.5), 2),  # the third peak is below it: not drafted
    (EarlyExit(0.5), 3),  # the same token says stop and is kept
    (PathProbability(0.5), 3),  # .9 * .8 * .4 = .288
    (PathProbability(0.75), 2),
])
@pytest.mark.parametrize("check_every", [0, 1, 2])
def test_where_each_rule_stops(rule: StoppingRule, count: int, check_every: int) -> None:
    drafter = DepthDrafter(peaked(0.9, 0.8, 0.4, 0.9, 0.9))
    assert drafted(StoppedChain(6, rule, check_every=check_every), drafter) == list(range(count))


def test_a_stopped_batch_makes_a_short_tree_and_no_look_makes_a_full_one() -> None:
    drafter = TableDrafter(random_log_probs(8, 8))
    roots = torch.tensor([1, 2])
    for check_every, size in ((1, 3), (0, 7)):
        policy = StoppedChain(6, FixedLength(2), check_every=check_every)
        assert policy.grow(drafter, drafter.start(2, 64), roots).size == size
    assert StoppedChain(6, FixedLength(0)).grow(drafter, drafter.start(2, 64), roots).size == 1


class PerRow(DepthDrafter):
    """Row b of a batch is scored by table b; the states are the log-probabilities of the likeliest tokens."""

    def expand(self, state, frontier):  # type: ignore[no-untyped-def]
        scores = super().expand(state, frontier)
        return type(scores)(log_probs_BFHQ=self.tables[:, None],
                            states_BFHD=self.tables[:, None].amax(-1, keepdim=True))

    def __init__(self, tables: Tensor) -> None:
        super().__init__(tables[0])
        self.tables = tables


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("sampled", [False, True])
def test_a_cut_depends_on_nothing_later(name: str, sampled: bool) -> None:
    """Rows share their first `place` distributions and differ after them: so do their drafts, up to there."""
    rows, depth = 64, 6
    start = random_log_probs(depth, 8, sharpness=2.0, seed=8)
    seen = set()
    for place in range(depth):
        tables = random_log_probs(rows, depth, 8, sharpness=2.0, seed=place)
        tables[:, :place] = start[:place]
        drafter, kind = PerRow(tables), SampledChain if sampled else StoppedChain
        # Every row draws by the numbers of request 0.
        draws = draws_for(rows)
        draws.requests_B.zero_()
        tree = kind(depth, RULES[name], check_every=0).grow(drafter, drafter.start(rows, 64),
                                                            torch.zeros(rows, dtype=torch.long), draws)
        assert len(tree.real_BN[:, : place + 1].unique(dim=0)) == 1
        assert len(tree.tokens_BN[:, : place + 1].unique(dim=0)) == 1
        seen |= set(tree.real_BN.sum(-1).tolist())
    assert len(seen) > (1 if name != "fixed" else 0)


class StatedTable(TableDrafter):
    """The state of a token is log(token / 5): it says which token was drawn, so that a rule may stop after some."""

    def expand(self, state, frontier):  # type: ignore[no-untyped-def]
        scores = super().expand(state, frontier)
        return replace(scores, states_BFHD=((frontier.tokens_BF + 0.01) / 5).log()[:, :, None, None])


class AnticipatingChain(SampledChain):
    """Wrong: drops a token whose own q is below a bound, instead of stopping after it."""

    def grow(self, drafter, state, roots_B, draws=None):  # type: ignore[no-untyped-def]
        tree = super().grow(drafter, state, roots_B, draws)
        own = tree.drawn.log_q_BIQ[:, 0].exp().gather(1, tree.tokens_BN[:, 1:2])[:, 0]
        tree.real_BN[:, 1:] &= (own > 0.3)[:, None]
        return tree


def g_of(policy: StoppedChain) -> tuple[float, int]:
    drafter, p = StatedTable(random_log_probs(5, 5, seed=2)), random_log_probs(5, 5, seed=1).double().exp()
    return pass_statistic(policy, drafter, p, 1.0, rows=60_000)


@pytest.mark.parametrize("name", RULES)
def test_stopped_samples_keep_the_targets_law(name: str) -> None:
    statistic, cells = g_of(SampledChain(2, RULES[name], check_every=0))
    assert statistic < chi2_bound(cells)


class DroppingChain(SampledChain):
    """Wrong: a token whose own state says that it will be rejected is dropped."""

    def grow(self, drafter, state, roots_B, draws=None):  # type: ignore[no-untyped-def]
        tree = super().grow(drafter, state, roots_B, draws)
        accepted = (tree.tokens_BN[:, 1:] + 0.01) / 5 > 0.4
        tree.real_BN[:, 1:] &= accepted.cumprod(-1).bool()
        return tree


@pytest.mark.parametrize("wrong", [AnticipatingChain, DroppingChain])
def test_dropping_tokens_by_their_own_chance_or_state_is_noticed(wrong: type[SampledChain]) -> None:
    statistic, cells = g_of(wrong(2, FixedLength(2)))
    assert statistic > chi2_bound(cells)


@pytest.mark.parametrize(("make", "message"), [
    (lambda: MaxProbability(0.0), "threshold must be above 0 and below 1, got 0.0"),
    (lambda: risk(1.0), "threshold must be above 0 and below 1, got 1.0"),
    (lambda: risk(0.5, least=0), "least must be at least 1, got 0"),
    (lambda: EarlyExit(1.0), "threshold must be above 0 and below 1, got 1.0"),
    (lambda: StoppedChain(0, FixedLength(1)), "length must be at least 1, got 0"),
    (lambda: StoppedChain(2, FixedLength(1), check_every=-1), "check_every must be at least 0, got -1"),
    (lambda: SampledChain(2, FixedLength(1), temperature=0.0), "temperature must be above 0, got 0.0"),
])
def test_bad_rules_say_so(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=message):
        make()


class Stated(DepthDrafter):
    """One-shot: the state at depth d is entry d of a list; the first is the root's, which no rule judges."""

    def __init__(self, tables: Tensor, accepted: list[float]) -> None:
        super().__init__(tables)
        self.states_HD = torch.tensor([99.0, *accepted])[:, None].log()

    def expand(self, state, frontier):  # type: ignore[no-untyped-def]
        return replace(super().expand(state, frontier), states_BFHD=self.states_HD[None, None])


def risk(threshold: float, least: int = 1) -> RejectionRisk:
    return RejectionRisk(first_component, SamplingSetting(), threshold, least)


@pytest.mark.parametrize(("accepted", "rule", "count"), [
    ([0.9, 0.9, 0.9, 0.9, 0.9], risk(0.3), 5),  # 1 - .9^4 = .344 is known once the fifth is drawn
    ([0.9, 0.9, 0.9, 0.9, 0.9], risk(0.25), 4),
    ([0.9, 0.2, 0.9, 0.9, 0.9], risk(0.7), 3),  # the second is judged when the third has been drawn: it stays
    ([0.1, 0.9, 0.9, 0.9, 0.9], risk(0.7), 2),  # the first is judged after the second
    ([0.1, 0.9, 0.9, 0.9, 0.9], risk(0.7, least=4), 4),
    ([1.0, 1.0, 1.0, 1.0, 1.0], risk(0.7), 6),  # the longest draft
])
@pytest.mark.parametrize("check_every", [0, 1, 3])
def test_the_risk_counts_the_tokens_that_were_read(accepted: list[float], rule: RejectionRisk, count: int,
                                                   check_every: int) -> None:
    drafter = Stated(peaked(*[0.9] * 6), accepted)
    assert len(drafted(StoppedChain(6, rule, check_every=check_every), drafter)) == count


@pytest.mark.parametrize(("chance", "counts"), [(0.9, (5, 8, 13)), (0.8, (3, 5, 7)), (0.699, (2, 3, 5))])
def test_the_lengths_of_constant_chances_are_the_papers(chance: float, counts: tuple[int, ...]) -> None:
    """h = 0.3, 0.5 and 0.7 with one chance for every token."""
    drafter = Stated(peaked(*[0.05 * place + 0.2 for place in range(8)]).repeat(2, 1), [chance] * 15)
    assert tuple(len(drafted(StoppedChain(16, risk(h, 2)), drafter)) for h in (0.3, 0.5, 0.7)) == counts


def test_a_drafter_without_states_is_refused() -> None:
    drafter = TableDrafter(random_log_probs(8, 8))
    with pytest.raises(UserError, match="acceptance head reads the drafter's states at its tokens, of which Table"):
        StoppedChain(6, risk(0.7)).grow(drafter, drafter.start(1, 64), torch.tensor([7]))


def test_greedy_filters_decide_nothing_and_sampled_ones_do() -> None:
    assert SamplingSetting(top_k=4, top_p=0.5, min_p=0.1) == SamplingSetting()
    assert SamplingSetting(repetition_penalty=1.2) != SamplingSetting()
    assert SamplingSetting(temperature=1.0, top_p=0.9) != SamplingSetting(temperature=1.0)
    assert str(SamplingSetting(temperature=0.7, top_p=0.9)) == "temperature 0.7, top_p 0.9"
