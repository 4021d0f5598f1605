"""The slow plain twin of the tree search: try every connected tree."""

from itertools import combinations


def best_expected_length(probability: dict[tuple[int, ...], float], nodes: int) -> float:
    """Largest expected accepted length of any connected tree of `nodes` nodes, the root included."""
    best = 1.0
    for chosen in combinations(probability, nodes - 1):
        kept = set(chosen)
        if all(len(path) == 1 or path[:-1] in kept for path in kept):
            best = max(best, 1.0 + sum(probability[path] for path in kept))
    return best
