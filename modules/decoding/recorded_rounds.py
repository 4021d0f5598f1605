"""Rounds of decoding that are recorded once for each of a few shapes and replayed: CUDA graphs of drafting,
verification, acceptance and commit.

What a round leaves to the next is written in place (`RowBuffer`, `RowCache`), and what it makes on the way lies in the
memory of its graphs, so that every address is the same in each replay. Batches are padded to a few numbers of rows, and
every cache is read up to a few numbers of slots; each combination has records of its own. Its first round is computed,
in which libraries prepare what they keep, the second is recorded, all later ones are replayed.

Shapes: B rows of a round.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..target.target_rows import TargetRows
from .rounds import Batch, Round
from .verifier import Rows

Body = Callable[[], None]  # A computation that reads and writes the same tensors whenever it is called
Recorder = Callable[[Body], Body]
"""Records a computation: the result repeats its operations on the same tensors, without running its Python code.
Recording runs that code once, and changes no tensor that was there before."""

_LEAST_SLOTS = 128  # Fewest slots of a cache that a record reads, unless the cache has fewer


class RoundShape(NamedTuple):
    """Numbers of rows and of cache slots of the records of a round."""

    rows: int
    slots: int


def recorder_of_rounds(rows: Rows) -> Recorder | str:
    """The recorder of the rounds of some rows, or the reason why they cannot be recorded."""
    if not isinstance(rows, TargetRows):
        return "stored text is read in place of a target"
    if rows.target.placement.spread:
        return "the target's layers are not whole on one device"
    if rows.target.recurrent:
        return "the target has recurrent layers"
    return recorder_for(rows.target.device)


def recorder_for(device: torch.device) -> Recorder | str:
    """The recorder of a device, or the reason why there is none."""
    return partial(record_cuda_graph, device) if device.type == "cuda" else "there is no CUDA device"


def record_cuda_graph(device: torch.device, body: Body) -> Body:
    """A CUDA graph of a computation; RuntimeError if it makes the host wait, which no graph can hold."""
    # No runs to warm up, as torch's examples have them: a round changes what the next one starts from. What libraries
    # allocate at first was allocated when the first round of the shape was computed.
    # The collector stays off meanwhile: graphs of an earlier batch that it frees would end the recording.
    collecting = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.device(device):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                body()
    finally:
        if collecting:
            gc.enable()
    return graph.replay


def steps_to(largest: int, least: int = 1) -> list[int]:
    """The largest number and its halves, rounded up, down to the least one; ascending."""
    found = [largest]
    while found[-1] > least:
        found.append(max(least, -(-found[-1] // 2)))
    return found[::-1]


class RecordedRounds:
    """The rounds of a batch, whose rows must be a target's, recorded and replayed: at most `rows` rows of `longest`
    tokens. `record` records a part of a round."""

    def __init__(self, batch: Batch, rows: int, longest: int, record: Recorder) -> None:
        if not isinstance(batch.rows, TargetRows):
            raise TypeError(f"rounds are recorded in the rows of a target, got {type(batch.rows).__name__}")
        self.batch, self.longest, self.record = batch, longest, record
        self.caches = (batch.rows.cache, *(() if batch.state is None else batch.state.caches))
        self.row_steps, self.slot_steps = steps_to(rows), list[int]()
        self.extents: list[int] = []  # Most slots after a row's tokens that a round takes in each cache
        self.refusal = ""  # The reason that some part of a round cannot be recorded; empty while none has failed
        self.made: dict[RoundShape, RecordedRound] = {}
        self._first: Round | None = None
        self._storage: list[Tensor | None] = [None for cache in self.caches for _ in cache.blocks]

    def next(self, active: int) -> Round:
        """The work of the next round of the first `active` rows."""
        if self._first is None:
            for cache in self.caches:
                cache.extent = 0
            self._first = Round(self.batch, active)
            return self._first
        if not self.extents:
            # All later rounds are shaped like the first one: room is made for the longest sequence at once.
            self.extents = [cache.extent for cache in self.caches]
            for cache, extent in zip(self.caches, self.extents, strict=True):
                cache.reserve(self.longest + extent)
                cache.take_all()
            most = self.longest + max(self.extents)
            self.slot_steps = steps_to(most, min(_LEAST_SLOTS, most))
            if self.batch.state is not None:
                self.batch.state.expect(self._first.accepted.path_BK.shape[1])
        needed = max(max(cache.host_lengths[:active]) + extent
                     for cache, extent in zip(self.caches, self.extents, strict=True))
        # The smallest shape with room for all of them.
        shape = RoundShape(next(step for step in self.row_steps if step >= active),
                           next(step for step in self.slot_steps if step >= needed))
        storage = [block.storage for cache in self.caches for block in cache.blocks]
        if not all(now is then for now, then in zip(storage, self._storage, strict=True)):
            # A cache has got its memory, or more of it, elsewhere: earlier records would write where it was.
            self.made.clear()
            self._storage = storage
        if shape not in self.made:
            self.made[shape] = RecordedRound(self, shape)
        work = self.made[shape]
        work.active = active
        return work

    @contextmanager
    def bounded(self, slots: int) -> Iterator[None]:
        """A block in which every pass reads so many slots of each cache."""
        for cache in self.caches:
            cache.bound = min(slots, cache.capacity)
        try:
            yield
        finally:
            for cache in self.caches:
                cache.bound = None


class RecordedRound(Round):
    """A round of one shape: computed the first time, then recorded, then replayed."""

    active: int  # Rows that hold a sequence

    def __init__(self, rounds: RecordedRounds, shape: RoundShape) -> None:
        super().__init__(rounds.batch, shape.rows, padded=True)
        self.rounds, self.shape = rounds, shape
        self.replays: dict[str, Body] = {}
        self.computed = False

    def draft(self) -> None:
        """`Round.draft` of as many rows as the shape has."""
        self._run("drafting", super().draft)

    def verify(self) -> None:
        """`Round.verify` of these rows."""
        self._run("verification", super().verify)

    def commit(self, counts: list[int]) -> None:
        """`Round.commit`; the host counts afterwards what the device has kept."""
        # Numbers for the host while the work may be recorded: none is true in every replay.
        self._run("the commit", lambda: Round.commit(self, [0] * self.rows))
        self.rounds.caches[0].advance(counts)

    def observe(self, counts: list[int]) -> None:
        """`Round.observe`; the host counts afterwards what the device has kept."""
        self._run("what the drafter observes", lambda: Round.observe(self, [0] * self.rows))
        if self.batch.state is not None:
            self.batch.state.advance(counts)
        self.computed = True

    def _run(self, name: str, work: Body) -> None:
        """Compute, record or replay a part."""
        if (replay := self.replays.get(name)) is not None:
            replay()
            return
        caches = self.rounds.caches
        with self.rounds.bounded(self.shape.slots):
            if not self.computed or self.rounds.refusal:
                work()
                return
            windows = [cache.window for cache in caches]
            try:
                self.replays[name] = self.rounds.record(work)
            except RuntimeError as error:
                # Whatever cannot be captured can be computed: nothing of it has been done on the device yet.
                for cache, window in zip(caches, windows, strict=True):
                    cache.window = window
                self.rounds.refusal = f"{name} cannot be captured ({str(error).splitlines()[0][:200]})"
                work()
                return
        self.replays[name]()
