"""Rounds that are recorded once and replayed give what computed ones give, and write to the same places for good.

Records of torch's operations on a pretended device stand in for CUDA graphs (`tests/support/devices`): the code takes
the branches of an accelerator, and whatever would make the host wait is refused. Tests marked `gpu` replay real graphs.
"""

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from benchmarks.parts.shapes import Oracle
from draftsmith.export.artifact import Artifact
from draftsmith.modules import Ensemble, Loop, Policy, Replay, StoppedChain, Target, Union, decode
from draftsmith.modules.baselines.registry import BASELINES, LayerDraft, baseline
from draftsmith.modules.decoding import recorded_rounds, rounds
from draftsmith.modules.decoding.answers import stream
from draftsmith.modules.decoding.recorders import PassRecorder, RecordedStates, StateRecorder
from draftsmith.modules.decoding.requests import DecodeResult, DecodeSettings, Request
from draftsmith.modules.interfaces.proposer import DraftState, Proposer, VerifiedRows
from draftsmith.modules.policies.lookahead_trees import LookaheadTrees, ahead_trees
from draftsmith.modules.policies.stopping_chains import EarlyExit, MaxProbability, PathProbability, StoppingRule
from draftsmith.modules.policies.trees import Chain, SampledTree, StaticTree
from draftsmith.modules.target.devices import compiled_layers
from draftsmith.modules.target.kv_cache import RowCache
from draftsmith.modules.target.target_rows import TargetRows
from draftsmith.modules.token_tree import TokenTree
from references.flash_attention import forced
from support.devices.pretended_device import files, place, pretended_device
from support.devices.recorded_operations import Records, held_tensors
from support.devices.waits import GREEDY, MIXED, WIDE, Way, drafted, moved, on_device, plain, together, without_training
from support.drafters import Wrapped, WrappedState
from support.families import CASES, randomised
from support.policies import EVERY, FirstGuesses, Turns
from support.targets import KINDS, RECURRENT, random_target, recurrent_model
from support.tiers import DRAFTING, FIRST_CASES, others_long, some_long
from torch.utils._python_dispatch import TorchDispatchMode

LENGTHS = (26, 9, 17, 12, 14)
"""Tokens of the answers: four rows end one after another, and one more request takes the place of the first that ends.
Three rows are padded to four."""


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> Records:
    """Records in place of CUDA graphs."""
    made = Records()
    monkeypatch.setattr(recorded_rounds, "recorder_for", lambda _device: made)
    return made


def requests(temperatures: Sequence[float], lengths: Sequence[int]) -> list[Request]:
    return [Request(tuple((7 * row + token) % 90 + 4 for token in range(9 + 3 * row)), row, length,
                    temperatures[row % len(temperatures)]) for row, length in enumerate(lengths)]


def both(target: Target, way: Way, records: Records, temperatures: Sequence[float] = GREEDY,
         lengths: Sequence[int] = LENGTHS, guesses: bool = True, **settings: Any) -> tuple[DecodeResult, DecodeResult]:
    """(computed on the CPU, replayed on the pretended device) answers, in passes that guessed the same, unless rows
    share a memory: a round after the end of one is remembered too."""
    guessed = list[PassRecorder]()

    def answers(there: Target, *, graphs: bool) -> DecodeResult:
        torch.manual_seed(0)
        drafter, policy = way(target, there)
        given = DecodeSettings(batch_size=4, ignore_eos=True, graphs=graphs, **settings)
        guessed.append(PassRecorder())
        return decode(there, requests(temperatures, lengths), given, drafter=drafter, policy=policy,
                      observer=guessed[-1])

    computed = answers(target, graphs=False)
    with pretended_device() as waits:
        records.waits = waits
        replayed = answers(on_device(target), graphs=True)
        # Right answers alone would not show a draft that sees nothing new. A round may come after an answer's end.
        expected, found = (one.passes for one in guessed)
        assert not guesses or expected == {index: found[index][: len(own)] for index, own in expected.items()}
    return computed, replayed


def check(found: tuple[DecodeResult, DecodeResult], records: Records) -> None:
    """Equal answers, all of whose rounds are replayed."""
    computed, replayed = found
    assert [one.tokens for one in replayed.generations] == [one.tokens for one in computed.generations]
    assert replayed.stats.graph_refusal == ""
    assert records.replays >= replayed.stats.target_calls > 0
    assert replayed.stats.recorded_rounds == len(records.made) > 0


@pytest.mark.parametrize("name", others_long(DRAFTING))
def test_replayed_rounds_decode_the_same_with_every_family(tiny_target_f64: Target, name: str,
                                                           records: Records) -> None:
    check(both(CASES[name].verifier(tiny_target_f64), drafted(name, StaticTree(WIDE)), records), records)


@pytest.mark.parametrize("name", others_long(["eagle3-window", "draft-lm-window"], ("eagle3-window",)))
def test_rings_come_round_in_replayed_rounds(tiny_target_f64: Target, name: str, records: Records,
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    rings, taken = list[RowCache](), RowCache.take_all

    def take_all(cache: RowCache) -> None:
        rings.append(cache)
        taken(cache)

    monkeypatch.setattr(RowCache, "take_all", take_all)
    check(both(tiny_target_f64, drafted(name, StaticTree(WIDE)), records, lengths=(150, 90)), records)
    ring, = (cache for cache in rings if cache.newest is not None)
    assert 2 * ring.capacity < 150


@pytest.mark.parametrize("name", others_long(
    ["medusa", "hydra++", "eagle", "falcon", "kangaroo", "prompt-tokens", "draft-lm"]))
def test_replayed_rounds_sample_the_same(tiny_target_f64: Target, name: str, records: Records) -> None:
    check(both(tiny_target_f64, drafted(name, SampledTree(WIDE)), records, MIXED, top_p=0.9), records)


@pytest.mark.parametrize("policy", some_long(EVERY, 3, 1), ids=lambda policy: type(policy).__name__)
def test_replayed_rounds_decode_the_same_with_every_policy(tiny_target_f64: Target, policy: Policy,
                                                           records: Records) -> None:
    check(both(tiny_target_f64, drafted("eagle3", policy), records, MIXED, repetition_penalty=1.2), records)


@pytest.mark.parametrize("name", some_long(BASELINES, 3, 2))
def test_replayed_rounds_decode_the_same_with_every_baseline(tiny_target_f64: Target, name: str,
                                                             records: Records) -> None:
    check(both(tiny_target_f64, without_training(name), records, guesses=name not in ("ngrams", "recycling")), records)


@pytest.mark.parametrize("name", some_long(["draft-lm", "medusa", "eagle3", "kangaroo", "prompt-tokens"], 1, 1))
def test_rounds_of_several_sizes_are_recorded_apart(tiny_target_f64: Target, name: str, records: Records) -> None:
    """Drafts of most rounds are left out; those of the others have read all the same."""
    target, seen = CASES[name].verifier(tiny_target_f64), list[FirstGuesses]()

    def answers(there: Target, *, graphs: bool) -> DecodeResult:
        torch.manual_seed(0)
        drafter, policy = drafted(name, Turns(WIDE))(target, there)
        seen.append(FirstGuesses())
        return decode(there, requests(MIXED, (20, 16)), DecodeSettings(batch_size=2, ignore_eos=True, graphs=graphs),
                      drafter=drafter, policy=policy, observer=seen[-1])

    computed = answers(target, graphs=False)
    with pretended_device() as waits:
        records.waits = waits
        replayed = answers(on_device(target), graphs=True)
        assert seen[0].agree(seen[1], 6)
    check((computed, replayed), records)


def test_replayed_rounds_decode_the_same_without_a_draft(tiny_target_f64: Target, records: Records) -> None:
    check(both(tiny_target_f64, plain, records, MIXED), records)


def test_replayed_rounds_give_the_same_log_probabilities(tiny_target_f64: Target, records: Records) -> None:
    computed, replayed = both(tiny_target_f64, drafted("medusa", StaticTree(WIDE)), records, MIXED, logprobs=True)
    check((computed, replayed), records)
    for one, other in zip(computed.generations, replayed.generations, strict=True):
        assert len(one.logprobs) == len(one.tokens)
        assert other.logprobs == pytest.approx(one.logprobs, abs=1e-6)


def test_replayed_rounds_decode_the_same_in_windows(records: Records) -> None:
    target = random_target(3, sliding_window=6, head_dim=8, query_pre_attn_scalar=8)
    check(both(target, plain, records, MIXED), records)


@pytest.mark.parametrize("name", others_long(["eagle3", "kangaroo"]))
def test_replayed_rounds_attend_in_two_parts(tiny_target_f64: Target, name: str, records: Records) -> None:
    """The lengths of the rows that the kernel is given are the device's, in every replay others."""
    with forced() as layers:
        found = both(tiny_target_f64, drafted(name, StaticTree(WIDE)), records)
    check(found, records)
    assert layers["took"] == layers["asked"] > 0
    alone = both(tiny_target_f64, drafted(name, StaticTree(WIDE)), records)[0]
    assert [one.tokens for one in found[1].generations] == [one.tokens for one in alone.generations]


@pytest.mark.long
@pytest.mark.parametrize("attention", [nullcontext, forced])
def test_rounds_with_compiled_layers_are_replayed(tiny_target_f64: Target, records: Records,
                                                  attention: Callable[[], AbstractContextManager[Any]],
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a compiled layer a record holds what its attention does, and not the call that asks for it."""
    monkeypatch.setattr(compiled_layers, "BACKEND", "eager")
    monkeypatch.setattr(tiny_target_f64, "compiler", compiled_layers.Compiler())
    monkeypatch.setattr(tiny_target_f64, "_compiled", None)
    with attention() as layers:
        found = both(tiny_target_f64, drafted("eagle3", StaticTree(WIDE)), records, compile=True)
    check(found, records)
    assert layers is None or layers["took"] == layers["asked"] > 0
    assert found[0].stats.compile_refusal == ""
    assert tiny_target_f64.compiler.graphs > 0


def test_replayed_rounds_decode_the_same_with_trees_by_guesses(tiny_target_f64: Target, records: Records) -> None:
    policy = LookaheadTrees(ahead_trees(((0.6, 0.2), (0.4, 0.1), (0.2, 0.1)), 12))
    check(both(tiny_target_f64, drafted("prompt-tokens", policy), records), records)


def looking(stop: StoppingRule) -> StoppedChain:
    """A chain that looks after each token whether any row goes on."""
    return StoppedChain(4, stop, check_every=1)


@pytest.mark.parametrize("stop", some_long([PathProbability(0.02), MaxProbability(0.05), EarlyExit(0.1)], 3),
                         ids=lambda stop: type(stop).__name__)
def test_a_chain_that_looks_between_its_steps_is_replayed_without_looks(tiny_target_f64: Target, stop: StoppingRule,
                                                                        records: Records) -> None:
    check(both(tiny_target_f64, drafted("eagle", looking(stop)), records), records)


def test_a_chain_next_to_copies_is_replayed_without_looks(tiny_target_f64: Target, records: Records) -> None:
    def way(origin: Target, there: Target) -> tuple[Proposer, Policy]:
        own = drafted("eagle", Chain(2))(origin, there)[0]
        assert own is not None
        return (Ensemble([baseline("prompt_lookup", there)[0], own]),
                Union([Chain(2), looking(PathProbability(0.02))], 6))

    check(both(tiny_target_f64, way, records), records)


class Held(Wrapped):
    """Another drafter whose state is part of this one's."""

    def state_of(self, state: DraftState) -> DraftState:
        assert isinstance(state, WrappedState)
        return state.inner

    def start(self, rows: int, capacity: int, verified: VerifiedRows | None = None) -> WrappedState:
        return WrappedState(super().start(rows, capacity, verified))


@pytest.mark.parametrize("name", some_long(["eagle3", "draft-lm"], 9, 1))
def test_replayed_rounds_decode_the_same_with_a_drafter_inside_another(tiny_target_f64: Target, name: str,
                                                                       records: Records) -> None:
    def held(origin: Target, there: Target) -> tuple[Proposer, Policy]:
        return Held(moved(randomised(CASES[name].make(origin)), there)), StaticTree(WIDE)

    check(both(tiny_target_f64, held, records), records)


def test_replayed_rounds_decode_the_same_with_guesses_of_stated_acceptance(tiny_target_f64: Target,
                                                                           records: Records) -> None:
    """The drafter of benchmarks, whose rows leave one after another."""
    lengths = LENGTHS[:4]
    answered = decode(tiny_target_f64, requests(GREEDY, lengths), DecodeSettings(batch_size=4, ignore_eos=True))
    texts_ST = torch.zeros(len(lengths), 60, dtype=torch.long)
    for row, generation in enumerate(answered.generations):
        text = [*generation.request.tokens, *generation.tokens]
        texts_ST[row, : len(text)] = torch.tensor(text)

    def stated(origin: Target, there: Target) -> tuple[Proposer, Policy]:
        inner = moved(randomised(CASES["eagle3"].make(origin)), there)
        return Oracle(inner, texts_ST.to(there.device), there.vocab_size, 0.7), StaticTree(WIDE)

    found = both(tiny_target_f64, stated, records, lengths=lengths)
    check(found, records)
    assert found[1].accepted_length > 1.5


@pytest.mark.parametrize("length", some_long([3, 17], 9, 1))
def test_a_draft_that_is_always_right_is_read_as_far_as_it_was_accepted(tiny_target_f64: Target, length: int,
                                                                        records: Records) -> None:
    """With the next root, or at once where a chain is longer than what a draft model may leave unread."""

    def whole(_origin: Target, there: Target) -> tuple[Proposer, Policy]:
        return LayerDraft(there, range(there.num_layers)), Chain(length)

    lengths = tuple(count * (length + 1) for count in (8, 5, 7, 4, 4))
    found = both(tiny_target_f64, whole, records, lengths=lengths)
    check(found, records)
    assert found[1].accepted_length > length


@pytest.mark.parametrize("first", some_long(["prompt_lookup", "recycling", "hidden-transfer", "kangaroo"], 9, 1))
def test_replayed_rounds_decode_the_same_with_several_drafters(tiny_target_f64: Target, first: str,
                                                               records: Records) -> None:
    """Those with rows of their own in the target too."""
    check(both(tiny_target_f64, together(first, StaticTree(WIDE)), records, guesses=first != "recycling"), records)


# Recurrent targets ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", some_long(RECURRENT, KINDS, KINDS))
@pytest.mark.parametrize("name", ["plain", "medusa", "eagle3"])
def test_replayed_rounds_of_recurrent_targets_decode_the_same(family: str, name: str, records: Records) -> None:
    """Their states are written in place, those of a tree's nodes before any is chosen."""
    model = recurrent_model(family)
    # The products of groups count in a way that a CPU lacks.
    model.set_experts_implementation("batched_mm")
    target = Target(model, None, name=family)
    way = plain if name == "plain" else drafted(name, StaticTree(WIDE))
    check(both(target, way, records, MIXED), records)


# Between calls --------------------------------------------------------------------------------------------------------


def calls(target: Target, way: Way, records: Records, asked: Sequence[dict[str, Any]],
          temperatures: Sequence[float] = MIXED) -> list[tuple[DecodeResult, int]]:
    """Of several calls with one drafter: the replayed answers, which are those computed with a drafter of its own, and
    the number of records made meanwhile."""
    with pretended_device() as waits:
        records.waits, there = waits, on_device(target)
        torch.manual_seed(0)
        drafter, policy = way(target, there)
        found = []
        for given in asked:
            before = len(records.made)
            lengths, settings = given.get("lengths", LENGTHS), {"batch_size": 4} | given.get("settings", {})
            made = decode(there, requests(temperatures, lengths), DecodeSettings(**settings), drafter=drafter,
                          policy=policy)
            assert made.stats.graph_refusal == ""
            assert made.stats.recorded_rounds == len(records.made) - before
            torch.manual_seed(0)
            own = decode(target, requests(temperatures, lengths), DecodeSettings(**settings, graphs=False),
                         **dict(zip(("drafter", "policy"), way(target, target), strict=True)))
            assert [one.tokens for one in made.generations] == [one.tokens for one in own.generations]
            found.append((made, made.stats.recorded_rounds))
    return found


@pytest.mark.parametrize("name", others_long(DRAFTING))
def test_a_second_call_of_a_shape_records_nothing(tiny_target_f64: Target, name: str, records: Records) -> None:
    """By default, as the target is on a device. Nothing of the first call is left, its seed included."""
    target = CASES[name].verifier(tiny_target_f64)
    found = calls(target, drafted(name, SampledTree(WIDE) if name != "prompt-tokens" else StaticTree(WIDE)), records,
                  [{}, {}, {"settings": {"seed": 2**64 - 7}}])
    assert found[0][1] > 0 == found[1][1]


@pytest.mark.parametrize("name", [*BASELINES, "plain"])
def test_a_second_call_without_training_records_nothing(tiny_target_f64: Target, name: str, records: Records) -> None:
    way = plain if name == "plain" else without_training(name)
    # Of one row: some remember earlier answers, and rows would end in another order.
    found = calls(tiny_target_f64, way, records, [{"lengths": (26,)}, {"lengths": (26,)}])
    assert found[0][1] > 0 == found[1][1]


def test_records_are_shared_as_far_as_they_can_be(tiny_target_f64: Target, records: Records) -> None:
    """By fewer rows and shorter answers, other end tokens, but not by another filter or longer answers."""
    found = calls(tiny_target_f64, drafted("eagle3", StaticTree(WIDE)), records, [
        {"settings": {"top_k": 9}}, {"settings": {"top_k": 9, "batch_size": 3}, "lengths": (9, 9, 9)},
        {"settings": {"top_k": 9, "ignore_eos": True}}, {"settings": {"top_k": 5}},
        {"settings": {"top_k": 9}, "lengths": (300, 4)}])
    assert [made > 0 for _, made in found] == [True, False, False, True, True]


def test_a_target_keeps_few_batches_and_none_that_moved(tiny_target: Target, records: Records) -> None:
    with pretended_device() as waits:
        records.waits, there = waits, on_device(tiny_target)
        for top_k in range(1, 11):
            decode(there, requests(MIXED, (4,)), DecodeSettings(top_k=top_k))
        assert [one.wanted.settings.top_k for one in there.kept] == [*range(3, 11)]
        there.to(there.device)
        assert not there.kept


@pytest.mark.parametrize("end", ["closed", "failed", "interleaved"])
def test_calls_that_overlap_or_stop_leave_sound_records(tiny_target_f64: Target, end: str, records: Records) -> None:
    """A batch is in the hands of one call; one that an error ended is not used again."""
    [expected], [other] = (decode(tiny_target_f64, [one], DecodeSettings()).generations
                           for one in requests(GREEDY, (40, 40))[:2])
    with pretended_device() as waits:
        records.waits, there = waits, on_device(tiny_target_f64)
        watched = list[TokenTree]()

        def watch(tree: TokenTree, *_: Any) -> None:
            watched.append(tree)
            if end == "failed" and len(watched) > 3:
                raise KeyboardInterrupt

        first = stream(there, expected.request, DecodeSettings(), observer=watch)
        found = [*next(first), *next(first), *next(first)]
        if end == "closed":
            first.close()
        elif end == "failed":
            with pytest.raises(KeyboardInterrupt):
                list(first)
        kept = len(there.kept)
        second = [token for tokens in stream(there, other.request, DecodeSettings()) for token in tokens]
        assert kept == (end == "closed")
        if end == "interleaved":
            found += [token for tokens in first for token in tokens]
    assert second == other.tokens
    assert found == expected.tokens[: len(found)]
    assert (len(found) == 40) == (end == "interleaved")


@pytest.mark.parametrize("stop", [True, False])
def test_what_comes_after_an_end_is_dropped(tiny_target_f64: Target, stop: bool, records: Records) -> None:
    """The round after the end was launched before the end was seen."""
    drafter, policy = drafted("medusa", StaticTree(WIDE))(tiny_target_f64, tiny_target_f64)
    plainly = decode(tiny_target_f64, requests(GREEDY, LENGTHS), DecodeSettings(batch_size=4)).generations
    ends = {"stop": (tiny_target_f64.tokenizer.decode(plainly[0].tokens[7:9]),)} if stop else {
        "eos_ids": (plainly[0].tokens[7], plainly[2].tokens[5])}
    found = [one.tokens for one in decode(tiny_target_f64, requests(GREEDY, LENGTHS),
                                          DecodeSettings(batch_size=4, **ends), drafter=drafter,
                                          policy=policy).generations]
    with pretended_device() as waits:
        records.waits, there = waits, on_device(tiny_target_f64)
        replayed = decode(there, requests(GREEDY, LENGTHS), DecodeSettings(batch_size=4, **ends),
                          drafter=moved(drafter, there), policy=policy)
    assert [one.tokens for one in replayed.generations] == found
    assert len(found[0]) < LENGTHS[0]


def test_a_round_is_launched_before_the_last_one_is_read(tiny_target_f64: Target, records: Records,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    """One at most, and none after the last that the answers can need."""
    order = list[str]()
    launch, landed = recorded_rounds.RecordedRound.launch, recorded_rounds.Flight.read
    monkeypatch.setattr(recorded_rounds.RecordedRound, "launch", lambda self: order.append("launch") or launch(self))
    monkeypatch.setattr(recorded_rounds.Flight, "read", lambda self: order.append("read") or landed(self))
    with pretended_device() as waits:
        records.waits, there = waits, on_device(tiny_target_f64)
        made = decode(there, requests(GREEDY, (6,)), DecodeSettings(ignore_eos=True))
    assert len(made.generations[0].tokens) == 6
    # The first token comes from the prompt's pass.
    assert order == ["launch", *["launch", "read"] * 4, "read"]


# Places ---------------------------------------------------------------------------------------------------------------


class Outside(TorchDispatchMode):
    """Counts operations that are no part of a replay, by the place in the code."""

    def __init__(self, records: Records) -> None:
        super().__init__()
        self.records, self.places = records, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.records.repeating and not func.is_view:
            self.places[place(2).rpartition(":")[0]] += 1
        return func(*args, **(kwargs or {}))


def steady(target: Target, way: Way, records: Records, temperatures: Sequence[float] = GREEDY) -> Iterator[Loop]:
    """The loop after each of some rounds of three rows in which none starts or ends, all of them replayed."""
    with pretended_device() as waits:
        records.waits, there = waits, on_device(target)
        torch.manual_seed(0)
        drafter, policy = way(target, there)
        loop = Loop(there, requests(temperatures, (64, 64, 64)),
                    DecodeSettings(batch_size=3, ignore_eos=True, graphs=True), drafter=drafter, policy=policy)
        passes = loop.run()
        for number in range(8):
            waits.clear()
            with Outside(records) as outside:
                for _ in range(3):
                    next(passes)
            # Of later rounds the copy of their numbers for the host is all that is not replayed.
            if number > 3:
                assert outside.places == files(waits.reads) == {"modules/decoding/recorded_rounds.py": 1}
                assert not waits.uploads
                yield loop


def check_places(loops: Iterator[Loop]) -> None:
    """The same tensors at the same places after each round."""
    found = [held_tensors(loop) for loop in loops]
    assert len(found) == 4
    assert any(name.startswith("batch.rows.cache") for name in found[0])
    assert any("recorded.made" in name for name in found[0])
    for later in found[1:]:
        assert later == found[0]


@pytest.mark.parametrize("name", others_long(FIRST_CASES))
def test_a_steady_round_of_every_family_writes_to_the_same_places(tiny_target: Target, name: str,
                                                                  records: Records) -> None:
    """And nothing but replays and one copy for the host runs in it."""
    check_places(steady(CASES[name].verifier(tiny_target), drafted(name, StaticTree(WIDE)), records))


@pytest.mark.parametrize("policy", some_long(EVERY, 3, 1), ids=lambda policy: type(policy).__name__)
def test_a_steady_round_of_every_policy_writes_to_the_same_places(tiny_target: Target, policy: Policy,
                                                                  records: Records) -> None:
    check_places(steady(tiny_target, drafted("eagle3", policy), records, MIXED))


@pytest.mark.parametrize("name", some_long(BASELINES, 3, 2))
def test_a_steady_round_of_every_baseline_writes_to_the_same_places(tiny_target: Target, name: str,
                                                                    records: Records) -> None:
    check_places(steady(tiny_target, without_training(name), records))


@pytest.mark.parametrize("name", others_long([*CASES, *BASELINES], ("eagle3", *BASELINES)))
def test_computed_rounds_write_what_they_leave_to_the_same_places(tiny_target: Target, name: str) -> None:
    """A record reads what the round before it has left: nothing of it may be made anew."""
    target = CASES[name].verifier(tiny_target) if name in CASES else tiny_target
    way = drafted(name, StaticTree(WIDE)) if name in CASES else without_training(name)
    drafter, policy = way(target, target)
    loop = Loop(target, requests(MIXED, (40, 40, 40)), DecodeSettings(batch_size=3, ignore_eos=True),
                drafter=drafter, policy=policy)
    passes, found = loop.run(), list[dict[str, Any]]()
    for _ in range(6):
        for _ in range(3):
            next(passes)
        found.append({path: held for path, held in held_tensors(loop).items()
                      if path.endswith((".values", ".storage", ".lengths_B")) or path.startswith("store")})
    assert any(path.endswith("roots.values") for path in found[0])
    for later in found[3:]:
        assert later == found[2]


@pytest.mark.parametrize("name", others_long(["medusa", "hydra++", "eagle3", "falcon", "kangaroo", "draft-lm"]))
def test_rows_without_a_sequence_stay_empty(tiny_target: Target, name: str, records: Records) -> None:
    """A round of three rows is that of four. Where states are recorded, the host has counted every round."""
    with pretended_device() as waits:
        records.waits, there = waits, on_device(tiny_target)
        drafter, policy = drafted(name, StaticTree(WIDE))(tiny_target, there)
        loop = Loop(there, requests(GREEDY, (40, 40, 40, 4)),
                    DecodeSettings(batch_size=4, ignore_eos=True, graphs=True), drafter=drafter, policy=policy,
                    recorder=StateRecorder((), torch.float32))
        passes = loop.run()
        while len(loop.slots) != 3 or records.replays < 15:
            next(passes)
        assert loop.recorded is not None
        for cache in loop.recorded.caches:
            *taken, empty = cache.lengths_B.tolist()
            assert empty == cache.host_lengths[3] == 0
            assert min(taken) > 9
            assert taken == cache.host_lengths[:3]


def test_the_number_of_records_is_bounded(tiny_target: Target, records: Records) -> None:
    """Six numbers of rows share four shapes."""
    with pretended_device() as waits:
        records.waits = waits
        there = on_device(tiny_target)
        lengths = tuple(14 + 6 * row for row in range(6))
        given = DecodeSettings(batch_size=6, ignore_eos=True, graphs=True)
        found = decode(there, requests(GREEDY, lengths), given)
    assert found.stats.graph_refusal == ""
    assert 1 < len(records.made) <= 4


# Refusals -------------------------------------------------------------------------------------------------------------


class AlwaysLooking(StoppedChain):
    """Looks whether any row goes on, recorded or not."""

    def unwatched(self) -> StoppedChain:
        return self


def test_a_policy_that_waits_is_computed_and_says_so(tiny_target_f64: Target, records: Records) -> None:
    policy = AlwaysLooking(4, MaxProbability(1e-9), check_every=1)
    computed, asked = both(tiny_target_f64, drafted("eagle", policy), records)
    assert [one.tokens for one in asked.generations] == [one.tokens for one in computed.generations]
    assert "a round cannot be captured" in asked.stats.graph_refusal
    assert "modules/policies/stopping_chains.py" in asked.stats.graph_refusal


@pytest.mark.parametrize("part", some_long(["observe", "commit", "verify"], 9, 1))
def test_a_part_that_waits_is_computed_with_all_later_rounds(tiny_target_f64: Target, part: str, records: Records,
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that was recorded before it is lost, and nothing is done twice."""
    former: Callable[..., None] = getattr(rounds.Round, part)

    def waiting(self: rounds.Round, *given: Any) -> None:
        former(self, *given)
        assert int(self.counts_B.max()) < 10

    monkeypatch.setattr(rounds.Round, part, waiting)
    computed, asked = both(tiny_target_f64, drafted("draft-lm", StaticTree(WIDE)), records)
    assert [one.tokens for one in asked.generations] == [one.tokens for one in computed.generations]
    assert [one.emitted for one in asked.generations] == [one.emitted for one in computed.generations]
    assert "cannot be captured" in asked.stats.graph_refusal


@pytest.mark.parametrize("stage", ["records", "caches"])
def test_without_memory_rounds_are_computed(tiny_target_f64: Target, stage: str, records: Records,
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    def starved(*_: Any) -> None:
        raise torch.OutOfMemoryError("tried to allocate 20 GiB")

    monkeypatch.setattr(*((Records, "__call__") if stage == "records" else (RowCache, "take_all")), starved)
    computed, asked = both(tiny_target_f64, drafted("draft-lm", StaticTree(WIDE)), records)
    assert [one.tokens for one in asked.generations] == [one.tokens for one in computed.generations]
    assert asked.stats.graph_refusal == "a round cannot be captured (the device has no memory for it)"


def test_a_round_that_cannot_be_tried_out_changes_nothing(tiny_target_f64: Target, records: Records,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a run, when two rows are left of four."""
    observe = rounds.Round.observe

    def starved(self: rounds.Round, counts: list[int]) -> None:
        observe(self, counts)
        if self.padded and self.rows == 2:
            raise torch.OutOfMemoryError("tried to allocate 20 GiB")

    monkeypatch.setattr(rounds.Round, "observe", starved)
    computed, asked = both(tiny_target_f64, drafted("eagle3", StaticTree(WIDE)), records, MIXED, (40, 9, 9, 40))
    assert [one.tokens for one in asked.generations] == [one.tokens for one in computed.generations]
    assert "no memory" in asked.stats.graph_refusal


@pytest.mark.parametrize("closed", [False, True])
def test_what_went_wrong_after_an_end_stays_in_no_cache(tiny_target_f64: Target, closed: bool, records: Records,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    """A round that was launched before the end was seen may have left keys that are no numbers."""
    read, wiped, over = recorded_rounds.Flight.read, list[int](), list[bool]()

    def faulty(self: recorded_rounds.Flight) -> Any:
        emitted, counts, faults, logprobs = read(self)
        return emitted, counts, [int(bool(over)) for _ in faults], logprobs

    monkeypatch.setattr(recorded_rounds.Flight, "read", faulty)
    monkeypatch.setattr(TargetRows, "wipe", lambda _rows, row: wiped.append(row))
    with pretended_device() as waits:
        records.waits, there = waits, on_device(tiny_target_f64)
        end = decode(tiny_target_f64, requests(GREEDY, (9,)), DecodeSettings()).generations[0].tokens[5]
        loop = Loop(there, requests(GREEDY, (30,)), DecodeSettings(eos_ids=() if closed else (end,)))
        passes = loop.run()
        for _generation, tokens, done in passes:
            if done or (closed and end in tokens):
                over.append(done)
                break
        passes.close() if closed else list(passes)
    assert wiped == [0]


def test_a_record_reads_the_weights_that_are_there(tiny_target_f64: Target, records: Records) -> None:
    """Others than those that were there when it was made."""
    asked, policy = requests(GREEDY, LENGTHS), StaticTree(WIDE)
    drafters = [randomised(CASES["medusa"].make(tiny_target_f64)) for _ in range(2)]
    with torch.no_grad():
        for weight in drafters[1].parameters():
            weight.mul_(-1.5)
    expected = [decode(tiny_target_f64, asked, DecodeSettings(batch_size=4), drafter=drafter, policy=policy)
                for drafter in drafters]
    with pretended_device() as waits:
        records.waits, there = waits, on_device(tiny_target_f64)
        first, second = (moved(drafter, there) for drafter in drafters)
        found = [decode(there, asked, DecodeSettings(batch_size=4), drafter=first, policy=policy)]
        first.load_state_dict(second.state_dict(), assign=True)
        found.append(decode(there, asked, DecodeSettings(batch_size=4), drafter=first, policy=policy))
    for made, own in zip(found, expected, strict=True):
        assert [row.emitted for row in made.generations] == [row.emitted for row in own.generations]
    assert found[0].generations != found[1].generations


def test_a_batch_of_inference_mode_serves_other_calls(tiny_target_f64: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_rounds, "recorder_for", lambda _device: lambda body: body)
    monkeypatch.setattr(tiny_target_f64, "kept", [])
    found = []
    for mode in (True, False, True):
        with torch.inference_mode(mode):
            found.append(decode(tiny_target_f64, requests(MIXED, LENGTHS), DecodeSettings(batch_size=4, graphs=True)))
    assert len({str([row.tokens for row in one.generations]) for one in found}) == 1
    assert [one.stats.recorded_rounds > 0 for one in found] == [True, False, False]


def test_kept_batches_make_room_for_another(tiny_target_f64: Target, records: Records,
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    take_all, [one] = RowCache.take_all, requests(GREEDY, (9,))
    with pretended_device() as waits:
        records.waits, there = waits, on_device(tiny_target_f64)
        decode(there, [one], DecodeSettings())
        former = there.kept[0]

        def crowded(cache: RowCache) -> None:
            if former in there.kept:
                raise torch.OutOfMemoryError("tried to allocate 20 GiB")
            take_all(cache)

        monkeypatch.setattr(RowCache, "take_all", crowded)
        assert decode(there, [one], DecodeSettings(top_k=3)).stats.graph_refusal == ""
        assert former not in there.kept


@pytest.mark.filterwarnings("error")
def test_generate_of_an_artifact_records_once_and_says_what_it_cannot(tiny_target_f64: Target,
                                                                      records: Records) -> None:
    """Also with a partner that reads the text, which is a new one in each call."""
    prompt = torch.tensor([requests(GREEDY, (1,))[0].tokens])
    drafter = randomised(CASES["medusa"].make(tiny_target_f64))

    def answers(target: Target) -> list[list[int]]:
        artifact = Artifact(drafter=moved(drafter, target), target=target, topology=WIDE, identity=target.identity,
                            provenance={})
        return [artifact.generate(prompt.to(target.device), max_new_tokens=9, policy="static+recycling").tolist()[0]
                for _ in range(2)]

    expected = answers(tiny_target_f64)
    with pretended_device() as waits:
        records.waits, there = waits, on_device(tiny_target_f64)
        assert answers(there) == expected
        assert len(records.made) == 1
    with pretended_device() as waits, patch.object(Records, "__call__", side_effect=RuntimeError("no stream")):
        records.waits, there = waits, on_device(tiny_target_f64)
        with pytest.warns(UserWarning, match="CUDA graphs: a round cannot be captured"):
            found = answers(there)
        assert found == expected


def test_without_cuda_rounds_are_computed_and_the_reason_is_reported(tiny_target: Target) -> None:
    found = decode(tiny_target, requests(GREEDY, LENGTHS), DecodeSettings(batch_size=3, graphs=True))
    assert found.stats.graph_refusal == "there is no CUDA device"
    assert recorded_rounds.recorder_for(torch.device("cpu")) == "there is no CUDA device"


def test_stored_text_needs_no_graphs(tiny_target: Target) -> None:
    found = recorded_rounds.recorder_of(Replay(tiny_target, []), DecodeSettings(graphs=True))
    assert found == "stored text is read in place of a target"


@pytest.mark.parametrize("prefix", [0, 12])
def test_states_of_replayed_rounds_are_recorded(tiny_target_f64: Target, records: Records, prefix: int) -> None:
    """As in distillation: also those of a common start, which is read once."""
    asked = [replace(one, tokens=tuple(range(4, 4 + prefix)) + one.tokens) for one in requests(GREEDY, LENGTHS)]

    def states(target: Target, *, graphs: bool) -> dict[int, RecordedStates]:
        recorder = StateRecorder((1,), torch.float64)
        made = decode(target, asked, DecodeSettings(batch_size=3, ignore_eos=True, graphs=graphs), recorder=recorder)
        assert made.stats.graph_refusal == ""
        return recorder.states(made.generations)

    found = [states(tiny_target_f64, graphs=False)]
    with pretended_device() as waits:
        records.waits, there = waits, on_device(tiny_target_f64)
        found += [states(there, graphs=True) for _ in range(2)]
    assert records.replays > 0
    for replayed in found[1:]:
        assert replayed.keys() == found[0].keys() == {0, 1, 2, 3, 4}
        for index, computed in found[0].items():
            assert replayed[index].tokens == computed.tokens
            torch.testing.assert_close(replayed[index].final_LD, computed.final_LD)
            torch.testing.assert_close(replayed[index].taps[1], computed.taps[1])


def test_steps_halve() -> None:
    assert recorded_rounds.steps_to(33) == [1, 2, 3, 5, 9, 17, 33]
    assert recorded_rounds.steps_to(1) == [1]
    assert recorded_rounds.steps_to(1000, 128) == [128, 250, 500, 1000]
    assert recorded_rounds.steps_to(100, 100) == [100]


@pytest.fixture
def pretended_graphs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Calls on a pretended `torch.cuda`, in order."""
    done: list[str] = []

    @contextmanager
    def inside(name: str) -> Iterator[None]:
        done.append(f"{name}:")
        yield
        done.append(f"{name} ends")

    monkeypatch.setattr(recorded_rounds.torch, "cuda", SimpleNamespace(
        CUDAGraph=lambda: SimpleNamespace(replay=lambda: done.append("replay")),
        device=lambda given: inside(str(given)), graph=lambda _graph, **_: inside("capture"),
        Stream=lambda _device: None, current_stream=lambda _device: None, current_device=lambda: 1,
        set_stream=lambda _stream: done.append("the stream of before"), graph_pool_handle=lambda: (0, 1)))
    recorded_rounds._capturing.cache_clear()
    return done


def test_a_cuda_graph_is_captured_once(pretended_graphs: list[str]) -> None:
    """A run before it would do the work of a round twice."""
    done = pretended_graphs
    record = recorded_rounds.recorder_for(torch.device("cuda:1"))
    assert not isinstance(record, str)
    replay = record(lambda: done.append("run"))
    assert done == ["cuda:1:", "capture:", "run", "capture ends", "cuda:1 ends"]
    replay()
    assert done[-1] == "replay"


@pytest.mark.parametrize("collecting", [True, False])
def test_nothing_is_collected_while_a_cuda_graph_is_captured(pretended_graphs: list[str], collecting: bool) -> None:
    """A graph of an earlier batch that the collector freed would end the capture; afterwards all is as before, also
    after a computation that no graph can hold."""
    within: list[bool] = []

    def waits() -> None:
        within.append(gc.isenabled())
        raise RuntimeError("operation not permitted when stream is capturing")

    before = gc.isenabled()
    try:
        (gc.enable if collecting else gc.disable)()
        recorded_rounds.record_cuda_graph(torch.device("cuda:1"), (0, 1), lambda: within.append(gc.isenabled()))
        assert gc.isenabled() == collecting
        with pytest.raises(RuntimeError, match="not permitted"):
            recorded_rounds.record_cuda_graph(torch.device("cuda:1"), (0, 1), waits)
        assert gc.isenabled() == collecting
        assert pretended_graphs[-1] == "the stream of before"
    finally:
        (gc.enable if before else gc.disable)()
    assert within == [False, False]


# Real graphs ----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", others_long(CASES))
def test_cuda_graphs_of_rounds_decode_the_same(tiny_target_f64: Target, name: str) -> None:
    # Copies with weights of their own: what a drafter borrows moves with it, and other tests share the fixture.
    given = CASES[name].verifier(tiny_target_f64)
    origin, target = (Target(deepcopy(given.copy_model()), given.tokenizer, name="there") for _ in range(2))
    target.to("cuda")
    found = []
    for graphs in (False, True):
        drafter, policy = drafted(name, StaticTree(WIDE))(origin, target)
        found.append(decode(target, requests(GREEDY, LENGTHS),
                            DecodeSettings(batch_size=3, ignore_eos=True, graphs=graphs), drafter=drafter,
                            policy=policy))
    assert [one.tokens for one in found[1].generations] == [one.tokens for one in found[0].generations]
    assert found[1].stats.graph_refusal == ""
