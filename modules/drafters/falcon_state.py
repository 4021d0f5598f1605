"""What a Falcon drafter knows of its rows while it decodes: the text behind each, and the blocks of the growing tree.

Shapes: M recurrent layers, R rows, D hidden size, K indices of a block, J = K - 1, N new positions, P blocks, F nodes
of a level, T tokens behind a block.
"""

import torch
from torch import Tensor

from ..interfaces.proposer import DraftState, Frontier
from .parts.block_cache import BlockRows
from .parts.lstm import Memory


class FalconState(DraftState):
    """The memory at each row's last committed index, the states of the indices before it, and a tree.

    Args:
        before: what the recurrent layers know of a blank row, [M, R, D] each.
        size: indices of a block.
        rows: what the decoder layer has read.
    """

    nodes_RF: Tensor
    """The nodes that were asked for last."""
    block_RF: Tensor
    """The block above each of them, a column of those below."""
    since_RFT: Tensor
    """The tokens of its path behind that block."""
    ends_RP: Tensor
    """The node in which each block of the deepest level ends."""
    memory: Memory
    """What the recurrent layers know there, [M, R, P, D] each."""
    told_RPKD: Tensor
    """The block's estimates."""

    def __init__(self, before: Memory, size: int, rows: BlockRows) -> None:
        _, batch, width = before[0].shape
        self.said_MRD, self.kept_MRD = before
        self.recent_RJD = before[0].new_zeros(batch, size - 1, width)
        self.told_RKD = before[0].new_zeros(batch, size, width)
        self.rows = rows
        self.uproot()

    def uproot(self) -> None:
        """Forget the tree; the root's children are told by the block that ends the text."""
        self.level = 0
        self.rows.uproot()

    def learn(self, rows_R: Tensor, counts_R: Tensor, memory: Memory, states_RND: Tensor, told_RKD: Tensor) -> None:
        """Take in what new positions of some rows gave: a row without any keeps what it had.

        Args:
            memory: behind every new position, [M, R, N, D] each.
            states_RND: what the decoder layer read at the last K - 1 indices before and at the new positions.
            told_RKD: estimates of the block that ends at the last one.
        """
        new_R = counts_R > 0
        each_R, last_R = torch.arange(len(counts_R), device=counts_R.device), (counts_R - 1).clamp(min=0)
        said_MRD, kept_MRD = (layers[:, each_R, last_R] for layers in memory)
        self.said_MRD = _taken(self.said_MRD, 1, rows_R, said_MRD, new_R[:, None])
        self.kept_MRD = _taken(self.kept_MRD, 1, rows_R, kept_MRD, new_R[:, None])
        self.told_RKD = _taken(self.told_RKD, 0, rows_R, told_RKD, new_R[:, None, None])
        newest_RJD = columns(states_RND, counts_R, self.recent_RJD.shape[1])
        self.recent_RJD = _taken(self.recent_RJD, 0, rows_R, newest_RJD, new_R[:, None, None])

    def clear(self, rows_R: Tensor) -> None:
        """Forget these rows."""
        self.said_MRD, self.kept_MRD = (part.index_fill(1, rows_R, 0) for part in (self.said_MRD, self.kept_MRD))
        self.told_RKD, self.recent_RJD = (part.index_fill(0, rows_R, 0) for part in (self.told_RKD, self.recent_RJD))
        self.rows.clear(rows_R.tolist())
        self.uproot()

    def keep(self, rows_R: Tensor) -> None:
        """Let row r be the former row rows_R[r]."""
        self.said_MRD, self.kept_MRD = self.said_MRD[:, rows_R], self.kept_MRD[:, rows_R]
        self.told_RKD, self.recent_RJD = self.told_RKD[rows_R], self.recent_RJD[rows_R]
        self.rows.keep(rows_R.tolist())
        self.uproot()

    # The tree --------------------------------------------------------------------------------------------------------

    def descend(self, frontier: Frontier) -> int:
        """Take in the next level of the tree; returns how deep below the newest block it stands, from 0 to K - 1."""
        if self.level == 0:
            self._root(frontier)
        else:
            above_RF = (frontier.parents_BF[:, :, None] == self.nodes_RF[:, None]).long().argmax(-1)
            since_RFT = self.since_RFT.gather(1, above_RF[..., None].expand(-1, -1, self.since_RFT.shape[-1]))
            self.since_RFT = torch.cat([since_RFT, frontier.tokens_BF[..., None]], dim=-1)
            self.block_RF = self.block_RF.gather(1, above_RF)
        self.nodes_RF = frontier.nodes_BF
        self.level += 1
        return (self.level - 1) % self.told_RKD.shape[1]

    def _root(self, frontier: Frontier) -> None:
        rows = len(frontier.nodes_BF)
        self.block_RF, self.ends_RP = torch.zeros_like(frontier.nodes_BF), frontier.nodes_BF
        self.since_RFT = frontier.tokens_BF[..., None][..., :0]
        self.memory = self.said_MRD[:, :rows, None], self.kept_MRD[:, :rows, None]
        self.told_RPKD = self.told_RKD[:rows, None]

    def above(self) -> tuple[Memory, Tensor]:
        """What each node finds at the end of the block above it: memory [M, R, F, D] each, estimates [R, F, K, D]."""
        layers, width = self.memory[0].shape[0], self.memory[0].shape[-1]
        index_RFD = self.block_RF[..., None].expand(-1, -1, width)
        said, kept = (part.gather(2, index_RFD.expand(layers, -1, -1, -1)) for part in self.memory)
        index_RFKD = index_RFD[:, :, None].expand(-1, -1, self.told_RPKD.shape[2], -1)
        return (said, kept), self.told_RPKD.gather(1, index_RFKD)

    def planted(self) -> Frontier:
        """The nodes of this level as ends of blocks, below the ends of the blocks above them."""
        return Frontier(nodes_BF=self.nodes_RF, parents_BF=self.ends_RP.gather(1, self.block_RF),
                        tokens_BF=self.since_RFT[..., -1])

    def grow(self, memory: Memory, told_RFKD: Tensor) -> None:
        """Let each node of this level be the end of a block."""
        self.memory, self.told_RPKD, self.ends_RP = memory, told_RFKD, self.nodes_RF
        self.block_RF = torch.arange(told_RFKD.shape[1], device=told_RFKD.device).expand_as(self.nodes_RF)
        self.since_RFT = self.since_RFT[..., :0]


def columns(states_RND: Tensor, first_R: Tensor, count: int) -> Tensor:
    """`count` neighbouring columns of each row from its own first on, [R, count, D]."""
    index_RJ = first_R[:, None] + torch.arange(count, device=first_R.device)
    return states_RND.gather(1, index_RJ[..., None].expand(-1, -1, states_RND.shape[-1]))


def _taken(held: Tensor, dim: int, rows_R: Tensor, found: Tensor, new: Tensor) -> Tensor:
    """`held` with what was found in the rows `rows_R` of its dimension `dim`, where that is new.

    Not in place: the state may have been made inside torch.inference_mode and written outside it.
    """
    return held.index_copy(dim, rows_R, torch.where(new, found, held.index_select(dim, rows_R)))
