"""Accepted length of trees of other sizes, and the calibration of the draft's confidence, from replayed answers.

Greedy decoding emits the same answer through any tree, so once an answer is known, the exact accepted length of every
other tree follows from the states at its tokens (`draftsmith.modules.replay`), without decoding again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ...modules import Confidence, ConfidenceCurve, Ensemble, Features, Target, replay, replay_noting
from ...modules.tuning.held_out_ranks import proposed_text
from ...modules.tuning.rank_walk import walk
from .methods import Method

SIZES = (16, 32, 64)
"""Nodes of the trees that are replayed, root included."""


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
        used = {self.method.own_nodes()} if isinstance(self.method.drafter, Ensemble) else set()
        *smaller, largest = sorted({min(size, topology.size) for size in {*SIZES, *used}} - {1})
        # Only the answer's tokens are walked: the target did not choose those of the prompt.
        supervised = [False] * len(prompt) + [True] * len(answer)
        features = [self.target.encode(Features.from_rows([([*prompt, *answer], supervised)]), drafter.taps)]
        # One ranking of the drafter's guesses serves all sizes; each would cost a pass of the drafter otherwise.
        text = proposed_text(drafter, features, max(topology.ranks) + 1).ranked if smaller else None
        found: list[tuple[int, int, int]] = []
        for size in smaller:
            prefix = topology.prefix(size)
            if text is not None and prefix.depth <= text.ranks_PK.shape[1]:
                emitted = walk(text, prefix)
                found.append((size, sum(emitted), len(emitted)))
            else:
                decoded = replay(drafter, self.target, features, prefix, batch_size=1)
                found.append((size, decoded.tokens, decoded.passes))
        noted = replay_noting(drafter, self.target, features, topology.prefix(largest), self.confidence)
        for size, tokens, passes in [*found, (largest, noted.tokens, noted.passes)]:
            counts = self.counts.setdefault(prompt_set, {}).setdefault(size, [0, 0])
            counts[0] += tokens
            counts[1] += passes

    @property
    def found(self) -> Replays:
        """The figures so far."""
        lengths = {name: {str(size): tokens / passes if passes else 0.0 for size, (tokens, passes) in sizes.items()}
                   for name, sizes in self.counts.items()}
        return Replays(lengths, self.confidence.curves() if lengths else {})
