"""When drafting stops: rules behind one interface, and the chain that asks them after every token.

A rule sees what has been drafted and nothing later. Dropping a sampled token because of its own probability would bias
the output (arXiv:2607.05147); so a rule stops either before a token is drawn, knowing its distribution only, or behind
a token that stays in the draft.

Shapes: B rows, T tokens drafted so far, N nodes, Q draft vocabulary.
"""

from dataclasses import dataclass, field
from math import log

import torch
from torch import Tensor

from .acceptance import Accepted
from .asking import Asker, check_temperature, sample, tempered, within_reach
from .drafter import DraftState, Frontier, Proposer
from .policies import Policy
from .streams import Draws
from .tree import Drawn, TokenTree


@dataclass(frozen=True, kw_only=True)
class Drafted:
    """The tokens drafted so far. Probabilities are the drafter's own, as it was trained, before any temperature."""

    log_probs_BT: Tensor
    """log-probability of each token."""
    peaks_BT: Tensor
    """log-probability of the likeliest token at the same places."""

    @property
    def length(self) -> int:
        """Tokens drafted so far."""
        return self.log_probs_BT.shape[1]


class StoppingRule:
    """Says which rows draft no further. A rule may stop before a token, behind it, or both."""

    def before(self, drafted: Drafted, peak_B: Tensor) -> Tensor | None:
        """Rows that do not draft the next token, whose distribution has the peak `peak_B` (log); None for no row."""
        return None

    def after(self, drafted: Drafted) -> Tensor | None:
        """Rows that keep what they drafted, at least one token, and stop behind it; None for no row."""
        return None

    def learn(self, accepted_B: Tensor, drafted_B: Tensor, length: int) -> None:
        """How much of the last drafts, of at most `length` tokens, the target accepted; nothing by default."""


def _check_share(name: str, value: float) -> None:
    if not 0 < value < 1:
        raise ValueError(f"{name} must be above 0 and below 1, got {value}")


@dataclass(frozen=True)
class FixedLength(StoppingRule):
    """Always the same number of tokens, 0 included: no drafting."""

    length: int
    """Tokens."""

    def __post_init__(self) -> None:
        if self.length < 0:
            raise ValueError(f"length must be at least 0, got {self.length}")

    def before(self, drafted: Drafted, peak_B: Tensor) -> Tensor | None:
        return torch.full_like(peak_B, drafted.length >= self.length, dtype=torch.bool)


@dataclass(frozen=True)
class MaxProbability(StoppingRule):
    """Draft nothing where the drafter's best guess has less than this probability."""

    threshold: float
    """Probability."""

    def __post_init__(self) -> None:
        _check_share("threshold", self.threshold)

    def before(self, drafted: Drafted, peak_B: Tensor) -> Tensor | None:
        return peak_B < log(self.threshold)


@dataclass(frozen=True)
class PathProbability(StoppingRule):
    """Stop behind the token at which the product of the drafted tokens' probabilities falls below this."""

    threshold: float
    """Probability of the whole draft."""

    def __post_init__(self) -> None:
        _check_share("threshold", self.threshold)

    def after(self, drafted: Drafted) -> Tensor | None:
        return drafted.log_probs_BT.sum(-1) < log(self.threshold)


@dataclass(frozen=True)
class EarlyExit(StoppingRule):
    """Kangaroo's second exit (arXiv:2404.18911): stop behind the first token whose distribution peaks below eta.

    The token that says so is kept and verified.
    """

    eta: float = 0.6
    """Probability."""

    def __post_init__(self) -> None:
        _check_share("eta", self.eta)

    def after(self, drafted: Drafted) -> Tensor | None:
        return drafted.peaks_BT[:, -1] < log(self.eta)


@dataclass
class AdaptiveThreshold(StoppingRule):
    """Draft & Verify's threshold (arXiv:2309.08168): stop behind a token less likely than a threshold that adapts.

    After every pass, with m the running accepted share: m <- m / 2 + share / 2; th' = th + step while m is below
    `wanted`, th - step above it unless every draft ran to its full length; th <- 0.9 th + 0.1 th'. The share is that of
    all rows together, the threshold one for all: what a row drafts may depend on its neighbours, what point masses emit
    does not. Kept on the device, where nothing waits for it.
    """

    threshold: float = 0.6
    """The first one, a probability."""
    wanted: float = 0.9
    """Accepted share of drafted tokens to aim at."""
    step: float = 0.01
    """How far a pass pulls the threshold, before smoothing."""
    _now: Tensor = field(init=False, repr=False)
    _share: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        _check_share("threshold", self.threshold)
        _check_share("wanted", self.wanted)
        self._now = torch.tensor(self.threshold, dtype=torch.float64)
        self._share = torch.tensor(self.wanted, dtype=torch.float64)

    def after(self, drafted: Drafted) -> Tensor | None:
        self._follow(drafted.log_probs_BT)
        return drafted.log_probs_BT[:, -1] < self._now.log()

    def learn(self, accepted_B: Tensor, drafted_B: Tensor, length: int) -> None:
        self._follow(accepted_B)
        total = drafted_B.sum()
        share = torch.where(total > 0, 0.5 * self._share + 0.5 * accepted_B.sum() / total.clamp(min=1), self._share)
        full = (drafted_B >= length).all()
        pulled = torch.where(
            share < self.wanted, self._now + self.step, torch.where(full, self._now, self._now - self.step)
        )
        smoothed = (0.9 * self._now + 0.1 * pulled).clamp(1e-6, 1.0)
        self._now, self._share = torch.where(total > 0, smoothed, self._now), share

    def _follow(self, like: Tensor) -> None:
        self._now, self._share = self._now.to(like.device), self._share.to(like.device)


class StoppedChain(Policy):
    """A chain of point masses, each the drafter's likeliest, that ends where a rule says so.

    It serves every family; from a one-shot family it saves verification only.

    Args:
        length: most tokens.
        stop: the rule.
        check_every: draft steps between two looks, from the host, at whether all rows have stopped, so that neither
            the drafter nor the target works for nothing. 0 never looks: the tree keeps its full size, padded, and
            nothing is read back while drafting.

    Raises:
        ValueError: if a number is too small.
    """

    def __init__(self, length: int, stop: StoppingRule, *, check_every: int = 1) -> None:
        if length < 1:
            raise ValueError(f"length must be at least 1, got {length}")
        if check_every < 0:
            raise ValueError(f"check_every must be at least 0, got {check_every}")
        self.length, self.stop, self.check_every = length, stop, check_every

    @property
    def max_size(self) -> int:
        return self.length + 1

    def grow(self, drafter: Proposer, state: DraftState, roots_B: Tensor, draws: Draws | None = None) -> TokenTree:
        asker = Asker(drafter, state)
        tokens, reals = [roots_B], [torch.ones_like(roots_B, dtype=torch.bool)]
        probs: list[Tensor] = []
        candidates: list[Tensor] = []
        empty_BT = torch.zeros(len(roots_B), 0, device=roots_B.device)
        drafted = Drafted(log_probs_BT=empty_BT, peaks_BT=empty_BT)
        for place in range(within_reach(self.length, drafter)):
            going_B = reals[-1] & ~_rows(self.stop.after(drafted) if place else None, roots_B)
            if self._looks(place):
                going, needed = torch.stack([going_B.any(), reals[-1].any()]).tolist()
                if not going:
                    kept = len(tokens) if needed else len(tokens) - 1
                    tokens, reals, probs = tokens[:kept], reals[:kept], probs[: kept - 1]
                    break
            log_probs_BQ = asker.ask(*_step(tokens[-1], place))[0][:, 0]
            peak_B = log_probs_BQ.amax(-1)
            log_q_BQ, entries_B = self._pick(log_probs_BQ, place, draws)
            own_B = log_probs_BQ.gather(1, entries_B[:, None])[:, 0]
            reals.append(going_B & (own_B > -torch.inf) & ~_rows(self.stop.before(drafted, peak_B), roots_B))
            tokens.append(asker.tokens(entries_B[:, None, None])[:, 0, 0])
            probs.append(log_q_BQ)
            candidates += [] if asker.candidates_BOQ is None else [asker.candidates_BOQ]
            drafted = Drafted(
                log_probs_BT=torch.cat([drafted.log_probs_BT, own_B[:, None]], dim=1),
                peaks_BT=torch.cat([drafted.peaks_BT, peak_B[:, None]], dim=1),
            )
        return self._chain(tokens, reals, self._drawn(probs, candidates, asker, draws))

    def _looks(self, place: int) -> bool:
        return self.check_every > 0 and place > 0 and place % self.check_every == 0

    def _pick(self, log_probs_BQ: Tensor, place: int, draws: Draws | None) -> tuple[Tensor, Tensor]:
        """(log q of the token's draw, its entry in the draft vocabulary)."""
        return log_probs_BQ, log_probs_BQ.argmax(-1)

    def _drawn(self, probs: list[Tensor], candidates: list[Tensor], asker: Asker, draws: Draws | None) -> Drawn | None:
        return None

    def _chain(self, tokens: list[Tensor], reals: list[Tensor], drawn: Drawn | None) -> TokenTree:
        tokens_BN = torch.stack(tokens, dim=1)
        parents_BN = (torch.arange(len(tokens), device=tokens_BN.device) - 1).expand_as(tokens_BN)
        # A chain's real nodes are the first ones, so that a plain count of them is their depth.
        return TokenTree.grown(
            tokens_BN, parents_BN, torch.stack(reals, dim=1), max_depth=len(tokens) - 1, most_children=1, drawn=drawn
        )

    def learn(self, tree: TokenTree, accepted: Accepted) -> None:
        self.stop.learn(accepted.counts_B - 1, tree.real_BN.sum(-1) - 1, self.length)


class SampledChain(StoppedChain):
    """The same chain with sampled tokens, verified by rejection (arXiv:2211.17192); greedy rows take the likeliest.

    Args:
        length: most tokens.
        stop: the rule.
        check_every: as in `StoppedChain`.
        temperature: the draft's; None takes each row's own.

    Raises:
        ValueError: if a number is too small.
    """

    def __init__(
        self, length: int, stop: StoppingRule, *, check_every: int = 1, temperature: float | None = None
    ) -> None:
        super().__init__(length, stop, check_every=check_every)
        check_temperature(temperature)
        self.temperature = temperature

    @property
    def samples(self) -> bool:
        return True

    def _pick(self, log_probs_BQ: Tensor, place: int, draws: Draws | None) -> tuple[Tensor, Tensor]:
        if draws is None:
            return super()._pick(log_probs_BQ, place, draws)
        log_q_B1Q = tempered(log_probs_BQ[:, None], self.temperature, draws)
        node_B1 = torch.full_like(draws.places_B, place)[:, None]
        return log_q_B1Q[:, 0], sample(log_q_B1Q, node_B1, 1, draws)[:, 0, 0]

    def _drawn(self, probs: list[Tensor], candidates: list[Tensor], asker: Asker, draws: Draws | None) -> Drawn | None:
        if draws is None or not probs:
            return None
        inner_N = torch.arange(len(probs) + 1, device=probs[0].device).clamp(max=len(probs) - 1)
        size = (len(draws.hot_B), len(inner_N))
        return Drawn(
            probs_BIQ=torch.stack(probs, dim=1).exp(),
            inner_BN=inner_N.expand(size),
            sampled_BN=draws.hot_B[:, None].expand(size),
            token_ids_Q=asker.token_ids_Q,
            candidates_BIQ=torch.cat(candidates[: len(probs)], dim=1) if candidates else None,
        )


def _rows(marks_B: Tensor | None, like_B: Tensor) -> Tensor:
    return torch.zeros_like(like_B, dtype=torch.bool) if marks_B is None else marks_B


def _step(token_B: Tensor, place: int) -> tuple[Frontier, Tensor | None]:
    """The last token of a chain as a frontier, and the column of its parent in the one before."""
    node_B1 = torch.full_like(token_B, place)[:, None]
    frontier = Frontier(nodes_BF=node_B1, parents_BF=node_B1 - 1, tokens_BF=token_B[:, None])
    return frontier, torch.zeros_like(node_B1) if place else None
