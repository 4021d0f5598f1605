"""A pass reads from its device once, and copies nothing to it, whatever drafts and however the rows sample."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from draftsmith.modules import Policy, RejectionRisk, SampledChain, SamplingSetting, StoppedChain, Target, Typical
from draftsmith.modules.baselines.registry import BASELINES
from draftsmith.modules.families.medusa.drafter import Medusa, MedusaConfig
from draftsmith.modules.interfaces.proposer import DraftState, Observation, Proposer
from draftsmith.modules.policies.lookahead_trees import LookaheadTrees, ahead_trees
from draftsmith.modules.policies.stopping_chains import EarlyExit, MaxProbability, PathProbability, StoppingRule
from draftsmith.modules.policies.trees import Chain, SampledTree, StaticTree
from support.devices.pretended_device import DEVICE, Waits, files, pretended_device
from support.devices.waits import GREEDY, MIXED, WIDE, drafted, moved, plain, steady, together, without_training
from support.families import CASES
from support.policies import EVERY
from support.tiers import DRAFTING, others_long, some_long
from torch import Tensor

READ = "modules/decoding/loop.py"  # The one read of a pass: accepted tokens, counts and faults together
BETWEEN = "modules/policies/stopping_chains.py"
"""The read of a chain that asks after a token whether any row goes on: only the host can leave out a draft step. At
most one for each token after the first."""
FILTERED = {"top_k": 20, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2}


def check(waits: Waits, looks: int = 0) -> None:
    """One read, at most so many more between draft steps, and no upload."""
    assert not waits.uploads, waits.uploads
    read = files(waits.reads)
    assert read.pop(READ) == 1, waits.reads
    assert read.pop(BETWEEN, 0) <= looks, waits.reads
    assert not read, waits.reads


@pytest.mark.parametrize(("settings", "temperatures"), [({}, (0.0,)), ({}, (0.8,)), ({}, MIXED), (FILTERED, MIXED)],
                         ids=["greedy", "sampled", "mixed", "filtered"])
def test_a_pass_without_a_draft_waits_once(tiny_target: Target, settings: dict[str, Any],
                                           temperatures: tuple[float, ...]) -> None:
    check(steady(tiny_target, plain, temperatures, **settings))


@pytest.mark.parametrize("name", others_long(DRAFTING))
def test_a_pass_of_every_family_waits_once(tiny_target: Target, name: str) -> None:
    check(steady(CASES[name].verifier(tiny_target), drafted(name, StaticTree(WIDE)), GREEDY))


@pytest.mark.parametrize("name", others_long([
    "medusa", "hydra++", "eagle", "eagle3", "falcon", "kangaroo", "prompt-tokens", "hidden-transfer", "draft-lm"]))
def test_a_sampled_pass_of_a_family_waits_once(tiny_target: Target, name: str) -> None:
    check(steady(CASES[name].verifier(tiny_target), drafted(name, SampledTree(WIDE)), MIXED))


@pytest.mark.parametrize("name", ["eagle3", "kangaroo", "draft-lm"])
def test_a_pass_of_one_row_waits_once(tiny_target: Target, name: str) -> None:
    """Of families that read the text into a cache of their own."""
    check(steady(tiny_target, drafted(name, Chain(2)), (0.8,)))


@pytest.mark.parametrize("name", BASELINES)
def test_a_pass_of_every_baseline_waits_once(tiny_target: Target, name: str) -> None:
    check(steady(tiny_target, without_training(name)))


@pytest.mark.parametrize(("name", "temperatures"), [("medusa", GREEDY), ("eagle3", MIXED)])
@pytest.mark.parametrize("policy", some_long(EVERY, 3), ids=lambda policy: type(policy).__name__)
def test_a_pass_of_every_policy_waits_once(tiny_target: Target, name: str, policy: Policy,
                                           temperatures: tuple[float, ...]) -> None:
    check(steady(tiny_target, drafted(name, policy), temperatures))


def test_trees_by_guesses_wait_once(tiny_target: Target) -> None:
    chances = ((0.6, 0.2), (0.4, 0.1), (0.2, 0.1))
    policy = LookaheadTrees(ahead_trees(chances, 12))
    check(steady(tiny_target, drafted("prompt-tokens", policy)))


def test_a_lossy_rule_waits_once(tiny_target: Target) -> None:
    check(steady(tiny_target, drafted("medusa", StaticTree(WIDE)), MIXED, lossy=Typical()))


@pytest.mark.parametrize(("stop", "every"), [(MaxProbability(1e-9), 0), (MaxProbability(1e-9), 1),
                                             (EarlyExit(1e-9), 1), (PathProbability(1e-9), 2)],
                         ids=lambda given: given if isinstance(given, int) else type(given).__name__)
def test_a_chain_that_stops_waits_between_its_steps_alone(tiny_target: Target, stop: StoppingRule, every: int) -> None:
    """A look after each step is what leaves out the steps after it; without looks nothing waits."""
    looks = [place for place in range(1, 4) if every and place % every == 0]

    def way(origin: Target, target: Target) -> tuple[Proposer | None, Policy]:
        policy = StoppedChain(4, deepcopy(stop), check_every=every)
        return drafted("eagle", policy)(origin, target)[0], policy

    waits = steady(tiny_target, way)
    check(waits, looks=len(looks))
    assert waits.reads.total() == 1 + len(looks)


def test_an_acceptance_head_waits_between_its_steps_alone(tiny_target: Target) -> None:
    stop = RejectionRisk(lambda state_BD: 1e-3 * state_BD[:, 0].sigmoid().log(), SamplingSetting(temperature=0.7))
    check(steady(tiny_target, drafted("eagle", SampledChain(3, stop)), (0.7, 0.7)), looks=2)


@pytest.mark.parametrize("first", ["prompt_lookup", "recycling", "ngrams", "hidden-transfer", "kangaroo"])
def test_drafters_that_draft_together_wait_once(tiny_target: Target, first: str) -> None:
    check(steady(tiny_target, together(first, SampledTree(WIDE)), MIXED))


def test_greedy_drafters_that_draft_together_wait_once(tiny_target: Target) -> None:
    check(steady(tiny_target, together("prompt_lookup", StaticTree(WIDE)), GREEDY))


# The count itself -----------------------------------------------------------------------------------------------------

READS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda there: there[0].item(),
    "tolist": lambda there: there.tolist(),
    "cpu": lambda there: there.cpu(),
    "to": lambda there: there.to("cpu"),
    "numpy": lambda there: there.numpy(),
    "int": lambda there: int(there[0]),
    "float": lambda there: float(there[0]),
    "bool": lambda there: bool((there > 1).any()),
    "if": lambda there: 1 if there[0] > 1 else 0,
    "range": lambda there: range(there[0]),
    "in": lambda there: 3 in there,
    "max": lambda there: max(there),
    "equal": lambda there: torch.equal(there, there),
    "nonzero": lambda there: there.nonzero(),
    "where": lambda there: torch.where(there > 1),
    "unique": lambda there: there.unique(),
    "masked_select": lambda there: there.masked_select(there > 1),
    "marks": lambda there: there[there > 1],
    "marks set": lambda there: there.__setitem__(there > 1, there[:1]),
    "repeat_interleave": lambda there: there.repeat_interleave(there),
    "copy": lambda there: torch.zeros(4, dtype=torch.long).copy_(there),
    "a number of a slice": lambda there: there[: there[1]],
}
UPLOADS: dict[str, Callable[[Tensor], object]] = {
    "tensor": lambda there: torch.tensor([1, 2], device=there.device),
    "as_tensor": lambda there: torch.as_tensor([1, 2], device=there.device),
    "one number": lambda there: torch.tensor(1, device=there.device),
    "new_tensor": lambda there: there.new_tensor([1, 2]),
    "to": lambda there: torch.zeros(2).to(there.device),
    "copy": lambda there: there.copy_(torch.zeros(4)),
    "a list": lambda there: there[[0, 1]],
    "a list in columns": lambda there: there[None][:, [0, 1]],
    "a list set": lambda there: there.__setitem__([0, 1], 5),
    "a tuple set": lambda there: there[None].__setitem__((slice(None), (0, 1)), 5),
    "a row set": lambda there: there.__setitem__(slice(0, 2), torch.zeros(2, dtype=torch.long)),
    "an index": lambda there: there[torch.tensor([0, 1])],
}
FREE: dict[str, Callable[[Tensor], object]] = {
    "arange": lambda there: torch.arange(4, device=there.device),
    "where": lambda there: torch.where(there > 1, there, 0),
    "one row": lambda there: there[1],
    "one row set": lambda there: there.__setitem__(1, 5),
    "an index": lambda there: there[there],
    "masked_fill": lambda there: there.masked_fill(there > 1, 0),
    "one_hot": lambda there: torch.nn.functional.one_hot(there, 4),
    "sort": lambda there: there.sort(),
    "repeat_interleave": lambda there: there.repeat_interleave(2),
    "unbind": lambda there: list(there),
}


def counted(action: Callable[[Tensor], object]) -> Waits:
    with pretended_device() as waits:
        there = torch.arange(4, device=DEVICE)
        waits.clear()
        action(there)
        return waits.copy()


@pytest.mark.parametrize("name", READS)
def test_every_read_is_counted(name: str) -> None:
    waits = counted(READS[name])
    assert waits.reads
    assert set(files(waits.reads)) == {"tests/modules/decoding/test_host_waits.py"}


@pytest.mark.parametrize("name", UPLOADS)
def test_every_upload_is_counted(name: str) -> None:
    waits = counted(UPLOADS[name])
    assert not waits.reads
    assert set(files(waits.uploads)) == {"tests/modules/decoding/test_host_waits.py"}


@pytest.mark.parametrize("name", FREE)
def test_what_does_not_wait_is_not_counted(name: str) -> None:
    waits = counted(FREE[name])
    assert not waits.reads
    assert not waits.uploads
    assert (waits.operations > 0) == (name not in ("one row", "unbind"))


class Curious(Medusa):
    """A drafter that looks at a number, and brings a list."""

    def observe(self, state: DraftState, rows_R: Tensor, observation: Observation) -> None:
        super().observe(state, rows_R, observation)
        assert observation.counts_B.max() > 0
        assert observation.counts_B[[0]].shape == (1,)


def test_a_drafter_that_waits_is_found_with_its_place(tiny_target: Target) -> None:
    def way(origin: Target, target: Target) -> tuple[Proposer, Policy]:
        return moved(Curious.create(MedusaConfig(num_heads=2), origin), target), Chain(2)

    waits = steady(tiny_target, way)
    here = "tests/modules/decoding/test_host_waits.py"
    assert files(waits.reads) == {READ: 1, here: 1}
    assert files(waits.uploads) == {here: 1}
    with pytest.raises(AssertionError, match="test_host_waits"):
        check(waits)
