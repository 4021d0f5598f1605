"""Medusa: residual heads on the target's last state, each guessing one token further ahead (arXiv:2401.10774).

Shapes: B rows, L positions, K heads, D hidden size, Q entries of the draft vocabulary, R rows of a decoding state.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class MedusaConfig:
    """The shape of Medusa heads."""

    num_heads: int = 4
    """Tokens guessed beyond the target's own next one; head k (from 0) at index p guesses token p + 2 + k."""
    num_layers: int = 1
    """Residual blocks in each head."""
    output: Literal["shared", "copy"] = "shared"
    """`shared` reads the target's own output layer and adds no weights; `copy` trains an own one for every head."""
    vocabulary_size: int | None = None
    """Entries of a reduced draft vocabulary, the most frequent tokens of the training data; None keeps them all."""
