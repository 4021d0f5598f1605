"""Tokens of a shard that training learns as labels: the answers, by choice without loops or with the target's prompts.

Shapes: T tokens of a shard.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from ..prompts.chat import Surroundings
from ..store.token_store import TokenShard
from .loops import loops

LoopUse = Literal["keep", "cut", "drop"]
"""Uses of answers that end in loops."""


@dataclass(frozen=True, kw_only=True)
class LearnedTokens:
    """The choice of labels among the tokens of a folder of data."""

    loops: LoopUse = "keep"
    """keep: nothing is left out; cut: the repeated part of an answer is; drop: the whole row is."""
    around: Surroundings | None = None
    """Tokens around a prompt that the target wrote, which is learned too; None where prompts are not."""

    def of(self, shard: TokenShard) -> Tensor:
        """True at the tokens that are learned as labels, bool [T]."""
        learned_T = shard.supervised_T.clone()
        if self.loops != "keep":
            for row, first, stop in loops(shard):
                learned_T[slice(first, stop) if self.loops == "cut" else slice(*shard.span(row))] = False
        if self.around is not None:
            for row in range(shard.num_rows):
                start, stop = shard.span(row)
                # A row that was dropped stays out.
                if learned_T[start:stop].any():
                    first, end = _between(shard.tokens_T[start:stop].tolist(), self.around)
                    learned_T[start + first : start + end] = True
        return learned_T


def _between(tokens: Sequence[int], around: Surroundings) -> tuple[int, int]:
    """(first token, end) of a row's first message; of no tokens where the row is laid out otherwise."""
    before, after = list(around.before), list(around.after)
    if list(tokens[: len(before)]) != before or not after:
        return 0, 0
    ends = (place for place in range(len(before), len(tokens)) if list(tokens[place : place + len(after)]) == after)
    return len(before), next(ends, len(before))


def prompts_learnable(prompts: Mapping[str, Any]) -> bool:
    """True if the prompts of data can be labels: text of the target that follows its chat template alone, or given
    first words.

    Given words are learned like the text after them: the target's probabilities are right after any. Prompts that a
    system prompt asked for followed other tokens than those of the data, and later turns are laid out elsewhere.

    Args:
        prompts: section of the recipe that the data were made by.
    """
    steered = prompts.get("own_kinds") is not None and not prompts.get("own_openings")
    return prompts.get("origin") == "own" and prompts.get("own_turns") is None and not steered


@dataclass(frozen=True, kw_only=True)
class LoopCount:
    """Loops among the train answers of a folder of data."""

    answers: int
    """Answers that end in a loop."""
    tokens: int
    """Their repeated tokens."""


def count_loops(shards: Sequence[TokenShard]) -> LoopCount:
    """Loops of these shards."""
    found = [stop - first for shard in shards for _, first, stop in loops(shard)]
    return LoopCount(answers=len(found), tokens=sum(found))
