"""Blocks and output layers of heads, as the layouts of Medusa and Hydra store them."""

from collections.abc import Mapping

import torch
from torch import Tensor

from ...modules import Hydra, Medusa, UserError

Blocks = Mapping[tuple[int, int, str], Tensor]
"""Tensors by head, block and name within the block."""


def require_whole_output(drafter: Medusa | Hydra) -> None:
    """Refuse heads with output layers of their own over a reduced vocabulary: the other tokens have no rows to write.

    Raises:
        UserError: if the heads have such output layers.
    """
    if drafter.config.output == "copy" and drafter.token_ids_Q is not None:
        raise UserError(f"these heads have own output layers over {drafter.config.vocabulary_size} tokens; the layout "
                        "needs a row for every token: train with output: shared, or with vocabulary_size: null")


def tied(blocks: Blocks, first: int) -> bool:
    """True if in every head all blocks after block `first` equal it; independent training never leaves them so."""
    pairs = [(blocks.get((head, first, part)), tensor) for (head, block, part), tensor in blocks.items()
             if block > first]
    return all(shared is not None and torch.equal(shared, tensor) for shared, tensor in pairs)
