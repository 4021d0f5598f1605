"""Drafted tokens at equal accepted length: an acceptance head (SpecDec++, arXiv:2405.19715) against rules without one.

On whole drafts with the exact acceptance of each token every stopping rule says where it would have stopped, which
gives its drafted tokens and its expected accepted length without decoding again. Thresholds are swept; between two of
them both figures are those of a draft that takes either at random.

Shapes: C chains, T tokens of a chain.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .acceptance_examples import Rollouts

SWEEP = (0.0, *torch.linspace(-14, 8, 300).sigmoid().tolist(), 2.0)
"""Thresholds: never, equally spaced in log-odds, always."""
FIXED, BEFORE, AFTER, PRODUCT, HEAD = NAMES = (
    "fixed number", "max q before", "max q after", "product of q", "acceptance head")
"""Names of rules: a number of tokens; the probability of the likeliest token, with the unsure one dropped or kept; the
path's probability; SpecDec++'s."""
Lengths = Callable[[float], Tensor]
"""Tokens that each chain keeps under a threshold, [C]."""
Point = tuple[float, float]
"""Expected accepted length and mean number of drafted tokens."""


@dataclass(frozen=True, kw_only=True)
class DraftedTokens:
    """Drafted tokens of every rule where the expected accepted length is the same."""

    expected_accepted_length: float
    """Tokens of a pass, the target's own included."""
    by_rule: dict[str, float | None]
    """Mean drafted tokens of a pass by the name of the rule; None where no threshold reaches this length."""


def rules(chains: Rollouts, estimates_CT: Tensor) -> dict[str, Lengths]:
    """The rules of `modules/policies/stopping_rules.py` on whole chains.

    Args:
        chains: whole drafts.
        estimates_CT: a head's estimated acceptance of each token.
    """
    # A sampled token's own probability says little; that of the likeliest one at its place is the drafter's confidence.
    peaks_CT, path_CT = chains.peaks_CT.exp(), chains.log_probs_CT.cumsum(1).exp()
    return {
        BEFORE: lambda bound: first(peaks_CT < bound) - (peaks_CT < bound).any(1).long(),
        AFTER: lambda bound: first(peaks_CT < bound),
        PRODUCT: lambda bound: first(path_CT < bound),
        HEAD: lambda bound: kept_by_head(estimates_CT, bound),
    }


def kept_by_head(estimates_CT: Tensor, bound: float, *, least: int = 1, most: int | None = None) -> Tensor:
    """Tokens that `RejectionRisk` keeps of each chain, [C].

    Args:
        estimates_CT: the estimated acceptance of each token.
        bound: probability that no token is rejected under which drafting ends: 1 - its threshold.
        least: tokens that are drafted whatever the risk.
        most: most tokens of a draft; None is the whole chain.
    """
    kept_CT = estimates_CT.cumprod(1)
    # Token t is judged when token t + 1 has been drafted, which stays.
    late_CT = torch.cat([torch.ones_like(kept_CT[:, :1]), kept_CT[:, :-1]], dim=1)
    return first(late_CT < bound).clamp(min=min(least, kept_CT.shape[1]), max=most)


def first(stops_CT: Tensor) -> Tensor:
    """Number of the first token, counted from 1, after which a draft stops; T where it never does, [C]."""
    count = stops_CT.shape[1]
    return torch.where(stops_CT.any(1), stops_CT.long().argmax(1) + 1, count)


def point(chances_CT: Tensor, lengths_C: Tensor) -> Point:
    """Expected accepted length, 1 + the sum over t of prod_{i <= t} P_i, and mean length of the drafts."""
    # A token counts as far as all before it were accepted and the draft was as long.
    kept_CT = torch.arange(1, chances_CT.shape[1] + 1) <= lengths_C[:, None]
    return 1 + float((chances_CT.double().cumprod(1) * kept_CT).sum(1).mean()), float(lengths_C.double().mean())


def curves(chains: Rollouts, found: Mapping[str, Lengths]) -> dict[str, list[Point]]:
    """The points of every rule under all thresholds, and those of a fixed number of tokens; shortest drafts first."""
    chances_CT = chains.chances_CT
    count, length = chances_CT.shape
    fixed = [point(chances_CT, torch.full((count,), kept)) for kept in range(length + 1)]
    return {FIXED: fixed} | {name: sorted(point(chances_CT, lengths(bound)) for bound in SWEEP)
                             for name, lengths in found.items()}


def drafted_at(points: list[Point], wanted: float) -> float | None:
    """Fewest drafted tokens where the expected accepted length is `wanted`, between two points; None beyond all."""
    # Between two thresholds a draft may take either at random: both figures are then interpolated.
    below = max((one for one in points if one[0] <= wanted), key=lambda one: (one[0], -one[1]), default=None)
    above = min((one for one in points if one[0] >= wanted), default=None)
    if below is None or above is None:
        return None
    share = 0.0 if above[0] == below[0] else (wanted - below[0]) / (above[0] - below[0])
    return below[1] + share * (above[1] - below[1])


def at_fixed_numbers(chains: Rollouts, found: Mapping[str, Lengths]) -> tuple[DraftedTokens, ...]:
    """Every rule at the accepted lengths of 1, 2, ... T - 1 drafted tokens."""
    points = curves(chains, found)
    return tuple(_row(points, length) for length, _ in points[FIXED][1:-1])


def at_head(chains: Rollouts, estimates_CT: Tensor, threshold: float, least: int, most: int) -> DraftedTokens:
    """A head's own policy, and every rule without a head at the accepted length that it reaches.

    Args:
        chains: whole drafts; the policy's are no longer.
        estimates_CT: the head's estimated acceptance of each token.
        threshold: risk of a rejection above which drafting ends.
        least: tokens that are drafted whatever the risk.
        most: most tokens of a draft.
    """
    kept_C = kept_by_head(estimates_CT, 1 - threshold, least=least, most=most)
    length, drafted = point(chains.chances_CT, kept_C)
    row = _row(curves(chains, {name: rule for name, rule in rules(chains, estimates_CT).items() if name != HEAD}),
               length)
    return DraftedTokens(expected_accepted_length=length, by_rule={**row.by_rule, HEAD: drafted})


def _row(points: Mapping[str, list[Point]], wanted: float) -> DraftedTokens:
    return DraftedTokens(expected_accepted_length=wanted,
                         by_rule={name: drafted_at(of_rule, wanted) for name, of_rule in points.items()})
