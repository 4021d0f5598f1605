"""Drafting, accepting and committing are each one graph, and the compiled ones do what the others do."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from draftsmith.modules import DySpecTree, Observation, Policy, Sampling, StaticTree, Target, TokenTree, Topology
from draftsmith.modules.interfaces.proposer import DraftState
from draftsmith.modules.target.kv_cache import RowCache
from draftsmith.modules.verification.acceptance_rules import Chances, exact_rule
from support.drafters import draws_for
from support.families import CASES, randomised
from support.policies import EVERY, medusa
from support.tiers import DRAFTING, FIRST_CASES, others_long, some_long
from torch import Tensor


@pytest.fixture(autouse=True)
def _fresh_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


def compiled(function: Any, backend: str = "eager") -> Any:
    """A break in the graph raises."""
    return torch.compile(function, fullgraph=True, backend=backend)


def described(tree: TokenTree) -> tuple[Tensor, ...]:
    drawn = () if tree.drawn is None else (tree.drawn.log_q_BIQ, tree.drawn.inner_BN, tree.drawn.sampled_BN)
    return tree.tokens_BN, tree.parents_BN, tree.depths_BN, tree.ancestors_BNN, tree.real_BN, *drawn


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize("policy", some_long(EVERY, 5, 3), ids=lambda policy: type(policy).__name__)
@pytest.mark.parametrize("hot", [False, True])
def test_expand_and_accept_are_one_graph_each(tiny_target: Target, policy: Policy, hot: bool) -> None:
    drafter, roots, draws = medusa(tiny_target), torch.tensor([3, 4]), draws_for(2) if hot else None
    final = torch.randn(2, tiny_target.hidden_size)

    state = drafter.start(2, 64)

    def expand(final_RD: Tensor, roots_B: Tensor) -> tuple[Tensor, ...]:
        state.final.values = final_RD
        return described(policy.grow(drafter, state, roots_B, draws))

    torch.testing.assert_close(compiled(expand)(final, roots), expand(final, roots))
    state.final.values = final
    tree = policy.grow(drafter, state, roots, draws)
    rows = (0, 1) if hot else ()
    sampling = Sampling(temperature_B=torch.full((2,), float(hot)), sampling_rows=rows, top_k=9, top_p=0.9)

    def accept(logits_BNV: Tensor, choices_BN: Tensor, tests_BN: Tensor) -> tuple[Tensor, ...]:
        chances = Chances(choices_BN=choices_BN, tests_BN=tests_BN)
        accepted = exact_rule(tree).accept(tree, logits_BNV, sampling, chances)
        return accepted.path_BK, accepted.counts_B, accepted.bonus_B

    # The target agrees with the second node of the first row, so that a path is longer than the root.
    logits = torch.randn(2, tree.size, tiny_target.vocab_size)
    logits[0, 0, tree.tokens_BN[0, 1]] = 50.0
    given = logits, torch.rand(2, tree.size), torch.rand(2, tree.size)
    wanted = accept(*given)
    torch.testing.assert_close(compiled(accept)(*given), wanted)
    assert int(wanted[1][0]) > 1


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize(("name", "kind"), others_long(
    [*((name, "static") for name in DRAFTING), *((name, "sampled") for name in FIRST_CASES)]))
def test_the_drafts_of_every_family_are_one_graph(tiny_target: Target, name: str, kind: str) -> None:
    """Two tokens deep, which every case answers."""
    hot = kind == "sampled"
    policy: Policy = DySpecTree(7, 2, 4) if hot else StaticTree(Topology((-1, 0, 0, 1, 2), (0, 0, 1, 0, 1)))
    drafter, roots = randomised(CASES[name].make(tiny_target)), torch.tensor([3, 4])
    draws = draws_for(2) if hot else None
    states = torch.randn(2, 2, tiny_target.hidden_size)
    seen = Observation(tokens_BN=torch.tensor([[5, 9], [6, 0]]), counts_B=torch.tensor([2, 1]), final_BND=states,
                       taps=dict.fromkeys(drafter.taps, states), roots_B=roots)

    def started() -> DraftState:
        state = drafter.start(2, 64)
        drafter.observe(state, torch.arange(2), seen)
        return state

    def expand(roots_B: Tensor, state: DraftState) -> tuple[Tensor, ...]:
        return described(policy.grow(drafter, state, roots_B, draws))

    torch.testing.assert_close(compiled(expand)(roots, started()), expand(roots, started()))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_commit_is_one_graph(backend: str) -> None:
    path, counts = torch.tensor([[0, 2, 4], [0, 1, 2]]), torch.tensor([3, 1])
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(2, 2, 5, 4, generator=generator)

    def opened() -> RowCache:
        cache = RowCache(2, 2, 12, torch.device("cpu"))
        cache.assume(3)
        cache.open(slice(0, 2), 5)
        for layer in range(2):
            cache.write(layer, keys + layer, keys - layer)
        return cache

    def commit(cache: RowCache) -> Tensor:
        cache.commit(path, counts, [3, 1])
        return cache.lengths_B

    plain, quick = opened(), opened()
    before = quick.storage
    torch.testing.assert_close(compiled(commit, backend)(quick), commit(plain))
    assert quick.host_lengths == plain.host_lengths == [6, 4]
    assert quick.storage is not None
    assert before is not None
    assert plain.storage is not None
    assert torch.equal(quick.storage, plain.storage)
    # In place, and not by a path that moves nothing.
    assert quick.storage.data_ptr() == before.data_ptr()
    assert torch.equal(plain.storage[0, 0, :, 5], keys[0, :, 4])
