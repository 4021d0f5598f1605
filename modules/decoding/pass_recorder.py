"""Record of the guesses of every pass, and the author of each token of an answer: the draft or the target.

Shapes: B rows, C children of a node.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ..token_tree import TokenTree
from ..verification.tree_walk import Accepted
from .requests import Generation


@dataclass(frozen=True, kw_only=True)
class WrittenToken:
    """One token of an answer and its author."""

    token: int  # Its id
    guessed: bool  # True for an accepted guess of the draft, False for a token that the target chose itself
    rejected: tuple[int, ...] = ()  # The draft's guesses for the same place that the target rejected


@dataclass(frozen=True, kw_only=True)
class GuessedPass:
    """The guesses of one row's pass, as verified."""

    accepted: int = 0  # Accepted guesses; the token after them is the target's own
    rejected: tuple[int, ...] = ()  # Guesses for the place of the target's token, in the tree's order, each once

    def written(self, tokens: Sequence[int]) -> list[WrittenToken]:
        """The tokens that the pass added to its answer, with their authors; the last ones are missing where the answer
        ended."""
        return [
            WrittenToken(token=token, guessed=place < self.accepted,
                         rejected=self.rejected if place == self.accepted else ())
            for place, token in enumerate(tokens)
        ]


PROMPT_PASS = GuessedPass()  # The pass over the prompt: nothing is guessed, and its one token is the target's


@dataclass
class PassRecorder:
    """An observer of the decoding loop that keeps the guesses of every pass."""

    passes: dict[int, list[GuessedPass]] = field(default_factory=dict)  # By the request's index, after the prompt's

    def __call__(self, tree: TokenTree, accepted: Accepted, generations: Sequence[Generation]) -> None:
        last_B1 = accepted.counts_B[:, None] - 1
        children_BC, real_BC = tree.children(accepted.path_BK.gather(1, last_B1)[:, 0])
        guesses_BC = torch.where(real_BC, tree.tokens_BN.gather(1, children_BC), -1)
        # Counts and guesses in one transfer, which waits for the device.
        rows = torch.cat([last_B1, guesses_BC], dim=1).tolist()
        for generation, (count, *guesses) in zip(generations, rows, strict=True):
            rejected = tuple(dict.fromkeys(token for token in guesses if token >= 0))
            found = GuessedPass(accepted=count, rejected=rejected)
            self.passes.setdefault(generation.request.index, []).append(found)

    def written(self, generation: Generation) -> list[WrittenToken]:
        """All tokens of a finished answer, with their authors."""
        found = PROMPT_PASS.written(generation.tokens[:1])
        # A pass that failed added nothing and has no count.
        for one, count in zip(self.passes.get(generation.request.index, []), generation.emitted, strict=False):
            found += one.written(generation.tokens[len(found) : len(found) + count])
        return found
