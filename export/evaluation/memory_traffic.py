"""What a method reads from memory, and the speed-up that would be its own if nothing else took time.

Decoding few rows is bound by reading weights. With c the bytes that a draft step reads over those of a target pass,
gamma draft steps a pass and tau tokens a pass, drafting then gains tau / (c * gamma + 1) (arXiv:2411.11055).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from ...modules import DraftState, Ensemble, Frontier, Observation, Proposer, Scores, Target


@dataclass
class Meter:
    """Bytes of weights that a drafter has read so far."""

    drafted: int = 0
    """By `expand` and by `observe` after a verifying pass, all parts of an ensemble together. Reading prompts does not
    count, as the passes over prompts do not count for the target, nor do embeddings that are looked up."""


@contextmanager
def metered(drafter: Proposer | None, meter: Meter) -> Iterator[None]:
    """Count inside the block what the drafter reads."""
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
    """Stands before one drafter. A verifying pass is drafted before it is observed, a piece of a prompt is not."""

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
    """Bytes of weights that a pass of the target reads; of an embedding that is not the output layer too, only a few
    lines are looked up. All experts of a mixture count, though a small batch reads some only."""
    embedding = target.model.get_input_embeddings().weight
    looked_up: int = embedding.nbytes if embedding is not target.head.weight else 0
    every: int = sum(parameter.nbytes for parameter in target.model.parameters())
    return every - looked_up


def memory_bound_speedup(block_efficiency: float, draft_share: float) -> float:
    """tau / (c * gamma + 1) with c * gamma the bytes drafting reads for each byte of the target (arXiv:2411.11055)."""
    return block_efficiency / (draft_share + 1)
