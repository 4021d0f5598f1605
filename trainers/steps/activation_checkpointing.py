"""Activation checkpointing: states inside a drafter's layers that the backward pass computes again (arXiv:1604.06174).

Of a decoder layer that a drafter trains, these are the states of its MLP, several times as wide as its input: attention
leaves keys for the draft steps after it and runs once.
"""

from ...modules.errors import UserError
from ...modules.interfaces.drafter import Drafter


def checkpoint_activations(drafter: Drafter) -> None:
    """Let training keep the inputs of a drafter's layers in place of the states inside them.

    Raises:
        UserError: if it has no layers whose states this would save.
    """
    if not drafter.recompute_layers():
        raise UserError(f"activation_checkpointing computes the states inside of MLPs again, and the {drafter.family} "
                        "drafter has none; set train.activation_checkpointing: false")
