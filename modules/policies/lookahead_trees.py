"""Trees for drafters with virtual nodes: one for each number of guesses that a row has, and how many virtual nodes
follow each of its nodes (the dynamic sparse trees of PPD, arXiv:2405.18628, section 4).

More virtual nodes after a node let the next tree be deeper if that node is the last accepted one. Which trees are best
follows from the chance of each rank at each depth, measured on held-out text, by the theory of Markov decisions: a
state is the number of depths that a row has guesses for, its reward the tokens accepted, and the last accepted node
decides the next state.

Shapes: B rows, N nodes, K depths, R ranks, T trees (K + 1, by number of guesses)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import heapify, heappop, heappush

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..errors import UserError
from ..interfaces.proposer import DraftState, Frontier, Proposer
from ..token_tree import Lookahead, TokenTree, Topology, remembered
from ..verification.sampling import Draws
from .base import Policy

_ROUNDS = 20  # Most rounds of improving the trees; three are usual
Path = tuple[float, tuple[int, ...]]  # The probability of a path, and its ranks


@dataclass(frozen=True)
class AheadTree:
    """The tree for rows with one number of guesses."""

    topology: Topology
    counts: tuple[int, ...]  # Steps of virtual nodes after each node
    chances: tuple[float, ...]  # Probability that each node is the last accepted one

    @property
    def size(self) -> int:
        """Nodes and virtual nodes."""
        return self.topology.size + sum(self.counts)

    @property
    def accepted(self) -> float:
        """Expected tokens accepted below the root."""
        return sum(chance * depth for chance, depth in zip(self.chances, self.topology.depths, strict=True))


@lru_cache(maxsize=64)
def ahead_trees(chances_KR: tuple[tuple[float, ...], ...], size: int) -> tuple[AheadTree, ...]:
    """The trees with the most tokens a pass in the long run, for 0 to K guesses, by the chance that the guess of a rank
    is right at a depth. Each has at most `size` nodes, root and virtual nodes included, and the chances of different
    depths count as independent. Howard's policy iteration: with the value of every state, each tree is chosen anew for
    its tokens plus the value of the state that follows. UserError if the root with its virtual nodes has more."""
    depths = len(chances_KR)
    if size <= depths:
        raise UserError(f"a tree with virtual nodes for {depths} steps needs at least {depths + 1} nodes, got {size}; "
                        "ask for more")
    values = [float(guesses) for guesses in range(depths + 1)]
    trees: tuple[AheadTree, ...] = ()
    for _ in range(_ROUNDS):
        found = tuple(_best_tree(likeliest_paths(chances_KR, guesses, size), depths, size, values)
                      for guesses in range(depths + 1))
        if found == trees:
            break
        trees = found
        values = _solved(trees)[1]
    return trees


def likeliest_paths(chances_KR: Sequence[Sequence[float]], guesses: int, most: int) -> list[Path]:
    """The likeliest paths of at most `guesses` tokens, the likeliest first."""
    found: list[Path] = []
    heap: list[Path] = [(-1.0, ())]
    while heap and len(found) < most:
        chance, path = heappop(heap)
        found.append((-chance, path))
        if len(path) < guesses:
            for rank, right in enumerate(chances_KR[len(path)]):
                if right > 0:
                    heappush(heap, (chance * right, (*path, rank)))
    # Without the root, which every tree has.
    return found[1:]


def _best_tree(paths: list[Path], depths: int, size: int, values: Sequence[float]) -> AheadTree:
    """The number of nodes, and the virtual nodes after them, with the most tokens and value to come."""
    # Numbers of nodes below the root that are tried: all small ones, then every eighth more.
    numbers, count = [0], 1
    while count <= min(len(paths), size - 1):
        numbers.append(count)
        count += max(1, count // 8)
    trees = [_filled(paths[:number], depths, size, values) for number in numbers]
    to_come = [sum(chance * values[count] for chance, count in zip(tree.chances, tree.counts, strict=True))
               for tree in trees]
    # Rounded: of trees whose worth differs by rounding alone the smaller one is taken, on every machine.
    return max(zip(trees, to_come, strict=True),
               key=lambda found: (round(found[0].accepted + found[1], 9), -found[0].size))[0]


def _filled(paths: list[Path], depths: int, size: int, values: Sequence[float]) -> AheadTree:
    """The tree of these paths with as many virtual nodes as fit, those removed that are worth least."""
    topology = Topology.from_paths(path for _, path in paths)
    reached = [1.0, *(chance for chance, _ in paths)]
    last = list(reached)
    for node, parent in enumerate(topology.parents[1:], start=1):
        # A node is the last accepted one where it is reached and none of its children is.
        last[parent] -= reached[node]
    # All nodes start with all virtual nodes; a removal costs what a shorter next tree loses if the node is the last.
    counts = [depths] * topology.size
    heap = [(chance * (values[depths] - values[depths - 1]), node) for node, chance in enumerate(last)]
    heapify(heap)
    for _ in range(topology.size * (depths + 1) - size):
        _, node = heappop(heap)
        counts[node] -= 1
        if counts[node]:
            heappush(heap, (last[node] * (values[counts[node]] - values[counts[node] - 1]), node))
    return AheadTree(topology, tuple(counts), tuple(max(chance, 0.0) for chance in last))


def _solved(trees: Sequence[AheadTree]) -> tuple[float, list[float]]:
    """(accepted tokens per pass in the long run, value of each state relative to the first)."""
    states = len(trees)
    moves_TT = torch.zeros(states, states, dtype=torch.float64)
    for state, tree in enumerate(trees):
        for chance, count in zip(tree.chances, tree.counts, strict=True):
            moves_TT[state, count] += chance
    rewards_T = torch.tensor([tree.accepted for tree in trees], dtype=torch.float64)
    # h + g = r + P h with h of the last state 0: unknowns are h of the others, and g.
    system_TT = torch.eye(states, dtype=torch.float64) - moves_TT
    system_TT[:, -1] = 1.0
    solved = torch.linalg.lstsq(system_TT, rewards_T[:, None], driver="gelsd").solution[:, 0].tolist()
    return solved[-1], [*solved[:-1], 0.0]


class LookaheadTrees(Policy):
    """The trees of `ahead_trees`, for 0, 1, ... guesses: each row gets the one for the number that it has."""

    def __init__(self, trees: Sequence[AheadTree]) -> None:
        if not trees:
            raise ValueError("a policy of trees by guesses needs at least 1 tree, got 0")
        self.trees = tuple(trees)
        self.max_size = max(tree.topology.size for tree in trees)
        self._most = max(sum(tree.counts) for tree in self.trees)
        self._width = max(1, *(tree.topology.width for tree in self.trees))

    def check(self, drafter: Proposer) -> None:
        if not drafter.virtual_nodes or drafter.reach != len(self.trees) - 1:
            raise UserError(f"these trees are made for {len(self.trees) - 1} steps of virtual nodes, the "
                            f"{drafter.family} drafter has {drafter.reach if drafter.virtual_nodes else 0}; choose "
                            "another policy")

    def grow(self, drafter: Proposer, state: DraftState, roots_B: Tensor, draws: Draws | None = None) -> TokenTree:
        root_B1 = torch.zeros_like(roots_B)[:, None]
        root = Frontier(nodes_BF=root_B1, parents_BF=root_B1 - 1, tokens_BF=roots_B[:, None])
        best_BFHR, known_BFHR = drafter.expand(state, root).best(self._width)
        guesses_B = (torch.full_like(roots_B, len(self.trees) - 1) if known_BFHR is None else
                     known_BFHR[:, 0, :, 0].sum(-1))
        parents_BN, ranks_BN, depths_BN, counts_BN, real_BN = (
            table_TN[guesses_B] for table_TN in _tables(self.trees, roots_B.device))
        rows_B1 = torch.arange(len(roots_B), device=roots_B.device)[:, None]
        guesses_BN = best_BFHR[:, 0][rows_B1, (depths_BN - 1).clamp(min=0), ranks_BN]
        tree = TokenTree.grown(torch.where(depths_BN > 0, guesses_BN, roots_B[:, None]), parents_BN, real_BN,
                               max_depth=max(tree.topology.depth for tree in self.trees),
                               most_children=max(tree.topology.most_children for tree in self.trees))
        size, most = self.max_size, self._most
        if tree.real_BN.device.type == "cpu":
            # Sizes are known at once here, and padding that no row needs costs time.
            size, most = torch.stack([tree.real_BN.sum(-1), counts_BN.sum(-1)]).amax(-1).tolist()
            tree = tree.packed(size)
        return replace(tree, lookahead=Lookahead(counts_BN=counts_BN[:, :size], most=most, nodes=size))


@remembered
def _tables(trees: tuple[AheadTree, ...], device: torch.device) -> list[Tensor]:
    """Parents, ranks, depths, virtual nodes and marks of real nodes of the trees, padded to one size, [T, N] each."""
    columns = zip(*((tree.topology.parents, tree.topology.ranks, tree.topology.depths, tree.counts,
                     (True,) * tree.topology.size) for tree in trees), strict=True)
    # Padded with zeros: the nodes that a smaller tree lacks are not real.
    return [pad_sequence([torch.tensor(row, device=device) for row in rows], batch_first=True) for rows in columns]
