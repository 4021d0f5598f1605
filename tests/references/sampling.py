"""The nucleus and a draw from a distribution, token by token."""

from collections.abc import Sequence
from math import fsum


def nucleus(probs: Sequence[float], top_p: float) -> list[float]:
    """The smallest set of likeliest tokens whose probabilities reach `top_p`, renormalised; of equally likely ones the
    highest ids stay."""
    bound, mass, kept = top_p + (fsum(probs) - 1), 0.0, set[int]()
    for token in sorted(range(len(probs)), key=lambda token: (-probs[token], -token)):
        if kept and mass >= bound:
            break
        kept.add(token)
        mass += probs[token]
    total = fsum(probs[token] for token in kept)
    return [prob / total if token in kept else 0.0 for token, prob in enumerate(probs)]


def draw(probs: Sequence[float], uniform: float) -> int:
    """The first token up to which the probabilities, in the order of the ids, add up to more than `uniform` of all."""
    wanted, mass = uniform * fsum(probs), 0.0
    for token, prob in enumerate(probs):
        mass += prob
        if mass > wanted:
            return token
    return max(token for token, prob in enumerate(probs) if prob > 0)
