"""Token trees: a drafter's proposal, verified by one target pass; and the virtual nodes of a pass, places after tokens
at which the target itself guesses ahead.

Shapes: B rows, N nodes, K nodes of a path, M virtual nodes, D hidden size. Node 0 is the root: the last token the
target has decided, which has not been through the target yet. Parents precede children; a chain is a tree."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from .errors import TreeError

Record = TypeVar("Record", bound=Any)


def first_rows(record: Record, rows: int) -> Record:
    """A record whose tensors [B, ...], which their names tell, are those of the first rows."""
    cut = {name: value[:rows] for name, value in vars(record).items() if "_B" in name and value is not None}
    found: Record = replace(record, **cut)
    return found


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


@dataclass(frozen=True)
class Topology:
    """The shape of a static tree: for each node its parent and its rank among the parent's proposals. Raises ValueError
    if a parent does not precede its child, or two children of a node have the same rank."""

    parents: tuple[int, ...]  # Index of each node's parent; the root's is -1
    ranks: tuple[int, ...]  # Which of its parent's proposals a node is: 0 the likeliest. The root's is 0.

    def __post_init__(self) -> None:
        if not self.parents or len(self.parents) != len(self.ranks):
            raise ValueError(f"a topology needs as many parents as ranks and at least a root, got {len(self.parents)} "
                             f"parents and {len(self.ranks)} ranks")
        if self.parents[0] != -1:
            raise ValueError(f"node 0 is the root and its parent must be -1, got {self.parents[0]}")
        for node, parent in enumerate(self.parents[1:], start=1):
            if not 0 <= parent < node:
                raise ValueError(f"the parent of node {node} must be a node before it (0 to {node - 1}), got {parent}")
        # Two nodes of one rank would be the same token twice: the second could never be the accepted one.
        places = list(zip(self.parents, self.ranks, strict=True))
        if len(set(places)) != len(places):
            raise ValueError("two nodes of the topology have the same parent and the same rank")
        if min(self.ranks) < 0:
            raise ValueError(f"ranks must be at least 0, got {min(self.ranks)}")

    @classmethod
    def chain(cls, length: int) -> "Topology":
        """A root and `length` tokens in a row, each its parent's likeliest."""
        return cls(tuple(range(-1, length)), (0,) * (length + 1))

    @property
    def size(self) -> int:
        """Number of nodes, the root included: tokens of the verifying pass."""
        return len(self.parents)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Distance of each node from the root."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def depth(self) -> int:
        """Length of the longest path below the root: the most tokens a pass can accept."""
        return max(self.depths)

    @property
    def width(self) -> int:
        """Largest number of proposals of one node that are used."""
        return max(self.ranks[1:], default=-1) + 1

    @cached_property
    def most_children(self) -> int:
        """Largest number of children of a node."""
        return max((self.parents.count(node) for node in range(self.size)), default=0)

    @cached_property
    def ancestors_NN(self) -> Tensor:
        """True where the column's node is an ancestor of the row's node, or the node itself."""
        ancestors = torch.eye(self.size, dtype=torch.bool)
        for node, parent in enumerate(self.parents[1:], start=1):
            ancestors[node] |= ancestors[parent]
        return ancestors

    @classmethod
    def from_paths(cls, paths: Iterable[tuple[int, ...]]) -> "Topology":
        """Build from the rank paths of the nodes, parents first (the root's empty path may be left out), or else
        ValueError."""
        index: dict[tuple[int, ...], int] = {(): 0}
        parents, ranks = [-1], [0]
        for path in paths:
            if not path:
                continue
            if path[:-1] not in index:
                raise ValueError(f"the path {path} comes before its parent {path[:-1]}")
            index[path] = len(parents)
            parents.append(index[path[:-1]])
            ranks.append(path[-1])
        return cls(tuple(parents), tuple(ranks))

    def numbered(self) -> "Topology":
        """The shape with siblings numbered in their order, as they are drawn: a search may have found the sixth guess
        before the fifth."""
        return Topology(self.parents, tuple(self.parents[:node].count(one) for node, one in enumerate(self.parents)))

    def prefix(self, size: int) -> "Topology":
        """The first `size` nodes: of a best-first tree, the best tree of that size. ValueError if there are fewer, or
        for none."""
        if not 1 <= size <= self.size:
            raise ValueError(f"size must be between 1 and {self.size}, got {size}")
        return Topology(self.parents[:size], self.ranks[:size])

    def plant(self, tokens_BN: Tensor) -> "TokenTree":
        """Give every node its tokens: the same shape in each row."""
        # Kept for each device: they would otherwise be copied there in every pass.
        batch = tokens_BN.shape[0]
        parents_N, depths_N, ancestors_NN, real_N = _constants(self, tokens_BN.device)
        return TokenTree(tokens_BN=tokens_BN, parents_BN=parents_N.expand(batch, -1),
                         depths_BN=depths_N.expand(batch, -1), ancestors_BNN=ancestors_NN.expand(batch, -1, -1),
                         real_BN=real_N.expand(batch, -1), max_depth=self.depth, most_children=self.most_children)


Remembering = TypeVar("Remembering", bound=Callable[..., Any])


def remembered(function: Remembering) -> Remembering:
    """The function of a device, its last argument, that remembers its last results on a CPU and all others: recorded
    rounds read them where they are."""
    few, every = lru_cache(maxsize=256)(function), cache(function)

    @wraps(function)
    def found(*given: Any) -> Any:
        return (few if given[-1].type == "cpu" else every)(*given)

    def clear() -> None:
        few.cache_clear()
        every.cache_clear()

    found.cache_clear = clear  # type: ignore[attr-defined]
    return found  # type: ignore[return-value]


@remembered
def _constants(topology: Topology, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(parents, depths, ancestors, ones) of a topology on a device: the same in every pass."""
    return (torch.tensor(topology.parents, device=device), torch.tensor(topology.depths, device=device),
            topology.ancestors_NN.to(device), torch.ones(topology.size, dtype=torch.bool, device=device))


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """Draws of sampled nodes: from the parent's q, without replacement, siblings in the order of their indices. The
    first sampled child was drawn from q, each later one from q with the earlier ones removed and the rest renormalised.
    Whether a node was drawn at all may depend on other tokens, never on its own.

    Shapes: I distributions a row, Q entries of the draft vocabulary."""

    log_q_BIQ: Tensor
    """Logarithms of exactly the distributions drawn from, after temperature and filters, float32; minus infinity for
    entries that cannot be drawn. Probabilities would underflow: what is left of q after its favourite may lie below
    the smallest float32, and later siblings are drawn from it."""
    inner_BN: Tensor  # Which of them is the q of a node's children, int64; any for a node without children
    sampled_BN: Tensor  # True where a node was drawn from its parent's q; the others are point masses
    token_ids_Q: Tensor | None = None  # Target-vocabulary id of each entry of a reduced vocabulary; None for the whole
    candidates_BIQ: Tensor | None = None  # Instead: ids that differ from node to node, those of possible entries apart

    def at(self, nodes_BS: Tensor) -> "Drawn":
        """The same for other nodes of a tree: node s is the former node nodes_BS[s]."""
        return replace(self, inner_BN=self.inner_BN.gather(1, nodes_BS), sampled_BN=self.sampled_BN.gather(1, nodes_BS))


@dataclass(frozen=True, kw_only=True)
class TokenTree:
    """One tree a row, padded to the same number of nodes. Its nodes are point masses unless `drawn` says otherwise."""

    tokens_BN: Tensor  # Token of each node, int64; any valid id where `real_BN` is False
    parents_BN: Tensor  # Index of each node's parent, int64, below the node's own; -1 for the root
    depths_BN: Tensor  # Distance from the root, int64: the position id of a node is the row's length plus its depth
    ancestors_BNN: Tensor  # True where the column's node is an ancestor of the row's or itself. Padding sees itself
    real_BN: Tensor  # True where a node holds a token that may be accepted: not padding, not virtual
    max_depth: int  # Largest depth of any node of the batch, known on the host
    virtual: VirtualNodes | None = None  # The last nodes where a drafter added some without tokens; in no grown tree
    lookahead: Lookahead | None = None  # Virtual nodes that the policy wants; None leaves their number to the drafter
    drawn: Drawn | None = None  # Draws of the nodes; None when every node was proposed without chance: a point mass
    most_children: int | None = None  # Largest number of children of any node, for the host; None when nobody counted
    prompt: bool = False  # Whether the rows are chains, padded at the end, of which a commit keeps every real node
    parts_BN: Tensor | None = None  # Drafter of an ensemble that proposed each node first, from 0, int64; None for one

    @property
    def size(self) -> int:
        """Number of nodes of a row, padding and virtual nodes included."""
        return self.tokens_BN.shape[1]

    @property
    def virtual_BN(self) -> Tensor | None:
        """True at virtual nodes; None for a tree without any."""
        if self.virtual is None:
            return None
        order_N = torch.arange(self.size, device=self.tokens_BN.device)
        return (order_N >= self.size - self.virtual.anchors_BM.shape[1]).expand_as(self.tokens_BN)

    def of_first(self, rows: int) -> "TokenTree":
        """The trees of the first rows; ValueError for virtual nodes: what they enter with belongs to all rows."""
        if self.virtual is not None:
            raise ValueError("a tree with virtual nodes cannot be cut; cut it before they are added")
        return replace(first_rows(self, rows), drawn=self.drawn and first_rows(self.drawn, rows),
                       lookahead=self.lookahead and first_rows(self.lookahead, rows))

    def children(self, nodes_B: Tensor) -> tuple[Tensor, Tensor]:
        """(indices of the children of one node a row in ascending order, which of them are real), [B, K] each."""
        columns_N = torch.arange(self.size, device=nodes_B.device)
        ours_BN = (self.parents_BN == nodes_B[:, None]) & self.real_BN & (columns_N > 0)
        width = self.size - 1 if self.most_children is None else self.most_children
        # Sorting keeps the shape known to the host; nonzero would make it wait for the device.
        found_BK = torch.where(ours_BN, columns_N, self.size).sort(-1).values[:, :width]
        return found_BK.clamp(max=self.size - 1), found_BK < self.size

    def draft_at(self, nodes_BM: Tensor, vocab_size: int, rows_B: Tensor | None = None) -> Tensor:
        """log q over the target's vocabulary at M nodes of all rows, or of those given, [B, M, V], float64; minus
        infinity where nothing is drawn."""
        nothing_BMV = torch.full((*nodes_BM.shape, vocab_size), -torch.inf, dtype=torch.float64, device=nodes_BM.device)
        if self.drawn is None:
            return nothing_BMV
        rows_B1 = (torch.arange(len(nodes_BM), device=nodes_BM.device) if rows_B is None else rows_B)[:, None]
        inner_BM = self.drawn.inner_BN[rows_B1, nodes_BM]
        log_q_BMQ = self.drawn.log_q_BIQ[rows_B1, inner_BM].double()
        if self.drawn.candidates_BIQ is not None:
            ids_BMQ = self.drawn.candidates_BIQ[rows_B1, inner_BM]
            # An impossible entry may repeat the id of a possible one.
            return nothing_BMV.scatter_reduce(2, ids_BMQ, log_q_BMQ, "amax")
        if self.drawn.token_ids_Q is None:
            return log_q_BMQ
        return nothing_BMV.index_copy(2, self.drawn.token_ids_Q, log_q_BMQ)

    def equal_paths(self, other: "TokenTree") -> Tensor:
        """True where the path to a real node has the tokens of the path to a real node of another tree, whose roots may
        have other tokens, [B, N, M]."""
        same_BNM = (self.tokens_BN[:, :, None] == other.tokens_BN[:, None]) & (
            self.depths_BN[:, :, None] == other.depths_BN[:, None]
        )
        same_BNM &= self.real_BN[:, :, None] & other.real_BN[:, None]
        rows_B11 = torch.arange(len(same_BNM), device=same_BNM.device)[:, None, None]
        above_BN1, above_B1M = self.parents_BN.clamp(min=0)[:, :, None], other.parents_BN.clamp(min=0)[:, None]
        # After d rounds the last d + 1 tokens of both paths are known to agree.
        for _ in range(min(self.max_depth, other.max_depth)):
            same_BNM = same_BNM & same_BNM[rows_B11, above_BN1, above_B1M]
        return same_BNM

    def packed(self, size: int) -> "TokenTree":
        """The first `size` real nodes of each row, in their order; padding fills what is left. A parent precedes its
        children, so whatever is cut off, the rest is a tree. ValueError for virtual nodes: they have a fixed place at
        the end."""
        if self.virtual is not None:
            raise ValueError("a tree with virtual nodes cannot be packed; pack it before they are added")
        # A stable sort moves padding to the end and leaves the order of real nodes, so parents still come first.
        order_BN = torch.sort((~self.real_BN).byte(), dim=-1, stable=True).indices
        chosen_BS = order_BN[:, :size]
        places_BN = order_BN.argsort(-1)
        parents_BS = self.parents_BN.gather(1, chosen_BS)
        chosen_BSS = chosen_BS[:, None, :].expand(-1, chosen_BS.shape[1], -1)
        rows_BSN = chosen_BS[..., None].expand(-1, -1, self.size)
        return TokenTree(
            tokens_BN=self.tokens_BN.gather(1, chosen_BS),
            parents_BN=torch.where(parents_BS < 0, -1, places_BN.gather(1, parents_BS.clamp(min=0))),
            depths_BN=self.depths_BN.gather(1, chosen_BS), real_BN=self.real_BN.gather(1, chosen_BS),
            ancestors_BNN=self.ancestors_BNN.gather(1, rows_BSN).gather(2, chosen_BSS),
            max_depth=min(self.max_depth, chosen_BS.shape[1] - 1), most_children=self.most_children,
            drawn=None if self.drawn is None else self.drawn.at(chosen_BS),
            lookahead=None if self.lookahead is None else replace(
                self.lookahead, counts_BN=self.lookahead.counts_BN.gather(1, chosen_BS)),
            parts_BN=None if self.parts_BN is None else self.parts_BN.gather(1, chosen_BS))

    @classmethod
    def from_parents(cls, tokens_BN: Tensor, parents_BN: Tensor, real_BN: Tensor | None = None) -> "TokenTree":
        """Derive depths and ancestors of trees that differ from row to row; TreeError names rows in which a real node's
        parent does not precede it."""
        batch, size = tokens_BN.shape
        real_BN = torch.ones_like(tokens_BN, dtype=torch.bool) if real_BN is None else real_BN
        columns = torch.arange(size, device=tokens_BN.device)
        wrong_B = ((parents_BN >= columns) | (parents_BN < 0))[:, 1:].logical_and(real_BN[:, 1:]).any(-1)
        if bool(wrong_B.any()):
            raise TreeError(wrong_B.nonzero()[:, 0].tolist())
        ancestors_BNN = torch.eye(size, dtype=torch.bool, device=tokens_BN.device).repeat(batch, 1, 1)
        rows = torch.arange(batch, device=tokens_BN.device)
        for node in range(1, size):
            inherited = ancestors_BNN[rows, parents_BN[:, node].clamp(min=0)]
            ancestors_BNN[:, node] |= inherited & real_BN[:, node, None]
        depths_BN = ancestors_BNN.sum(-1) - 1
        return cls(tokens_BN=tokens_BN, parents_BN=parents_BN, depths_BN=depths_BN, ancestors_BNN=ancestors_BNN,
                   real_BN=real_BN, max_depth=int(depths_BN.max()))

    @classmethod
    def grown(cls, tokens_BN: Tensor, parents_BN: Tensor, real_BN: Tensor, *, max_depth: int, most_children: int,
              drawn: Drawn | None = None) -> "TokenTree":
        """`from_parents` for trees that are right by construction, of no more depth and children of a node than said:
        nothing is checked, nothing read on the host."""
        size = tokens_BN.shape[1]
        itself_NN = torch.eye(size, dtype=torch.bool, device=tokens_BN.device)
        above_BNN = parents_BN.clamp(min=0)[..., None].expand(-1, -1, size)
        # Each round adds one level of ancestors to all nodes at once, where `from_parents` goes from node to node.
        ancestors_BNN = itself_NN.expand(tokens_BN.shape[0], -1, -1)
        for _ in range(max_depth):
            ancestors_BNN = itself_NN | (ancestors_BNN.gather(1, above_BNN) & real_BN[..., None])
        return cls(tokens_BN=tokens_BN, parents_BN=parents_BN, depths_BN=ancestors_BNN.sum(-1) - 1,
                   ancestors_BNN=ancestors_BNN, real_BN=real_BN, max_depth=max_depth, drawn=drawn,
                   most_children=most_children)

    @classmethod
    def prompts(cls, tokens_BN: Tensor, counts_B: Tensor) -> "TokenTree":
        """Chains of different lengths, right-padded: what prefill sends through the target."""
        size = tokens_BN.shape[1]
        columns = torch.arange(size, device=tokens_BN.device)
        real_BN = columns < counts_B[:, None]
        # Padding sees itself, since a softmax over nothing is NaN, and a NaN reaches the keys of later layers.
        causal_NN = columns[:, None] >= columns
        itself_NN = columns[:, None] == columns
        return cls(tokens_BN=tokens_BN, parents_BN=(columns - 1).expand_as(tokens_BN),
                   depths_BN=columns.expand_as(tokens_BN), ancestors_BNN=(causal_NN & real_BN[:, None, :]) | itself_NN,
                   real_BN=real_BN, max_depth=size - 1, prompt=True)
