"""Tokens of a shard that training learns as labels: answers up to a phrase that they repeat to their end, and prompts
that the target wrote; and counts of them, by which a reduced draft vocabulary is chosen, with its coverage.

Small models fall into such repetitions when they answer greedily. They are easy to draft: they lift every measured
length, and say little about other text.

Shapes: T tokens of a shard, Q entries of the draft vocabulary, V vocabulary.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..prompts.chat import Surroundings
from ..store.token_store import Manifest, TokenShard

LONGEST_PERIOD = 64  # Longest phrase whose repetition is looked for, in tokens
LEAST_REPEATED = 16  # Fewest repeated tokens of a repetition; also at least two repetitions of the phrase


@dataclass(frozen=True, kw_only=True)
class LearnedTokens:
    """The choice of labels among the tokens of a folder of data."""

    around: Surroundings | None = None  # Around a prompt that the target wrote, if it is learned; else None

    def of(self, shard: TokenShard) -> Tensor:
        """True at the tokens that are learned as labels, bool [T]."""
        learned_T = shard.supervised_T.clone()
        for _, first, stop in repetitions(shard):
            learned_T[first:stop] = False
        if self.around is not None:
            before, after = list(self.around.before), list(self.around.after)
            for row in range(shard.num_rows):
                start, stop = shard.span(row)
                tokens = shard.tokens_T[start:stop].tolist()
                # A row without a learned answer stays out. One that is laid out otherwise, such as that of a later
                # turn, has no prompt to learn.
                if after and learned_T[start:stop].any() and tokens[: len(before)] == before:
                    ends = (place for place in range(len(before), len(tokens))
                            if tokens[place : place + len(after)] == after)
                    learned_T[start + len(before) : start + next(ends, len(before))] = True
        return learned_T


def prompts_learnable(prompts: Mapping[str, Any]) -> bool:
    """True if the prompts of data, made by this section of a recipe, can be labels: text of the target that follows its
    chat template alone, or given first words.

    Given words are learned like the text after them: the target's probabilities are right after any. Prompts that a
    system prompt asked for followed other tokens than those of the data."""
    steered = prompts.get("own_kinds") is not None and not prompts.get("own_openings")
    return prompts.get("origin") == "own" and not steered


def repetition_start(answer: Sequence[int]) -> int | None:
    """Tokens of an answer before the first repetition of the phrase that it repeats to its end; None without one. The
    last token may be another one, such as that of the end; of several phrases that fit, such as one and twice the same,
    the one with the earliest repetition counts."""
    starts = list[int]()
    # The last token may be that of the end, which is not repeated.
    for end in (len(answer), len(answer) - 1):
        for period in range(1, min(LONGEST_PERIOD, end // 3) + 1):
            place = end
            while place > period and answer[place - 1] == answer[place - 1 - period]:
                place -= 1
            if end - place >= max(LEAST_REPEATED, 2 * period):
                starts.append(place)
    return min(starts, default=None)


def repetitions(shard: TokenShard) -> Iterator[tuple[int, int, int]]:
    """(row, first repeated token, end of the answer) of every answer that repeats a phrase to its end, by place."""
    for row, start, stop in answers(shard):
        kept = repetition_start(shard.tokens_T[start:stop].tolist())
        if kept is not None:
            yield row, start + kept, stop


def answers(shard: TokenShard) -> Iterator[tuple[int, int, int]]:
    """(row, first token, end) of every unbroken run of supervised tokens, by place in the shard."""
    for row in range(shard.num_rows):
        start, stop = shard.span(row)
        flags_N = shard.supervised_T[start:stop].to(torch.int8)
        edges = torch.diff(flags_N, prepend=flags_N.new_zeros(1), append=flags_N.new_zeros(1)).nonzero()[:, 0].tolist()
        for first, end in zip(edges[::2], edges[1::2], strict=True):
            yield row, start + first, start + end


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
