"""Kangaroo: its formula, its chains, the handed-over layers in whole decodings, LayerSkip as the untrained case."""

from collections import Counter
from collections.abc import Sequence
from itertools import cycle
from typing import Any

import pytest
import torch
from benchmarks.parts.campaign_drafters import ARCHITECTURES, POLICIES
from benchmarks.parts.campaign_exact import tiny
from draftsmith.modules import (
    DecodeSettings,
    Eagle2Tree,
    Ensemble,
    Features,
    Frontier,
    Generation,
    Kangaroo,
    KangarooConfig,
    Loop,
    Policy,
    Request,
    StaticTree,
    StoppedChain,
    Target,
    TokenTree,
    Topology,
    Union,
    UserError,
    baseline,
    decode,
    policy_named,
)
from draftsmith.modules.families.kangaroo.drafter import KangarooState
from draftsmith.modules.interfaces.proposer import DraftState
from draftsmith.modules.policies.stopping_chains import EarlyExit
from draftsmith.modules.verification.acceptance_rules import Accepted
from families.kangaroo.reference import adapter, chain, draft_logits
from support.families import randomised
from support.targets import random_target
from support.tiers import some_long
from torch import Tensor

EXACT = [name for name, growth in POLICIES.items() if not growth.samples]
"""Policies whose answers are those of `generate`."""
TREE = Topology((-1, 0, 0, 1, 1, 2), (0, 0, 1, 0, 1, 0))


@pytest.fixture(scope="module")
def target() -> Target:
    """Four layers, in float64."""
    return random_target(4)


def drafter_of(target: Target, **settings: Any) -> Kangaroo:
    return randomised(Kangaroo.create(KangarooConfig(**settings), target).to(target.dtype))


@torch.no_grad()
@pytest.mark.parametrize("exit_layer", [1, 3])
def test_training_states_equal_the_plain_twin(target: Target, exit_layer: int) -> None:
    drafter = drafter_of(target, exit_layer=exit_layer)
    tokens = [5, 9, 33, 71, 8, 20, 11]
    features = target.encode(Features.from_rows([(tokens, [True] * len(tokens))]), drafter.taps)
    with target.native() as model:
        exits_LD = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states[exit_layer][0]
    drafts = drafter(features)
    assert drafts.offsets == (1,)
    torch.testing.assert_close(drafts.hidden_BLKD[0, :, 0], adapter(drafter, exits_LD), atol=1e-6, rtol=1e-6)


class Watched(Kangaroo):
    """Keeps the scores of each node with the tokens on its path, and the states it made."""

    seen: list[tuple[list[list[int]], Tensor]]
    states: list[KangarooState]

    def start(self, rows: int, capacity: int, verified: Any = None) -> KangarooState:
        state = super().start(rows, capacity, verified)
        self.states.append(state)
        return state

    def expand(self, state: DraftState, frontier: Frontier) -> Any:
        scores = super().expand(state, frontier)
        assert isinstance(state, KangarooState)
        tree = state.early.tree
        assert tree is not None
        new = range(tree.size - frontier.nodes_BF.shape[1], tree.size)
        paths = [[tree.tokens_BN[0, tree.ancestors_BNN[0, node]].tolist() for node in new]]
        self.seen.append((paths[0], scores.log_probs_BFHQ[0, :, 0]))
        return scores


@pytest.mark.parametrize("policy", some_long([StaticTree(TREE), Eagle2Tree(7, 3, 2)], 9, 1), ids=["static", "eagle-2"])
def test_scores_of_every_drafted_node_equal_the_plain_twin(target: Target, policy: Policy) -> None:
    """In the target's own cache, over several passes of an answer."""
    drafter = drafter_of(target, exit_layer=2)
    drafter.__class__ = Watched
    assert isinstance(drafter, Watched)
    drafter.seen, drafter.states, texts = [], [], []

    def note(_tree: TokenTree, _accepted: Accepted, slots: Sequence[Generation]) -> None:
        text = [*slots[0].request.tokens, *slots[0].tokens[:-1]]
        texts.extend((text, *one) for one in drafter.seen)
        drafter.seen.clear()

    decode(target, [Request((5, 9, 33), 0, 16)], DecodeSettings(ignore_eos=True), drafter=drafter, policy=policy,
           observer=note)
    assert drafter.states[0].shared
    compared = 0
    with torch.no_grad():
        for text, paths, log_probs_FQ in texts:
            for path, found_Q in zip(paths, log_probs_FQ, strict=True):
                expected_Q = draft_logits(drafter, target, [*text, *path]).log_softmax(-1)
                torch.testing.assert_close(found_Q, expected_Q, atol=1e-5, rtol=1e-5)
                compared += 1
    assert compared > 20


@pytest.mark.parametrize(("eta", "gamma"), some_long([(0.02, 4), (0.1, 6), (0.9, 3)], 9, 1))
def test_chains_end_at_the_first_unsure_token_or_at_gamma(target: Target, eta: float, gamma: int) -> None:
    drafter = drafter_of(target, exit_layer=2, eta=eta, gamma=gamma)
    found: list[tuple[list[int], list[int]]] = []

    def note(tree: TokenTree, _accepted: Accepted, slots: Sequence[Generation]) -> None:
        text = [*slots[0].request.tokens, *slots[0].tokens]
        found.append((text, tree.tokens_BN[0, 1:][tree.real_BN[0, 1:]].tolist()))

    decode(target, [Request((5, 9, 33), 0, 10)], DecodeSettings(ignore_eos=True), drafter=drafter, observer=note,
           policy=policy_named("early-exit", TREE, drafter))
    with torch.no_grad():
        assert [drafted for _, drafted in found] == [chain(drafter, target, text) for text, _ in found]
    lengths = {len(drafted) for _, drafted in found}
    assert lengths == {gamma} if eta == 0.02 else lengths == {1} if eta == 0.9 else len(lengths) > 1


def test_a_name_with_a_number_sets_gamma_alone(target: Target) -> None:
    drafter = drafter_of(target, eta=0.25, gamma=5)
    policies = [policy_named(name, TREE, drafter) for name in ("early-exit", "early-exit-2")]
    assert [policy.max_size for policy in policies] == [6, 3]
    assert all(isinstance(policy, StoppedChain) and policy.stop == EarlyExit(0.25) for policy in policies)


@pytest.mark.parametrize(("architecture", "policy"), some_long(list(zip(ARCHITECTURES, cycle(EXACT), strict=False)), 5))
def test_answers_equal_those_of_generate_on_every_architecture(architecture: str, policy: str) -> None:
    """In float64, in ragged batches, where most drafts are right; the campaign has every policy on each."""
    outcome = tiny(architecture, "kangaroo", policy)
    assert outcome.divergences == 0, outcome.note


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("name", ["chain-3", "early-exit", "eagle2-6"])
def test_no_layer_reads_more_nodes_than_are_verified_or_drafted(target: Target, name: str, batch_size: int) -> None:
    """Later layers read the verified nodes; first layers those, and drafted ones that the tree left out."""
    drafter = drafter_of(target, exit_layer=2, eta=0.05, gamma=4)
    seen: Counter[int] = Counter()

    def counting(layer: int) -> Any:
        def hook(_module: object, _args: object, kwargs: dict[str, Tensor]) -> None:
            seen[layer] += kwargs["hidden_states"].shape[:2].numel()
        return hook

    verified, drafted = Counter[str](), Counter[str]()

    def note(tree: TokenTree, _accepted: Accepted, _slots: Sequence[Generation]) -> None:
        verified["nodes"] += tree.tokens_BN.numel()

    expand = drafter.expand

    def watching(state: DraftState, frontier: Frontier) -> Any:
        drafted["nodes"] += frontier.nodes_BF.numel()
        return expand(state, frontier)

    drafter.expand = watching  # type: ignore[method-assign]
    loop = Loop(target, [Request((5 + row, 9, 33), row, 16) for row in range(3)],
                DecodeSettings(batch_size=batch_size, ignore_eos=True), drafter=drafter, observer=note,
                policy=policy_named(name, TREE, drafter))
    handles = [layer.self_attn.register_forward_pre_hook(counting(number), with_kwargs=True)
               for number, layer in enumerate(target.layers)]
    list(loop.run())
    for handle in handles:
        handle.remove()
    prompts = 3 * 3
    assert seen[2] == seen[3] == prompts + verified["nodes"]
    assert seen[0] == seen[1]
    if name == "chain-3" or (batch_size == 1 and name == "early-exit"):
        assert seen[0] == seen[2]
    assert seen[0] <= prompts + verified["nodes"] + drafted["nodes"]
    assert seen[0] - prompts < verified["nodes"] + drafted["nodes"]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_beside_prompt_lookup_the_first_layers_run_in_the_verified_rows(target: Target, temperature: float) -> None:
    drafter = drafter_of(target, exit_layer=2)
    drafter.__class__ = Watched
    assert isinstance(drafter, Watched)
    drafter.seen, drafter.states = [], []
    lookup, chain_of_seven = baseline("prompt_lookup", target)
    requests = [Request((5, 9, 33, 5 + row, 9, 33, 5), row, 24, temperature) for row in range(3)]
    settings = DecodeSettings(batch_size=2, ignore_eos=True)
    found = decode(target, requests, settings, drafter=Ensemble([lookup, drafter]),
                   policy=Union([chain_of_seven, StaticTree(TREE)], 10))
    assert [one.tokens for one in found.generations] == [
        one.tokens for one in decode(target, requests, settings).generations]
    assert drafter.states[0].shared


@torch.no_grad()
def test_without_training_it_is_the_target_ended_early(target: Target) -> None:
    """LayerSkip's draft: the last norm and the output layer on the output of the first layers."""
    drafter = Kangaroo.create(KangarooConfig(exit_layer=3), target)
    tokens = [5, 9, 33, 71, 8]
    features = target.encode(Features.from_rows([(tokens, [True] * len(tokens))]), drafter.taps)
    expected = target.logits(target.decoder.norm(features.taps[2]))
    found = drafter.project(drafter(features).hidden_BLKD[:, :, 0], 0)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_a_sixteenth_of_the_layers_is_the_exit_by_default(target: Target) -> None:
    assert Kangaroo.create(KangarooConfig(), target).exit_layer == 1
    assert Kangaroo.fitted(KangarooConfig(), random_target(33))[0].exit_layer == 2


@pytest.mark.parametrize(("settings", "message"), [
    ({"exit_layer": 4}, "exit_layer must be below the 4 layers of random, got 4; verification needs at least one"),
    ({"exit_layer": 0}, "exit_layer must be at least 1, got 0"),
    ({"eta": 1.0}, "eta must be below 1, got 1.0"),
    ({"gamma": 0}, "gamma must be at least 1, got 0"),
])
def test_settings_that_make_no_sense_are_refused(target: Target, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Kangaroo.create(KangarooConfig(**settings), target)


def test_a_target_with_too_few_layers_is_refused(target: Target) -> None:
    drafter = Kangaroo.create(KangarooConfig(exit_layer=3), target)
    other = Kangaroo.rebuild(drafter.describe(), target.identity)
    with pytest.raises(UserError, match="exit_layer must be below the 2 layers of random, got 3"):
        other.bind(random_target(2))


def test_an_exit_must_be_chosen_before_a_drafter_is_made(target: Target) -> None:
    drafter = Kangaroo.create(KangarooConfig(), target)
    with pytest.raises(UserError, match="exit_layer of a Kangaroo drafter must be set; use"):
        Kangaroo(KangarooConfig(), target, drafter.block)


def test_states_without_the_tap_are_refused(target: Target) -> None:
    drafter = drafter_of(target, exit_layer=2)
    with pytest.raises(ValueError, match=r"the outputs of the target's layers \[1\] are missing; encode with"):
        drafter(target.encode(Features.from_rows([([5, 9], [True, True])])))
