"""Passes that are recorded once and replayed give what computed ones give, from the same places, whatever is drafted.

They are what is replayed where whole rounds cannot be (`tests/modules/decoding/test_recorded_rounds.py`). Records of
torch's operations stand in for CUDA graphs (`tests/support/recorded_operations.py`); tests marked `gpu` replay real
ones.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from draftsmith.modules import (
    Chain,
    DecodeResult,
    DecodeSettings,
    Drafter,
    DraftState,
    Loop,
    Observation,
    Policy,
    Proposer,
    Replay,
    Request,
    SampledTree,
    StaticTree,
    Target,
    Topology,
    baseline,
    decode,
)
from draftsmith.modules.baselines.registry import BASELINES
from draftsmith.modules.decoding import loop
from draftsmith.modules.target import recorded_passes, target_rows
from draftsmith.modules.target.recorded_passes import NO_CUDA, recorder_for, steps_to
from draftsmith.modules.target.target_rows import TargetRows
from draftsmith.recipes.planning.counted_storages import CountedStorages
from support.families import CASES, randomised
from support.policy_cases import EVERY
from support.recorded_operations import Records
from support.targets import random_target

WIDE = Topology((-1, 0, 0, 1, 2), (0, 0, 1, 0, 0))
VIRTUAL = ("prompt-tokens", "hidden-transfer")
"""Families whose virtual nodes no record holds."""
FIRST_LAYERS = ("kangaroo",)
"""Families whose drafts hand over the target's first layers."""


PASSES_ALONE = "this test replays passes alone"
"""The reason that rounds are not recorded here."""


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> Records:
    """Records in place of CUDA graphs."""
    made = Records()
    monkeypatch.setattr(target_rows, "recorder_for", lambda _device: made)
    monkeypatch.setattr(loop, "recorder_of_rounds", lambda _batch: PASSES_ALONE)
    return made


def requests(temperatures: tuple[float, ...], lengths: tuple[int, ...] = (30, 12, 21)) -> list[Request]:
    return [Request(tuple((7 * row + place) % 90 + 4 for place in range(9 + 3 * row)), row, lengths[row], temperature)
            for row, temperature in enumerate(temperatures)]


def both(target: Target, drafter: Proposer | None, policy: Policy | None, temperatures: tuple[float, ...],
         **settings: object) -> tuple[DecodeResult, DecodeResult]:
    """(computed, replayed) answers."""
    found = []
    for graphs in (False, True):
        given = DecodeSettings(batch_size=3, ignore_eos=True, graphs=graphs, **settings)  # type: ignore[arg-type]
        found.append(decode(target, requests(temperatures), given, drafter=drafter, policy=deepcopy(policy)))
        if drafter is not None:
            drafter.forget()
    return found[0], found[1]


def check(computed: DecodeResult, replayed: DecodeResult) -> None:
    assert [one.tokens for one in replayed.generations] == [one.tokens for one in computed.generations]
    assert [one.emitted for one in replayed.generations] == [one.emitted for one in computed.generations]


@pytest.mark.parametrize("name", CASES)
def test_replayed_passes_decode_the_same_with_every_family(
    tiny_target_f64: Target, name: str, records: Records
) -> None:
    target = CASES[name].verifier(tiny_target_f64)
    computed, replayed = both(target, randomised(CASES[name].make(target)), StaticTree(WIDE), (0.0, 0.0, 0.0))
    check(computed, replayed)
    refused = replayed.stats.graph_refusal
    assert computed.stats.graph_refusal == ""
    if name.startswith(VIRTUAL):
        assert "virtual nodes" in refused
    elif name.startswith(FIRST_LAYERS):
        assert "first layers" in refused
    else:
        assert refused == PASSES_ALONE
        assert sum(record.replays for record in records.made) == replayed.stats.target_calls


@pytest.mark.parametrize("name", ["medusa", "hydra++", "eagle", "falcon", "draft-lm"])
def test_replayed_passes_sample_the_same(tiny_target_f64: Target, name: str, records: Records) -> None:
    drafter = randomised(CASES[name].make(tiny_target_f64))
    check(*both(tiny_target_f64, drafter, SampledTree(WIDE), (0.0, 1.0, 0.7), top_p=0.9))
    assert records.made


@pytest.mark.parametrize("name", BASELINES)
def test_replayed_passes_decode_the_same_with_every_baseline(
    tiny_target_f64: Target, name: str, records: Records
) -> None:
    computed, replayed = both(tiny_target_f64, *baseline(name, tiny_target_f64), (0.0, 0.0, 0.0))
    check(computed, replayed)
    assert (replayed.stats.graph_refusal == PASSES_ALONE) == (sum(one.replays for one in records.made)
                                                   == replayed.stats.target_calls)


@pytest.mark.parametrize("policy", EVERY, ids=lambda policy: type(policy).__name__)
def test_replayed_passes_decode_the_same_with_every_policy(
    tiny_target_f64: Target, policy: Policy, records: Records
) -> None:
    drafter = randomised(CASES["eagle3"].make(tiny_target_f64))
    computed, replayed = both(tiny_target_f64, drafter, policy, (0.0, 1.0, 0.7), repetition_penalty=1.2)
    check(computed, replayed)
    assert replayed.stats.graph_refusal == PASSES_ALONE
    assert len(records.made) < replayed.stats.target_calls


def test_replayed_passes_decode_the_same_without_a_draft_and_in_windows(records: Records) -> None:
    target = random_target(3, sliding_window=6, head_dim=8, query_pre_attn_scalar=8)
    check(*both(target, None, None, (0.0, 1.0, 0.7)))
    assert records.made


class Places:
    """Addresses and shapes of what the passes of a loop read and write."""

    def __init__(self, running: Loop) -> None:
        assert isinstance(running.rows, TargetRows)
        assert running.rows.recorded is not None
        cache, passes = running.rows.cache, running.rows.recorded.passes
        assert cache.storage is not None
        tensors = {"storage": cache.storage, "lengths": cache.lengths_B}
        for shape, one in passes.items():
            named = {"embedded": one.embedded_BND, "depths": one.depths_BN, "ancestors": one.ancestors_BNN,
                     "logits": one.logits_BNV, "final": one.final_BND,
                     **{f"tap {layer}": states for layer, states in one.taps.items()}}
            tensors |= {f"{shape} {name}": tensor for name, tensor in named.items()}
        self.held = {name: (tensor.data_ptr(), tensor.shape, tensor.stride()) for name, tensor in tensors.items()}


@pytest.mark.parametrize("policy", EVERY, ids=lambda policy: type(policy).__name__)
@pytest.mark.parametrize("name", ["medusa", "hydra++", "eagle3", "draft-lm"])
def test_passes_keep_their_places_and_shapes(
    tiny_target: Target, name: str, policy: Policy, records: Records
) -> None:
    drafter = randomised(CASES[name].make(tiny_target))
    running = Loop(tiny_target, requests((0.0, 1.0, 0.7), (40, 40, 40)),
                   DecodeSettings(batch_size=3, ignore_eos=True, graphs=True), drafter=drafter,
                   policy=deepcopy(policy))
    steps, held = running.run(), list[Places]()
    for _ in range(6):
        for _ in range(3):
            next(steps)
        if records.made:
            held.append(Places(running))
    assert len(held) >= 4
    for before, after in pairwise(held):
        assert before.held.items() <= after.held.items()


def test_steady_passes_hold_no_more_memory(tiny_target: Target, records: Records) -> None:
    drafter = randomised(CASES["medusa"].make(tiny_target))
    with CountedStorages() as tally:
        running = Loop(tiny_target, requests((0.0, 0.0, 0.0), (40, 40, 40)),
                       DecodeSettings(batch_size=3, ignore_eos=True, graphs=True), drafter=drafter, policy=Chain(2))
        steps, live = running.run(), list[int]()
        for _ in range(8):
            for _ in range(3):
                next(steps)
            live.append(tally.live)
    assert len(records.made) == 1
    assert len(set(live[3:])) == 1, live


def test_the_number_of_records_is_bounded(tiny_target: Target, records: Records) -> None:
    """Rows end one after another, and trees are trimmed to what was guessed: few shapes are enough for all."""
    drafter, _ = baseline("prompt_lookup", tiny_target)
    several = [Request(tuple((7 * row + place) % 30 + 4 for place in range(40)), row, 20 + 9 * row) for row in range(6)]
    found = decode(tiny_target, several, DecodeSettings(batch_size=6, ignore_eos=True, graphs=True), drafter=drafter,
                   policy=Chain(6))
    assert found.stats.graph_refusal == PASSES_ALONE
    assert len(records.made) <= len(steps_to(6)) * len(steps_to(7))
    assert len(records.made) < found.stats.target_calls / 2


def test_steps_halve() -> None:
    assert steps_to(33) == [1, 2, 3, 5, 9, 17, 33]
    assert steps_to(1) == [1]
    assert steps_to(1000, 128) == [128, 250, 500, 1000]
    assert steps_to(100, 100) == [100]


# Refusals -------------------------------------------------------------------------------------------------------------


def test_without_cuda_passes_are_computed_and_the_reason_is_reported(tiny_target: Target) -> None:
    assert recorder_for(torch.device("cpu")) == NO_CUDA
    computed, asked = both(tiny_target, None, None, (0.0, 0.0, 0.0))
    check(computed, asked)
    assert asked.stats.graph_refusal == "there is no CUDA device"


def test_a_model_that_waits_is_computed_and_the_reason_is_reported(
    tiny_target_f64: Target, records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Target.read_nodes

    def waiting(self: Target, *args: object) -> torch.Tensor:
        states: torch.Tensor = read(self, *args)  # type: ignore[arg-type]
        assert float(states.sum()) < float("inf")
        return states

    monkeypatch.setattr(Target, "read_nodes", waiting)
    computed, asked = both(tiny_target_f64, None, None, (0.0, 0.0, 0.0))
    check(computed, asked)
    assert "a pass of this target cannot be captured" in asked.stats.graph_refusal
    assert "makes the host wait" in asked.stats.graph_refusal
    assert not records.made


def test_a_tree_larger_than_foreseen_is_computed(tiny_target: Target, records: Records) -> None:
    rows = tiny_target.start(1, 40)
    rows.use_graphs(2)
    tree = Topology.chain(3).plant(torch.full((1, 4), 7))
    rows.run(tree)
    assert rows.graph_refusal == "a tree has 4 nodes, more than the 2 that were foreseen"
    rows.commit(torch.arange(4)[None], torch.tensor([4]), [4])
    wide = tiny_target.start(1, 5)
    wide.use_graphs(4)
    wide.cache.assume(2)
    wide.run(Topology.chain(2).plant(torch.full((1, 3), 7)))
    assert "no room for the padding" in wide.graph_refusal
    empty = tiny_target.start(1, 5)
    empty.use_graphs(4)
    empty.run(Topology.chain(2).plant(torch.full((1, 3), 7)))
    assert "nothing was read before" in empty.graph_refusal
    assert not records.made


def test_stored_text_says_that_it_needs_no_graphs(tiny_target: Target) -> None:
    rows = Replay(tiny_target, []).start(1, 4)
    rows.use_graphs(3)
    assert rows.graph_refusal == "stored text is read in place of a target"


def test_states_of_a_pass_outlive_the_next_one(tiny_target_f64: Target, records: Records) -> None:
    """Observations are copies: the next replay writes over the pass's own tensors."""
    drafter: Drafter = randomised(CASES["medusa"].make(tiny_target_f64))
    kept: list[tuple[Observation, torch.Tensor]] = []
    observe: Callable[[DraftState, torch.Tensor, Observation], None] = drafter.observe

    def noting(state: DraftState, rows_R: torch.Tensor, observation: Observation) -> None:
        kept.append((observation, observation.final_BND.clone()))
        observe(state, rows_R, observation)

    drafter.observe = noting  # type: ignore[method-assign]
    decode(tiny_target_f64, requests((0.0, 0.0, 0.0)), DecodeSettings(batch_size=3, ignore_eos=True, graphs=True),
           drafter=drafter, policy=Chain(2))
    assert len(kept) > 5
    assert all(torch.equal(observation.final_BND, then) for observation, then in kept)


def test_a_cuda_graph_is_captured_after_runs_on_another_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Stream:
        def __init__(self, name: str = "own") -> None:
            self.name = name

        def wait_stream(self, other: "Stream") -> None:
            done.append(f"{self.name} waits for {other.name}")

    class Graph:
        def replay(self) -> None:
            done.append("replay")

    @contextmanager
    def inside(name: str) -> Iterator[None]:
        done.append(f"{name}:")
        yield
        done.append(f"{name} ends")

    monkeypatch.setattr(recorded_passes.torch, "cuda", SimpleNamespace(
        Stream=Stream, CUDAGraph=Graph, current_stream=lambda: Stream("main"), device=lambda given: inside(str(given)),
        stream=lambda given: inside(given.name), graph=lambda _graph: inside("capture")))
    record = recorder_for(torch.device("cuda:1"))
    assert not isinstance(record, str)
    replay = record(lambda: done.append("run"))
    assert done == ["cuda:1:", "own waits for main", "own:", "run", "run", "run", "own ends", "main waits for own",
                    "capture:", "run", "capture ends", "cuda:1 ends"]
    replay()
    assert done[-1] == "replay"


# Real graphs ----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["medusa", "eagle3", "draft-lm"])
def test_cuda_graphs_decode_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = random_target(2).to("cuda")
    drafter = randomised(CASES[name].make(target))
    monkeypatch.setattr(loop, "recorder_of_rounds", lambda _batch: PASSES_ALONE)
    computed, replayed = both(target, drafter, StaticTree(WIDE), (0.0, 1.0, 0.7))
    check(computed, replayed)
    assert replayed.stats.graph_refusal == PASSES_ALONE
