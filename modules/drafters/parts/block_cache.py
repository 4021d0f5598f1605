"""A batch of sequences inside a drafter's own decoder blocks: what they have read, and the tree that grows behind it.

The keys stand in a `RowCache`: the committed positions of each row first, then the nodes of the growing tree in the
order in which they were asked for. Nodes are never committed; the next reading writes over them.

Shapes: B rows, N new positions, J positions asked again, F new nodes, P slots of a node, M nodes in the cache, W cache
slots in use.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...interfaces.proposer import Frontier
from ...target.kv_cache import RowCache, Window
from .decoder_block import Sight


class BlockRows:
    """Cache, masks and positions of one drafter's blocks; weights are elsewhere.

    Position ids count the positions that were read, so they equal slots; a node's is its row's length plus the nodes
    above it in the cache.

    Args:
        num_layers: blocks that write keys.
        rows: sequences.
        capacity: most tokens of one, the largest tree included; more nodes than that only cost a larger copy.
        device: where it lives.
    """

    nodes_BM: Tensor
    """Index in the tree of each node in the cache."""
    above_BMM: Tensor
    """Which nodes in the cache each of them sees: its ancestors there and itself."""

    def __init__(self, num_layers: int, rows: int, capacity: int, device: torch.device) -> None:
        self.cache = RowCache(num_layers, rows, capacity, device)
        self.uproot()

    def read(self, rows: list[int], size: int) -> Sight:
        """What `size` new positions of these rows see: all committed ones, and each other causally.

        Give the sight to the blocks, then `commit`. Drafted nodes are forgotten. What stands in padding columns must be
        finite: nobody sees it, and it is written over, but 0 * NaN is NaN.
        """
        self.uproot()
        window = self._open(rows, size, behind=0)
        slots_W = torch.arange(window.width, device=window.slots_BN.device)
        return Sight(
            positions_BN=window.slots_BN, visible_BNW=slots_W <= window.slots_BN[..., None], cache=self.cache
        )

    def reread(self, rows: list[int], size: int, counts_B: Tensor, again: int) -> Sight:
        """What the `size` new positions see, as in `read`, and behind them the `again` ones before each row's last.

        Those are asked a second time, now that they may see all up to the last one; the keys that they write in doing
        so stand behind the new ones, nobody sees them, and they are not to be committed.

        Args:
            counts_B: how many of the new positions are real.
        """
        self.uproot()
        window = self._open(rows, size + again, behind=0)
        new_BN = window.slots_BN[:, :size]
        last_B1 = new_BN[:, :1] + counts_B[:, None] - 1
        again_BJ = last_B1 - torch.arange(again, 0, -1, device=last_B1.device)
        # A row without any position sees one all the same: a softmax of nothing is NaN.
        until_BN = torch.cat([new_BN, last_B1.clamp(min=0).expand(-1, again)], dim=1)
        slots_W = torch.arange(window.width, device=new_BN.device)
        return Sight(
            positions_BN=torch.cat([new_BN, again_BJ], dim=1),
            visible_BNW=slots_W <= until_BN[..., None],
            cache=self.cache,
        )

    def commit(self, counts_B: Tensor, host_counts: list[int]) -> None:
        """Keep the first counts_B[b] positions of the last reading in each of its rows."""
        self.cache.commit(counts_B[:, None], counts_B, host_counts, moved=False)

    def sprout(self, frontier: Frontier, places: int = 1) -> Sight:
        """What new nodes of the tree see: all committed positions, their ancestors in the cache and themselves.

        A node whose parent is not in the cache, such as the root, stands right behind the committed positions.

        Args:
            places: neighbouring slots and positions that each node takes; they see each other. The same for all nodes
                of a tree.
        """
        batch, width = frontier.nodes_BF.shape
        held = self.nodes_BM.shape[1]
        window = self._open(list(range(batch)), width * places, behind=held * places)
        parent_BFM = frontier.parents_BF[:, :, None] == self.nodes_BM[:batch, None]
        inherited_BFM = (parent_BFM.float() @ self.above_BMM[:batch].float()) > 0
        itself_BFF = torch.eye(width, dtype=torch.bool, device=parent_BFM.device).expand(batch, -1, -1)
        seen_BFM = torch.cat([inherited_BFM, itself_BFF], dim=2)
        self.above_BMM = torch.cat([pad(self.above_BMM[:batch], (0, width)), seen_BFM], dim=1)
        self.nodes_BM = torch.cat([self.nodes_BM[:batch], frontier.nodes_BF], dim=1)
        lengths_B1 = self.cache.lengths_B[:batch, None]
        behind_BW = torch.arange(window.width, device=lengths_B1.device) - lengths_B1
        node_BW = behind_BW if places == 1 else behind_BW.div(places, rounding_mode="floor")
        column_BW = node_BW.clamp(0, held + width - 1)
        inside_BW = (node_BW >= 0) & (node_BW < held + width)
        drafted_BFW = seen_BFM.gather(2, column_BW[:, None].expand(-1, width, -1)) & inside_BW[:, None]
        visible_BFW = (behind_BW < 0)[:, None] | drafted_BFW
        above_BF = inherited_BFM.sum(-1)
        if places == 1:
            return Sight(positions_BN=lengths_B1 + above_BF, visible_BNW=visible_BFW, cache=self.cache)
        order_P = torch.arange(places, device=lengths_B1.device)
        return Sight(
            positions_BN=lengths_B1 + (above_BF[..., None] * places + order_P).flatten(1),
            visible_BNW=visible_BFW.repeat_interleave(places, dim=1),
            cache=self.cache,
        )

    def key_positions(self) -> Tensor:
        """Position id of every slot of the running pass, [B, W]: for sliding windows, which follow positions. For trees
        of one slot a node.

        Raises:
            ValueError: if no pass is running.
        """
        window = self.cache.window
        if window is None:
            raise ValueError("there is no pass; read or sprout first")
        slots_W = torch.arange(window.width, device=window.slots_BN.device)
        if not self.nodes_BM.shape[1]:
            return slots_W.expand(len(window.host_rows), -1)
        lengths_B1 = self.cache.lengths_B[window.rows_B1]
        behind_BW = slots_W - lengths_B1
        depths_BM = self.above_BMM.sum(-1) - 1
        return torch.where(
            behind_BW < 0, slots_W, lengths_B1 + depths_BM.gather(1, behind_BW.clamp(0, depths_BM.shape[1] - 1))
        )

    def uproot(self) -> None:
        """Forget the drafted nodes; their slots are written over."""
        lengths_B = self.cache.lengths_B
        self.nodes_BM = lengths_B.new_zeros(len(lengths_B), 0)
        self.above_BMM = lengths_B.new_zeros(len(lengths_B), 0, 0, dtype=torch.bool)

    def clear(self, rows: list[int]) -> None:
        """Forget rows. Their slots are zeroed: a NaN would reach the next sequence through the mask, 0 * NaN is NaN."""
        self.uproot()
        for row in rows:
            self.cache.wipe(row)

    def keep(self, order: list[int]) -> None:
        """Let row r be the former row order[r]; an order may only pull later rows forward."""
        self.uproot()
        for destination, source in enumerate(order):
            if source != destination:
                # The row that leaves may have been longer, and may hold NaN behind what is written over it.
                self.cache.wipe(destination)
                self.cache.move(source, destination)

    def _open(self, rows: list[int], size: int, *, behind: int) -> Window:
        # Neighbouring rows are read through a view of the cache, others through a copy.
        together = rows == list(range(len(rows)))
        self.cache.reserve(max(self.cache.host_lengths[row] for row in rows) + behind + size)
        return self.cache.open(slice(0, len(rows)) if together else rows, size, behind=behind)
