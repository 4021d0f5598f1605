"""Batches for Lightning: micro-batch n is a pure function of the seed, n, the rank and the world size.

Shapes: B packed rows, L tokens of a row, N tokens of a piece, V vocabulary.
"""

import hashlib
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Literal

import lightning
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from ..modules import Features, UserError
from ..modules.config_checks import MOST_ROWS, MOST_TOKENS, check_bounds
from .collate import Piece, pack, pad, plan_bins
from .feature_store import GIB, FeatureShard, affordable, open_features, stored_dtype
from .token_store import Manifest, ShardRecord, TokenShard


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """Shape and order of the training batches."""

    row_length: int = 512
    """Tokens of a packed row. A longer conversation becomes windows of stored states; without those its end is cut."""
    rows_per_batch: int = 4
    """Packed rows of one micro-batch on one device."""
    seed: int = 0
    """Seed of the order of the conversations."""
    states: Literal["stored", "computed", "mixed"] = "stored"
    """Origin of the target's states. stored: written to disk beforehand, kept while the target decodes answers and
    computed for other text; computed: by the target in the training step; mixed: those of the first shards are stored,
    as many as `store_gib` has room for, the others computed. Batches of mixed and of computed hold the same pieces in
    the same order."""
    store_gib: float | None = None
    """GiB on disk for stored states, with `mixed`. Shards are stored in their order, each whole."""

    def __post_init__(self) -> None:
        if self.states not in ("stored", "computed", "mixed"):
            raise UserError(f"batch.states must be stored, computed or mixed, got {self.states!r}")
        if self.states == "mixed" and not 0 < (self.store_gib or 0) < math.inf:
            raise UserError(f"batch.store_gib must be above 0 with batch.states mixed, got {self.store_gib}; say how "
                            "many GiB of states may be stored, or set batch.states: computed")
        if self.states != "mixed" and self.store_gib is not None:
            raise UserError(f"batch.store_gib {self.store_gib} means nothing with batch.states {self.states}; set "
                            "batch.states: mixed, or leave it out")
        check_bounds(self, "batch.", row_length=(2, MOST_TOKENS), rows_per_batch=(1, MOST_ROWS))

    @property
    def store_bytes(self) -> int | None:
        """Bytes that stored states may take; None for no limit."""
        return None if self.store_gib is None else int(self.store_gib * GIB)


@dataclass(frozen=True)
class Window:
    """Part of a row of a shard that fits a packed row."""

    shard: int
    start: int
    stop: int
    first: int

    @property
    def length(self) -> int:
        """Tokens of the window."""
        return self.stop - self.start


class Split:
    """The shards of one split, cut into pieces.

    Args:
        folder: of `distill`.
        name: train or validation.
        config: says where states come from.
        taps: tapped layers whose stored states are wanted too.

    Raises:
        UserError: if a shard or its states are missing or corrupted.
    """

    def __init__(
        self, folder: Path, manifest: Manifest, name: str, config: BatchConfig, taps: tuple[int, ...]
    ) -> None:
        records = manifest.split(name)
        self.shards = [TokenShard.read(folder / record.file, record.sha256) for record in records]
        self.all_stored = config.states == "stored"
        stored = [record for record in _stored(folder, manifest, config, taps) if record.split == name]
        opened = dict(zip(stored, open_features(folder, stored, taps), strict=True))
        self.states: list[FeatureShard | None] = [opened.get(record) for record in records]

    def windows(self, length: int | None = None, temperature: float | None = None) -> list[Window]:
        """All rows, cut into windows of `length` tokens; windows in which nothing is supervised are left out.

        Unless all states are stored, only the first window of a row can be used: the target would not see the tokens
        before the others.

        Args:
            length: tokens of a window; None for whole rows.
            temperature: of the rows' answers; None takes all rows.
        """
        found = []
        for number, shard in enumerate(self.shards):
            for row in shard.answered_at(temperature):
                start, stop = shard.span(row)
                step = length or max(1, stop - start)
                stop = stop if self.all_stored else min(stop, start + step)
                found += [Window(number, at, min(stop, at + step), at - start) for at in range(start, stop, step)]
        return [one for one in found if bool(self.shards[one.shard].supervised_T[one.start : one.stop].any())]

    def piece(self, window: Window) -> Piece:
        """Tokens, mask and, where they are stored, states of a window."""
        shard, place = self.shards[window.shard], slice(window.start, window.stop)
        states = self.states[window.shard]
        return Piece(
            tokens_N=shard.tokens_T[place],
            supervised_N=shard.supervised_T[place],
            first=window.first,
            final_ND=None if states is None else states.final(window.start, window.stop),
            taps={} if states is None else states.taps(window.start, window.stop),
        )


def _stored(folder: Path, manifest: Manifest, config: BatchConfig, taps: tuple[int, ...]) -> tuple[ShardRecord, ...]:
    """The shards whose states are read from disk."""
    if config.states == "computed":
        return ()
    if config.states == "stored":
        return manifest.shards
    return affordable(manifest, taps, stored_dtype(folder), config.store_bytes)


class BatchPlan:
    """The endless order of packed batches: every epoch a new order of the pieces, packed anew.

    Args:
        lengths: tokens of each piece.
        config: shape of the batches and seed.
    """

    def __init__(self, lengths: list[int], config: BatchConfig) -> None:
        self.lengths, self.config = lengths, config
        self.ends: list[int] = []
        self.latest: tuple[int, list[list[list[int]]]] | None = None

    def batch(self, number: int) -> list[list[int]]:
        """The pieces of each row of batch `number`, by index."""
        while not self.ends or self.ends[-1] <= number:
            self.ends.append((self.ends[-1] if self.ends else 0) + len(self._epoch(len(self.ends))))
        epoch = bisect_right(self.ends, number)
        return self._epoch(epoch)[number - (self.ends[epoch - 1] if epoch else 0)]

    def _epoch(self, epoch: int) -> list[list[list[int]]]:
        if self.latest is None or self.latest[0] != epoch:
            self.latest = (epoch, self._plan(epoch))
        return self.latest[1]

    def _plan(self, epoch: int) -> list[list[list[int]]]:
        """Batches of one epoch; the last may have fewer rows."""
        digest = hashlib.sha256(f"{self.config.seed} {epoch}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        order = torch.randperm(len(self.lengths), generator=generator).tolist()
        bins = plan_bins([self.lengths[piece] for piece in order], self.config.row_length)
        rows = [[order[place] for place in row] for row in bins]
        # Packing leaves the emptiest rows for the end; a second shuffle spreads them.
        shuffled = [rows[place] for place in torch.randperm(len(rows), generator=generator).tolist()]
        size = self.config.rows_per_batch
        return [shuffled[at : at + size] for at in range(0, len(shuffled), size)]


class _Stream(IterableDataset[Features]):
    """Batches start, start + 1, ... without end."""

    def __init__(self, batch: Callable[[int], Features], start: int) -> None:
        self.batch, self.start = batch, start

    def __iter__(self) -> Iterator[Features]:
        return map(self.batch, count(self.start))


class DraftDataModule(lightning.LightningDataModule):
    """The shards of one folder as Lightning wants them.

    Training takes `Trainer(use_distributed_sampler=False)`: batches are dealt to the ranks here. A resumed run goes on
    at the micro-batch after the last optimizer step, since Lightning restores `global_step` before it asks for batches.

    Args:
        folder: of `distill` (and `encode`).
        config: shape and order of the batches.
        taps: layers whose stored outputs the drafter reads.

    Raises:
        UserError: if the folder is not complete, a file is corrupted, or no train token is supervised.
    """

    def __init__(self, folder: str | Path, config: BatchConfig, taps: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.folder, self.config, self.taps = Path(folder), config, taps
        self.manifest = Manifest.load(folder)
        if not self.manifest.complete:
            raise UserError(f"the data in {folder} is not complete; finish it with draftsmith distill")
        self.train = Split(self.folder, self.manifest, "train", config, taps)
        self.validation = Split(self.folder, self.manifest, "validation", config, taps)
        self.windows = self.train.windows(config.row_length)
        if not self.windows:
            raise UserError(
                f"no token in the train shards of {folder} is supervised within row_length {config.row_length}; raise "
                "batch.row_length, or distil with answers"
            )
        self.plan = BatchPlan([window.length for window in self.windows], config)

    def micro_batch(self, number: int, rank: int = 0, world: int = 1) -> Features:
        """Training micro-batch `number` of one rank: batch number * world + rank of the one order all ranks share."""
        rows = self.plan.batch(number * world + rank)
        pieces = [[self.train.piece(self.windows[piece]) for piece in row] for row in rows]
        return pack(pieces, self.config.row_length)

    def train_dataloader(self) -> DataLoader[Features]:
        """Endless micro-batches of this rank, from the trainer's step on."""
        trainer = self.trainer
        if trainer is None:
            raise ValueError("the data module is not attached to a trainer; use micro_batch outside of one")
        start = trainer.global_step * trainer.accumulate_grad_batches
        rank, world = trainer.global_rank, trainer.world_size
        return DataLoader(_Stream(lambda number: self.micro_batch(number, rank, world), start), batch_size=None)

    def validation_features(self, temperature: float = 0.0) -> list[Features]:
        """The held-out conversations whole, one row a batch, to be replayed. Empty when none were held out.

        Args:
            temperature: of their answers: 0 for greedy ones, SIZING_TEMPERATURE for drawn ones.
        """
        windows = self.validation.windows(temperature=temperature)
        return [pad([self.validation.piece(window)]) for window in windows]


def count_tokens(folder: str | Path) -> Tensor:
    """Number of times that each token of the vocabulary occurs among the supervised training tokens: int64 [V].

    Raises:
        UserError: if the folder holds no manifest, or a shard is corrupted.
    """
    manifest = Manifest.load(folder)
    counts_V = torch.zeros(manifest.target.vocab_size, dtype=torch.int64)
    for record in manifest.split("train"):
        shard = TokenShard.read(Path(folder) / record.file, record.sha256)
        counts_V += torch.bincount(shard.tokens_T[shard.supervised_T], minlength=len(counts_V))
    return counts_V
