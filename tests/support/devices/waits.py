"""Reads, uploads and operations of the decoding loop's passes on a pretended device, once all rows are decoding."""

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from typing import Any

import torch
from draftsmith.modules import (
    Chain,
    DecodeSettings,
    Drafter,
    Ensemble,
    Loop,
    Policy,
    Proposer,
    Request,
    Target,
    Topology,
    Union,
    baseline,
)
from support.devices.pretended_device import DEVICE, Waits, pretended_device
from support.families import CASES, randomised

Way = Callable[[Target, Target], tuple[Proposer | None, Policy | None]]
"""A drafter that was made with the first target, moved to the second one, and its policy."""
GREEDY = (0.0, 0.0, 0.0)
MIXED = (0.0, 1.0, 0.7)  # Temperatures of the rows of a batch
WIDE = Topology((-1, 0, 0, 1, 2), (0, 0, 1, 0, 0))  # Two tokens deep, which every family answers
_BEFORE, _COUNTED = 3, 2
"""Passes before the count, in which policies make what they keep for later passes; passes that are counted."""
_LENGTH = 64  # Tokens of an answer: more than these passes accept, so that no row ends


def moved(drafter: Drafter, target: Target) -> Drafter:
    """The drafter on the device of another copy of its target."""
    drafter.to(target.device)
    drafter.bind(target)
    return drafter


def drafted(name: str, policy: Policy) -> Way:
    """A drafter of a family with random weights."""
    return lambda origin, there: (moved(randomised(CASES[name].make(origin)), there), deepcopy(policy))


def without_training(name: str, policy: Policy | None = None) -> Way:
    """A drafter of a baseline."""
    return lambda _origin, there: (baseline(name, there)[0], policy or baseline(name, there)[1])


def plain(_origin: Target, _there: Target) -> tuple[None, None]:
    return None, None


def together(first: str, own: Policy) -> Way:
    """Medusa's heads with a drafter before them, which has no rows of the target to share and runs what it needs in
    its own."""

    def way(origin: Target, there: Target) -> tuple[Proposer, Policy]:
        other = drafted(first, Chain(2)) if first in CASES else without_training(first, Chain(2))
        parts = [other(origin, there), drafted("medusa", own)(origin, there)]
        return Ensemble([part for part, _ in parts if part is not None]), Union([Chain(2), own], 2 + own.max_size)

    return way


def on_device(target: Target) -> Target:
    """A copy of the target on the pretended device; for use inside its block."""
    return Target(target.copy_model(), target.tokenizer, name=target.identity.name).to(DEVICE)


def steady(target: Target, way: Way, temperatures: Sequence[float] = GREEDY, **settings: Any) -> Waits:
    """The counts of the pass that waits most, of passes of all rows in which none starts or ends."""
    prompts = [tuple((7 + row + place) % 90 + 4 for place in range(9 + 3 * row)) for row in range(len(temperatures))]
    requests = [Request(prompt, row, _LENGTH, temperatures[row]) for row, prompt in enumerate(prompts)]
    given = DecodeSettings(batch_size=len(requests), ignore_eos=True, **settings)

    def started(there: Target) -> tuple[Loop, Iterator[None]]:
        torch.manual_seed(0)
        drafter, policy = way(target, there)
        loop = Loop(there, requests, given, drafter=drafter, policy=policy)
        return loop, _whole(loop.run(), len(requests))

    here, passes_here = started(target)
    for _ in range(1 + _BEFORE + _COUNTED):
        next(passes_here)
    found = list[Waits]()
    with pretended_device() as waits:
        there, passes_there = started(on_device(target))
        for number in range(1 + _BEFORE + _COUNTED):
            waits.clear()
            next(passes_there)
            found += [waits.copy()] if number > _BEFORE else []
    for expected, slot in zip(here.slots, there.slots, strict=True):
        # Rounding may decide which guesses are drafted, and so how many tokens a pass accepts; never which tokens.
        count = min(len(expected.tokens), len(slot.tokens))
        assert _BEFORE + _COUNTED < count < _LENGTH
        assert slot.tokens[:count] == expected.tokens[:count]
    return max(found, key=lambda one: (one.reads.total(), one.uploads.total()))


def _whole(steps: Iterator[Any], rows: int) -> Iterator[None]:
    """One item for each pass of the loop, which yields one for each row; the first is that of the prompts."""
    while True:
        for _ in range(rows):
            next(steps)
        yield
