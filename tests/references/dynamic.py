"""Slow plain twin of the dynamic tree: candidates level by level in a dictionary, the best subset by trying all."""

from itertools import combinations
from math import exp


def candidates(log_q_of, root, depth, width):
    """{path: log-probability} of everything EAGLE-2 records; `log_q_of(path)` gives the [V] scores below a path."""
    found, frontier = {}, {(): 0.0}
    for _ in range(depth):
        level = {}
        for path, value in frontier.items():
            best = log_q_of((root, *path)).topk(width)
            for score, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                level[(*path, token)] = value + score
        found.update(level)
        frontier = dict(sorted(level.items(), key=lambda item: -item[1])[:width])
    return found


def best_sum(values, count):
    """Largest sum of probabilities of a connected set of `count` paths."""
    best = 0.0
    for chosen in combinations(values, count):
        kept = set(chosen)
        if all(len(path) == 1 or path[:-1] in kept for path in kept):
            best = max(best, sum(exp(values[path]) for path in kept))
    return best
