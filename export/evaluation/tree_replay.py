"""Accepted length of trees of other sizes, and the calibration of the draft's confidence, from replayed answers.

Greedy decoding emits the same answer through any tree, so once an answer is known, the exact accepted length of every
other tree follows from the states at its tokens (`draftsmith.modules.replay`), without decoding again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ...modules import Confidence, ConfidenceCurve, Drafter, Ensemble, Features, Target, replay, replay_noting
from ...modules.tuning.held_out_ranks import proposed_text
from ...modules.tuning.rank_walk import walk
from .methods import Method

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


class TreeReplay:
    """Counts, answer by answer, what the prefixes of a method's tree would accept.

    Decoding through the largest prefix notes the confidence in all its guesses. What the smaller ones accept follows
    from the ranks of the answer's tokens, see `draftsmith.modules.tuning.rank_walk`; of a tree that is deeper than the
    ranks known it is decoded too.

    Args:
        target: the model that gave the answers.
        method: with a drafter that is bound to it and a best-first tree; of another one nothing is counted. Where it
            drafts next to copies, the tree that is used there is one of the sizes: what it accepts by itself.
    """

    def __init__(self, target: Target, method: Method) -> None:
        self.target, self.method = target, method
        self.counts: dict[str, dict[int, list[int]]] = {}
        """Tokens and passes by prompt set and number of nodes."""
        self.confidence = Confidence()

    def add(self, prompt_set: str, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Replay one greedy answer."""
        drafter, topology = self.method.trained, self.method.trees
        if drafter is None or topology is None:
            return
        used = {self.method.own_nodes} if isinstance(self.method.drafter, Ensemble) else set()
        *smaller, largest = sorted({min(size, topology.size) for size in {*SIZES, *used}} - {1})
        features = [_encoded(self.target, drafter, (prompt, answer))]
        text = proposed_text(drafter, features, max(topology.ranks) + 1).ranked if smaller else None
        for size in smaller:
            prefix = topology.prefix(size)
            if text is not None and prefix.depth <= text.ranks_PK.shape[1]:
                emitted = walk(text, prefix)
                self._count(prompt_set, size, sum(emitted), len(emitted))
            else:
                found = replay(drafter, self.target, features, prefix, batch_size=1)
                self._count(prompt_set, size, found.tokens, found.passes)
        noted = replay_noting(drafter, self.target, features, topology.prefix(largest), self.confidence)
        self._count(prompt_set, largest, noted.tokens, noted.passes)

    def _count(self, prompt_set: str, size: int, tokens: int, passes: int) -> None:
        counts = self.counts.setdefault(prompt_set, {}).setdefault(size, [0, 0])
        counts[0] += tokens
        counts[1] += passes

    @property
    def found(self) -> Replays:
        """The figures so far."""
        lengths = {name: {str(size): tokens / passes if passes else 0.0 for size, (tokens, passes) in sizes.items()}
                   for name, sizes in self.counts.items()}
        return Replays(lengths, self.confidence.curves() if lengths else {})


def _encoded(target: Target, drafter: Drafter, row: Answered) -> Features:
    prompt, answer = row
    supervised = [False] * len(prompt) + [True] * len(answer)
    return target.encode(Features.from_rows([([*prompt, *answer], supervised)]), drafter.taps)
