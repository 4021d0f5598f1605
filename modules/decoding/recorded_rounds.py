"""Rounds of decoding that are recorded once and replayed: CUDA graphs, kept with their target from call to call.

A record repeats the operations of a round on the very same tensors. Batches are padded to a few numbers of rows, and
every cache is read up to a few numbers of slots; each combination has one record. It is made before its first round,
which is a replay too: first an empty round is computed, so that libraries load their kernels and take their memory.

The host needs no number of a replayed round to launch the next one, so it reads a round while the next one runs."""

import functools
import gc
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from ..interfaces.proposer import DraftState, Proposer
from ..policies.base import Policy
from ..row_buffers import RowBuffer
from ..target.kv_cache import MANY_SLOTS, RowCache
from ..target.model import Target
from ..target.target_rows import TargetRows
from .recorders import DeviceTimer
from .requests import DecodeSettings, Request
from .rounds import Batch, Round, read
from .verifier import Verifier

Body = Callable[[], None]  # A computation that reads and writes the same tensors whenever it is called
Recorder = Callable[[Body], Body]
"""Records a computation: the result repeats its operations on the same tensors, without running its Python code.
Recording runs that code once, and changes no tensor that was there before."""

_LEAST_SLOTS = 128  # Fewest slots of a cache that a record reads, unless the cache has fewer
_LEAST_TEXT = 256  # Fewest tokens of a row that a kept batch has room for, so that answers of most lengths share it
_FEW_ROWS = 8  # Most rows of which a batch has as many as the next power of two
MOST_KEPT, KEPT_SHARE = 8, 0.25  # Batches that a target keeps, and the share of its device's memory that they may take


def recorder_of(target: Verifier, settings: DecodeSettings, requests: Iterable[Request] = ()) -> Recorder | str:
    """The recorder of the rounds of a target, or the reason why they cannot be recorded; "" where nobody wants that. By
    default they are wanted on every device but a CPU."""
    if settings.graphs is False or (settings.graphs is None and target.device.type == "cpu"):
        return ""
    biases = target.biases if settings.biases is None else settings.biases
    if biases != biases.alone or any(request.processors or request.grammar for request in requests):
        return "processors and grammars look at the texts on the host"
    if not isinstance(target, Target):
        return "stored text is read in place of a target"
    if target.placement.spread:
        return "the target's layers are not whole on one device"
    return recorder_for(target.device)


def recorder_for(device: torch.device) -> Recorder | str:
    """The recorder of a device, or the reason why there is none."""
    if device.type != "cuda":
        return "there is no CUDA device"
    # The records of a batch are never replayed side by side: they share the memory of what they make on the way.
    return partial(record_cuda_graph, device, torch.cuda.graph_pool_handle())


@functools.cache
def _capturing(device: torch.device) -> torch.cuda.Stream:
    """The stream of a device on which all graphs are captured: torch's own is that of the device that came first."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def record_cuda_graph(device: torch.device, pool: Any, body: Body) -> Body:
    """A CUDA graph of a computation; RuntimeError if it makes the host wait, which no graph can hold."""
    # The collector stays off meanwhile: graphs of an earlier batch that it frees would end the recording.
    collecting = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.device(device):
            graph, outside = torch.cuda.CUDAGraph(), torch.cuda.current_stream(device)
            try:
                with torch.cuda.graph(graph, pool=pool, stream=_capturing(device), capture_error_mode="thread_local"):
                    body()
            except RuntimeError as error:
                # What cannot be captured ends the capture with an error of its own, and torch's block leaves its stream
                # and its memory pool as they are.
                torch.cuda.set_stream(outside)
                with suppress(RuntimeError, AttributeError):
                    torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
                cause = error.__context__
                raise (cause if isinstance(cause, RuntimeError) else error) from None
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


@dataclass(frozen=True)
class Wanted:
    """The batch that a call wants, as far as its records depend on it: equal ones can share them."""

    drafter: Proposer | None
    policy: Policy | None
    settings: DecodeSettings  # Without what the host alone looks at
    rows: int
    taps: tuple[int, ...]
    sampled: bool
    prefixed: bool  # Whether a further row holds a common start
    numbers: Any  # Number types that operations choose by settings of torch
    weights: tuple[tuple[int, int], ...]  # Number of each weight's object, and its address

    @classmethod
    def by(cls, target: Target, settings: DecodeSettings, drafter: Proposer | None, policy: Policy | None, *,
           rows: int, sampled: bool, taps: Sequence[int], prefixed: bool) -> "Wanted":
        """The wishes of a call to a target."""
        kind = target.device.type
        numbers = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
        shared = replace(settings, seed=0, stop=(), stop_from_prompt=False, ignore_eos=False, batch_size=1,
                         prefill_chunk=1, graphs=None, biases=target.biases if settings.biases is None else
                         settings.biases, eos_ids=target.eos_ids if settings.eos_ids is None else settings.eos_ids)
        # A record reads weights where they were, also those that were moved, cast or replaced meanwhile.
        parts = [target.model, drafter, *getattr(drafter, "parts", ())]
        weights = tuple((id(one), one.data_ptr()) for part in parts if isinstance(part, nn.Module)
                        for one in (*part.parameters(), *part.buffers()))
        # Few rows are as many as a power of two: batches of like sizes share their records.
        return cls(drafter, policy, shared, 1 << (rows - 1).bit_length() if rows <= _FEW_ROWS else rows, tuple(taps),
                   sampled, prefixed, (numbers, torch.get_float32_matmul_precision()), weights)


class RecordedRounds:
    """A batch of a target's rows of at most `longest` tokens, and its recorded rounds. `record` records a round."""

    def __init__(self, target: Target, wanted: Wanted, settings: DecodeSettings, longest: int, prefix: Sequence[int],
                 record: Recorder) -> None:
        self.wanted, self.rows, self.record = wanted, wanted.rows, record
        # Many rows of long texts take what they need: their memory may be all that there is.
        step = _LEAST_TEXT if self.rows * longest > MANY_SLOTS else 1 << (longest - 1).bit_length()
        self.longest = max(longest, min(max(_LEAST_TEXT, -(-longest // step) * step), target.context_length))
        policy = None if wanted.policy is None else wanted.policy.unwatched()
        nodes = 1 if policy is None else policy.max_size
        # A row that has ended is found out when one more round has been launched.
        most = nodes if wanted.drafter is None else nodes * (1 + wanted.drafter.virtual_nodes)
        self.batch = Batch.made(target, settings, wanted.drafter, policy, rows=self.rows, slots=self.longest + 5 * most,
                                places=self.longest + 2 * nodes, sampled=wanted.sampled, taps=wanted.taps,
                                prefix=prefix)
        assert isinstance(self.batch.rows, TargetRows)
        state, self.target_rows = self.batch.state, self.batch.rows
        self.caches: Sequence[RowCache] = (self.target_rows.cache, *(() if state is None else state.caches))
        self.row_steps, self.slot_steps = steps_to(self.rows), list[int]()
        self.path = 0  # Most tokens that a round commits to a row
        self.extents: list[int] = []  # Most slots after a row's tokens that a round takes in each cache
        self.refusal = ""  # The reason that rounds cannot be recorded; empty while none has failed
        self.done: torch.cuda.Event | None = None  # Recorded after the last round of a call
        self.starved = False  # Whether it is the memory, of which there may be more in the next call
        self.made: dict[tuple[int, int, int], RecordedRound] = {}  # By rows, cache slots and a chosen size of the trees
        # Memory of caches and records on the device, and of the drafter, which lives as long.
        self.bytes = 0 if not isinstance(wanted.drafter, nn.Module) else sum(
            one.nbytes for one in wanted.drafter.parameters())
        self.records = 0  # Rounds that were recorded
        self.launches = Counter[RecordedRound]()
        self._storage: list[Tensor | None] = []
        self._tried = set[tuple[int, int]]()  # Rows and size of the trees of which a round was computed
        self._landed = 0.0  # When the host had the numbers of the last round
        # Before the first prompt: no row may have a text when rounds are tried out.
        self._refusing(self._prepare)
        self._empty()

    def restart(self, settings: DecodeSettings, prefix: Sequence[int]) -> None:
        """Empty the batch for another call that wants the same, but for settings that the host alone looks at."""
        self._empty()
        self.batch.verifier.restart(settings)
        if prefix:
            self.target_rows.share(prefix)

    def _empty(self) -> None:
        self.batch.keep([])
        self.target_rows.active = self.rows

    def shape(self, active: int, ahead: bool) -> tuple[int, int, int]:
        """Numbers of rows and slots of the next round of the first `active` rows, while another one runs if `ahead`,
        whose numbers the host does not know, and the chosen size of its trees."""
        # What a draft leaves unread in one round it reads in the next.
        needed = ahead * 2 * self.path + max(
            max(cache.host_lengths[:active]) + extent for cache, extent in zip(self.caches, self.extents, strict=True))
        return (next(step for step in self.row_steps if step >= active),
                next(step for step in self.slot_steps if step >= needed), self.batch.size)

    def next(self, active: int, ahead: bool) -> "RecordedRound | None":
        """The next round of the first `active` rows, to be launched; None where rounds cannot be recorded."""
        if self.refusal:
            return None
        storage = [block.storage for cache in self.caches for block in cache.blocks]
        if not all(now is then for now, then in zip(storage, self._storage, strict=True)):
            # A cache has got more memory elsewhere: earlier records would write where it was.
            self.made.clear()
            self._storage = storage
        if (shape := self.shape(active, ahead)) not in self.made:
            self._refusing(partial(self._make, shape))
            if self.refusal:
                return None
        work = self.made[shape]
        work.active = active
        self.launches[work] += 1
        return work

    def draft_seconds(self) -> float:
        """Seconds of drafting in all rounds since the last call, of which the last of each shape stands for the others;
        the host waits for it. 0 where the device does not tell."""
        found = sum(count * work.timer.replayed() for work, count in self.launches.items() if work.timer is not None)
        self.launches.clear()
        return found

    def _refusing(self, work: Body) -> None:
        """Prepare rounds or record one; what cannot be recorded can be computed, and nothing of it has been done."""
        before, caching = _allocated(self.batch), torch.is_autocast_cache_enabled()
        # A cast of weights that torch remembers until the end of an autocast block would not live as long as a record.
        torch.set_autocast_cache_enabled(False)
        try:
            work()
        except RuntimeError as error:
            self.starved = isinstance(error, torch.OutOfMemoryError)
            said = "the device has no memory for it" if self.starved else str(error)
            self.refusal = f"a round cannot be captured ({said.splitlines()[0][:200]})"
            self.made.clear()
            for cache in self.caches:
                cache.window = None
        finally:
            torch.set_autocast_cache_enabled(caching)
        self.bytes += max(0, _allocated(self.batch) - before)

    def _make(self, shape: tuple[int, int, int]) -> None:
        """Record a round."""
        if (shape[0], self.batch.size) not in self._tried:
            self._try_out(shape[0], self.slot_steps[-1])
        self.made[shape] = RecordedRound(self, *shape[:2])
        self.records += 1

    def _prepare(self) -> None:
        """Learn what a round takes, and take the memory for the longest text at once."""
        lengths = [list(cache.host_lengths) for cache in self.caches]
        # Once as rounds are computed, then as they are recorded, in which a draft may read more at once.
        self.path = self._try_out(self.row_steps[-1])
        for cache, held in zip(self.caches, lengths, strict=True):
            cache.host_lengths = held
        if self.batch.state is not None:
            self.batch.state.expect(self.path, bool(self.batch.size))
        for cache in self.caches:
            cache.reserve(self.longest, cache.extent + 4 * self.path)
        for cache in self.caches:
            cache.extent = 0
        self._try_out(self.row_steps[-1], max(cache.capacity for cache in self.caches))
        self.extents = [cache.extent for cache in self.caches]
        for cache, extent in zip(self.caches, self.extents, strict=True):
            cache.reserve(self.longest, extent + 4 * self.path)
            cache.take_all()
        most = self.longest + max(self.extents) + 4 * self.path
        self.slot_steps = steps_to(most, min(_LEAST_SLOTS, most))
        self._storage = [block.storage for cache in self.caches for block in cache.blocks]

    def _try_out(self, rows: int, slots: int | None = None) -> int:
        """Compute a round that leaves every row as it was; returns the most tokens that one commits to a row."""
        batch = self.batch
        parts: list[Any] = [*self.caches, batch.roots, batch.live, *batch.verifier.buffers]
        parts += [] if batch.state is None else [batch.state]
        held = [(values, values.clone()) for part in parts for values in _values(part)]
        self.batch.live.values.fill_(False)
        work = Round(self.batch, rows, padded=True)
        try:
            with self.bounded(slots):
                work.whole()
        finally:
            for values, former in held:
                values.copy_(former)
        self._tried.add((rows, self.batch.size))
        return work.accepted.path_BK.shape[1]

    @contextmanager
    def bounded(self, slots: int | None) -> Iterator[None]:
        """A block whose passes read so many slots, whatever the rows hold."""
        for cache in self.caches:
            cache.bound = None if slots is None else min(slots, cache.capacity)
        try:
            yield
        finally:
            for cache in self.caches:
                cache.bound = None

    def advance(self, flight: "Flight", counts: list[int]) -> None:
        """Count on the host what a round has committed on the device."""
        if self.batch.policy is not None:  # It began when it was launched, or the one before it had ended
            began, self._landed = max(flight.launched, self._landed), time.perf_counter()
            self.batch.policy.learn(flight.work.size, counts, self._landed - began)
        self.caches[0].advance(counts)
        if self.batch.state is not None:
            self.batch.state.advance(counts)


class RecordedRound(Round):
    """A recorded round of one shape."""

    active: int  # Rows that hold a sequence

    def __init__(self, rounds: RecordedRounds, rows: int, slots: int) -> None:
        super().__init__(rounds.batch, rows, padded=True)
        device = rounds.batch.roots.values.device
        # CUDA alone can time a part of a record.
        timed = device.type == "cuda" and torch.version.hip is None and rounds.batch.drafter is not None
        self.timer = DeviceTimer(device) if timed else None
        drafting = nullcontext if self.timer is None else self.timer.running
        with rounds.bounded(slots):
            self.replay = rounds.record(partial(self.whole, drafting))

    def launch(self) -> "Flight":
        """Replay it, without waiting for its numbers."""
        self.replay()
        # Now and once: rounds are waited for where the next one has yet to be recorded.
        self.batch.plan(self.active)
        asked = self.batch.verifier.settings.logprobs
        return Flight(self, _to_host(self.host_BX[: self.active]),
                      _to_host(self.logprobs_BK[: self.active]) if asked else list)


@dataclass(frozen=True)
class Flight:
    """A launched round, whose numbers are on their way to the host."""

    work: RecordedRound
    numbers: Callable[[], list[list[int]]]
    logprobs: Callable[[], list[list[float]]]  # None at all where nobody asks for them
    launched: float = field(default_factory=time.perf_counter)  # When

    def read(self) -> tuple[list[list[int]], list[int], list[int], list[list[float]]]:
        """(new tokens, nodes on the path, fault, log-probabilities) of each row; the host waits for this round."""
        emitted, counts, faults = read(self.numbers())
        return emitted, counts, faults, self.logprobs() or [[]] * len(emitted)


def _to_host(values: Tensor) -> Callable[[], list[Any]]:
    """A function that waits for values and returns them, while the work that is launched later goes on. The next round
    may overwrite them on their device."""
    if values.device.type != "cuda":
        kept = values.clone()
        return lambda: kept.tolist()
    there = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    there.copy_(values, non_blocking=True)
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record(torch.cuda.current_stream(values.device))

    def waited() -> list[Any]:
        done.synchronize()
        return there.tolist()

    return waited


def _values(part: RowBuffer | RowCache | DraftState) -> list[Tensor]:
    """All that a round of no sequence may change, but slots after the rows' tokens."""
    if isinstance(part, RowBuffer):
        return [part.values]
    if isinstance(part, RowCache):
        return [part.lengths_B, *({} if part.states is None else part.states.held).values()]
    return [values for one in part.held for values in _values(one)]


def _allocated(batch: Batch) -> int:
    """Bytes of the device that are in use."""
    device = batch.roots.values.device
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


# Between calls --------------------------------------------------------------------------------------------------------

_KEEPING = Lock()  # Held while what a target keeps is taken or given back


def taken(target: Target, wanted: Wanted, settings: DecodeSettings, longest: int, prefix: Sequence[int],
          record: Recorder) -> RecordedRounds:
    """The rounds that an earlier call has left with the target, or new ones; nobody else has them meanwhile."""
    with _KEEPING:
        found: RecordedRounds | None = next((one for one in target.kept if one.wanted == wanted), None)
        if found is not None:
            target.kept.remove(found)
    # Tensors of inference mode could not be written by a later call outside it.
    with torch.inference_mode(False), torch.no_grad():
        if found is not None and found.longest >= longest:
            if found.done is not None:
                torch.cuda.current_stream(target.device).wait_event(found.done)
            found.restart(settings, prefix)
            return found
        # Its memory first.
        del found
        made = RecordedRounds(target, wanted, settings, longest, prefix, record)
        if made.starved and target.kept:
            # What is kept for other calls has to go.
            target.kept.clear()
            del made
            made = RecordedRounds(target, wanted, settings, longest, prefix, record)
        return made


def give_back(target: Target, rounds: RecordedRounds) -> None:
    """Keep rounds for the next call that wants them; the least recently used go first."""
    most = float("inf")
    if target.device.type == "cuda":
        # A last round may still run, and the next call have another stream.
        rounds.done = torch.cuda.current_stream(target.device).record_event()
        most = KEPT_SHARE * torch.cuda.get_device_properties(target.device).total_memory
    with _KEEPING:
        target.kept += [] if rounds.starved else [rounds]
        while len(target.kept) > MOST_KEPT or sum(one.bytes for one in target.kept) > most:
            del target.kept[0]
