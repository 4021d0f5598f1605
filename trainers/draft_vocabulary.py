"""The choice of a reduced draft vocabulary."""

from torch import Tensor

from ..modules.errors import UserError
from ..modules.target.draft_vocabulary import choose
from ..modules.target.model import Target


def reduced_vocabulary(size: int | None, weights_V: Tensor | None, target: Target) -> Tensor | None:
    """The `size` heaviest labels and the end tokens, [Q]; None for the whole vocabulary.

    Raises:
        UserError: if a size is given without weights, or does not fit them.
    """
    if size is None:
        return None
    if weights_V is None:
        raise UserError(f"vocabulary_size is {size}, but the tokens of the training data were not counted; pass "
                        "token_counts, or leave vocabulary_size out")
    return choose(weights_V, size, always=target.eos_ids)
