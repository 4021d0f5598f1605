"""Counts of the accepted guesses of each drafter of an ensemble.

Shapes: B rows, K nodes of a path.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..token_tree import TokenTree
from ..verification.tree_walk import Accepted
from .requests import Generation


@dataclass
class PartCounter:
    """An observer of the decoding loop; it waits for the device once, when it is asked for its counts."""

    held: list[tuple[list[int], Tensor]] = field(default_factory=list)
    """Of each pass: the requests' indices, and the parts of the accepted guesses, -1 after them, [B, K - 1]."""

    def __call__(self, tree: TokenTree, accepted: Accepted, generations: Sequence[Generation]) -> None:
        if tree.parts_BN is None:
            return
        columns_K = torch.arange(accepted.path_BK.shape[1], device=accepted.path_BK.device)
        on_path_BK = columns_K < accepted.counts_B[:, None]
        parts_BK = torch.where(on_path_BK, tree.parts_BN.gather(1, accepted.path_BK), -1)
        self.held.append(([generation.request.index for generation in generations], parts_BK[:, 1:]))

    def counts(self, generations: Sequence[Generation], parts: int) -> dict[int, tuple[int, ...]]:
        """Guesses of each part of the ensemble in each finished answer, by the request's index; what lies after an end
        of an answer is left out."""
        passes: dict[int, list[list[int]]] = {}
        for indices, parts_BK in self.held:
            for index, line in zip(indices, parts_BK.tolist(), strict=True):
                passes.setdefault(index, []).append(line)
        found = {}
        for one in generations:
            # A pass that failed added nothing and has no count.
            lines = zip(passes.get(one.request.index, []), one.emitted, strict=False)
            written = [part for line, count in lines for part in line[:count]]
            found[one.request.index] = tuple(written.count(part) for part in range(parts))
        return found
