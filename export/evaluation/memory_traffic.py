"""Bytes of weights that drafting and the target read: decoding few rows is bound by reading weights.

The memory-bound speed-up (`modules.tuning.draft_model_sizing`) follows from their ratio.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from ...modules import DraftState, Ensemble, Frontier, Observation, Proposer, Scores, Target


@dataclass
class Meter:
    """Count of the bytes of weights that a drafter has read."""

    drafted: int = 0
    """By `expand` and by `observe` after a verifying pass, all parts of an ensemble together. Reading prompts does not
    count, as the passes over prompts do not count for the target, nor do embeddings that are looked up."""


@contextmanager
def metered(drafter: Proposer | None, meter: Meter) -> Iterator[None]:
    """Count what the drafter reads inside the block."""
    parts = _parts(drafter)
    for part in parts:
        counter = _Counter(part, meter)
        part.__dict__["expand"], part.__dict__["observe"] = counter.expand, counter.observe
    try:
        yield
    finally:
        for part in parts:
            del part.__dict__["expand"], part.__dict__["observe"]


def _parts(drafter: Proposer | None) -> tuple[Proposer, ...]:
    if isinstance(drafter, Ensemble):
        return tuple(part for whole in drafter.parts for part in _parts(whole))
    return () if drafter is None else (drafter,)


class _Counter:
    """Counting methods in place of one drafter's. Before the drafter observes a verifying pass it has drafted for it;
    before it observes a piece of a prompt it has not."""

    def __init__(self, part: Proposer, meter: Meter) -> None:
        self._expand, self._observe = part.expand, part.observe
        self._expand_bytes, self._observe_bytes = part.expand_bytes(), part.observe_bytes()
        self._meter, self._drafted = meter, False

    def expand(self, state: DraftState, frontier: Frontier) -> Scores:
        self._meter.drafted += self._expand_bytes
        self._drafted = True
        return self._expand(state, frontier)

    def observe(self, state: DraftState, rows_R: Tensor, observation: Observation) -> None:
        if self._drafted:
            self._meter.drafted += self._observe_bytes
        self._drafted = False
        self._observe(state, rows_R, observation)


def target_bytes(target: Target) -> int:
    """Bytes of weights that a pass of the target reads.

    An embedding counts only where it is also the output layer: otherwise a few of its rows are looked up. All experts
    of a mixture count, though a small batch reads only some.
    """
    embedding = target.model.get_input_embeddings().weight
    looked_up: int = embedding.nbytes if embedding is not target.head.weight else 0
    every: int = sum(parameter.nbytes for parameter in target.model.parameters())
    return every - looked_up
