"""Acceptance rules against exact enumeration, plain twins and each other; wrong rules must fail the same tests."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from draftsmith.modules import Drawn, Equality, Rejection, Rule, Sampling, TokenTree, Topology, Typical, UserError
from draftsmith.modules.verification import acceptance_rules
from draftsmith.modules.verification import sampling as sampling_module
from draftsmith.modules.verification.acceptance_rules import (
    Accepted,
    Chances,
    Divergence,
    chain_chances,
    down_to,
    exact_rule,
    lossy_rule,
    reject_siblings,
)
from draftsmith.modules.verification.sampling import draw, penalise
from draftsmith.recipes.counted_work import CountedStorages
from references import wrong_rules
from references.rejection import block_law, block_walk, pair_law, walk
from support.drafters import TableDrafter, draws_for, random_log_probs
from support.policies import branching, chi2_bound, g_statistic
from torch import Tensor

pytestmark = pytest.mark.usefixtures("on_device")

SIZE = 5
PROMPT = (1, 4)
SETTINGS = [(1.0, 0, 1.0, 1.0), (0.6, 4, 1.0, 1.0), (1.4, 0, 0.8, 1.0), (0.9, 4, 0.9, 1.5), (1.1, 0, 1.0, 0.7)]
"""temperature, top-k, top-p, repetition penalty"""


def raw_logits(prefix: tuple[int, ...], seed: int = 0) -> Tensor:
    key = sum((place + 1) * token for place, token in enumerate(prefix))
    generator = torch.Generator().manual_seed(seed + 31 * key)
    return 2 * torch.randn(SIZE, dtype=torch.float64, generator=generator)


@pytest.fixture(params=["host", "all nodes", "step by step"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A rule on a CPU, and on an accelerator for all nodes together or a few at a time."""
    if request.param != "host":
        for module in (acceptance_rules, sampling_module):
            monkeypatch.setattr(module, "on_host", lambda _values: False)
    monkeypatch.setattr(sampling_module, "_ENTRIES_TOGETHER", 1 if request.param == "step by step" else 1 << 24)
    return str(request.param)


def ours(prefix: tuple[int, ...], setting: tuple[float, int, float, float]) -> Tensor:
    """The target's processed distribution after the prompt and a path, as the loop forms it."""
    temperature, top_k, top_p, penalty = setting
    seen_BV = torch.zeros(1, SIZE, dtype=torch.bool)
    seen_BV[:, list(PROMPT)] = True
    path = torch.tensor([[[*prefix, PROMPT[-1]]]])
    logits = penalise(raw_logits(prefix)[None, None], penalty, seen_BV, path)
    sampling = Sampling(temperature_B=torch.tensor([temperature]), top_k=top_k, top_p=top_p, sampling_rows=(0,))
    return sampling.distribution(logits)[0, 0]


def theirs(prefix: tuple[int, ...], setting: tuple[float, int, float, float]) -> Tensor:
    """The same by transformers' own processors."""
    from transformers import (
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    temperature, top_k, top_p, penalty = setting
    tokens, scores = torch.tensor([[*PROMPT, *prefix]]), raw_logits(prefix)[None]
    scores = TemperatureLogitsWarper(temperature)(tokens, RepetitionPenaltyLogitsProcessor(penalty)(tokens, scores))
    scores = TopKLogitsWarper(top_k)(tokens, scores) if top_k else scores
    scores = TopPLogitsWarper(top_p)(tokens, scores) if top_p < 1 else scores
    return scores.softmax(-1)[0]


def expected_pairs(setting: tuple[float, int, float, float]) -> Tensor:
    return theirs((), setting)[:, None] * torch.stack([theirs((token,), setting) for token in range(SIZE)])


def draft(prefix: tuple[int, ...]) -> Tensor:
    return (raw_logits(prefix, seed=1000) / 2).softmax(-1)


@pytest.mark.parametrize("sampled", [True, False])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_rejection_has_the_targets_law(width: int, setting: tuple[float, int, float, float], sampled: bool) -> None:
    law = pair_law(reject_siblings, lambda prefix: ours(prefix, setting), draft, width, sampled)
    torch.testing.assert_close(law, expected_pairs(setting), atol=1e-7, rtol=0)


@pytest.mark.parametrize(("rule", "sampled"), [
    (wrong_rules.unchanged_q, True),
    (wrong_rules.one_entry_residual, True),
    (wrong_rules.likeliest_as_samples, False),
    (wrong_rules.no_renormalisation, False),
    (wrong_rules.typical, False),
])
@pytest.mark.parametrize("width", [2, 3, 4])
def test_wrong_rules_do_not(rule: object, sampled: bool, width: int) -> None:
    law = pair_law(rule, lambda prefix: ours(prefix, SETTINGS[0]), draft, width, sampled)
    # A thousand times the tolerance of the test above.
    assert float((law - expected_pairs(SETTINGS[0])).abs().max()) > 1e-4


def test_an_oracle_is_always_accepted_and_point_masses_with_their_sum() -> None:
    p = draft(())[None]
    everything = torch.ones(1, 3, dtype=torch.bool)
    tokens = p.topk(3).indices
    accept_BK, _ = reject_siblings(p, p.log(), tokens, everything, everything)
    assert float(accept_BK[0, 0]) == 1.0
    accept_BK, _ = reject_siblings(p, p.log(), tokens, everything, ~everything)
    some = 1 - (1 - accept_BK).prod()
    torch.testing.assert_close(some, p.topk(3).values.sum())


def random_drawn_tree(generator: torch.Generator, batch: int, size: int, width: int | None = None) -> TokenTree:
    """Random shapes in which some nodes are drawn, some point masses, some padding."""

    def above(node: int) -> int:
        return int(torch.randint(0 if width is None else node - 1, node, (), generator=generator))

    parents = torch.tensor([[-1, *(above(node) for node in range(1, size))] for _ in range(batch)])
    tokens = torch.stack([torch.randperm(max(SIZE, size), generator=generator)[:size] % SIZE for _ in range(batch)])
    real = torch.rand(batch, size, generator=generator) > 0.1
    real[:, 0] = True
    if width == 1:
        real = real.long().cumprod(-1).bool()
    log_q = torch.rand(batch, size, SIZE, generator=generator).log_softmax(-1)
    sampled = torch.rand(batch, size, generator=generator) > 0.4
    drawn = Drawn(log_q_BIQ=log_q, inner_BN=torch.arange(size).expand(batch, -1), sampled_BN=sampled)
    return TokenTree.grown(tokens, parents, real, max_depth=size - 1, most_children=width or size - 1, drawn=drawn)


def emitted(tree: TokenTree, accepted: object, row: int) -> list[int]:
    path = accepted.path_BK[row, : int(accepted.counts_B[row])].tolist()  # type: ignore[attr-defined]
    return [*(int(tree.tokens_BN[row, node]) for node in path[1:]), int(accepted.bonus_B[row])]  # type: ignore[attr-defined]


@pytest.mark.usefixtures("way")
def test_rejection_equals_its_plain_twin_on_random_trees() -> None:
    generator = torch.Generator().manual_seed(0)
    for size in range(1, 9):
        tree = random_drawn_tree(generator, 12, size)
        logits = torch.randn(12, size, SIZE, dtype=torch.float64, generator=generator)
        sampling_rows = tuple(row for row in range(12) if row % 3)
        sampling = Sampling(temperature_B=torch.tensor([0.0, 0.8, 1.3] * 4), sampling_rows=sampling_rows, top_k=4)
        chances = Chances(choices_BN=torch.rand(12, size, dtype=torch.float64, generator=generator),
                          tests_BN=torch.rand(12, size, dtype=torch.float64, generator=generator))
        accepted, p = Rejection().accept(tree, logits, sampling, chances), sampling.distribution(logits)
        for row in range(12):
            wanted = walk(
                tree,
                p[row],
                tree.drawn.log_q_BIQ[row].double(),  # type: ignore[union-attr]
                row,
                chances.tests_BN[row],
                chances.choices_BN[row],
                draw,
            )
            assert emitted(tree, accepted, row) == wanted


@pytest.mark.usefixtures("way")
def test_block_verification_equals_its_plain_twin_on_random_chains() -> None:
    """Drawn nodes, point masses and padding at the end, greedy rows among them."""
    generator = torch.Generator().manual_seed(1)
    for size in range(2, 8):
        tree = random_drawn_tree(generator, 40, size, width=1)
        assert tree.drawn is not None
        # Half of the drafts are near the target, so that whole blocks are accepted too.
        logits = torch.randn(40, size, SIZE, dtype=torch.float64, generator=generator)
        logits[20:] = 0.2 * logits[20:] + tree.drawn.log_q_BIQ[20:]
        sampling_rows = tuple(row for row in range(40) if row % 4)
        sampling = Sampling(temperature_B=torch.tensor([0.0, 0.8, 1.3, 1.0] * 10), sampling_rows=sampling_rows)
        chances = Chances(choices_BN=torch.rand(40, size, dtype=torch.float64, generator=generator),
                          tests_BN=torch.rand(40, size, dtype=torch.float64, generator=generator))
        accepted, p_BNV = Rejection().accept(tree, logits, sampling, chances), sampling.distribution(logits)
        for row in range(40):
            end = int(tree.real_BN[row].sum())
            tokens = tuple(tree.tokens_BN[row, 1:end].tolist())

            def q_of(path: tuple[int, ...], row: int = row, tokens: tuple[int, ...] = tokens,
                     drawn: Drawn = tree.drawn) -> Tensor:
                if len(path) == len(tokens) or drawn.sampled_BN[row, len(path) + 1]:
                    return drawn.log_q_BIQ[row, len(path)].double().softmax(-1)
                return torch.eye(SIZE, dtype=torch.float64)[tokens[len(path)]]

            p_NV = p_BNV[row]
            wanted = block_walk(lambda path, p_NV=p_NV: p_NV[len(path)], q_of, tokens, chances.tests_BN[row],
                                chances.choices_BN[row], draw)
            assert emitted(tree, accepted, row) == wanted


@pytest.mark.usefixtures("way")
def test_a_place_after_which_nothing_can_come_is_no_surer_than_its_own_chance() -> None:
    """Everything is ruled out after the first drafted token, which has half the probability that the draft gave it."""
    logits = torch.full((1, 3, SIZE), -torch.inf, dtype=torch.float64)
    logits[0, 0, :2] = 0.0
    tree = replace(Topology.chain(2).plant(torch.tensor([[4, 0, 1]])), drawn=Drawn(
        log_q_BIQ=torch.eye(SIZE)[:2].log()[None], inner_BN=torch.tensor([[0, 1, 0]]),
        sampled_BN=torch.ones(1, 3, dtype=torch.bool)))
    sampling = Sampling(temperature_B=torch.ones(1), sampling_rows=(0,))
    chances = Chances(choices_BN=torch.full((1, 3), 0.5, dtype=torch.float64),
                      tests_BN=torch.full((1, 3), 0.9, dtype=torch.float64))
    assert int(Rejection().accept(tree, logits, sampling, chances).counts_B) == 1


@pytest.mark.parametrize("temperature", [0.1, 0.3, 0.7, 1.0, 1.2])
@pytest.mark.parametrize("stops", [False, True])
def test_block_verification_has_the_targets_law_and_accepts_more(temperature: float, stops: bool) -> None:
    """Chains that end where their own tokens say so, too."""
    size, most = 3, 3

    def p_of(path: tuple[int, ...]) -> Tensor:
        # The same at every temperature, as if the logits had been multiplied by it: only drafts get too sure.
        return raw_logits(path)[:size].softmax(-1)

    def q_of(path: tuple[int, ...]) -> Tensor:
        return ((raw_logits(path)[:size] / 2 + raw_logits(path, seed=1000)[:size] / 2) / temperature).softmax(-1)

    def goes_on(path: tuple[int, ...]) -> bool:
        return not stops or not path or path[-1] != 1

    def by_token(path: tuple[int, ...]) -> float:
        if len(path) == most or not goes_on(path):
            return 1.0
        return 1 + sum(float(chance) * by_token((*path, token))
                       for token, chance in enumerate(torch.minimum(p_of(path), q_of(path))))

    def exact(path: tuple[int, ...]) -> Tensor:
        if len(path) == most:
            return p_of(path)
        return torch.stack([float(p_of(path)[token]) * exact((*path, token)) for token in range(size)])

    law, mean = block_law(p_of, q_of, goes_on, most, size)
    torch.testing.assert_close(law, exact(()), atol=1e-12, rtol=0)
    wrong, _ = block_law(p_of, q_of, goes_on, most, size, carry=False)
    assert float((wrong - law).abs().max()) > 1e-4
    assert mean > by_token(()) + (1e-5 if temperature > 0.1 else 1e-7)


@pytest.mark.usefixtures("way")
def test_every_rule_is_greedy_verification_in_greedy_rows() -> None:
    generator = torch.Generator().manual_seed(2)
    for width, rules in ((None, (Rejection(), Typical())), (1, (Rejection(), Typical()))):
        # No two nodes share a token: of equal siblings, equality follows the luckier and rejection the first.
        tree = random_drawn_tree(generator, 30, SIZE, width)
        table = torch.randn(SIZE, SIZE, dtype=torch.float64, generator=generator)
        logits = table[tree.tokens_BN]
        sampling = Sampling(temperature_B=torch.zeros(30))
        chances = Chances(choices_BN=torch.rand(30, SIZE), tests_BN=torch.rand(30, SIZE))
        expected = Equality().accept(tree, logits, sampling, chances)
        for rule in rules:
            found = rule.accept(tree, logits, sampling, chances)
            for row in range(30):
                assert emitted(tree, found, row) == emitted(tree, expected, row)


def by_all_nodes(rule: Rule, tree: TokenTree, logits_BNV: Tensor, sampling: Sampling, chances: Chances) -> Accepted:
    """Equality or typical acceptance by the target's distributions at all nodes, whether a walk gets there or not."""
    rows_B, nodes_N = torch.arange(len(logits_BNV)), torch.arange(tree.size)
    adjusted_BNV = sampling.adjusted(logits_BNV, rows_B, nodes_N.expand_as(tree.tokens_BN))
    p_BNV = sampling.distribution(adjusted_BNV)
    choices_BN = torch.where(sampling.temperature_B[:, None] > 0, draw(p_BNV, chances.choices_BN),
                             adjusted_BNV.argmax(-1))
    ends = []
    for row in rows_B.tolist():
        scores = {0: 0.0}
        for node, (above, token) in enumerate(zip(tree.parents_BN[row].tolist(), tree.tokens_BN[row].tolist(),
                                                  strict=True)):
            if node == 0 or above not in scores or not tree.real_BN[row, node]:
                continue
            own = p_BNV[row, above, token].double()
            if (own > rule.bound(p_BNV[row, above].double())) if isinstance(rule, Typical) else (
                    token == choices_BN[row, above]):
                scores[node] = scores[above] + float(own.log()) * isinstance(rule, Typical)
        ends.append(max(scores, key=lambda node: (int(tree.depths_BN[row, node]), scores[node], -node)))
    deepest_B = torch.tensor(ends)
    return down_to(tree, deepest_B, choices_BN[rows_B, deepest_B])


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.8}, {"top_k": 7, "top_p": 1e-9}, {"top_k": 1},
                                     {"top_p": 1 - 1e-9, "min_p": 0.05}])
@pytest.mark.parametrize("rule", [Equality(), Typical()])
def test_a_walk_forms_the_distributions_that_it_meets_and_accepts_what_all_would(
    rule: Rule, filters: dict[str, float], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Duplicate siblings, padding, rows that end early, equal, impossible and unreadable logits, extreme temperatures,
    and a penalty that depends on the node."""
    generator, formed, probabilities = torch.Generator().manual_seed(0), list[int](), sampling_module.probabilities
    temperatures, entries, accepted = torch.tensor([0.0, 0.001, 0.7, 1.0, 1.5, 1000.0]), 40, 0

    def noting(logits: Tensor, *given: object) -> Tensor:
        formed.append(logits.shape[0] * logits.shape[1])
        return probabilities(logits, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(sampling_module, "probabilities", noting)
    for size in (1, 2, 5, 9, 16):
        tree = replace(random_drawn_tree(generator, 6, size), drawn=None)
        table = 2 * torch.randn(size, SIZE, entries, generator=generator)
        table[..., :SIZE] += 4 * torch.rand(size, SIZE, SIZE, generator=generator) + 4
        table[1:, 1], table[:, 2, ::3], table[2:, 3] = 0.0, -torch.inf, torch.nan
        # Of equal siblings one is as good as another: all that decides is the same.
        logits = table[tree.depths_BN, tree.tokens_BN]
        uniforms = torch.rand(6, size, dtype=torch.float64, generator=generator).gather(1, tree.depths_BN)
        chances = Chances(choices_BN=uniforms, tests_BN=uniforms)

        def penalty(logits_RMV: Tensor, rows_R: Tensor, nodes_RM: Tensor, tree: TokenTree = tree) -> Tensor:
            return logits_RMV + 0.1 * (rows_R[:, None] + tree.depths_BN[rows_R[:, None], nodes_RM])[..., None] * (
                torch.arange(entries) % 2)

        for sampling in (Sampling(temperature_B=temperatures, sampling_rows=tuple(range(1, 6)), **filters,
                                  adjust=penalty), Sampling(temperature_B=torch.zeros(6), adjust=penalty)):
            expected = by_all_nodes(rule, tree, logits, sampling, chances)
            formed.clear()
            found = rule.accept(tree, logits, sampling, chances)
            for name in ("path_BK", "counts_B", "bonus_B"):
                assert torch.equal(getattr(found, name), getattr(expected, name)), name
            accepted += int(found.counts_B.sum()) - 6
            sampled = len(sampling.sampling_rows)
            if isinstance(rule, Equality) and way == "host":
                assert sum(formed) == (int(found.counts_B[1:].sum()) if sampled else 0)
            elif way == "step by step":
                assert set(formed) <= {6}
    assert accepted > 15


def test_the_rule_follows_from_how_the_tree_was_drawn() -> None:
    chain = random_drawn_tree(torch.Generator().manual_seed(0), 1, 3, width=1)
    tree = random_drawn_tree(torch.Generator().manual_seed(0), 1, 4)
    assert isinstance(exact_rule(Topology.chain(2).plant(torch.zeros(1, 3, dtype=torch.long))), Equality)
    assert isinstance(exact_rule(chain), Rejection)
    assert isinstance(exact_rule(tree), Rejection)
    assert [rule.lossless for rule in (Equality(), Rejection(), Typical())] == [True] * 2 + [False]


@pytest.mark.parametrize("kept", [None, [0, 2, 3, 5]])
def test_a_sampled_tree_with_its_rule_passes_a_g_test(kept: list[int] | None) -> None:
    """Policy, noise, carried q, reduced vocabulary, tests and residual together, 60,000 rows of one pass."""
    rows, size = 60_000, 6
    p = random_log_probs(size, size, seed=1, sharpness=1.5).double()
    ids = None if kept is None else torch.tensor(kept)
    drafter = TableDrafter(random_log_probs(size, size if kept is None else len(kept), seed=2), ids)
    draws, roots = draws_for(rows, 0.8), torch.full((rows,), 4)
    tree = branching(3, 2).grow(drafter, drafter.start(rows, 64), roots, draws)
    generator = torch.Generator().manual_seed(5)
    choices = torch.rand(rows, tree.size, dtype=torch.float64, generator=generator)
    sampling = Sampling(temperature_B=draws.temperature_B, sampling_rows=tuple(range(len(draws.temperature_B))))
    accepted = Rejection().accept(tree, p[tree.tokens_BN], sampling,
                                  Chances(choices_BN=choices, tests_BN=draws.tests(tree.size)))
    exact = (p / 0.8).softmax(-1)
    assert float((accepted.counts_B - 1).float().mean()) > 0.3
    statistic, cells = g_statistic(tree, accepted, exact, generator)
    assert statistic < chi2_bound(cells)
    # A q that is not the one really drawn from, here without the temperature, is noticed.
    assert tree.drawn is not None
    untempered = (0.8 * tree.drawn.log_q_BIQ).log_softmax(-1)
    wrong = replace(tree, drawn=replace(tree.drawn, log_q_BIQ=untempered))
    accepted = Rejection().accept(wrong, p[tree.tokens_BN], sampling,
                                  Chances(choices_BN=choices, tests_BN=draws.tests(tree.size)))
    statistic, cells = g_statistic(wrong, accepted, exact, generator)
    assert statistic > chi2_bound(cells)


@pytest.mark.parametrize("width", [1, 2])
def test_a_divergence_of_nothing_is_rejection_and_of_more_takes_what_is_alike(width: int) -> None:
    """At 0 nats token by token; at some every guess of a draft that is like an unsure target, and the law is lost."""
    rows, size = 4000, 6
    p = random_log_probs(size, size, seed=1).double()
    near = TableDrafter((p + 0.2 * random_log_probs(size, size, seed=3)).log_softmax(-1).float())
    draws, roots = draws_for(rows, 1.0), torch.full((rows,), 4)
    tree = branching(width, 1).grow(near, near.start(rows, 64), roots, draws)
    generator = torch.Generator().manual_seed(5)
    chances = Chances(choices_BN=torch.rand(rows, tree.size, dtype=torch.float64, generator=generator),
                      tests_BN=draws.tests(tree.size))
    temperature_B = draws.temperature_B.clone()
    temperature_B[::4] = 0
    sampling = Sampling(temperature_B=temperature_B, sampling_rows=tuple(range(rows)))
    exact, none, some, sure = (rule.accept(tree, scale * p[tree.tokens_BN], sampling, chances) for rule, scale in (
        (Rejection(), 1), (Divergence(nats=0), 1), (Divergence(nats=9), 1), (Divergence(nats=9), 40)))
    for name, values in vars(exact).items():
        assert torch.equal(values, getattr(none, name))
        # Greedy rows are exact at any threshold, and so is a target that is sure.
        assert torch.equal(values[::4], getattr(some, name)[::4])
    assert float(some.counts_B[1::4].float().mean()) == tree.max_depth + 1
    assert float(sure.counts_B.float().mean()) < tree.max_depth + 1
    statistic, cells = g_statistic(tree.of_first(rows), some, p.softmax(-1), generator)
    assert statistic > chi2_bound(cells)


@pytest.mark.parametrize(("name", "found"), [("typical", Typical()), ("kl", Divergence()), ("kl-2", Divergence(nats=2)),
                                             ("kl-x", None), ("exact", None), ("kl--1", None), ("typical-2", None)])
def test_lossy_rules_by_name(name: str, found: Rule | None) -> None:
    if found is None:
        with pytest.raises(UserError, match=r"there is no lossy rule|takes a number of nats from 0 on, got -1"):
            lossy_rule(name)
    else:
        assert lossy_rule(name) == found
        assert not found.lossless


def test_typical_acceptance_by_hand() -> None:
    rule = Typical()
    uniform, peaked = torch.full((8,), 1 / 8), torch.tensor([0.97, 0.03, 0, 0, 0, 0, 0, 0])
    torch.testing.assert_close(rule.bound(uniform), torch.tensor(0.3 * math.exp(-math.log(8))))
    torch.testing.assert_close(rule.bound(uniform), torch.tensor(0.0375))
    torch.testing.assert_close(rule.bound(peaked), torch.tensor(0.09))
    assert bool(rule.bound(torch.tensor([1.0, 0.0])).isfinite())
    #   0 -> 1 -> 3: likely enough all the way; 0 -> 2 -> 4: likelier; 0 -> 2 -> 5: not likely enough
    tree = Topology((-1, 0, 0, 1, 2, 2), (0, 0, 1, 0, 0, 1)).plant(torch.tensor([[7, 0, 1, 0, 0, 3]]))
    p = torch.tensor([0.3, 0.6, 0.09, 0.01])
    logits = torch.cat([p, torch.full((4,), 1e-9)]).log().expand(1, 6, -1)
    chances = Chances(choices_BN=torch.full((1, 6), 0.5, dtype=torch.float64), tests_BN=torch.zeros(1, 6))
    accepted = rule.accept(tree, logits, Sampling(temperature_B=torch.ones(1), sampling_rows=(0,)), chances)
    assert accepted.path_BK[0].tolist() == [0, 2, 4]
    assert int(accepted.bonus_B) == 1
    with pytest.raises(UserError, match="epsilon must be above 0 and at most 1, got 0"):
        Typical(epsilon=0)


@pytest.mark.parametrize("penalty", [1.0, 1.3, 0.8])
def test_the_penalty_equals_transformers_at_every_node(penalty: float) -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    topology = Topology((-1, 0, 0, 1, 1, 3), (0, 0, 1, 0, 1, 0))
    tokens = torch.tensor([[3, 8, 2, 8, 1, 6], [5, 5, 9, 0, 3, 3]])
    tree, prompts = topology.plant(tokens), torch.tensor([[1, 2, 2], [9, 7, 4]])
    logits = torch.randn(2, 6, 10)
    seen = torch.zeros(2, 10, dtype=torch.bool).scatter(1, prompts, True)
    paths = torch.where(tree.ancestors_BNN, tokens[:, None, :], tokens[:, :1, None])
    found = penalise(logits, penalty, seen, paths)
    processor = RepetitionPenaltyLogitsProcessor(penalty)
    for row, node in itertools.product(range(2), range(6)):
        path = tokens[row, topology.ancestors_NN[node]]
        expected = processor(torch.cat([prompts[row], path])[None], logits[row, node][None].clone())
        assert torch.equal(found[row, node], expected[0])


@pytest.mark.parametrize("way", ["all nodes"], indirect=True)
@pytest.mark.parametrize("name", ["chain", "typical", "all", "equality"])
@pytest.mark.usefixtures("way")
def test_few_distributions_are_held_at_a_time_and_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, nodes, vocab_size = 3, 17, 640
    rule: Rule = {"chain": Rejection(), "typical": Typical(), "all": acceptance_rules.AcceptAll(),
                  "equality": Equality()}[name]
    generator = torch.Generator().manual_seed(0)
    log_q_BIQ = torch.randn(rows, nodes - 1, vocab_size, generator=generator).log_softmax(-1)
    tree = replace(Topology.chain(nodes - 1).plant(torch.randint(vocab_size, (rows, nodes), generator=generator)),
                   drawn=Drawn(log_q_BIQ=log_q_BIQ, inner_BN=torch.arange(nodes).clamp(max=nodes - 2).expand(rows, -1),
                               sampled_BN=torch.rand(rows, nodes, generator=generator) < 0.7))
    logits_BNV = 3 * torch.randn(rows, nodes, vocab_size, generator=generator)
    chances = Chances(choices_BN=torch.rand(rows, nodes, generator=generator, dtype=torch.float64),
                      tests_BN=0.3 * torch.rand(rows, nodes, generator=generator, dtype=torch.float64))
    sampling = Sampling(temperature_B=torch.tensor([0.0, 1.0, 1.7]), top_p=0.9, sampling_rows=(1, 2))
    whole = rule.accept(tree, logits_BNV, sampling, chances)
    monkeypatch.setattr(sampling_module, "_ENTRIES_TOGETHER", 2 * rows * vocab_size)
    with CountedStorages() as tally:
        pieces = rule.accept(tree, logits_BNV, sampling, chances)
    for field in ("path_BK", "counts_B", "bonus_B"):
        assert torch.equal(getattr(pieces, field), getattr(whole, field))
    # Float64 probabilities of two nodes, not of all.
    assert tally.largest <= 8 * 2 * rows * vocab_size


def test_the_chances_of_a_chain_are_the_same_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    logits_BNV = torch.randn(2, 4, 50, generator=torch.Generator().manual_seed(0))
    tree = Topology.chain(3).plant(logits_BNV.argmax(-1))
    sampling = Sampling(temperature_B=torch.tensor([1.0, 0.6]), sampling_rows=(0, 1))
    whole = chain_chances(tree, logits_BNV, sampling)
    monkeypatch.setattr(sampling_module, "_ENTRIES_TOGETHER", 1)
    assert torch.equal(chain_chances(tree, logits_BNV, sampling), whole)
    assert float(whole.min()) > 0
