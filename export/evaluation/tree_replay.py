"""Accepted length of trees of other sizes, and the calibration of the draft's confidence, from replayed answers.

Greedy decoding emits the same answer through any tree, so once an answer is known, the exact accepted length of every
other tree follows from the states at its tokens (`draftsmith.modules.replay`), without decoding again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...modules import Confidence, ConfidenceCurve, Drafter, Features, Target, Topology, replay, replay_noting

SIZES = (16, 32, 64)
"""Nodes of the trees that are replayed, root included."""
Answered = tuple[Sequence[int], Sequence[int]]
"""Tokens of a prompt and of its greedy answer."""


@dataclass(frozen=True)
class Replays:
    """Figures from replayed answers."""

    accepted_lengths: dict[str, dict[str, float]] = field(default_factory=dict)
    """By prompt set and number of nodes."""
    confidence: dict[str, ConfidenceCurve] = field(default_factory=dict)
    """Calibration of the draft's confidence over all prompt sets: of a token, and of a path."""


def replay_trees(
    target: Target, drafter: Drafter, topology: Topology, answers: Mapping[str, Sequence[Answered]]
) -> Replays:
    """Accepted length of the prefixes of a best-first tree, and the confidence in all guesses of the largest.

    Args:
        target: the model that gave the answers.
        drafter: bound to it.
        topology: the tree, best node first.
        answers: prompts with their greedy answers, by prompt set.
    """
    found: dict[str, dict[str, float]] = {}
    confidence = Confidence()
    *smaller, largest = sorted({min(size, topology.size) for size in SIZES})
    for name, rows in answers.items():
        features = [_encoded(target, drafter, row) for row in rows]
        # One row at a time: the replayed logits of a row take nodes x vocabulary floats.
        found[name] = {str(size): replay(drafter, target, features, topology.prefix(size), batch_size=1).accepted_length
                       for size in smaller}
        noted = replay_noting(drafter, target, features, topology.prefix(largest), confidence)
        found[name][str(largest)] = noted.accepted_length
    return Replays(found, confidence.curves())


def _encoded(target: Target, drafter: Drafter, row: Answered) -> Features:
    prompt, answer = row
    supervised = [False] * len(prompt) + [True] * len(answer)
    return target.encode(Features.from_rows([([*prompt, *answer], supervised)]), drafter.taps)
