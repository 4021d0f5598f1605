"""Trees of tokens by the ranks of their nodes."""

from draftsmith.modules import SampledTree, Topology


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
