"""Corrections of a block's guesses by the tokens that stand before them in the block.

A backbone scores all slots of a block at once, none of them knowing what the others will be. A correction is asked
twice: `begin` reads the states of a whole block, once, and `extend` adds a token to a path in it. A path is what it
keeps of the tokens so far; its state is what the output layer reads for the next slot. Training asks the same with the
true tokens, from all places at once.

Shapes: K slots that guess, D width of a slot's state, P numbers of a path, X numbers of a state, R rank, Q entries of
the draft vocabulary, V tokens of the target's vocabulary.
"""

from collections.abc import Callable
from typing import Literal

from torch import Tensor, nn

CorrectionName = Literal["none", "markov", "gated", "rnn", "selector", "state"]
"""Names for recipes: no correction; DSpark's Markov head, with a gate, or with a recurrent state (arXiv:2607.05147);
the selector of DFlash 2 among a slot's likeliest tokens; a correction of the slot's state, as in DFly
(arXiv:2607.25852)."""
Embed = Callable[[Tensor], Tensor]
"""The target's embeddings [..., D] of tokens."""


class Correction(nn.Module):
    """No correction: a slot's state alone.

    Args:
        width: of a slot's state.
    """

    path_size = 0
    """Numbers that a path keeps, P."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.state_size = width
        """Numbers of a state, X; the first ones are the slot's state."""

    def begin(self, slots: Tensor) -> Tensor:
        """The inputs of `extend` at each slot, [..., K, any], from the states of a block, [..., K, D]."""
        return slots

    def extend(self, slot: Tensor, path: Tensor, tokens: Tensor, embed: Embed) -> tuple[Tensor, Tensor]:
        """(the path [..., P] with a token more, the state [..., X] of the slot that guesses the next one).

        Args:
            slot: the slot's part of `begin`.
            path: the path so far; zeros at the start of a block.
            tokens: the token after it, [...]; at the start the root.
            embed: the target's embedding.
        """
        return path, slot

    def correct(self, logits: Tensor, states: Tensor) -> Tensor:
        """The logits [..., Q] of states [..., X], from those of the slots alone; minus infinity for no guess."""
        return logits

    def candidates(self, logits: Tensor, states: Tensor) -> tuple[Tensor, Tensor] | None:
        """(a few tokens, their logits), [..., any] each, in place of all; None for a correction that scores all."""
        return None

    def initialise(self, table_VD: Tensor) -> None:
        """Set first weights that correct nothing, from the target's embeddings; called without gradients."""

    def output_parameters(self) -> tuple[nn.Parameter, ...]:
        """The trained weights that `correct` reads."""
        return ()
