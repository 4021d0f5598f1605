"""Bad input and rows that go wrong: one sentence that names the request, and every other row as if alone."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from draftsmith.modules import DecodeError, Draws, PassOutput, Policy, Target, TokenTree, UserError, decode, stream
from draftsmith.modules.decoding.requests import DecodeSettings, Generation, Request
from draftsmith.modules.interfaces.proposer import DraftState, Proposer
from draftsmith.modules.policies.stopping_chains import SampledChain, StoppedChain
from draftsmith.modules.policies.trees import Chain, DySpecTree, Eagle2Tree, SampledTree, StaticTree
from draftsmith.modules.token_tree import Topology
from support.drafters import ScriptedDrafter, TableDrafter, random_log_probs
from support.policies import FixedLength, branching
from support.targets import with_broken
from torch import Tensor

pytestmark = pytest.mark.usefixtures("on_device")

SETTINGS = DecodeSettings(batch_size=3, ignore_eos=True)
BROKEN = 61  # A token without a finite embedding


def some_requests(count: int = 7, temperature: float = 0.0) -> list[Request]:
    return [Request((5, 20 + index, 7), 100 + index, 10 + index, temperature) for index in range(count)]


def failing(run: Callable[[], Any]) -> DecodeError:
    with pytest.raises(DecodeError) as caught:
        run()
    return caught.value


def check_others(target: Target, found: list[Generation], bad: set[int], temperature: float = 0.0) -> None:
    """Every request but the bad ones has the answer that it gets alone."""
    requests = some_requests(temperature=temperature)
    assert [generation.request.index for generation in found] == [request.index for request in requests]
    for request, generation in zip(requests, found, strict=True):
        alone = decode(target, [request], SETTINGS).generations[0].tokens
        if request.index in bad:
            assert generation.finish == "error"
            assert generation.tokens == alone[: len(generation.tokens)]
            assert f"prompt {request.index}" in generation.error
        else:
            assert (generation.finish, generation.error, generation.tokens) == ("length", "", alone)


@pytest.mark.parametrize(("wrong", "message"), [
    (Request((), 102, 5), "prompt 102 is empty; give at least one token"),
    (Request((1,), 102, 0), "prompt 102: max_new_tokens must be at least 1, got 0"),
    (Request((1,), 102, 5, -0.1), "prompt 102: temperature must be 0 (greedy) or from 0.001 to 1000, got -0.1"),
    (Request((1,), 102, 5, float("nan")), "prompt 102: temperature must be 0 (greedy) or from 0.001 to 1000"),
    (Request((1,), 102, 5, float("inf")), "prompt 102: temperature must be 0 (greedy) or from 0.001 to 1000"),
    (Request((1,), 102, 5, 1e-39), "prompt 102: temperature must be 0 (greedy) or from 0.001 to 1000, got 1e-39"),
    (Request((1,), 102, 5, 1e39), "prompt 102: temperature must be 0 (greedy) or from 0.001 to 1000, got 1e+39"),
    (Request((1, 10**6), 102, 5), "prompt 102 has token 1000000; the target's ids are 0 to"),
    (Request((1, -1), 102, 5), "prompt 102 has token -1; the target's ids are 0 to"),
    (Request((1,) * 510, 102, 3), "prompt 102 has 510 tokens and asks for 3 more, but the target's context holds"),
])
def test_a_wrong_request_is_named_and_others_are_answered(tiny_target: Target, wrong: Request, message: str) -> None:
    requests, reported = some_requests(), []
    requests[2] = wrong
    error = failing(lambda: decode(tiny_target, requests, SETTINGS,
                                   on_tokens=lambda g, new, done: reported.append((g.finish, new, done))))
    assert message in str(error)
    assert "6 other answers are in this error's result" in str(error)
    assert isinstance(error, UserError)
    assert reported[0] == ("error", [], True)
    assert error.result.generations[2].request == wrong
    requests[2] = some_requests()[2]
    found = [replace(g, request=r) for g, r in zip(error.result.generations, requests, strict=True)]
    check_others(tiny_target, found, {102})


def test_a_single_wrong_request_says_only_what_is_wrong(tiny_target: Target) -> None:
    for run in (lambda: decode(tiny_target, [Request((), 4, 5)], SETTINGS),
                lambda: list(stream(tiny_target, Request((), 4, 5), SETTINGS))):
        assert str(failing(run)) == "prompt 4 is empty; give at least one token"


class Sabotaged:
    """A target whose logits go bad for one request from its n-th pass on, the prompt's being the first."""

    def __init__(self, target: Target, index: int, at: int, value: float) -> None:
        self.target, self.index, self.at, self.value, self.passes = target, index, at, value, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.target, name)

    def start(self, *args: Any) -> "SabotagedRows":
        return SabotagedRows(self, self.target.start(*args))


class SabotagedRows:
    def __init__(self, owner: Sabotaged, rows: Any) -> None:
        self.owner, self.rows = owner, rows
        self.indices: dict[int, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rows, name)

    def open(self, row: int, index: int) -> int:
        self.indices[row] = index
        return int(self.rows.open(row, index))

    def keep(self, order: list[int]) -> None:
        self.indices = {row: self.indices[source] for row, source in enumerate(order)}
        self.rows.keep(order)

    def run(self, tree: TokenTree, rows: list[int] | None = None, select_BM: Tensor | None = None) -> PassOutput:
        output: PassOutput = self.rows.run(tree, rows, select_BM)
        running = range(self.rows.active) if rows is None else rows
        for place, row in enumerate(running):
            if self.indices[row] == self.owner.index:
                self.owner.passes += 1
                if self.owner.passes >= self.owner.at:
                    output.logits_BMV[place, :, 3] = self.owner.value
        return output


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_unreadable_logits_end_their_row_alone(tiny_target_f64: Target, value: float, at: int,
                                               temperature: float) -> None:
    requests = some_requests(temperature=temperature)
    target: Any = Sabotaged(tiny_target_f64, 101, at, value)
    drafter = ScriptedDrafter(tiny_target_f64.vocab_size, [], "random")
    error = failing(lambda: decode(target, requests, SETTINGS, drafter=drafter, policy=Chain(2)))
    check_others(tiny_target_f64, error.result.generations, {101}, temperature)
    count = len(error.result.generations[1].tokens)
    assert count >= at - 1
    assert f"prompt 101: the target's logits are NaN or infinite after token {count} of the answer" in str(error)


def test_a_single_forbidden_token_is_no_fault(tiny_target_f64: Target) -> None:
    target: Any = Sabotaged(tiny_target_f64, 101, 1, -torch.inf)
    found = decode(target, some_requests(), SETTINGS).generations
    assert all(generation.finish == "length" for generation in found)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_nan_left_in_the_cache_does_not_reach_the_next_sequence(tiny_target_f64: Target, batch_size: int,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    """The row of a request whose states are NaN is used again, and is moved over by others."""
    requests, embed = some_requests(), tiny_target_f64.embed
    # A long neighbour: the slots that the bad row wrote stay inside the window of the passes.
    requests[0] = Request(tuple(range(20, 50)), 100, 12)
    plain = [decode(tiny_target_f64, [request], SETTINGS).generations[0].tokens for request in requests]
    said = {token for answer, request in zip(plain, requests, strict=True) for token in (*answer, *request.tokens)}
    poison = next(token for token in range(4, tiny_target_f64.vocab_size) if token not in said)
    requests[1] = Request((5, poison, 7, 8, 9, 10, 11, 12), 101, 11)

    mark = torch.full((tiny_target_f64.hidden_size,), 7.25, dtype=torch.float64)

    def marked(tokens: Tensor) -> Tensor:
        return torch.where((tokens == poison)[..., None], mark, embed(tokens))

    def poisoned(_layer: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (torch.where((inputs[0] == mark).all(-1, keepdim=True), torch.nan, inputs[0]), *inputs[1:])

    monkeypatch.setattr(tiny_target_f64, "embed", marked)
    handle = tiny_target_f64.layers[0].register_forward_pre_hook(poisoned)
    settings = replace(SETTINGS, batch_size=batch_size)
    try:
        error = failing(lambda: decode(tiny_target_f64, requests, settings))
    finally:
        handle.remove()
    for place, generation in enumerate(error.result.generations):
        assert generation.tokens == ([] if place == 1 else plain[place])


class Spoiled(Policy):
    """A chain whose trees are spoiled in row 1 of the third pass."""

    def __init__(self, spoil: Callable[[TokenTree], TokenTree]) -> None:
        self.chain, self.spoil, self.passes = StaticTree(Topology.chain(2)), spoil, 0
        self.max_size = self.chain.max_size

    def grow(self, drafter: Any, state: Any, roots_B: Tensor, draws: Any = None) -> TokenTree:
        self.passes += 1
        tree = self.chain.grow(drafter, state, roots_B, draws)
        return self.spoil(tree) if self.passes == 3 else tree


def with_entry(tree: TokenTree, name: str, value: int) -> TokenTree:
    changed = getattr(tree, name).clone()
    changed[1, 1] = value
    return replace(tree, **{name: changed})


@pytest.mark.parametrize(("spoil", "message"), [
    (lambda tree: with_entry(tree, "tokens_BN", 10**6), "outside the target's vocabulary"),
    (lambda tree: with_entry(tree, "tokens_BN", -1), "outside the target's vocabulary"),
    (lambda tree: with_entry(tree, "parents_BN", 2), "a node whose parent does not come before it"),
    (lambda tree: with_entry(tree, "parents_BN", 1), "a node whose parent does not come before it"),
    (lambda tree: with_entry(tree, "parents_BN", 99), "a node whose parent does not come before it"),
    (lambda tree: TokenTree.from_parents(tree.tokens_BN, with_entry(tree, "parents_BN", 2).parents_BN),
     "a node whose parent does not come before it"),
])
def test_trees_that_cannot_be_verified_end_their_row_alone(
    tiny_target_f64: Target, spoil: Callable[[TokenTree], TokenTree], message: str
) -> None:
    drafter = ScriptedDrafter(tiny_target_f64.vocab_size, [], "random")
    error = failing(lambda: decode(tiny_target_f64, some_requests(), SETTINGS, drafter=drafter, policy=Spoiled(spoil)))
    check_others(tiny_target_f64, error.result.generations, {101})
    assert message in str(error)
    assert "prompt 101: " in str(error)


def test_a_draft_vocabulary_with_a_wrong_id_fails_every_row_that_meets_it(tiny_target_f64: Target) -> None:
    size = tiny_target_f64.vocab_size
    ids = torch.arange(size)
    ids[3] = size
    scores = random_log_probs(size, size)
    scores[:, 3] = 0.0
    drafter = TableDrafter(scores, ids)
    error = failing(lambda: decode(tiny_target_f64, some_requests(2), SETTINGS, drafter=drafter, policy=Chain(1)))
    assert [generation.finish for generation in error.result.generations] == ["error", "error"]
    assert "prompt 100: " in str(error)
    assert "prompt 101: " in str(error)


GROWING = [StaticTree(Topology((-1, 0, 0, 1), (0, 0, 1, 0))), Chain(3), Eagle2Tree(8, 3, 3), DySpecTree(8, 3, 3),
           branching(2, 1), SampledChain(3, FixedLength(3)), StoppedChain(3, FixedLength(3))]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("policy", GROWING, ids=lambda policy: type(policy).__name__)
def test_scores_that_are_not_finite_change_no_answer(value: float, policy: Policy, tiny_target_f64: Target) -> None:
    """A drafter that reads a token without a finite embedding has no guess there; the root stays the root."""
    size = tiny_target_f64.vocab_size
    scores = random_log_probs(size, size)
    scores[::2] = value
    scores[1::4, 3] = value
    plain = decode(tiny_target_f64, some_requests(), SETTINGS).generations
    drafted = decode(tiny_target_f64, some_requests(), SETTINGS, drafter=TableDrafter(scores),
                     policy=policy).generations
    assert [one.tokens for one in drafted] == [one.tokens for one in plain]
    sampled = decode(tiny_target_f64, some_requests(temperature=0.9), SETTINGS, drafter=TableDrafter(scores),
                     policy=policy).generations
    assert [one.finish for one in sampled] == ["length"] * len(sampled)


class PoisonedTree(SampledTree):
    """A policy of somebody else's, which hands on a draft distribution that is NaN after one token."""

    def __init__(self, token: int) -> None:
        super().__init__(Topology((-1, 0, 0), (0, 0, 1)))
        self.token = token

    def grow(self, drafter: Proposer, state: DraftState, roots_B: Tensor, draws: Draws | None = None) -> TokenTree:
        tree = super().grow(drafter, state, roots_B, draws)
        assert tree.drawn is not None
        log_q_BIQ = tree.drawn.log_q_BIQ.masked_fill((roots_B == self.token)[:, None, None], torch.nan)
        return replace(tree, drawn=replace(tree.drawn, log_q_BIQ=log_q_BIQ))


def test_a_q_that_is_nan_ends_its_row(tiny_target_f64: Target) -> None:
    size = tiny_target_f64.vocab_size
    scores = random_log_probs(size, size)
    first = [decode(tiny_target_f64, [r], SETTINGS).generations[0].tokens[0] for r in some_requests(temperature=0.9)]
    assert len(set(first)) > 1
    error = failing(lambda: decode(tiny_target_f64, some_requests(temperature=0.9), SETTINGS,
                                   drafter=TableDrafter(scores), policy=PoisonedTree(first[0])))
    assert "prompt 100: the drafter's probabilities are NaN or infinite after token 1 of the answer" in str(error)
    assert any(generation.finish == "length" for generation in error.result.generations)


def test_a_prompt_with_a_token_without_an_embedding_fails_alone() -> None:
    target = with_broken(BROKEN)
    requests = [Request((5, 20, 7), 0, 6), Request((5, BROKEN, 7, 8, 9, 10), 1, 6)]
    for chunk in (2, 512):
        settings = replace(SETTINGS, prefill_chunk=chunk)
        error = failing(lambda settings=settings: decode(target, requests, settings))
        assert [generation.finish for generation in error.result.generations] == ["length", "error"]


def test_a_token_without_an_embedding_in_a_common_start_fails_every_row_that_has_it() -> None:
    target = with_broken(BROKEN)
    start = (5, 8, 9, BROKEN, 7, 8, 9, 10, 11, 12, 13, 14)
    error = failing(lambda: decode(target, [Request((*start, 20), 0, 6), Request((*start, 21), 1, 6)], SETTINGS))
    assert [generation.finish for generation in error.result.generations] == ["error", "error"]


@pytest.mark.parametrize("index", [-1, 2**63])
def test_an_index_outside_int64_is_refused(tiny_target: Target, index: int) -> None:
    last = Request((5, 6), 2**63 - 1, 4, 0.7)
    error = failing(lambda: decode(tiny_target, [Request((5, 6), index, 4), last], SETTINGS))
    assert f"prompt {index}: an index must be from 0 to 2^63 - 1" in str(error)
    assert error.result.generations[1].finish == "length"


def test_two_requests_of_one_index_are_refused(tiny_target: Target) -> None:
    with pytest.raises(UserError, match="several requests have the index 4; give each request of a run its own"):
        decode(tiny_target, [Request((5,), 3, 2), Request((6,), 4, 2), Request((7,), 4, 2)], SETTINGS)


def test_a_stream_gives_all_tokens_that_decode_keeps_before_a_fault() -> None:
    """Right guesses before the fault are tokens of the same pass."""
    target = with_broken(BROKEN)
    faults = 0
    for request in (Request((5, 20 + index, 7), index, 24) for index in range(12)):
        try:
            kept = decode(target, [request], SETTINGS).generations[0].tokens
        except DecodeError as error:
            kept = error.result.generations[0].tokens
        drafted = {"drafter": ScriptedDrafter(target.vocab_size, [[*request.tokens, *kept]], "oracle"),
                   "policy": Chain(4)}
        tokens: list[int] = []
        try:
            for new in stream(target, request, SETTINGS, **drafted):
                tokens += new
        except DecodeError:
            faults += 1
        assert tokens == kept
    assert faults
