"""Batches for Lightning: micro-batch n is a pure function of the seed, n, the rank and the world size.

They are made ahead by a thread and no process: nearly all of the work is copying out of memory maps, for which torch
lets other threads run. A process would copy every state once more, through shared memory that containers keep small,
would start for seconds and could outlive a killed training.

Shapes: B packed rows, L tokens of a row, N tokens of a piece, T tokens of a shard."""

import hashlib
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from threading import Lock
from typing import Annotated, ClassVar, Generic, Literal, TypeVar

import lightning
import torch
from pydantic import Field

from ..modules import Features, UserError
from ..modules.config_checks import MOST_TOKENS, CheckedSettings, Rows
from ..modules.features import ReadRows
from .prompts.chat import Surroundings
from .store.feature_shards import FeatureShard, FormatName, PackedBatch, Piece, open_features, packed, pad, plan_bins
from .store.token_store import Manifest, TokenShard, learned_tokens, prompts_learnable, repetitions

T = TypeVar("T")
AHEAD = 2  # Micro-batches that are read and packed while earlier ones are trained on: more would only fill memory
THREAD = "batches"  # Start of the thread's name


class Prefetched(Generic[T]):
    """The endless batches start, start + 1, ..., which a thread makes by their numbers so many `ahead`, on a CUDA
    device of that number where training is; with 0 each is made when it is due, without a thread.

    The error of a batch is raised where that batch is due, as without a thread. What was made is kept by this process
    alone, and nothing that the thread does depends on its time: ahead or not, the batches are the same."""

    def __init__(self, make: Callable[[int], T], start: int, ahead: int, device: torch.device | None = None) -> None:
        self.make, self.start, self.ahead, self.device = make, start, ahead, device
        self.waited = 0.0  # Seconds that were spent waiting for batches
        self._worker: ThreadPoolExecutor | None = None

    def __iter__(self) -> Iterator[T]:
        batches = self._made_ahead() if self.ahead else map(self.make, count(self.start))
        while True:
            started = time.perf_counter()
            batch = next(batches)
            self.waited += time.perf_counter() - started
            yield batch

    def close(self) -> None:
        """End the thread once it has made what it is making; nothing where it has ended."""
        if self._worker is not None:
            self._worker.shutdown(cancel_futures=True)
            self._worker = None

    def _made_ahead(self) -> Iterator[T]:
        self.close()
        worker = self._worker = ThreadPoolExecutor(1, THREAD)
        threads = torch.get_num_threads()
        worker.submit(self._prepare).result()
        # A thread that starts later takes the number that was set last; this one has taken its own.
        torch.set_num_threads(threads)
        coming = deque[Future[T]](worker.submit(self.make, self.start + place) for place in range(self.ahead))
        try:
            for number in count(self.start + self.ahead):
                batch = coming.popleft().result()
                coming.append(worker.submit(self.make, number))
                yield batch
        finally:
            worker.shutdown(cancel_futures=True)

    def _prepare(self) -> None:
        """Set what torch keeps for each thread: copies need no second thread, which would be one of the training's."""
        # A thread takes the number that was set last when it first asks, and would do so after this.
        torch.get_num_threads()
        torch.set_num_threads(1)
        if self.device is not None and self.device.type == "cuda":
            torch.cuda.set_device(self.device)


ORDER_SEED = 0  # Seed of the order of the conversations: runs with other seeds of training read the same batches


@dataclass(frozen=True, kw_only=True)
class BatchConfig(CheckedSettings):
    """Shape and order of the training batches."""

    section: ClassVar[str] = "batch"

    row_length: Annotated[int, Field(ge=2, le=MOST_TOKENS)] = 512
    """Tokens of a packed row. A longer conversation becomes windows of stored states; without those its end is cut."""
    rows_per_batch: Rows = 4
    """Packed rows of one micro-batch on one device."""
    states: Literal["stored", "computed", "auto"] = "stored"
    """Origin of the target's states. stored: written to disk beforehand, kept while the target decodes answers and
    computed for other text; computed: by the target in the training step; auto: stored where they fill at most nine
    tenths of the free disk, else computed; the run's folder keeps the choice."""
    states_format: FormatName | None = None
    """Number format of stored states. null: the target's own; int8 and fp8 (e4m3): a byte a number, with scales for
    tokens, and of int8 for channels."""
    own_prompts: bool = False
    """Learn the tokens of prompts too, where the target has written them (prompts.origin own), by itself or after given
    first words (prompts.own_openings). Other prompts are never learned."""


@dataclass(frozen=True)
class Window:
    """Part of a row of a shard that fits a packed row."""

    shard: int  # Number of the shard in its split
    start: int  # Index of the first token in the shard
    stop: int  # Index after the last token
    first: int  # Position of the first token in its conversation


class Split:
    """The shards of one split, train or validation, in a folder of `distill`, cut into pieces; `around` as in
    `learned_tokens`. UserError if a shard or its states, those of the layers `taps` among them, are missing or
    corrupted."""

    def __init__(self, folder: Path, manifest: Manifest, name: str, config: BatchConfig, taps: tuple[int, ...],
                 around: Surroundings | None = None) -> None:
        records = manifest.split(name)
        self.files = [record.file for record in records]  # Names of the shards
        self.shards = [TokenShard.read(folder / record.file, record.sha256) for record in records]
        self.learned = [learned_tokens(shard, around) for shard in self.shards]  # Bool [T] a shard
        self.all_stored = config.states == "stored"
        self.states: list[FeatureShard] = open_features(folder, records, taps) if self.all_stored else []

    def windows(self, length: int) -> list[Window]:
        """All rows up to their last learned token, cut into windows of `length` tokens; those in which nothing is
        learned are left out. Unless all states are stored, only the first window of a row can be used: the target would
        not see the tokens before the others."""
        found = []
        for number, (shard, learned_T) in enumerate(zip(self.shards, self.learned, strict=True)):
            for row in range(shard.num_rows):
                start, stop = shard.span(row)
                # Tokens after the last label teach nothing: states are not read, and rows pack tighter.
                places_N = learned_T[start:stop].nonzero()[:, 0]
                stop = start + int(places_N[-1]) + 1 if len(places_N) else start
                stop = stop if self.all_stored else min(stop, start + length)
                cuts = (Window(number, at, min(stop, at + length), at - start) for at in range(start, stop, length))
                found += [cut for cut in cuts if bool(learned_T[cut.start : cut.stop].any())]
        return found

    def rows(self, temperature: float) -> list[Window]:
        """The rows with answers at a temperature, whole; those without an answer are left out."""
        found = [Window(number, *shard.span(row), 0) for number, shard in enumerate(self.shards)
                 for row in shard.answered_at(temperature)]
        return [row for row in found if bool(self.shards[row.shard].supervised_T[row.start : row.stop].any())]

    def piece(self, window: Window, *, whole: bool = False) -> Piece:
        """Tokens, labels and, where they are stored, states of a window. With `whole` all tokens of the answers are
        labels, not only those that training learns."""
        shard, place = self.shards[window.shard], slice(window.start, window.stop)
        labels_T = shard.supervised_T if whole else self.learned[window.shard]
        final, taps = (self.states[window.shard].slices(window.start, window.stop) if self.all_stored
                       else (None, {}))
        return Piece(tokens_N=shard.tokens_T[place], supervised_N=labels_T[place], first=window.first, final=final,
                     taps=taps)


class BatchPlan:
    """The endless order of packed batches: every epoch packs the pieces, of these lengths, anew in another order."""

    def __init__(self, lengths: list[int], config: BatchConfig) -> None:
        self.lengths, self.config = lengths, config
        self.ends: list[int] = []
        self.latest: tuple[int, list[list[list[int]]]] | None = None
        self._lock = Lock()

    def batch(self, number: int) -> list[list[int]]:
        """The pieces of each row of batch `number`, by index; any thread may ask."""
        # Lengths of later epochs are known only once they are packed.
        with self._lock:
            while not self.ends or self.ends[-1] <= number:
                self.ends.append((self.ends[-1] if self.ends else 0) + len(self._epoch(len(self.ends))))
            epoch = bisect_right(self.ends, number)
            return self._epoch(epoch)[number - (self.ends[epoch - 1] if epoch else 0)]

    def _epoch(self, epoch: int) -> list[list[list[int]]]:
        """Batches of one epoch; the last may have fewer rows."""
        if self.latest is not None and self.latest[0] == epoch:
            return self.latest[1]
        # A hash, so that epochs of neighbouring numbers have unrelated orders.
        digest = hashlib.sha256(f"{ORDER_SEED} {epoch}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        order = torch.randperm(len(self.lengths), generator=generator).tolist()
        bins = plan_bins([self.lengths[piece] for piece in order], self.config.row_length)
        rows = [[order[place] for place in row] for row in bins]
        # Packing leaves the emptiest rows for the end; a second shuffle spreads them.
        shuffled = [rows[place] for place in torch.randperm(len(rows), generator=generator).tolist()]
        size = self.config.rows_per_batch
        # A plan is asked for at every batch of its epoch, and takes seconds for millions of pieces.
        self.latest = (epoch, [shuffled[at : at + size] for at in range(0, len(shuffled), size)])
        return self.latest[1]


class HeldOutRows:
    """The conversations that training holds out in a folder of `distill` (and `encode`), one row a batch; no other
    shard is read. `taps` are the layers whose stored outputs the drafter reads. UserError if the folder is not
    complete, or a file is corrupted."""

    def __init__(self, folder: str | Path, config: BatchConfig, taps: tuple[int, ...] = ()) -> None:
        # Of held-out rows only the answers are drafted.
        self.split = Split(Path(folder), _complete(Path(folder)), "validation", config, taps)
        self.greedy = [row for row in self.split.rows(0.0)  # With greedy answers that do not repeat from their start
                       if bool(self.split.learned[row.shard][row.start : row.stop].any())]

    def _read(self, rows: Iterable[Window], whole: bool = True) -> ReadRows:
        return ReadRows(partial(lambda row: pad([self.split.piece(row, whole=whole)]), row) for row in rows)

    def up_to_repetitions(self) -> ReadRows:
        """Rows with greedy answers, which end where their repetitions start."""
        return self._read(self.greedy, whole=False)

    def whole(self, temperature: float = 0.0) -> ReadRows:
        """Rows with whole answers, to be replayed: greedy ones, or those drawn at the temperature of sizing."""
        return self._read(self.split.rows(temperature))

    def unread(self) -> ReadRows:
        """Whole rows with greedy answers by whose acceptance training chose no checkpoint: of those that
        `up_to_repetitions` gives, the first, the third and so on."""
        return self._read(self.greedy[0::2])

    def repeating(self) -> ReadRows:
        """Whole rows whose greedy answers end in repetitions."""
        starts = {(number, shard.span(row)[0]) for number, shard in enumerate(self.split.shards)
                  for row, *_ in repetitions(shard)}
        return self._read(row for row in self.split.rows(0.0) if (row.shard, row.start) in starts)


def _complete(folder: Path) -> Manifest:
    """The manifest of finished data. Raises UserError."""
    manifest = Manifest.load(folder)
    if not manifest.complete:
        raise UserError(f"the data in {folder} is not complete; finish it with draftsmith distill")
    return manifest


class DraftDataModule(lightning.LightningDataModule):
    """The shards of one folder of `distill` (and `encode`) as Lightning wants them. UserError if it is not complete, a
    file is corrupted, or no train token is learned. `around` are the tokens around the prompts that the target wrote,
    needed where `config.own_prompts` learns them; `taps` the layers whose stored outputs the drafter reads.

    Training takes `Trainer(use_distributed_sampler=False)`: batches are dealt to the ranks here. A resumed run goes on
    at the micro-batch after the last optimizer step, since Lightning restores `global_step` before it asks for
    batches."""

    def __init__(self, folder: str | Path, config: BatchConfig, taps: tuple[int, ...] = (),
                 around: Surroundings | None = None) -> None:
        super().__init__()
        if config.states == "auto":
            raise ValueError("batch.states auto is chosen by draftsmith.recipes; name stored or computed here")
        self.folder, self.config, self.taps = Path(folder), config, taps
        self.manifest = _complete(self.folder)
        self.train = Split(self.folder, self.manifest, "train", config, taps,
                           learned_around(self.manifest, config, around))
        self.held_out = HeldOutRows(folder, config, taps)
        self.windows = self.train.windows(config.row_length)
        if not self.windows:
            raise UserError(
                f"no token in the train shards of {folder} is learned within row_length {config.row_length}; raise "
                "batch.row_length, or distil with answers that do more than repeat a phrase")
        self.plan = BatchPlan([window.stop - window.start for window in self.windows], config)
        self._batches: Prefetched[PackedBatch | Features] | None = None

    def packed_batch(self, number: int, rank: int = 0, world: int = 1) -> PackedBatch:
        """Training micro-batch `number` of one rank, with its states as they are stored: batch number * world + rank of
        the one order that all ranks share. UserError if a file of states was altered since it was opened."""
        rows = self.plan.batch(number * world + rank)
        pieces = [[self.train.piece(self.windows[piece]) for piece in row] for row in rows]
        return packed(pieces, self.config.row_length)

    def rows_of(self, number: int, rank: int = 0, world: int = 1) -> list[str]:
        """Names of the rows in a micro-batch, as file:row, counted from 0."""
        found = []
        for row in self.plan.batch(number * world + rank):
            for window in (self.windows[piece] for piece in row):
                # A window may start inside its row: the row is the last that starts no later.
                starts = self.train.shards[window.shard].starts_S.tolist()
                found.append(f"{self.train.files[window.shard]}:{bisect_right(starts, window.start) - 1}")
        return found

    def train_dataloader(self) -> Prefetched[PackedBatch | Features]:
        """Endless micro-batches of this rank, from the trainer's step on; `to` moves them to its device."""
        trainer = self.trainer
        if trainer is None:
            raise ValueError("the data module is not attached to a trainer; use packed_batch outside of one")
        start = trainer.global_step * trainer.accumulate_grad_batches
        rank, world, device = trainer.global_rank, trainer.world_size, trainer.strategy.root_device

        def make(number: int) -> PackedBatch | Features:
            batch = self.packed_batch(number, rank, world)
            # A GPU decodes the states itself, copied from page-locked memory while the host goes on; on a CPU this
            # thread does it, not the one that trains.
            return batch.moved(torch.Tensor.pin_memory) if device.type == "cuda" else batch.to("cpu")

        # Lightning may ask again, and an earlier thread would go on reading.
        self.teardown("fit")
        self._batches = Prefetched(make, start, AHEAD, device)
        return self._batches

    @property
    def waited(self) -> float:
        """Seconds that training has waited for batches."""
        return 0.0 if self._batches is None else self._batches.waited

    def teardown(self, stage: str) -> None:
        """End the thread that reads ahead."""
        if self._batches is not None:
            self._batches.close()

    def on_exception(self, exception: BaseException) -> None:
        """End the thread that reads ahead, after an error or a signal."""
        # Lightning calls no `teardown` then.
        self.teardown("fit")

    def validation_features(self) -> ReadRows:
        """The conversations that choose checkpoints: held-out rows with greedy answers up to their repetitions, one a
        batch; none where none were held out."""
        return self.held_out.up_to_repetitions()


def learned_around(manifest: Manifest, config: BatchConfig, around: Surroundings | None) -> Surroundings | None:
    """The tokens around the prompts that the target wrote, by which `learned_tokens` finds these in training text; None
    where it wrote none or none are learned."""
    if not config.own_prompts or not prompts_learnable(manifest.recipe["prompts"]):
        return None
    if around is None:
        raise ValueError("prompts are found by the tokens around them; give those of ChatTemplate.user_turn")
    return around
