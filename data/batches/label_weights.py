"""Counts of the tokens as labels of the training text, by which a reduced draft vocabulary is chosen, and its coverage.

Shapes: Q entries of the draft vocabulary, V vocabulary.
"""

from pathlib import Path

import torch
from torch import Tensor

from ..store.token_store import Manifest, TokenShard
from .learned_tokens import LearnedTokens


def count_labels(folder: str | Path, learned: LearnedTokens) -> Tensor:
    """Number of times that each token of the vocabulary is a label in training: int64 [V]. UserError if the folder
    holds no manifest, or a shard is corrupted."""
    manifest = Manifest.load(folder)
    counts_V = torch.zeros(manifest.target.vocab_size, dtype=torch.int64)
    for record in manifest.split("train"):
        shard = TokenShard.read(Path(folder) / record.file, record.sha256)
        counts_V += torch.bincount(shard.tokens_T[learned.of(shard)], minlength=len(counts_V))
    return counts_V


def coverage(folder: str | Path, ids_Q: Tensor) -> float:
    """Share of the tokens of held-out greedy answers that a draft vocabulary holds; 1 where none are held out.
    UserError if the folder holds no manifest, or a shard is corrupted."""
    inside = total = 0
    # Checkpoints and trees for greedy decoding are chosen by these answers too.
    for record in Manifest.load(folder).split("validation"):
        shard = TokenShard.read(Path(folder) / record.file, record.sha256)
        for row in shard.answered_at(0.0):
            place = slice(*shard.span(row))
            labels_N = shard.tokens_T[place][shard.supervised_T[place]]
            inside, total = inside + int(torch.isin(labels_N, ids_Q.cpu()).sum()), total + len(labels_N)
    return inside / total if total else 1.0
