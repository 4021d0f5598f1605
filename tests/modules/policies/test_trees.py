"""Growing trees: EAGLE-2 against brute force, DySpec against what a heap guarantees, sampling, every family."""

import itertools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from draftsmith.modules import Drafter, Draws, HydraConfig, Medusa, SampledChain, Sampling, Target, TokenTree, UserError
from draftsmith.modules.decoding.verifier import examine, pruned
from draftsmith.modules.families.hydra.drafter import Hydra, HydraState
from draftsmith.modules.policies.base import Policy, sample
from draftsmith.modules.policies.trees import BeamTree, DySpecTree, Eagle2Tree, SampledTree, StaticTree
from draftsmith.modules.target.kv_cache import RowCache
from draftsmith.modules.token_tree import Topology
from draftsmith.modules.verification import acceptance_rules
from draftsmith.modules.verification import sampling as sampling_module
from draftsmith.modules.verification.acceptance_rules import Chances, exact_rule
from references.dynamic import best_sum, candidates
from support.drafters import CandidateDrafter, DepthDrafter, TableDrafter, draws_for, random_log_probs
from support.policies import EVERY, FixedLength, branching, chi2_bound, medusa, pass_statistic
from support.tiers import some_long
from torch._subclasses.fake_tensor import FakeTensorMode

pytestmark = pytest.mark.usefixtures("on_device")

SIZE = 12


def grow(policy: Policy, drafter: Drafter, roots: list[int], draws: Draws | None = None) -> TokenTree:
    return policy.grow(drafter, drafter.start(len(roots), 64), torch.tensor(roots), draws)


def paths_of(tree: TokenTree, row: int) -> list[tuple[int, ...]]:
    """Tokens from below the root to each real node; the root's is empty. Checks order, ancestors and depths."""
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, tree.size):
        parent = int(tree.parents_BN[row, node])
        assert 0 <= parent < node
        if bool(tree.real_BN[row, node]):
            assert bool(tree.real_BN[row, parent])
            expected = tree.ancestors_BNN[row, parent].clone()
            expected[node] = True
            assert torch.equal(tree.ancestors_BNN[row, node], expected)
            assert int(tree.depths_BN[row, node]) == int(tree.depths_BN[row, parent]) + 1 <= tree.max_depth
        else:
            assert int(tree.ancestors_BNN[row, node].sum()) == 1
        paths.append((*paths[parent], int(tree.tokens_BN[row, node])))
    return [path for node, path in enumerate(paths) if bool(tree.real_BN[row, node])]


@pytest.mark.parametrize(("nodes", "depth", "width"), [(5, 3, 2), (2, 1, 1), (6, 2, 3), (4, 3, 2)])
def test_eagle2_keeps_the_best_connected_set_of_its_candidates(nodes: int, depth: int, width: int) -> None:
    log_q = random_log_probs(SIZE, SIZE, sharpness=2.0)
    roots = [3, 7, 0]
    tree = grow(Eagle2Tree(nodes, depth, width), TableDrafter(log_q), roots)
    for row, root in enumerate(roots):
        values = candidates(lambda path: log_q[path[-1]], root, depth, width)
        paths = paths_of(tree, row)
        assert len(paths) == len(set(paths)) == nodes
        found = sum(torch.tensor(values[path]).exp() for path in paths if path)
        torch.testing.assert_close(found, torch.tensor(best_sum(values, nodes - 1)))


def test_eagle2_asks_a_recurrent_family_once_a_level_and_a_one_shot_family_once() -> None:
    recurrent, one_shot = TableDrafter(random_log_probs(SIZE, SIZE)), DepthDrafter(random_log_probs(3, SIZE))
    assert grow(Eagle2Tree(20, 4, 3), recurrent, [1]).max_depth == 4
    assert recurrent.calls == 4
    tree = grow(Eagle2Tree(20, 4, 3), one_shot, [1, 2])
    assert (tree.max_depth, one_shot.calls) == (3, 1)
    values = candidates(lambda path: one_shot.log_q_VQ[len(path) - 1], 1, 3, 3)
    best = sorted(values.values(), reverse=True)[:19]
    found = sorted((values[path] for path in paths_of(tree, 0) if path), reverse=True)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(best))


def test_more_nodes_than_candidates_and_tokens_that_cannot_be() -> None:
    log_q = random_log_probs(SIZE, 3)
    log_q[:, 2] = -torch.inf
    ids = torch.tensor([4, 9, 2])
    tree = grow(Eagle2Tree(50, 2, 10), TableDrafter(log_q, ids), [5])
    # Three entries a node, of which two are possible; the third is padding.
    assert sorted(paths_of(tree, 0)) == [(), (4,), (4, 4), (4, 9), (9,), (9, 4), (9, 9)]
    assert tree.size == 1 + 3 + 9


def test_equal_scores_keep_parents() -> None:
    certain = torch.full((SIZE, SIZE), -torch.inf)
    certain[torch.arange(SIZE), (torch.arange(SIZE) + 1) % SIZE] = 0.0
    assert paths_of(grow(Eagle2Tree(4, 5, 3), TableDrafter(certain), [0]), 0) == [(), (1,), (1, 2), (1, 2, 3)]


@pytest.mark.parametrize("one_shot", [False, True])
def test_dyspec_fills_the_places_a_heap_would(one_shot: bool) -> None:
    """No place left open is worth more than one that was filled, and siblings keep the order of their draws."""
    size, depth, nodes, rows = 4, 4, 9, 40
    table = random_log_probs(depth if one_shot else size, size, sharpness=1.5)
    drafter = DepthDrafter(table) if one_shot else TableDrafter(table)
    # 64 nodes a level are expanded, which is all there are: nothing but the budget limits the tree.
    tree = grow(DySpecTree(nodes, depth, 64), drafter, [2] * rows, draws_for(rows, 0.7))
    shapes = set()
    for row in range(rows):
        assert len(paths_of(tree, row)) == nodes
        values, filled, still_open = {0: 1.0}, [], []
        for node in range(nodes):
            if int(tree.depths_BN[row, node]) == depth:
                continue
            q, left = tree.draft_at(torch.full((rows, 1), node), size)[row, 0].exp(), 1.0
            for child in (child for child in range(1, nodes) if int(tree.parents_BN[row, child]) == node):
                filled.append(values[node] * left)
                values[child] = values[node] * float(q[tree.tokens_BN[row, child]])
                left -= float(q[tree.tokens_BN[row, child]])
            still_open.append(values[node] * left)
        assert max(still_open) <= min(filled) + 1e-6
        shapes.add(tuple(tree.parents_BN[row].tolist()))
    assert len(shapes) > 5


def test_without_chance_dyspec_is_the_greedy_tree() -> None:
    drafter = TableDrafter(random_log_probs(SIZE, SIZE))
    ours, theirs = grow(DySpecTree(9, 3, 4), drafter, [1, 2]), grow(Eagle2Tree(9, 3, 4), drafter, [1, 2])
    assert torch.equal(ours.tokens_BN, theirs.tokens_BN)
    assert ours.drawn is None


def test_the_last_level_of_a_beam_is_drawn_without_replacement_from_all_sequences() -> None:
    """Ordered pairs of paths have the probability q(x) q(y) / (1 - q(x)), by a G-test over 60,000 rows."""
    size, rows = 3, 60_000
    log_q_VQ = random_log_probs(size, size, seed=4)
    tree = grow(BeamTree(2, 2), TableDrafter(log_q_VQ), [1] * rows, draws_for(rows))
    above_BF = tree.tokens_BN.gather(1, tree.parents_BN[:, 3:])
    paths_BF = above_BF * size + tree.tokens_BN[:, 3:]
    q = (log_q_VQ[1][:, None] + log_q_VQ).double().exp().flatten()
    wanted = (q[:, None] * q / (1 - q)[:, None]).fill_diagonal_(0).flatten() * rows
    seen = torch.bincount(paths_BF[:, 0] * size**2 + paths_BF[:, 1], minlength=size**4).double()
    assert float(seen[wanted == 0].sum()) == 0
    assert 2 * float(torch.special.xlogy(seen, seen / wanted.clamp(min=1e-9)).sum()) < chi2_bound(size**4 - size**2)


@pytest.mark.parametrize("one_shot", [False, True])
def test_a_beam_without_chance_keeps_the_likeliest_paths_and_a_wide_one_all(one_shot: bool) -> None:
    table = random_log_probs(3, 3)
    drafter = DepthDrafter(table) if one_shot else TableDrafter(table)
    values = {path: sum(float(table[level if one_shot else above, token])
                        for level, (above, token) in enumerate(itertools.pairwise((1, *path))))
              for length in (1, 2, 3) for path in itertools.product(range(3), repeat=length)}
    tree = grow(BeamTree(2, 3), drafter, [1])
    beam = [()]
    for level in range(3):
        below = sorted((path for path in values if len(path) == level + 1 and path[:-1] in beam), key=lambda path:
                       -values[path])[:2]
        assert paths_of(tree, 0)[1 + 2 * level : 3 + 2 * level] == below
        beam = below
    for draws in (None, draws_for(1)):
        assert sorted(paths_of(grow(BeamTree(27, 3), drafter, [1], draws), 0)) == sorted({(), *values})


def test_gumbel_top_k_draws_without_replacement() -> None:
    """Ordered pairs have the probability q(x) q(y) / (1 - q(x)), by a G-test over 100,000 rows."""
    log_q, rows = random_log_probs(5, seed=4), 100_000
    pairs = sample(log_q.expand(rows, 1, -1), torch.zeros(rows, 1, dtype=torch.long), 2, draws_for(rows))[:, 0]
    q = log_q.double().exp()
    wanted = (q[:, None] * q / (1 - q)[:, None]).fill_diagonal_(0).flatten() * rows
    seen = torch.bincount(pairs[:, 0] * 5 + pairs[:, 1], minlength=25).double()
    assert float(seen[wanted == 0].sum()) == 0
    statistic = 2 * float(torch.special.xlogy(seen, seen / wanted.clamp(min=1e-9)).sum())
    assert statistic < chi2_bound(20)


class AnticipatingTree(DySpecTree):
    """Wrong: places are ranked by what was drawn there, so that unlikely samples are dropped after the draw."""

    def _children(self, *given: Any) -> Any:
        entries, values, _ = super()._children(*given)
        return entries, values, values


POLICIES: dict[str, Policy] = {
    "tree": SampledTree(Topology((-1, 0, 0, 0, 1, 1, 2), (0, 0, 1, 2, 0, 1, 0))),
    "tempered": branching(2, 2, temperature=0.5),
    "dyspec": DySpecTree(6, 2, 3),
    "chain": SampledChain(2, FixedLength(2)),
}


def g_of(policy: Policy, family: str) -> tuple[float, int]:
    """G of the first two tokens of one pass."""
    drafter = {
        "recurrent": lambda: TableDrafter(random_log_probs(5, 5, seed=2)),
        "one-shot": lambda: DepthDrafter(random_log_probs(2, 5, seed=2)),
        "candidates": lambda: CandidateDrafter(random_log_probs(5, 3, seed=2)),
    }[family]()
    return pass_statistic(policy, drafter, random_log_probs(5, 5, seed=1).double().exp(), 1.0, rows=60_000)


@pytest.mark.parametrize("family", ["recurrent", "one-shot", "candidates"])
@pytest.mark.parametrize("name", some_long(POLICIES, 3))
def test_sampling_policies_keep_the_targets_law(name: str, family: str) -> None:
    statistic, cells = g_of(POLICIES[name], family)
    assert statistic < chi2_bound(cells)


def test_dropping_samples_after_the_draw_is_noticed() -> None:
    statistic, cells = g_of(AnticipatingTree(4, 2, 3), "recurrent")
    assert statistic > chi2_bound(cells)


def test_greedy_rows_of_a_sampled_batch_get_the_static_tree() -> None:
    drafter = TableDrafter(random_log_probs(SIZE, SIZE))
    draws = draws_for(4)
    draws = Draws(**{**vars(draws), "temperature_B": torch.tensor([0.0, 1.0, 0.0, 1.0])})
    policy = branching(3, 2)
    mixed, static = grow(policy, drafter, [1, 2, 3, 4], draws), grow(StaticTree(policy.topology), drafter, [1, 2, 3, 4])
    assert torch.equal(mixed.tokens_BN[0::2], static.tokens_BN[0::2])
    assert not torch.equal(mixed.tokens_BN[1::2], static.tokens_BN[1::2])
    assert mixed.drawn is not None
    assert mixed.drawn.sampled_BN[:, 1].tolist() == [False, True, False, True]
    assert grow(policy, drafter, [1]).drawn is None


def test_a_rows_draft_does_not_depend_on_its_neighbours() -> None:
    drafter = TableDrafter(random_log_probs(SIZE, SIZE))
    for policy in (*POLICIES.values(), Eagle2Tree(7, 3, 3)):
        whole, draws = grow(policy, drafter, [1, 2, 3, 4], draws_for(4)), draws_for(4)
        alone = Draws(**{**vars(draws), **{k: v[2:3] for k, v in vars(draws).items() if k.endswith("_B")}})
        assert torch.equal(grow(policy, drafter, [3], alone).tokens_BN[0], whole.tokens_BN[2])


def hydra(target: Target) -> Hydra:
    heads = Hydra.create(HydraConfig(num_heads=3, num_layers=3, prefix=True), target)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_(std=0.5)
    return heads


def functions_that_remember() -> list[Any]:
    """All functions of the room that keep their results."""
    rooms = [room for name, room in sys.modules.items() if name.startswith("draftsmith.modules")]
    return [value for room in rooms for value in vars(room).values() if hasattr(value, "cache_clear")]


@pytest.mark.parametrize("policy", EVERY, ids=lambda policy: type(policy).__name__)
@pytest.mark.parametrize("hot", [False, True])
@pytest.mark.parametrize("family", [medusa, hydra])
def test_drafting_accepting_and_committing_read_nothing_on_the_host(
    request: pytest.FixtureRequest, tiny_target: Target, policy: Policy, hot: bool,
    family: Callable[[Target], Medusa | Hydra], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under FakeTensorMode a hidden `.item()` raises; rules that walk on a CPU take the way of an accelerator."""
    for module in (acceptance_rules, sampling_module):
        monkeypatch.setattr(module, "on_host", lambda _values: False)
    # The constants of a topology outlive a test: fake ones must neither be found nor remain.
    for remembered in functions_that_remember():
        remembered.cache_clear()
        request.addfinalizer(remembered.cache_clear)
    drafter = family(tiny_target)
    roots, draws, state = torch.tensor([3, 4]), draws_for(2) if hot else None, drafter.start(2, 64)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        if isinstance(state, HydraState):
            state.context.values = mode.from_tensor(state.context.values)
        else:
            state.final.values = mode.from_tensor(state.final.values)
        tree = policy.grow(drafter, state, mode.from_tensor(roots), draws)
        wrong = (tree.tokens_BN < 0) | (tree.tokens_BN >= tiny_target.vocab_size)
        faults = examine(tree, wrong)
        tree = pruned(tree, faults, wrong)
        logits = torch.zeros(2, tree.size, tiny_target.vocab_size)
        chances = Chances(choices_BN=torch.rand(2, tree.size), tests_BN=torch.rand(2, tree.size))
        sampling = Sampling(temperature_B=torch.full((2,), float(hot)), sampling_rows=(0, 1) if hot else ())
        accepted = exact_rule(tree).accept(tree, logits, sampling, chances)
        cache = RowCache(1, 2, 2 * tree.size, tiny_target.device)
        cache.open(slice(0, 2), tree.size)
        cache.write(0, torch.zeros(2, 1, tree.size, 4), torch.zeros(2, 1, tree.size, 4))
        cache.commit(accepted.path_BK, accepted.counts_B, [1, 1])
    assert accepted.bonus_B.shape == faults.shape == cache.lengths_B.shape == (2,)


def test_a_tree_deeper_than_the_family_is_refused_and_others_are_cut(tiny_target: Target) -> None:
    heads = medusa(tiny_target)
    with pytest.raises(UserError, match="4 tokens deep, but this medusa drafter answers 3"):
        StaticTree(Topology.chain(4)).check(heads)
    for policy in EVERY[1:]:
        policy.check(heads)
    assert grow(Eagle2Tree(9, 6, 2), heads, [3]).max_depth == 3


@pytest.mark.parametrize(("make", "message"), [
    (lambda: Eagle2Tree(1), "nodes must be at least 2, got 1"),
    (lambda: DySpecTree(9, 0), "depth must be at least 1, got 0"),
    (lambda: BeamTree(0, 6), "width and depth must be at least 1, got 0 and 6"),
    (lambda: DySpecTree(temperature=0.0), "temperature must be above 0, got 0.0"),
    (lambda: SampledTree(Topology((-1, 0, 0), (0, 1, 0))), "children of node 0 must have the ranks 0, 1, …"),
    (lambda: SampledTree(Topology.chain(1), -1.0), "temperature must be above 0, got -1.0"),
])
def test_bad_policies_say_so(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
