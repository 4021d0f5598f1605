"""What a method reads from memory, and the speed-up that would be its own if nothing else took time.

Decoding few rows is bound by reading weights. With c the bytes that a draft step reads over those of a target pass,
gamma draft steps a pass and tau tokens a pass, drafting then gains tau / (c * gamma + 1) (arXiv:2411.11055).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..modules import Ensemble, Proposer, Target


@dataclass
class Meter:
    """Bytes of weights that a drafter has read so far."""

    drafted: int = 0
    """By `expand` and `observe`, all parts of an ensemble together; embeddings that are looked up do not count."""


@contextmanager
def metered(drafter: Proposer | None, meter: Meter) -> Iterator[None]:
    """Count inside the block what the drafter reads."""
    parts = _parts(drafter)
    for part in parts:
        part.__dict__["expand"] = _counting(part.expand, part.expand_bytes(), meter)
        part.__dict__["observe"] = _counting(part.observe, part.observe_bytes(), meter)
    try:
        yield
    finally:
        for part in parts:
            del part.__dict__["expand"], part.__dict__["observe"]


def _parts(drafter: Proposer | None) -> tuple[Proposer, ...]:
    if isinstance(drafter, Ensemble):
        return tuple(part for whole in drafter.parts for part in _parts(whole))
    return () if drafter is None else (drafter,)


def _counting(call: Callable[..., Any], size: int, meter: Meter) -> Callable[..., Any]:
    def counted(*given: Any, **named: Any) -> Any:
        meter.drafted += size
        return call(*given, **named)

    return counted


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
