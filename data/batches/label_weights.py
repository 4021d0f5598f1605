"""Weights of the tokens as labels of the training text: how often each is one, and how probable the target holds it.

A text of some 100,000 tokens holds most of a vocabulary's tokens never or once. The target's distribution, summed over
the text, orders them.

Shapes: T tokens of a shard, N labels, V vocabulary, D hidden size of the target.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from tqdm import tqdm

from ...modules import Target
from ..store.feature_shards import FINAL, FeatureShard
from ..store.feature_store import StateStore, read_rows
from ..store.state_formats import format_named
from ..store.token_store import Manifest, ShardRecord, TokenShard
from .learned_tokens import LearnedTokens

READ_TOKENS = 20_000
"""Tokens of the text that the target reads where no states are stored."""
CHUNK_ELEMENTS = {"cpu": 1 << 23, "cuda": 1 << 26}
"""Probabilities in memory at once, by kind of device: 32 MiB of float32 on a CPU, 256 MiB on a GPU."""
PROBABILITIES = "probabilities"


def count_labels(folder: str | Path, learned: LearnedTokens) -> Tensor:
    """Number of times that each token of the vocabulary is a label in training: int64 [V].

    Raises:
        UserError: if the folder holds no manifest, or a shard is corrupted.
    """
    manifest = Manifest.load(folder)
    counts_V = torch.zeros(manifest.target.vocab_size, dtype=torch.int64)
    for record in manifest.split("train"):
        shard = TokenShard.read(Path(folder) / record.file, record.sha256)
        counts_V += torch.bincount(shard.tokens_T[learned.of(shard)], minlength=len(counts_V))
    return counts_V


def weigh_labels(target: Target, folder: Path, learned: LearnedTokens, positions: int,
                 form: str | None = None) -> Tensor:
    """Counts of the labels plus the target's probabilities, both with the weight of all labels: float64 [V].

    The probabilities are those at up to `positions` labels, spread over the text. Their cost is an output layer and a
    softmax at each; where no final states are stored, a pass of the target over READ_TOKENS as well. They are kept in
    the folder, so that a resumed run and other trainings choose by the same.

    Args:
        target: the one that the data were made with.
        folder: of `distill`.
        learned: choice of the labels.
        positions: labels at which the target's distribution is read; 0 counts alone.
        form: name of the number format of the folder's stored states; None is the target's own.

    Raises:
        UserError: if a shard is corrupted, or the disk is full.
    """
    counts_V = count_labels(folder, learned).to(torch.float64)
    if not positions or not counts_V.sum():
        return counts_V
    manifest = Manifest.load(folder)
    digest = hashlib.sha256(json.dumps([positions, learned.words]).encode()).hexdigest()
    store = StateStore(folder, target, format_named(form, target.dtype))
    name = f"probabilities-{digest[:16]}.safetensors"
    if not store.holds(name, manifest.hash):
        with target.reproducible():
            sums_V = _LabelText(target, folder, manifest, learned).probabilities(store, positions)
        store.keep(name, manifest.hash, {PROBABILITIES: sums_V})
    sums_V = load_file(folder / name)[PROBABILITIES]
    return counts_V + sums_V * (counts_V.sum() / sums_V.sum())


def coverage(folder: str | Path, ids_Q: Tensor) -> float:
    """Share of the tokens of held-out greedy answers that a draft vocabulary holds; 1 where none are held out.

    Raises:
        UserError: if the folder holds no manifest, or a shard is corrupted.
    """
    inside = total = 0
    for record in Manifest.load(folder).split("validation"):
        shard = TokenShard.read(Path(folder) / record.file, record.sha256)
        for row in shard.answered_at(0.0):
            place = slice(*shard.span(row))
            labels_N = shard.tokens_T[place][shard.supervised_T[place]]
            inside, total = inside + int(torch.isin(labels_N, ids_Q.cpu()).sum()), total + len(labels_N)
    return inside / total if total else 1.0


class _LabelText:
    """The labels of the training text and the final states that the target predicts them from."""

    def __init__(self, target: Target, folder: Path, manifest: Manifest, learned: LearnedTokens) -> None:
        self.target, self.folder, self.records, self.learned = target, folder, manifest.split("train"), learned

    @torch.no_grad()
    def probabilities(self, store: StateStore, positions: int) -> Tensor:
        """The target's distribution, summed over up to `positions` labels, float64 [V] on the CPU."""
        stored = [record for record in self.records if not store.lacks(record, (FINAL,))]
        found = self._stored(stored, positions) if stored else self._read(positions)
        sums_V = torch.zeros(self.target.vocab_size, dtype=torch.float64, device=self.target.device)
        elements = CHUNK_ELEMENTS.get(self.target.device.type, CHUNK_ELEMENTS["cuda"])
        with tqdm(total=positions, desc="probabilities of the draft vocabulary", unit="tok") as bar:
            for states_ND in found:
                for chunk_ND in torch.split(states_ND, max(1, elements // len(sums_V))):
                    logits_NV = self.target.logits(chunk_ND.to(self.target.device, self.target.dtype))
                    sums_V += logits_NV.float().softmax(-1).sum(0, dtype=torch.float64)
                    bar.update(len(chunk_ND))
        return sums_V.cpu()

    def _stored(self, records: list[ShardRecord], positions: int) -> Iterator[Tensor]:
        """Stored states before labels, spread evenly, [N, D] of each shard."""
        shards = [TokenShard.read(self.folder / record.file, record.sha256) for record in records]
        places = [_predicted(shard, self.learned.of(shard)) for shard in shards]
        total, before = sum(map(len, places)), 0
        for record, places_N in zip(records, places, strict=True):
            states = FeatureShard(self.folder, record, ())
            taken = places_N[_spread(before, len(places_N), total, positions)].tolist()
            before += len(places_N)
            if taken:
                yield torch.cat([states.final(place - 1, place) for place in taken])

    def _read(self, positions: int) -> Iterator[Tensor]:
        """States before labels in rows that the target reads now, spread evenly, [N, D] of each row."""
        total, before, room = sum(record.rows for record in self.records), 0, positions
        tokens, labels = (max(1, sum(counts)) for counts in zip(
            *((record.tokens, record.supervised) for record in self.records), strict=True))
        share = min(READ_TOKENS / tokens, positions / labels)
        for record in self.records:
            shard = TokenShard.read(self.folder / record.file, record.sha256)
            rows = _spread(before, shard.num_rows, total, max(1, int(total * share))).tolist()
            before += shard.num_rows
            places_N = _predicted(shard, self.learned.of(shard))
            found = read_rows(self.target, shard, rows, (FINAL,), self.target.dtype)
            for row in rows:
                start, stop = shard.span(row)
                here_N = places_N[(places_N > start) & (places_N < stop)][:room]
                room -= len(here_N)
                yield found[row][FINAL][here_N - 1 - start]


def _predicted(shard: TokenShard, learned_T: Tensor) -> Tensor:
    """Places of the labels of a shard, [N]; the first token of a row is predicted from nothing."""
    learned_T = learned_T.clone()
    starts_R = shard.starts_S[:-1]
    learned_T[starts_R[starts_R < len(learned_T)]] = False
    return learned_T.nonzero()[:, 0]


def _spread(before: int, count: int, total: int, wanted: int) -> Tensor:
    """Those of the things before to before + count - 1 that are taken, counted from `before`, when `wanted` of `total`
    are taken at equal distances; all where there are no more."""
    numbers = torch.arange(before, before + count)
    if wanted >= total:
        return numbers - before
    return numbers[(numbers + 1) * wanted // total > numbers * wanted // total] - before
