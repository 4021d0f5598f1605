"""The decoding state of a Falcon drafter: memory of the committed text, and the blocks of the growing tree.

Shapes: M recurrent layers, R rows, D hidden size, K positions of a block, J = K - 1, N new positions, P blocks, F nodes
of a level, T tokens after a block.
"""

import torch
from torch import Tensor

from ..interfaces.proposer import DraftState, Frontier
from ..row_buffers import RowBuffer
from ..target.kv_cache import RowCache
from .parts.block_cache import BlockRows
from .parts.lstm import Memory


class FalconState(DraftState):
    """The memory at each row's last committed position, the states of the positions before it, and a tree.

    Args:
        before: memory of the recurrent layers before any text, [M, R, D] each.
        size: positions of a block.
        rows: the decoder layer's cache.
    """

    nodes_RF: Tensor
    """The nodes of the last frontier."""
    block_RF: Tensor
    """The block above each of these nodes, a column of the fields below."""
    since_RFT: Tensor
    """The tokens of each node's path after that block."""
    ends_RP: Tensor
    """The node at the end of each block of the deepest level."""
    memory: Memory
    """Memory of the recurrent layers at each block's end, [M, R, P, D] each."""
    estimates_RPKD: Tensor
    """Each block's estimates."""

    def __init__(self, before: Memory, size: int, rows: BlockRows) -> None:
        layers, batch, width = before[0].shape

        def blank(*entry: int) -> RowBuffer:
            return RowBuffer(batch, *entry, width, device=before[0].device, dtype=before[0].dtype)

        self.output, self.cell = blank(layers), blank(layers)
        self.recent, self.estimates = blank(size - 1), blank(size)
        self.rows = rows
        self.drop_tree()

    @property
    def caches(self) -> tuple[RowCache, ...]:
        """The decoder layer's."""
        return (self.rows.cache,)

    @property
    def buffers(self) -> tuple[RowBuffer, ...]:
        """Outputs and cells of the recurrent layers, states of the positions before the last one, its estimates."""
        return self.output, self.cell, self.recent, self.estimates

    def memory_of(self, rows: slice | Tensor) -> Memory:
        """The memory of some rows, [M, R, D] each."""
        return self.output.values[rows].transpose(0, 1), self.cell.values[rows].transpose(0, 1)

    def drop_tree(self) -> None:
        """Discard the tree; the block at the end of the text gives the root's children."""
        self.level = 0
        self.rows.drop_tree()

    def update(
        self, rows_R: Tensor, counts_R: Tensor, memory: Memory, states_RND: Tensor, estimates_RKD: Tensor
    ) -> None:
        """Store the results of new positions; a row without new positions keeps its former ones.

        Args:
            memory: after every new position, [M, R, N, D] each.
            states_RND: the decoder layer's inputs at the K - 1 positions before the new ones and at the new ones.
            estimates_RKD: estimates of the block that ends at the last position.
        """
        new_R = counts_R > 0
        each_R, last_R = torch.arange(len(counts_R), device=counts_R.device), (counts_R - 1).clamp(min=0)
        output_RMD, cell_RMD = (layers[:, each_R, last_R].transpose(0, 1) for layers in memory)
        newest_RJD = columns(states_RND, counts_R, self.recent.values.shape[1])
        for buffer, found in zip(self.buffers, (output_RMD, cell_RMD, newest_RJD, estimates_RKD), strict=True):
            buffer.store(rows_R, found, new_R)

    def clear(self, rows_R: Tensor) -> None:
        """Reset these rows."""
        for buffer in self.buffers:
            buffer.clear(rows_R)
        self.rows.clear(rows_R.tolist())
        self.drop_tree()

    def keep(self, rows_R: Tensor) -> None:
        """Keep the rows `rows_R`, in that order."""
        for buffer in self.buffers:
            buffer.keep(rows_R)
        self.rows.keep(rows_R.tolist())
        self.drop_tree()

    # The tree --------------------------------------------------------------------------------------------------------

    def next_level(self, frontier: Frontier) -> int:
        """Add the next level of the tree; returns its depth below the newest block, from 0 to K - 1."""
        if self.level == 0:
            self._start_tree(frontier)
        else:
            above_RF = (frontier.parents_BF[:, :, None] == self.nodes_RF[:, None]).long().argmax(-1)
            since_RFT = self.since_RFT.gather(1, above_RF[..., None].expand(-1, -1, self.since_RFT.shape[-1]))
            self.since_RFT = torch.cat([since_RFT, frontier.tokens_BF[..., None]], dim=-1)
            self.block_RF = self.block_RF.gather(1, above_RF)
        self.nodes_RF = frontier.nodes_BF
        self.level += 1
        return (self.level - 1) % self.estimates.values.shape[1]

    def _start_tree(self, frontier: Frontier) -> None:
        rows = len(frontier.nodes_BF)
        self.block_RF, self.ends_RP = torch.zeros_like(frontier.nodes_BF), frontier.nodes_BF
        self.since_RFT = frontier.tokens_BF[..., None][..., :0]
        output_MRD, cell_MRD = self.memory_of(slice(0, rows))
        self.memory = output_MRD[:, :, None], cell_MRD[:, :, None]
        self.estimates_RPKD = self.estimates.values[:rows, None]

    def blocks_above(self) -> tuple[Memory, Tensor]:
        """(memory [M, R, F, D] each, estimates [R, F, K, D]) at the end of the block above each node."""
        layers, width = self.memory[0].shape[0], self.memory[0].shape[-1]
        index_RFD = self.block_RF[..., None].expand(-1, -1, width)
        output, cell = (part.gather(2, index_RFD.expand(layers, -1, -1, -1)) for part in self.memory)
        index_RFKD = index_RFD[:, :, None].expand(-1, -1, self.estimates_RPKD.shape[2], -1)
        return (output, cell), self.estimates_RPKD.gather(1, index_RFKD)

    def block_ends(self) -> Frontier:
        """The nodes of this level as ends of new blocks, with the ends of the blocks above them as parents."""
        return Frontier(nodes_BF=self.nodes_RF, parents_BF=self.ends_RP.gather(1, self.block_RF),
                        tokens_BF=self.since_RFT[..., -1])

    def add_blocks(self, memory: Memory, estimates_RFKD: Tensor) -> None:
        """Make each node of this level the end of a block."""
        self.memory, self.estimates_RPKD, self.ends_RP = memory, estimates_RFKD, self.nodes_RF
        self.block_RF = torch.arange(estimates_RFKD.shape[1], device=estimates_RFKD.device).expand_as(self.nodes_RF)
        self.since_RFT = self.since_RFT[..., :0]


def columns(states_RND: Tensor, first_R: Tensor, count: int) -> Tensor:
    """`count` consecutive columns of each row from its own first column, [R, count, D]."""
    index_RJ = first_R[:, None] + torch.arange(count, device=first_R.device)
    return states_RND.gather(1, index_RJ[..., None].expand(-1, -1, states_RND.shape[-1]))
