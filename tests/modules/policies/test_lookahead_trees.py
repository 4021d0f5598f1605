"""Trees by number of guesses: sizes, and expected tokens against a simulation and against other choices."""

import itertools
import random

import pytest
import torch
from draftsmith.modules import DecodeSettings, PromptTokens, PromptTokensConfig, Request, Target, UserError, decode
from draftsmith.modules.baselines.registry import joined_drafter, joined_policy, parse_joined
from draftsmith.modules.policies.lookahead_trees import AheadTree, LookaheadTrees, _solved, ahead_trees
from draftsmith.modules.policies.registry import policy_named
from draftsmith.modules.token_tree import Topology
from support.answers import native_greedy
from support.families import randomised

pytestmark = pytest.mark.usefixtures("on_device")

CHANCES = ((0.5, 0.2, 0.1), (0.35, 0.15, 0.05), (0.2, 0.1, 0.05))


def tokens_per_pass(trees: tuple[AheadTree, ...]) -> float:
    """Expected tokens of a pass in the long run, the target's own included."""
    return 1 + _solved(trees)[0]


def simulated(trees: tuple[AheadTree, ...], passes: int, seed: int = 0) -> float:
    """Tokens per pass of rows whose ranks at each depth are drawn independently."""
    chance = random.Random(seed)
    tokens, state = 0, len(trees) - 1
    for _ in range(passes):
        tree, node = trees[state], 0
        children = {(tree.topology.parents[n], tree.topology.ranks[n]): n for n in range(1, tree.topology.size)}
        for row in CHANCES:
            rank = chance.choices(range(len(row) + 1), [*row, 1 - sum(row)])[0]
            if (node, rank) not in children:
                break
            node = children[node, rank]
        tokens += 1 + tree.topology.depths[node]
        state = tree.counts[node]
    return tokens / passes


@pytest.mark.parametrize("size", [4, 9, 24, 60])
def test_the_expected_tokens_are_those_of_a_simulation(size: int) -> None:
    trees = ahead_trees(CHANCES, size)
    assert [tree.topology.depth <= guesses for guesses, tree in enumerate(trees)] == [True] * 4
    assert all(tree.size <= size for tree in trees)
    assert simulated(trees, 40_000) == pytest.approx(tokens_per_pass(trees), abs=0.02)


def test_more_nodes_never_accept_less() -> None:
    lengths = [tokens_per_pass(ahead_trees(CHANCES, size)) for size in range(4, 40)]
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[-1]


def test_no_other_virtual_nodes_of_the_same_trees_are_better() -> None:
    """Every way to give one node of a tree a virtual node of another is tried."""
    trees = ahead_trees(CHANCES, 12)
    best = tokens_per_pass(trees)
    for state, tree in enumerate(trees):
        for giver, taker in itertools.permutations(range(tree.topology.size), 2):
            if tree.counts[giver] > 0 and tree.counts[taker] < len(CHANCES):
                counts = list(tree.counts)
                counts[giver] -= 1
                counts[taker] += 1
                other = AheadTree(tree.topology, tuple(counts), tree.chances)
                assert tokens_per_pass((*trees[:state], other, *trees[state + 1 :])) <= best + 1e-9


def test_a_chain_with_certain_guesses_accepts_all_of_them() -> None:
    trees = ahead_trees(((1.0,), (1.0,)), 5)
    assert trees[2].topology == Topology.chain(2)
    assert trees[2].counts[-1] == 2
    assert tokens_per_pass(trees) == pytest.approx(3.0)


def test_answers_equal_those_of_generate_whatever_a_row_has_guesses_for(tiny_target_f64: Target) -> None:
    target = tiny_target_f64
    drafter = randomised(PromptTokens.create(PromptTokensConfig(), target))
    drafter.rank_chances_KR[:, :3] = torch.tensor(CHANCES)
    requests = [Request((5, 9, 33, 71, 8, 20), 0, 24), Request((40, 41), 1, 30), Request((7,), 2, 12)]
    seen: set[int] = set()
    for size in (4, 9, 30):
        policy = policy_named(f"sparse-{size}", Topology.chain(1), drafter)
        result = decode(target, requests, DecodeSettings(batch_size=2, ignore_eos=True), drafter=drafter, policy=policy,
                        observer=lambda tree, _accepted, _slots: seen.update(tree.real_BN.sum(-1).tolist()))
        for generation in result.generations:
            assert generation.tokens == native_greedy(target, generation.request.tokens,
                                                      generation.request.max_new_tokens)
    assert len(seen) > 2


@pytest.mark.parametrize(("name", "most"), [("sparse-14", 14), ("sparse-14+lookup-4", 14 + 4)])
def test_the_pass_has_no_more_nodes_than_were_asked_for(name: str, most: int, tiny_target_f64: Target) -> None:
    """Next to a partner no more than its own nodes are added."""
    target = tiny_target_f64
    drafter = randomised(PromptTokens.create(PromptTokensConfig(), target))
    drafter.rank_chances_KR[:, :3] = torch.tensor(CHANCES)
    sizes: list[int] = []
    whole = target.read_nodes

    def counted(embedded_BND: torch.Tensor, *args: object) -> torch.Tensor:
        sizes.append(embedded_BND.shape[1])
        return whole(embedded_BND, *args)  # type: ignore[arg-type]

    target.read_nodes = counted  # type: ignore[method-assign]
    try:
        parts = parse_joined(name)
        policy = joined_policy(parts, policy_named(parts.own, Topology.chain(1), drafter), target)
        request = Request((5, 9, 33, 5, 9), 0, 24)
        found = decode(target, [request], DecodeSettings(ignore_eos=True), policy=policy,
                       drafter=joined_drafter(parts, drafter, target))
    finally:
        del target.read_nodes  # type: ignore[method-assign]
    assert sizes[0] == 8
    assert max(sizes[1:]) == most
    assert found.generations[0].tokens == native_greedy(target, request.tokens, 24)


def test_a_drafter_without_virtual_nodes_or_counts_is_refused(tiny_target_f64: Target) -> None:
    target = tiny_target_f64
    drafter = PromptTokens.create(PromptTokensConfig(num_tokens=2), target)
    with pytest.raises(UserError, match="the policy sparse needs a drafter with virtual nodes"):
        policy_named("sparse", Topology.chain(1), drafter)
    drafter.count_ranks(torch.tensor([[0, 1], [3, 10]]))
    assert drafter.rank_chances is not None
    assert drafter.rank_chances[0][:4] == (0.5, 0.0, 0.0, 0.5)
    with pytest.raises(UserError, match="at least 3 nodes, got 2"):
        policy_named("sparse-2", Topology.chain(1), drafter)
    with pytest.raises(UserError, match="made for 3 steps of virtual nodes, the prompt_tokens drafter has 2"):
        LookaheadTrees(ahead_trees(CHANCES, 9)).check(drafter)
