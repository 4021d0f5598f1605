"""Calibration of a draft's confidence: the probability that it gave its guesses, and the share that was right.

A tree that follows the draft's confidence (EAGLE-2, arXiv:2406.16858, sections 3.2 and 4) is only as good as that
confidence is calibrated. A stored greedy answer shows for every guess of a pass whether it is right, the rejected ones
included, so the curve costs nothing beyond a replay that is made anyway.

Shapes: N nodes of a tree, A tokens of an answer left to draft, C bins of confidence.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import log

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ..decoding.answers import decode
from ..decoding.requests import DecodeSettings
from ..features import Features
from ..interfaces.drafter import Drafter
from ..interfaces.proposer import DraftState, JudgesGuesses, Proposals, Proposer
from ..policies.static_tree import Span, StaticTree
from ..random_streams import Draws
from ..target.model import Target
from ..token_tree import TokenTree, Topology
from .replay_acceptance import Acceptance, acceptance_of
from .replay_target import Replay

BINS = 10
"""Equal bins of confidence between 0 and 1."""
TEMPERATURES = tuple(2.0 ** (quarter / 4) for quarter in range(-8, 13))
"""Temperatures among which a drafter's judgement of its guesses is calibrated: from 1/4 to 8."""
_CHUNK = 512
"""Positions whose logits are computed at once."""


@dataclass(frozen=True, kw_only=True)
class ConfidenceBin:
    """Guesses of similar confidence."""

    guesses: int
    """Number of guesses."""
    mean_confidence: float | None
    """Average probability that the draft gave them; None without guesses."""
    acceptance_rate: float | None
    """Share of them that is right; None without guesses."""


@dataclass(frozen=True, kw_only=True)
class ConfidenceCurve:
    """Calibration curve: acceptance by confidence."""

    guesses: int
    """Number of guesses in all bins."""
    mean_confidence: float
    """Average probability that the draft gave them."""
    acceptance_rate: float
    """Share of them that is right."""
    expected_calibration_error: float
    """Distance between confidence and acceptance of a bin, averaged over guesses (arXiv:1706.04599, eq. 3)."""
    bins: tuple[ConfidenceBin, ...]
    """Equal bins from 0 to 1; the last one includes 1."""


class ConfidenceTally:
    """Sums over the guesses of each bin: their number, their confidence, the number of right ones."""

    def __init__(self) -> None:
        self.sums_C3 = torch.zeros(BINS, 3, dtype=torch.float64)

    def add(self, log_probs_N: Tensor, right_N: Tensor) -> None:
        """Add guesses with these log-probabilities."""
        confidence_N = log_probs_N.double().exp().clamp(max=1)
        bins_N = (confidence_N * BINS).long().clamp(max=BINS - 1)
        self.sums_C3.index_add_(0, bins_N, torch.stack([torch.ones_like(confidence_N), confidence_N, right_N.double()],
                                                       dim=1))

    def curve(self) -> ConfidenceCurve | None:
        """The calibration curve; None without guesses."""
        count, confidence, right = self.sums_C3.sum(0).tolist()
        if not count:
            return None
        gaps_C = (self.sums_C3[:, 1] - self.sums_C3[:, 2]).abs()
        return ConfidenceCurve(
            guesses=int(count), mean_confidence=confidence / count, acceptance_rate=right / count,
            expected_calibration_error=float(gaps_C.sum()) / count,
            bins=tuple(ConfidenceBin(guesses=int(count), mean_confidence=confidence / count if count else None,
                                     acceptance_rate=right / count if count else None)
                       for count, confidence, right in self.sums_C3.tolist()),
        )


@dataclass(kw_only=True)
class Confidence:
    """Confidence tallies of one drafter, by token and by path."""

    token: ConfidenceTally = field(default_factory=ConfidenceTally)
    """Probability of a token given the guesses before it, counted where these were right."""
    path: ConfidenceTally = field(default_factory=ConfidenceTally)
    """Product of the probabilities down to a node, by which EAGLE-2 ranks; right if the whole path is."""

    def add(self, guesses: "Guesses", topology: Topology, answer_A: Tensor) -> None:
        """Count the guesses of one pass.

        Args:
            answer_A: the target's next tokens; deeper guesses are not counted.
        """
        depths_N, parents_N = torch.tensor(topology.depths), torch.tensor(topology.parents).clamp(min=0)
        # Where the drafter had no guess, there is no path either.
        path_N = torch.where(topology.ancestors_NN, guesses.log_probs_N, 0.0).sum(-1)
        known_N = (depths_N > 0) & (depths_N <= len(answer_A)) & (path_N > -torch.inf)
        right_N = guesses.tokens_N == answer_A[(depths_N - 1).clamp(0, len(answer_A) - 1)]
        # The root is no guess.
        right_N[0] = True
        followed_N = ~(topology.ancestors_NN & ~right_N).any(-1)
        counted_N = known_N & followed_N[parents_N]
        self.token.add(guesses.log_probs_N[counted_N], right_N[counted_N])
        self.path.add(path_N[known_N], followed_N[known_N])

    def curves(self) -> dict[str, ConfidenceCurve]:
        """By what they are the confidence of; none when nothing was drafted."""
        found = {"token": self.token.curve(), "path": self.path.curve()}
        return {name: curve for name, curve in found.items() if curve is not None}


@torch.no_grad()
def calibrate_judgement(drafter: Drafter, features: Sequence[Features]) -> Tensor:
    """Give the judgement of each draft step a temperature, [K], so that the product of the judged chances down to it is
    calibrated on held-out greedy answers (sequential temperature scaling, arXiv:2607.05147): those before it are fixed.
    Raises ValueError for a drafter that does not judge its guesses.
    """
    if not (isinstance(drafter, JudgesGuesses) and drafter.judges):
        raise ValueError("this drafter does not judge its guesses")
    drafter.judge_temperatures_K.fill_(1.0)
    found: list[list[Tensor]] = [[] for _ in drafter.judge_temperatures_K]
    for batch in features:
        drafts = drafter(batch)
        # Guesses after a wrong one, or beyond the answer, are not verified; a block starts with a token of the answer.
        reached_BL = batch.labels(1)[1]
        for step, offset in enumerate(drafts.offsets):
            labels_BL, there_BL = batch.labels(offset)
            reached_BL = reached_BL & there_BL
            rights, logits = [], []
            for states_NX in torch.split(drafts.hidden_BLKD[:, :, step].flatten(0, 1), _CHUNK):
                guesses_N = drafter.project(states_NX, step).argmax(-1)
                rights.append(guesses_N if drafter.token_ids_Q is None else drafter.token_ids_Q[guesses_N])
                logits.append(drafter.judge(states_NX, step))
            right_BL = (torch.cat(rights) == labels_BL.flatten()).view_as(there_BL)
            found[step].append(torch.stack([torch.cat(logits).double(), right_BL.flatten().double(),
                                            reached_BL.flatten().double()]))
    before_P, right_P, chosen = torch.zeros(1), torch.ones(1), []
    for parts in found:
        logits_P, rights_P, reached_P = torch.cat(parts, dim=1).cpu()
        right_P, best = right_P * rights_P, (torch.inf, 1.0, before_P)
        for temperature in TEMPERATURES:
            log_chance_P, tally = before_P + logsigmoid(logits_P / temperature), ConfidenceTally()
            tally.add(log_chance_P[reached_P > 0], right_P[reached_P > 0])
            curve = tally.curve()
            error = 0.0 if curve is None else curve.expected_calibration_error
            # Of equal errors the one nearest to no change.
            best = min(best, (error, temperature, log_chance_P), key=lambda one: (one[0], abs(log(one[1]))))
        chosen.append(best[1])
        before_P = best[2]
    chosen_K = torch.tensor(chosen).to(drafter.judge_temperatures_K)
    drafter.judge_temperatures_K.copy_(chosen_K)
    return chosen_K


@dataclass(frozen=True)
class Guesses:
    """Guesses of a drafter at the nodes of a static tree in one pass of one row; the root is certain."""

    tokens_N: Tensor
    """Token of each node."""
    log_probs_N: Tensor
    """Draft log-probability of each node given its parent; minus infinity where there was no guess."""


class NotingTree(StaticTree):
    """A static tree that records the guesses for its one row and their log-probabilities, pass by pass."""

    def __init__(self, topology: Topology) -> None:
        super().__init__(topology)
        self.passes: list[Guesses] = []

    def grow(self, drafter: Proposer, state: DraftState, roots_B: Tensor, draws: Draws | None = None) -> TokenTree:
        self.passes.append(Guesses(roots_B.repeat(self.topology.size),
                                   torch.zeros(self.topology.size, device=roots_B.device)))
        return super().grow(drafter, state, roots_B, draws)

    def note(self, span: Span, proposals: Proposals) -> None:
        latest = self.passes[-1]
        latest.tokens_N[span.children_C] = span.of(proposals.tokens_BFHR)[0]
        latest.log_probs_N[span.children_C] = span.of(proposals.log_probs_BFHR)[0].float()


def replay_noting(drafter: Drafter, target: Target, features: Sequence[Features], topology: Topology,
                  confidence: Confidence) -> Acceptance:
    """`replay`, one row at a time, that also adds every guess to `confidence`.

    Args:
        drafter: bound to the target, on the features' device.
        target: the target that wrote the answers.
        features: encoded rows, one conversation each.
        topology: the static tree.
        confidence: the tallies to which the guesses are added.
    """
    source, policy = Replay(target, features, drafter=drafter), NotingTree(topology)
    result = decode(source, source.requests, DecodeSettings(batch_size=1), drafter=drafter, policy=policy)
    passes = iter(policy.passes)
    for generation in result.generations:
        # The first token of an answer comes from the prompt's pass; a tree of the root alone guesses nothing.
        tokens_A, place = torch.tensor(generation.tokens), 1
        for emitted in generation.emitted if policy.passes else ():
            guesses = next(passes)
            confidence.add(Guesses(guesses.tokens_N.cpu(), guesses.log_probs_N.cpu()), topology, tokens_A[place:])
            place += emitted
    return acceptance_of([count for one in result.generations for count in one.emitted], topology.depth)
