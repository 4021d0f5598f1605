"""Corrections of a block's guesses by the tokens that stand before them in the block.

A backbone scores all slots of a block at once, none of them knowing what the others will be. A correction is asked
twice: `begin` reads the states of a whole block, once, and `extend` adds a token to a path in it. A path is what it
keeps of the tokens so far; its state is what the output layer reads for the next slot. Training asks the same with the
true tokens, from all places at once.

Shapes: K slots that guess, D width of a slot's state, P numbers of a path, X numbers of a state, R rank, Q entries of
the draft vocabulary, V tokens of the target's vocabulary.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from ....target.draft_vocabulary import OwnOutput

CorrectionName = Literal["none", "markov", "gated", "rnn", "selector", "refiner", "gru", "state"]
"""Names for recipes, see `BlockDraftConfig`."""
Embed = Callable[[Tensor], Tensor]  # The target's embeddings [..., D] of tokens
Logits = Callable[[Tensor], Tensor]  # The output layer's logits [..., Q] of the states of slots, [..., D]


class Shape(NamedTuple):
    """Sizes from which a correction is made: the width D of a slot's state, its rank R, the slots of a block, that of
    the root included, the target's V tokens, Q entries of the draft vocabulary, the eps of norms; and its name."""

    width: int
    rank: int
    slots: int
    tokens: int
    entries: int
    eps: float
    name: CorrectionName


class Correction(nn.Module):
    """No correction: a slot's state alone."""

    path_size = 0  # Numbers that a path keeps, P
    reads_block = False
    """Whether `begin` reads the states of all slots of a block, that of the root too where it guesses nothing."""
    alone_too = False  # Whether the slots learn to guess without it too
    chooses = False  # Whether it chooses among a few candidates of each slot
    own_token = False  # Whether it takes for granted that a slot predicts the token of its own position

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.width, self.rank, self.slots = shape.width, shape.rank, shape.slots
        self.state_size = shape.width  # Numbers of a state, X; the first ones are the slot's state

    def begin(self, slots: Tensor) -> Tensor:
        """The inputs of `extend` at each slot, [..., K, any], whose first ones are the slot's state, from the states of
        a block, [..., K, D]."""
        return slots

    def extend(self, slot: Tensor, path: Tensor, tokens: Tensor, embed: Embed, step: int) -> tuple[Tensor, Tensor]:
        """(the path [..., P] with a token more, the state [..., X] of the slot that guesses the next one).

        Args:
            slot: the slot's part of `begin`.
            path: the path so far; zeros at the start of a block.
            tokens: the token after it, [...]; at the start the root.
            embed: the target's embedding.
            step: number of the guess in its block, from 0.
        """
        return path, slot

    def correct(self, logits: Tensor, states: Tensor) -> Tensor:
        """The logits [..., Q] of states [..., X], from those of the slots alone: the candidates' and minus infinity for
        other tokens, or with the bias of each own output layer, which reads the last numbers of the state."""
        if self.chooses:
            tokens, scores = self.candidates(states, lambda _: logits)
            return torch.full_like(logits, -torch.inf, dtype=scores.dtype).scatter(-1, tokens, scores)
        for layer in self.modules():
            if isinstance(layer, OwnOutput):
                logits = logits + layer(states[..., -layer.in_features :]).to(logits.dtype)
        return logits

    def candidates(self, states: Tensor, logits: Logits) -> tuple[Tensor, Tensor]:
        """(a few tokens, their logits), [..., any] each, of a correction that chooses. Raises ValueError for others."""
        raise ValueError("this correction scores all tokens; it has no candidates")

    @staticmethod
    def weighed(weights: tuple[float, ...], progress: float) -> tuple[float, ...]:
        """Weights in the loss of the steps with it, then of those of the slots alone, from those of the block's steps;
        at this progress of the training, from 0 to 1."""
        return weights * 2

    def initialise(self, table_VD: Tensor) -> None:
        """Set first weights that correct nothing, from the target's embeddings; called without gradients."""

    def output_parameters(self) -> tuple[nn.Parameter, ...]:
        """The trained weights that `correct` reads."""
        return tuple(weight for part in self.modules() if isinstance(part, OwnOutput) for weight in part.parameters())


def table(tokens: int, rank: int) -> nn.Embedding:
    """A table with a row for each token; NaN until initialised or loaded, so that one that was forgotten shows."""
    return nn.Embedding(tokens, rank, _weight=torch.full((tokens, rank), torch.nan))
