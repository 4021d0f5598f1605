"""How the accepted length grows with the draft tree, by replaying answers: no further pass of the target is needed.

Greedy decoding emits the same answer through any tree, so once an answer is known, the exact accepted length of every
other tree follows from the states at its tokens (`draftsmith.modules.replay`).
"""

from collections.abc import Mapping, Sequence

from ..modules import Drafter, Features, Target, Topology, replay

SIZES = (16, 32, 64)
"""Nodes of the trees that are replayed, root included."""
Answered = tuple[Sequence[int], Sequence[int]]
"""Tokens of a prompt and of its greedy answer."""


def accepted_length_by_tree_size(
    target: Target, drafter: Drafter, topology: Topology, answers: Mapping[str, Sequence[Answered]]
) -> dict[str, dict[str, float]]:
    """Accepted length of the prefixes of a best-first tree, by prompt set and number of nodes.

    Args:
        target: wrote the answers.
        drafter: bound to it.
        topology: the tree, best node first.
        answers: prompts with their greedy answers, by prompt set.
    """
    found = {}
    for name, rows in answers.items():
        features = [_encoded(target, drafter, row) for row in rows]
        sizes = sorted({min(size, topology.size) for size in SIZES})
        found[name] = {
            # One row at a time: the replayed logits of a row take nodes x vocabulary floats.
            str(size): replay(drafter, target, features, topology.prefix(size), batch_size=1).accepted_length
            for size in sizes
        }
    return found


def _encoded(target: Target, drafter: Drafter, row: Answered) -> Features:
    prompt, answer = row
    supervised = [False] * len(prompt) + [True] * len(answer)
    return target.encode(Features.from_rows([([*prompt, *answer], supervised)]), drafter.taps)
