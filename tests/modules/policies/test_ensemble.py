"""Several drafters in one tree: every path of each, no path twice, one budget, and still the target's own words."""

import random
from dataclasses import replace

import pytest
import torch
from draftsmith.modules import Chain, DecodeSettings, Medusa, MedusaConfig, StaticTree, Target, baseline, decode
from draftsmith.modules.baselines.memories import PromptLookup, TokenRecycling
from draftsmith.modules.decoding.requests import Request
from draftsmith.modules.errors import UserError
from draftsmith.modules.policies.ensemble import Ensemble, Union, joined
from draftsmith.modules.token_tree import Drawn, Lookahead, TokenTree, Topology
from support.answers import ROOT, native_greedy, observe, requests_for, unplaced
from support.drafters import ScriptedDrafter
from support.tiers import some_long
from torch import Tensor

pytestmark = pytest.mark.usefixtures("on_device")

CPU = torch.device("cpu")


def paths(tree: TokenTree, row: int) -> list[tuple[int, ...]]:
    """The tokens that lead to each real node."""
    found = []
    for node in range(tree.size):
        if tree.real_BN[row, node]:
            line, at = [], node
            while at > 0:
                assert tree.real_BN[row, at], "a real node below padding"
                line.append(int(tree.tokens_BN[row, at]))
                at = int(tree.parents_BN[row, at])
            found.append(tuple(reversed(line)))
    return found


def check_consistent(tree: TokenTree) -> None:
    """Depths, ancestors and order agree with the parents."""
    derived = TokenTree.from_parents(tree.tokens_BN, tree.parents_BN, tree.real_BN)
    real = tree.real_BN
    assert torch.equal(derived.ancestors_BNN[real], tree.ancestors_BNN[real])
    assert torch.equal(derived.depths_BN[real], tree.depths_BN[real])
    assert derived.max_depth <= tree.max_depth
    assert bool(tree.ancestors_BNN.diagonal(dim1=1, dim2=2).all())


def random_tree(rng: random.Random, rows: int, size: int) -> TokenTree:
    """Trees that differ in shape from row to row, of three tokens only, some with padding, siblings distinct."""
    tokens, parents, real = [], [], []
    for _ in range(rows):
        line, above, used = [9], [-1], {(): 0}
        for _ in range(size * 4):
            path = rng.choice(list(used))
            token = rng.randrange(3)
            if len(line) < size and (*path, token) not in used:
                used[(*path, token)] = len(line)
                line.append(token)
                above.append(used[path])
        missing = size - len(line)
        tokens.append(line + [0] * missing)
        parents.append(above + [0] * missing)
        real.append([True] * len(line) + [False] * missing)
    return TokenTree.from_parents(torch.tensor(tokens), torch.tensor(parents), torch.tensor(real))


def test_the_joined_tree_holds_the_paths_of_both_and_none_twice() -> None:
    rng = random.Random(0)
    for _ in range(60):
        first, second = random_tree(rng, 3, rng.randrange(1, 9)), random_tree(rng, 3, rng.randrange(1, 9))
        tree = joined(first, second)
        check_consistent(tree)
        for row in range(3):
            both = paths(tree, row)
            assert len(both) == len(set(both))
            assert set(both) == set(paths(first, row)) | set(paths(second, row))
        packed = tree.packed(6)
        check_consistent(packed)
        for row in range(3):
            assert paths(packed, row) == paths(tree, row)[:6]


@pytest.mark.parametrize("first_wants", [True, False])
def test_a_joined_tree_wants_the_virtual_nodes_that_its_parts_want(first_wants: bool) -> None:
    """After a node of both as many as either, after the nodes of a part that says nothing none."""
    rng = random.Random(1)

    def wanting(tree: TokenTree) -> TokenTree:
        counts_BN = torch.tensor([[rng.randrange(4) for _ in range(tree.size)] for _ in range(2)]) * tree.real_BN
        return replace(tree, lookahead=Lookahead(counts_BN=counts_BN, most=int(counts_BN.sum(-1).max()),
                                                 nodes=tree.size))

    def wishes(tree: TokenTree, row: int) -> dict[tuple[int, ...], int]:
        counts = [0] * tree.size if tree.lookahead is None else tree.lookahead.counts_BN[row].tolist()
        real = [count for count, real in zip(counts, tree.real_BN[row].tolist(), strict=True) if real]
        return dict(zip(paths(tree, row), real, strict=True))

    for _ in range(30):
        first, second = random_tree(rng, 2, 7), wanting(random_tree(rng, 2, 7))
        first = wanting(first) if first_wants else first
        tree = joined(first, second)
        assert tree.lookahead is not None
        assert int(tree.lookahead.counts_BN.sum(-1).max()) <= tree.lookahead.most
        for row in range(2):
            ours, theirs = wishes(first, row), wishes(second, row)
            assert wishes(tree, row) == {path: max(ours.get(path, 0), theirs.get(path, 0)) for path in ours | theirs}
    assert joined(random_tree(rng, 2, 7), random_tree(rng, 2, 7)).lookahead is None


def test_virtual_nodes_are_not_joined() -> None:
    tree = random_tree(random.Random(0), 1, 3)
    with pytest.raises(ValueError, match="virtual nodes cannot be joined"):
        joined(tree, replace(tree, virtual=unplaced(torch.zeros(1, 1, 4))))


def test_what_one_part_leaves_the_next_one_uses() -> None:
    texts = [[4, 5, 6, 7, 8, 9], [4, 5, 4]]
    oracle = ScriptedDrafter(12, [[4, 5, 6, 7, 8, 9, 3, 2, 1, 0]], "oracle")
    ensemble = Ensemble([PromptLookup(CPU, copied=3), oracle])
    state = ensemble.start(2, 32)
    observe(ensemble, state, [0, 1], texts)
    union = Union([Chain(3), Chain(4)], 5)
    tree = union.grow(ensemble, state, torch.tensor([9, 4]))
    check_consistent(tree)
    # Nothing to copy in the first row: all four nodes are the oracle's. In the second row three were copied.
    assert paths(tree, 0) == [(), (3,), (3, 2), (3, 2, 1), (3, 2, 1, 0)]
    assert paths(tree, 1)[:4] == [(), (5,), (5, 4), (5, 4, 5)]
    assert len(paths(tree, 1)) == 5
    assert union.max_size == tree.size == 5
    assert union.size == 0, "it chooses no size before each pass"
    assert tree.parts_BN is not None
    assert tree.parts_BN.tolist() == [[0, 1, 1, 1, 1], [0, 0, 0, 0, 1]]


def test_rows_without_a_copy_have_no_more_nodes_than_the_draft_alone() -> None:
    """And a row that copies makes the pass larger by no more than the budget."""
    draft = ScriptedDrafter(12, [[4, 5, 6, 7, 8, 9, 3, 2, 1, 0]], "oracle")
    ensemble, union = Ensemble([PromptLookup(CPU, copied=7), draft]), Union([Chain(7), Chain(3)], 9)
    for texts, nodes in (([[4, 5, 6], [4, 5, 6, 7]], 4), ([[4, 5, 6], [4, 5, 4]], 9)):
        state = ensemble.start(2, 32)
        observe(ensemble, state, [0, 1], texts)
        tree = union.grow(ensemble, state, torch.tensor([text[-1] for text in texts]))
        assert tree.size == nodes
        assert len(paths(tree, 0)) == 4


def test_what_comes_first_is_not_sampled() -> None:
    tree = random_tree(random.Random(0), 1, 3)
    drawn = Drawn(log_q_BIQ=torch.zeros(1, 1, 12), inner_BN=torch.zeros_like(tree.tokens_BN),
                  sampled_BN=torch.ones_like(tree.real_BN))
    with pytest.raises(ValueError, match="sampled nodes may stand in the joining tree only"):
        joined(replace(tree, drawn=drawn), tree)


def test_nobody_has_a_guess() -> None:
    ensemble = Ensemble([PromptLookup(CPU, copied=3), TokenRecycling(12, CPU)])
    state = ensemble.parts[0].start(1, 32)
    both = ensemble.start(1, 32)
    observe(ensemble.parts[0], state, [0], [[4, 5]])
    both.parts[0] = state
    assert Union([Chain(3), Chain(2)], 6).grow(ensemble, both, torch.tensor([5])).size == 1


@pytest.mark.parametrize("temperature", some_long([0.0, 0.9], 3))
@pytest.mark.parametrize("budget", [2, 6, 16])
def test_heads_and_lookup_and_recycling_in_one_tree_are_lossless(tiny_target_f64: Target, temperature: float,
                                                                 budget: int) -> None:
    target = tiny_target_f64
    requests = [
        Request((*request.tokens, *request.tokens[:2]), request.index, request.max_new_tokens, temperature)
        for request in requests_for(target, 7, 30)
    ]
    settings = DecodeSettings(batch_size=3, prefill_chunk=6, ignore_eos=True)
    plain = [generation.tokens for generation in decode(target, requests, settings).generations]
    if temperature == 0:
        assert plain == [native_greedy(target, request.tokens, request.max_new_tokens) for request in requests]
    lookup, chain = baseline("prompt_lookup", target)
    recycling, tree = baseline("recycling", target)
    heads = Medusa.create(MedusaConfig(num_heads=2), target)
    topology = Topology.from_paths([(0,), (1,), (0, 0), (1, 0)])
    result = decode(target, requests, settings, drafter=Ensemble([lookup, recycling, heads]),
                    policy=Union([chain, tree, StaticTree(topology)], budget))
    assert [generation.tokens for generation in result.generations] == plain


@pytest.mark.long
def test_an_ensemble_accepts_at_least_what_its_best_part_does(tiny_target_f64: Target) -> None:
    target, requests = tiny_target_f64, requests_for(tiny_target_f64, 4, 60)
    settings = DecodeSettings(ignore_eos=True)
    parts = [baseline(name, target) for name in ("prompt_lookup", "first_layers")]
    alone = [decode(target, requests, settings, drafter=drafter, policy=policy) for drafter, policy in parts]
    drafters, policies = zip(*parts, strict=True)
    size = sum(policy.max_size for policy in policies)
    together = decode(target, requests, settings, drafter=Ensemble(drafters), policy=Union(policies, size))
    assert together.stats.target_calls < min(result.stats.target_calls for result in alone)


class Reader(TokenRecycling):
    """A part that reads layers."""

    taps = (1, 0)


def test_an_ensemble_reads_what_its_parts_read() -> None:
    lookup = PromptLookup(CPU)
    assert (Ensemble([lookup]).taps, Ensemble([lookup]).reads_logits) == ((), False)
    both = Ensemble([lookup, Reader(12, CPU)])
    assert (both.taps, both.reads_logits) == ((0, 1), True)


def test_mistakes_are_named() -> None:
    lookup = PromptLookup(CPU)
    with pytest.raises(ValueError, match="at least 1 drafter, got 0"):
        Ensemble([])
    with pytest.raises(ValueError, match="got 1 and size 0"):
        Union([Chain(2)], 0)
    roots_B: Tensor = torch.tensor([4])
    with pytest.raises(UserError, match="joins an Ensemble of 1 drafters"):
        Union([Chain(2)], 4).grow(lookup, lookup.start(1, 8), roots_B)
    with pytest.raises(ValueError, match="give it the policy Union"):
        Ensemble([lookup]).expand(Ensemble([lookup]).start(1, 8), ROOT)
