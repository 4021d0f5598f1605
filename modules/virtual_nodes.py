"""Virtual nodes of a pass: places after tokens at which the target itself guesses ahead.

Shapes: B rows, N nodes, M virtual nodes, D hidden size.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Lookahead:
    """Number of virtual nodes wanted after each node, for drafters that have any; others ignore it."""

    counts_BN: Tensor  # Largest number of steps ahead that the virtual nodes after each node guess, int64
    most: int  # Largest sum of these counts over the nodes of a row, known on the host
    nodes: int  # Largest number of nodes of a row that want any, known on the host
    whole: bool = False  # Whether every count is 0 or all that the drafter has, known on the host

    @classmethod
    def after(cls, tokens_BN: Tensor, nodes_B: Tensor, count: int) -> "Lookahead":
        """All virtual nodes of a drafter, at most `count`, after one node of each row."""
        counts_BN = torch.zeros_like(tokens_BN).scatter(1, nodes_B[:, None], count)
        return cls(counts_BN=counts_BN, most=count, nodes=1, whole=True)


@dataclass(frozen=True, kw_only=True)
class Injection:
    """States that virtual nodes enter a layer with, in place of those that the layers before it gave them."""

    layer: int  # Index of the target's layer
    states: Callable[[Tensor, Tensor], Tensor]  # From what enters the layer at the nodes before, [B, M, D], and slots


@dataclass(frozen=True, kw_only=True)
class VirtualNodes:
    """The last M nodes of a pass, which have no token: attended to by each other and never accepted. Each comes after
    one node and sees what that node sees. The virtual nodes of a node are numbered by slots."""

    embedded_BMD: Tensor  # Embeddings in place of tokens, in the output space of the target's embedding module
    anchors_BM: Tensor  # The node that each comes after, int64; -1 for padding
    slots_BM: Tensor  # Number of each among those of its node, int64
    slots: int  # Most virtual nodes that a node may have
    injection: Injection | None = None  # States given to them at a later layer; None when they pass all layers
