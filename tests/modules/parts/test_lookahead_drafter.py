"""Drafters with virtual nodes against the plain twin: in training, in a pass of their own and in the verifying pass."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from draftsmith.modules import (
    DecodeSettings,
    Ensemble,
    Features,
    HiddenTransfer,
    HiddenTransferConfig,
    PromptTokens,
    PromptTokensConfig,
    Replay,
    Request,
    StaticTree,
    Target,
    Topology,
    Union,
    UserError,
    decode,
)
from draftsmith.modules.interfaces.proposer import DraftState, Frontier, Observation
from draftsmith.modules.parts.lookahead_drafter import LookaheadState, with_virtual_nodes
from draftsmith.modules.token_tree import Lookahead
from draftsmith.trainers import draft_module, train_config
from references.lookahead import states_after
from support.answers import encoded_answers, native_greedy
from support.families import randomised
from support.policies import paths
from torch import Tensor

TREE = Topology.from_paths([(0,), (1,), (0, 0), (0, 1), (0, 0, 0)])
CLOSE = {"atol": 1e-9, "rtol": 1e-9}


def prompts(target: Target, **settings: Any) -> PromptTokens:
    return randomised(PromptTokens.create(PromptTokensConfig(**settings), target))


def maps(target: Target, **settings: Any) -> HiddenTransfer:
    return randomised(HiddenTransfer.create(HiddenTransferConfig(**settings), target))


MAKERS = {
    "prompts": lambda target: prompts(target, num_tokens=2),
    "copies": lambda target: prompts(target, num_tokens=3, copies=2),
    "maps": lambda target: maps(target, num_tokens=2, layer=1),
}


def packed_rows() -> Features:
    """Two conversations in the first row, one and padding in the second."""
    return Features(
        tokens_BL=torch.tensor([[5, 9, 33, 71, 8, 40, 41, 60], [7, 8, 9, 10, 11, 0, 0, 0]]),
        supervised_BL=torch.tensor([[False, False, True, True, True, False, True, True],
                                    [False, True, True, True, True, False, False, False]]),
        segments_BL=torch.tensor([[0] * 5 + [1] * 3, [0] * 5 + [-1] * 3]),
        positions_BL=torch.tensor([[*range(5), *range(3)], [*range(5), 0, 0, 0]]),
    )


@pytest.mark.parametrize("name", MAKERS)
def test_every_position_has_the_states_of_the_plain_twin(name: str, tiny_target_f64: Target) -> None:
    target = tiny_target_f64
    drafter, features = MAKERS[name](target), packed_rows()
    hidden_BLKD = drafter(target.encode(features, drafter.taps)).hidden_BLKD
    for row, start, stop in ((0, 0, 5), (0, 5, 8), (1, 0, 5)):
        text = features.tokens_BL[row, start:stop].tolist()
        for place in range(len(text)):
            expected_KD = states_after(drafter, target, text[: place + 1])
            torch.testing.assert_close(hidden_BLKD[row, start + place], expected_KD, **CLOSE)


class Watched:
    """Records the text of each row and the states that a drafter keeps of it while it decodes."""

    def __init__(self, drafter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[list[int], Tensor]] = []
        self.texts: dict[int, list[int]] = {}
        inner, clear = drafter.observe, LookaheadState.clear

        def observe(state: DraftState, rows_R: Tensor, observation: Observation) -> None:
            inner(state, rows_R, observation)
            assert isinstance(state, LookaheadState)
            for place, row in enumerate(rows_R.tolist()):
                count = int(observation.counts_B[place])
                self.texts[row] = self.texts.get(row, []) + observation.tokens_BN[place, :count].tolist()
                self.seen.append((list(self.texts[row]), state.states.values[row].clone()))

        def cleared(state: LookaheadState, rows_R: Tensor) -> None:
            clear(state, rows_R)
            for row in rows_R.tolist():
                self.texts[row] = []

        monkeypatch.setattr(drafter, "observe", observe)
        monkeypatch.setattr(LookaheadState, "clear", cleared)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("name", MAKERS)
def test_the_states_in_decoding_are_those_of_the_plain_twin(
    name: str, own: bool, tiny_target_f64: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the verifying pass and, where the rows cannot read virtual nodes, in a pass of the drafter's own."""
    target = tiny_target_f64
    drafter = MAKERS[name](target)
    watched = Watched(drafter, monkeypatch)
    if own:
        monkeypatch.setattr("draftsmith.modules.target.model.TargetRows.reads_virtual", False)
    requests = [Request((5, 9, 33, 71, 8, 20), 0, 7), Request((40, 41), 1, 7)]
    tree = Topology.from_paths(path for path in paths(TREE) if len(path) <= drafter.reach)
    result = decode(target, requests, DecodeSettings(batch_size=2, prefill_chunk=4, ignore_eos=True), drafter=drafter,
                    policy=StaticTree(tree))
    for generation in result.generations:
        assert generation.tokens == native_greedy(target, generation.request.tokens, 7)
    assert len(watched.seen) > 8
    for text, states_KD in watched.seen:
        torch.testing.assert_close(states_KD, states_after(drafter, target, text), **CLOSE)


def test_a_row_that_lacks_virtual_nodes_has_no_guess_at_those_depths(tiny_target_f64: Target) -> None:
    target = tiny_target_f64
    drafter = prompts(target, num_tokens=3)
    state = drafter.start(2, 8, target.start(2, 8))
    state.present.values[0, :2] = True
    state.whole = False
    root = torch.zeros(2, 1, dtype=torch.long)
    _, known = drafter.expand(state, Frontier(nodes_BF=root, parents_BF=root - 1, tokens_BF=root)).best(2)
    assert known is not None
    assert known[:, 0, :, 0].tolist() == [[True, True, False], [False, False, False]]


def test_virtual_nodes_follow_the_nodes_that_want_them() -> None:
    real_BN = torch.tensor([[True] * 6, [True] * 3 + [False] * 3])
    tree = replace(TREE.plant(torch.arange(12).view(2, 6)), real_BN=real_BN)
    counts_BN = torch.tensor([[2, 0, 1, 0, 0, 3], [1, 1, 1, 1, 1, 1]])
    wanted = replace(tree, lookahead=Lookahead(counts_BN=counts_BN, most=5, nodes=6))
    virtual = with_virtual_nodes(wanted, torch.randn(4, 3), copies=2).virtual
    assert virtual is not None
    assert virtual.anchors_BM.tolist() == [[0, 0, 0, 0, 2, 2, 5, 5, 5, 5], [0, 0, 1, 1, 2, 2, -1, -1, -1, -1]]
    assert virtual.slots_BM[0].tolist() == [0, 1, 2, 3, 0, 1, 0, 1, 2, 3]
    nothing = replace(tree, lookahead=Lookahead(counts_BN=torch.zeros_like(counts_BN), most=0, nodes=6))
    padding = with_virtual_nodes(nothing, torch.randn(2, 3)).virtual
    assert padding is not None
    assert padding.anchors_BM.tolist() == [[-1], [-1]]
    whole = with_virtual_nodes(tree, torch.randn(2, 3))
    assert whole.virtual is not None
    assert (whole.virtual.anchors_BM >= 0).sum(-1).tolist() == [12, 6]
    with pytest.raises(ValueError, match="virtual nodes of another drafter"):
        with_virtual_nodes(whole, torch.randn(2, 3))


def test_gradients_reach_the_prompts_alone_and_insertions_lie_before_labels(tiny_target: Target) -> None:
    config = train_config(PromptTokens)(drafter=PromptTokensConfig(num_tokens=2, insertions=3))
    module = draft_module(PromptTokens)(tiny_target, config)
    module.configure_model()
    module.train()
    features = packed_rows()
    drafts = module.drafter(tiny_target.encode(features))
    assert drafts.valid_BLK is not None
    inserted_BL = drafts.valid_BLK.any(-1)
    assert inserted_BL.sum(-1).tolist() == [3, 3]
    labelled_BL = features.labels(2)[1] | features.labels(3)[1]
    assert not bool((inserted_BL & ~labelled_BL).any())
    module.loss(tiny_target.encode(features)).total.backward()
    gradient = module.drafter.prompts.grad
    assert gradient is not None
    assert bool(gradient.isfinite().all())
    assert float(gradient.abs().sum()) > 0
    assert all(weight.grad is None for weight in tiny_target.model.parameters())


def test_of_two_drafters_in_an_ensemble_the_last_has_its_nodes_in_the_verifying_pass(tiny_target_f64: Target) -> None:
    """The other one runs the target itself."""
    target, tree = tiny_target_f64, TREE.plant(torch.zeros(1, 6, dtype=torch.long))
    both = Ensemble([prompts(target), maps(target, layer=1, num_tokens=1)])
    virtual = both.extended(both.start(1, 64, target.start(1, 64)), tree).virtual
    assert virtual is not None
    assert virtual.slots == 1
    policy = Union([StaticTree(Topology.chain(2)), StaticTree(Topology.chain(1))], 4)
    request = Request((5, 9, 33, 71, 8, 20), 0, 12)
    result = decode(target, [request], DecodeSettings(ignore_eos=True), drafter=both, policy=policy)
    assert result.generations[0].tokens == native_greedy(target, request.tokens, 12)


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("name", MAKERS)
def test_virtual_nodes_that_overflow_change_no_answer(name: str, value: float, tiny_target_f64: Target) -> None:
    """In half precision a drafter's states may do so in any layer: through a mask, NaN would reach every node."""
    target, drafter = tiny_target_f64, MAKERS[name](tiny_target_f64)
    with torch.no_grad():
        for weight in drafter.parameters():
            weight.fill_(value)
    requests = [Request((5, 9, 33, 71, 8, 20), 0, 9), Request((40, 41), 1, 7)]
    result = decode(target, requests, DecodeSettings(batch_size=2, ignore_eos=True), drafter=drafter,
                    policy=StaticTree(Topology.chain(2)))
    for generation in result.generations:
        assert generation.tokens == native_greedy(target, generation.request.tokens, generation.request.max_new_tokens)


@pytest.mark.parametrize(("settings", "words"), [
    ({"layer": 2}, "layer must be below the 2 layers of .*, got 2; the mapped states must pass at least one"),
    ({"layer": 0}, "layer must be at least 1, got 0"),
    ({"num_tokens": 0}, "num_tokens must be at least 1, got 0"),
])
def test_maps_that_do_not_fit_are_refused(settings: dict[str, int], words: str, tiny_target: Target) -> None:
    with pytest.raises(UserError, match=words):
        HiddenTransfer.create(HiddenTransferConfig(**settings), tiny_target)


@pytest.mark.parametrize("name", MAKERS)
def test_replay_gives_the_accepted_length_of_real_decoding(
    name: str, tiny_target_f64: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From states that were computed at once: no node of the drafter's own is read while the answers are replayed."""
    target = tiny_target_f64
    drafter = MAKERS[name](target)
    requests = [Request((5, 20 + index, 7), index, 20 + index) for index in range(5)]
    features = [target.encode(row, drafter.taps) for row in encoded_answers(target, requests)]
    tree = Topology.from_paths(path for path in paths(TREE) if len(path) <= drafter.reach)
    real = decode(target, requests, DecodeSettings(batch_size=2), drafter=drafter, policy=StaticTree(tree))
    source = Replay(target, features, drafter=drafter)
    monkeypatch.setattr(target, "read_nodes", None)
    found = decode(source, source.requests, DecodeSettings(batch_size=2), drafter=drafter, policy=StaticTree(tree))
    assert [one.tokens for one in found.generations] == [one.tokens for one in real.generations]
    assert [one.emitted for one in found.generations] == [one.emitted for one in real.generations]
    assert any(count > 1 for one in real.generations for count in one.emitted)
