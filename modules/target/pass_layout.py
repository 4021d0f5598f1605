"""Positions and masks of the nodes of a pass: what each one sees of its row's committed tokens and of its tree.

Shapes: B rows, N nodes of a tree, W cache slots in use.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..token_tree import TokenTree


@dataclass(frozen=True, kw_only=True)
class PassLayout:
    """The places of nodes after the committed tokens of their rows."""

    positions_BN: Tensor  # Position id of each node, int64: its row's length plus its depth
    visible_BNW: Tensor  # True where a node sees a slot: committed tokens, its ancestors and itself
    key_positions_BW: Tensor  # Position id of each slot, for sliding windows

    @classmethod
    def of(cls, tree: TokenTree, lengths_B1: Tensor, width: int, context_length: int) -> "PassLayout":
        """The layout of one tree a row, whose node n is in the slot lengths[b] + n of `width` in use. Positions beyond
        the target's context length become its last one."""
        depths_BN, size = tree.depths_BN, tree.size
        positions_BN = (lengths_B1 + depths_BN).clamp(max=context_length - 1)
        slots_W = torch.arange(width, device=lengths_B1.device)
        node_BW = slots_W - lengths_B1
        inside_BW = (node_BW >= 0) & (node_BW < size)
        node_BW = node_BW.clamp(0, size - 1)
        ancestor_BNW = tree.ancestors_BNN.gather(2, node_BW[:, None, :].expand(-1, size, -1))
        return cls(positions_BN=positions_BN,
                   visible_BNW=(slots_W < lengths_B1)[:, None, :] | (inside_BW[:, None, :] & ancestor_BNW),
                   key_positions_BW=torch.where(inside_BW, positions_BN.gather(1, node_BW), slots_W))
