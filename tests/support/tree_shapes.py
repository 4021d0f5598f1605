"""Trees of tokens by the ranks of their nodes, by chance, and committed along a path."""

import torch
from draftsmith.modules import SampledTree, TargetRows, TokenTree, Topology
from torch import Tensor


def branching(*widths: int, temperature: float | None = None) -> SampledTree:
    """The tree in which every node of depth d has `widths[d]` children."""
    paths: list[tuple[int, ...]] = [()]
    for depth, width in enumerate(widths):
        paths += [(*path, rank) for path in paths if len(path) == depth for rank in range(width)]
    return SampledTree(Topology.from_paths(paths), temperature)


def paths(topology: Topology) -> tuple[tuple[int, ...], ...]:
    """The ranks that lead from the root to each node; empty for the root."""
    found: list[tuple[int, ...]] = [()]
    for parent, rank in zip(topology.parents[1:], topology.ranks[1:], strict=True):
        found.append((*found[parent], rank))
    return tuple(found)


def random_parents(rows: int, size: int, generator: torch.Generator) -> Tensor:
    """Parents of the nodes of random trees, [rows, size]."""
    return torch.tensor([[-1] + [int(torch.randint(0, node, (), generator=generator)) for node in range(1, size)]
                         for _ in range(rows)])


def random_trees(rows: int, size: int, generator: torch.Generator) -> TokenTree:
    """Random trees of tokens that are no special ones."""
    parents = random_parents(rows, size, generator)
    return TokenTree.from_parents(torch.randint(3, 100, (rows, size), generator=generator), parents)


def commit_path(rows: TargetRows, tree: TokenTree, ends: list[int]) -> list[list[int]]:
    """Commit the path to one node of each row; returns its tokens."""
    paths = [tree.ancestors_BNN[row, end].nonzero()[:, 0].tolist() for row, end in enumerate(ends)]
    counts, longest = [len(path) for path in paths], max(map(len, paths))
    padded = torch.tensor([path + list(range(len(path), longest)) for path in paths])
    rows.commit(padded, torch.tensor(counts), counts)
    return [tree.tokens_BN[row, path].tolist() for row, path in enumerate(paths)]
