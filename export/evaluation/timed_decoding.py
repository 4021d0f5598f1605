"""Decoding of questions with drafts, without drafts and by transformers' `generate`, with the seconds each takes.

Decoding few rows is bound by reading weights, so the bytes that drafting and the target read are counted too.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from ...modules import (
    DecodeResult,
    DraftState,
    Ensemble,
    Frontier,
    Generation,
    Observation,
    Proposer,
    Request,
    Scores,
    Target,
    decode,
)
from ...modules.decoding.recorders import PartCounter
from .contention import clock
from .lossless import generate, native_model
from .methods import EvaluateConfig, Method
from .results import Timing
from .schedule import UNTIMED_ROWS, Entry

TURN_STREAMS = 1 << 32
"""Distance between the random streams of a question's turns: more than there are questions."""


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """One turn of a question: its prompt, the same for all methods, and the target's own answer."""

    entry: Entry
    """The question."""
    turn: int
    """Its turn, from 1."""
    temperature: float
    """Sampling temperature; 0 is greedy."""
    prompt: tuple[int, ...]
    """Tokens of the conversation up to this turn's answer."""
    reference: tuple[int, ...] = ()
    """The answer of the target alone."""

    @property
    def index(self) -> int:
        """Number of its random stream."""
        return self.entry.number + (self.turn - 1) * TURN_STREAMS


@dataclass
class Meter:
    """Count of the bytes of weights that a drafter has read."""

    drafted: int = 0
    """By `expand` and by `observe` after a verifying pass, all parts of an ensemble together. Reading prompts does not
    count, as the passes over prompts do not count for the target, nor do embeddings that are looked up."""


@dataclass(kw_only=True)
class Records:
    """Answers, timings and target calls of one method."""

    generations: dict[int, Generation] = field(default_factory=dict)
    """Answers by `Exchange.index`."""
    timings: list[Timing] = field(default_factory=list)
    """One for each timed group."""
    target_calls: int = 0
    """Forward calls of the target after the prompts'."""
    meter: Meter = field(default_factory=Meter)
    """Bytes of weights that drafting read."""
    parts: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Accepted guesses of each drafter of an ensemble, by `Exchange.index`; empty with a single drafter."""
    graph_refusal: str = ""
    """Why some work was not replayed as CUDA graphs; empty where all was, or none was to be."""

    def with_untimed(self, untimed: "Records") -> "Records":
        """These timed records and those of the questions that were not timed."""
        return Records(generations={**untimed.generations, **self.generations}, timings=self.timings,
                       target_calls=untimed.target_calls + self.target_calls,
                       meter=Meter(drafted=untimed.meter.drafted + self.meter.drafted),
                       parts={**untimed.parts, **self.parts},
                       graph_refusal=untimed.graph_refusal or self.graph_refusal)


class TimedDecoder:
    """Decodes exchanges in one call and measures it."""

    def __init__(self, target: Target, config: EvaluateConfig) -> None:
        self.target, self.config = target, config

    def decode(self, asked: Sequence[Exchange], method: Method | None, batch_size: int, *, rows: int | None = None,
               tokens: int | None = None, records: Records | None = None,
               on_tokens: Callable[[Generation, list[int], bool], None] | None = None) -> tuple[DecodeResult, float]:
        """This project's loop on exchanges of one temperature: its answers, and the seconds it took.

        The method, None for the target alone, chooses its tree for `batch_size` rows, while `rows` (None for as many)
        are decoded at once. `records` takes the answers and counts of the method.
        """
        requests = [Request(tokens=exchange.prompt, index=exchange.index, temperature=exchange.temperature,
                            max_new_tokens=tokens or self.config.max_new_tokens) for exchange in asked]
        drafter = method.drafter if method else None
        policy = method.policy_for(batch_size, asked[0].temperature) if method and method.policy_for else None
        families = method.parts if method else ()
        counter = PartCounter() if len(families) > 1 else None
        with metered(drafter, records.meter if records else Meter()):
            # After the counter is in place: setting it up is no part of decoding.
            started = clock(self.target)
            result = decode(self.target, requests, self.config.settings(rows or batch_size), drafter=drafter,
                            policy=policy, on_tokens=on_tokens, observer=counter)
            seconds = clock(self.target) - started
        if records is not None:
            records.parts |= counter.counts(result.generations, len(families)) if counter else {}
            records.graph_refusal = records.graph_refusal or result.stats.graph_refusal
            records.target_calls += result.stats.target_calls
            records.generations |= {one.request.index: one for one in result.generations}
        return result, seconds

    def generate(self, asked: Sequence[Exchange], *, tokens: int | None = None) -> tuple[list[list[int]], float]:
        """transformers' `generate` on all exchanges as one batch: its answers, and the seconds it took."""
        with native_model(self.target) as model:
            started = clock(self.target)
            answers = generate(model, self.target, [exchange.prompt for exchange in asked],
                               max_new_tokens=tokens or self.config.max_new_tokens,
                               temperature=asked[0].temperature, settings=self.config.settings(1))
            return answers, clock(self.target) - started


def untimed_batches(exchanges: Sequence[Exchange]) -> list[list[Exchange]]:
    """Batches for exchanges that are not timed, those of similar lengths together: less is padded."""
    ordered = sorted(exchanges, key=lambda one: len(one.prompt))
    return [ordered[start : start + UNTIMED_ROWS] for start in range(0, len(ordered), UNTIMED_ROWS)]


@contextmanager
def metered(drafter: Proposer | None, meter: Meter) -> Iterator[None]:
    """Count what the drafter reads inside the block."""
    # The parts are counted, not the ensemble: it only calls them, and each reads its own weights.
    parts = [] if drafter is None else [drafter]
    while ensembles := [part for part in parts if isinstance(part, Ensemble)]:
        parts = [part for part in parts if part not in ensembles] + [inner for one in ensembles for inner in one.parts]
    for part in parts:
        # On the instance, so that the class, which other drafters share, stays as it is.
        counter = _Counter(part, meter)
        part.__dict__["expand"], part.__dict__["observe"] = counter.expand, counter.observe
    try:
        yield
    finally:
        for part in parts:
            del part.__dict__["expand"], part.__dict__["observe"]


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
