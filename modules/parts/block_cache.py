"""The cache of a drafter's own decoder blocks for a batch of sequences: the committed text and the growing tree.

The keys are in a `RowCache`: first the committed positions of each row, then the nodes of the growing tree in the order
in which they were added. Nodes are never committed; the next reading overwrites them. With a window the cache is a ring
of the newest positions, and masks follow places, not slots.

Shapes: B rows, N new positions, J repeated queries, F new nodes, P slots of a node, M cached nodes, W used slots."""

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..interfaces.proposer import Frontier
from ..target.attention.segment_attention import AttentionForm
from ..target.kv_cache import RowCache, Window
from .decoder_block import AttentionContext


class BlockRows:
    """Cache, masks and positions of one drafter's blocks, `num_layers` of which write keys; it holds no weights.
    Position ids count the positions read, so they equal slots; a node's is its row's length plus the number of its
    ancestors in the cache. `capacity` is the most tokens of one sequence, the largest tree included; more nodes only
    cause a larger copy. For `groups` of the blocks see `RowCache`. With a `window` a position sees as many of the
    newest ones, itself included."""

    nodes_BM: Tensor  # Index in the tree of each node in the cache
    above_BMM: Tensor  # True where a node in the cache sees another one: its ancestors and itself

    def __init__(self, num_layers: int, rows: int, capacity: int, device: torch.device,
                 groups: Sequence[Hashable] = (), window: int | None = None) -> None:
        self.cache, self.window = RowCache(num_layers, rows, capacity, device, groups=groups, newest=window), window
        self._no_nodes_B0 = torch.zeros(rows, 0, dtype=torch.long, device=device)
        self._no_nodes_B00 = torch.zeros(rows, 0, 0, dtype=torch.bool, device=device)
        self.root_B1 = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self.root_B11 = torch.ones(rows, 1, 1, dtype=torch.bool, device=device)
        self.drop_tree()

    def read(self, rows: list[int], size: int, *, causal: bool = True) -> AttentionContext:
        """Attention context of `size` new positions of these rows: they see all committed ones and each other, causally
        or not. Run the blocks with it, then call `commit`, or nothing if they are to be forgotten. Drafted nodes are
        discarded. Padding columns must be finite: no token sees them and they are overwritten, but 0 * NaN is NaN."""
        self.drop_tree()
        places_BN = self._open(rows, size, after=0).places_BN
        last_BN = places_BN if causal else places_BN[:, -1:].expand(-1, size)
        return AttentionContext(positions_BN=places_BN, visible_BNW=self._seen(last_BN, places_BN), cache=self.cache,
                                key_positions=self.key_positions)

    def reread(self, rows: list[int], size: int, counts_B: Tensor, again: int) -> AttentionContext:
        """Attention context of the `size` new positions, as in `read`, and of repeated queries: the `again` positions
        before each row's last one. The repeated queries see what the last one sees; their keys come after the new ones,
        no token sees them, and they are never committed. `counts_B` of the new positions are real."""
        self.drop_tree()
        new_BN = self._open(rows, size + again, after=0).places_BN[:, :size]
        last_B1 = new_BN[:, :1] + counts_B[:, None] - 1
        again_BJ = last_B1 - torch.arange(again, 0, -1, device=last_B1.device)
        # A row without any position sees one nevertheless: a softmax over no key is NaN.
        until_BN = torch.cat([new_BN, last_B1.clamp(min=0).expand(-1, again)], dim=1)
        return AttentionContext(positions_BN=torch.cat([new_BN, again_BJ], dim=1),
                                visible_BNW=self._seen(until_BN, until_BN), cache=self.cache)

    def commit(self, counts_B: Tensor, host_counts: list[int]) -> None:
        """Keep the first counts_B[b] positions of the last reading in each of its rows."""
        self.cache.commit(counts_B[:, None], counts_B, host_counts, moved=False)

    def add_nodes(self, frontier: Frontier, places: int = 1) -> AttentionContext:
        """Attention context of new nodes: they see all committed positions, their cached ancestors and themselves, or
        the newest of these. A node whose parent is not in the cache, such as the root, comes right after the committed
        positions. All nodes of a tree have as many adjacent `places`, slots and positions, which see each other."""
        batch, width = frontier.nodes_BF.shape
        held = self.nodes_BM.shape[1]
        self._open(list(range(batch)), width * places, after=held * places)
        # Not a column of the parent, since some parents are not in the cache.
        parent_BFM = frontier.parents_BF[:, :, None] == self.nodes_BM[:batch, None]
        inherited_BFM = (parent_BFM.float() @ self.above_BMM[:batch].float()) > 0
        itself_BFF = torch.eye(width, dtype=torch.bool, device=parent_BFM.device).expand(batch, -1, -1)
        seen_BFM = torch.cat([inherited_BFM, itself_BFF], dim=2)
        self.above_BMM = torch.cat([pad(self.above_BMM[:batch], (0, width)), seen_BFM], dim=1)
        self.nodes_BM = torch.cat([self.nodes_BM[:batch], frontier.nodes_BF], dim=1)
        lengths_B1 = self.cache.lengths_B[:batch, None]
        after_BW = self.cache.held() - lengths_B1
        node_BW = after_BW if places == 1 else after_BW.div(places, rounding_mode="floor")
        column_BW = node_BW.clamp(0, held + width - 1)
        inside_BW = (node_BW >= 0) & (node_BW < held + width)
        drafted_BFW = seen_BFM.gather(2, column_BW[:, None].expand(-1, width, -1)) & inside_BW[:, None]
        visible_BFW = (after_BW < 0)[:, None] | drafted_BFW
        above_BF = inherited_BFM.sum(-1)
        if self.window is not None:
            # The places of a node see each other, and what the last of them sees.
            visible_BFW = visible_BFW & self._near(lengths_B1 + (above_BF + 1) * places - 1, self.key_positions(places))
        if places == 1:
            return AttentionContext(positions_BN=lengths_B1 + above_BF, visible_BNW=visible_BFW, cache=self.cache,
                                    key_positions=self.key_positions)
        order_P = torch.arange(places, device=lengths_B1.device)
        return AttentionContext(positions_BN=lengths_B1 + (above_BF[..., None] * places + order_P).flatten(1),
                                visible_BNW=visible_BFW.repeat_interleave(places, dim=1), cache=self.cache)

    def key_positions(self, places: int = 1) -> Tensor:
        """Position id of every slot of the running pass, [B, W], for windows; negative where it holds nothing. Nodes
        have so many slots each. Raises ValueError if no pass is running."""
        held_BW = self.cache.held()
        if not self.nodes_BM.shape[1]:
            return held_BW
        lengths_B1 = self.cache.lengths_B[: len(held_BW), None]
        after_BW, depths_BM = held_BW - lengths_B1, self.above_BMM.sum(-1) - 1
        node_BW = after_BW.div(places, rounding_mode="floor").clamp(0, depths_BM.shape[1] - 1)
        return torch.where(after_BW < 0, held_BW,
                           lengths_B1 + depths_BM.gather(1, node_BW) * places + after_BW % places)

    def _seen(self, until_BN: Tensor, places_BN: Tensor) -> Tensor:
        """True where positions at these places see a slot: those up to `until_BN`, and near if there is a window."""
        held_BW = self.cache.held()
        seen_BNW = held_BW[:, None] <= until_BN[..., None]
        return seen_BNW if self.window is None else seen_BNW & self._near(places_BN, held_BW)

    def _near(self, positions_BN: Tensor, keys_BW: Tensor) -> Tensor:
        """True where the window of a query holds a key, [B, N, W]."""
        form = AttentionForm(window=self.window)
        return form.near(positions_BN, keys_BW) & (keys_BW >= 0)[:, None]

    def drop_tree(self) -> None:
        """Discard the drafted nodes; their slots are overwritten."""
        self.nodes_BM, self.above_BMM = self._no_nodes_B0, self._no_nodes_B00

    def _open(self, rows: list[int], size: int, *, after: int) -> Window:
        # Adjacent rows are read through a view of the cache, others through a copy.
        adjacent = rows == list(range(len(rows)))
        self.cache.reserve(max(self.cache.host_lengths[row] for row in rows), after + size)
        return self.cache.open(slice(0, len(rows)) if adjacent else rows, size, gap=after)
