"""Rules that end a draft early, under one interface.

A rule sees what has been drafted and nothing later. Dropping a sampled token because of its own probability would bias
the output (arXiv:2607.05147); so a rule stops either before a token is drawn, knowing its distribution only, or after
a token that stays in the draft.

Shapes: B rows, T tokens drafted so far, J of them judged, D width of the drafter's states.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import log

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ..errors import UserError
from ..verification.sampling import SamplingSetting


@dataclass(frozen=True, kw_only=True)
class Drafted:
    """The tokens drafted so far. Probabilities are the drafter's own, as it was trained, before any temperature."""

    log_probs_BT: Tensor
    """log-probability of each token."""
    peaks_BT: Tensor
    """log-probability of the likeliest token at the same places."""
    judged_BJ: Tensor | None = None
    """The values that `StoppingRule.judge` made of the drafter's state at each token that it has read: all but the
    newest one in `after`, all of them in `before`. None before the first one, and for rules that read no states."""

    @property
    def length(self) -> int:
        """Tokens drafted so far."""
        return self.log_probs_BT.shape[1]


class StoppingRule:
    """Says which rows draft no further. A rule may stop before a token, after it, or both."""

    reads_states: bool = False
    """True if `judge` is asked."""
    judges_root: bool = False
    """True if `judge` is asked at the root too, from which the first token is guessed."""

    def judge(self, state_BD: Tensor, step: int) -> Tensor:
        """A number for each row from the drafter's state at a drafted token, [B]: `Drafted.judged_BJ` collects them.

        Args:
            state_BD: the states.
            step: tokens that were drafted before, that one included.

        Raises:
            NotImplementedError: for rules that read no states.
        """
        raise NotImplementedError(f"{type(self).__name__} reads no states")

    def check_sampling(self, setting: SamplingSetting) -> None:
        """Raise UserError if the rule was made for another sampling of the answers; most serve all."""

    def before(self, drafted: Drafted, peak_B: Tensor) -> Tensor | None:
        """Rows that do not draft the next token, whose distribution has the peak `peak_B` (log); None for no row."""
        return None

    def after(self, drafted: Drafted) -> Tensor | None:
        """Rows that keep what they drafted, at least one token, and stop after it; None for no row."""
        return None


def _check_share(name: str, value: float) -> None:
    if not 0 < value < 1:
        raise ValueError(f"{name} must be above 0 and below 1, got {value}")


@dataclass(frozen=True)
class MaxProbability(StoppingRule):
    """Draft nothing where the drafter's best guess has less than this probability."""

    threshold: float
    """Probability."""

    def __post_init__(self) -> None:
        _check_share("threshold", self.threshold)

    def before(self, drafted: Drafted, peak_B: Tensor) -> Tensor | None:
        # The peak says nothing of the token that would be drawn, so that samples keep their law.
        return peak_B < log(self.threshold)


@dataclass(frozen=True)
class PathProbability(StoppingRule):
    """Stop after the token at which the product of the drafted tokens' probabilities falls below this."""

    threshold: float
    """Probability of the whole draft."""

    def __post_init__(self) -> None:
        _check_share("threshold", self.threshold)

    def after(self, drafted: Drafted) -> Tensor | None:
        # The token that takes the product below the bound stays: it would be dropped for its own probability.
        return drafted.log_probs_BT.sum(-1) < log(self.threshold)


@dataclass(frozen=True)
class EarlyExit(StoppingRule):
    """Kangaroo's second exit (arXiv:2404.18911): stop after the first token whose distribution peaks below eta.

    The token that says so is kept and verified.
    """

    eta: float = 0.6
    """Probability."""

    def __post_init__(self) -> None:
        _check_share("eta", self.eta)

    def after(self, drafted: Drafted) -> Tensor | None:
        return drafted.peaks_BT[:, -1] < log(self.eta)


@dataclass(frozen=True)
class RejectionRisk(StoppingRule):
    """SpecDec++ (arXiv:2405.19715): stop once it is likely that a drafted token will be rejected.

    The risk is 1 - prod_j P_j over the tokens j that the drafter has read, P_j the estimated probability that token j
    is accepted if those before it are. The newest token has not been read yet: it stays in the draft, unjudged.
    """

    log_acceptance: Callable[[Tensor], Tensor]
    """log P_j, [B], of the drafter's states [B, D] at tokens: an acceptance head."""
    setting: SamplingSetting
    """The sampling of answers for which it was calibrated."""
    threshold: float = 0.7
    """Largest risk with which drafting goes on; the paper's h."""
    least: int = 2
    """Tokens that are drafted whatever the risk; the paper's k_min."""

    reads_states = True

    def __post_init__(self) -> None:
        _check_share("threshold", self.threshold)
        if self.least < 1:
            raise ValueError(f"least must be at least 1, got {self.least}")

    def judge(self, state_BD: Tensor, step: int) -> Tensor:
        return self.log_acceptance(state_BD)

    def check_sampling(self, setting: SamplingSetting) -> None:
        if setting != self.setting:
            raise UserError(f"this acceptance head was calibrated for {self.setting}, but answers are sampled at "
                            f"{setting}; train a head for that with draftsmith specdec, or choose another policy")

    def after(self, drafted: Drafted) -> Tensor | None:
        if drafted.length < self.least or drafted.judged_BJ is None:
            return None
        # 1 - exp(x) loses all digits of a small risk; expm1 keeps them.
        return -torch.expm1(drafted.judged_BJ.sum(-1)) > self.threshold


@dataclass(frozen=True)
class Judged(StoppingRule):
    """A rule by the drafter's own judgement of its guesses (DSpark, arXiv:2607.05147).

    Each is made from the slot and the token before the guess: it says nothing of which token will be drawn.
    """

    judgement: Callable[[Tensor, int], Tensor]
    """Logit [B] of the acceptance of the guess made from the drafter's states [B, D] at a step."""

    reads_states = True
    judges_root = True

    def judge(self, state_BD: Tensor, step: int) -> Tensor:
        return logsigmoid(self.judgement(state_BD, step).float())

    def chances_of(self, drafted: Drafted) -> Tensor:
        """Chances that the first 1, 2 ... guesses are all accepted, [B, J], that of the next guess the last one."""
        if drafted.judged_BJ is None:
            raise ValueError("nothing was judged; the drafter's states at the root come first")
        return drafted.judged_BJ.cumsum(-1).exp()


@dataclass(frozen=True)
class JudgedPath(Judged):
    """Draft nothing where the draft would hardly be accepted with one token more."""

    threshold: float
    """Probability that the whole draft is accepted, the next token included."""

    def __post_init__(self) -> None:
        _check_share("threshold", self.threshold)

    def before(self, drafted: Drafted, peak_B: Tensor) -> Tensor | None:
        return self.chances_of(drafted)[:, -1] < self.threshold


@dataclass(frozen=True)
class PaidGuesses(Judged):
    """Stop all rows of a batch before the guess with which it would emit fewer tokens a second (DSpark, alg. 1).

    Let a_ri be the chance that the first i guesses of row r are all accepted. With j guesses a row, a step of R rows
    emits R + sum_r sum_{i <= j} a_ri tokens in T_j seconds. The rows are verified as one rectangle, where a shorter row
    saves nothing: they end together, at the first decrease, since looking further would read what may be dropped.
    """

    seconds: tuple[float, ...]
    """T_j of 0, 1, 2 ... guesses a row; the last is also that of any more."""

    def before(self, drafted: Drafted, peak_B: Tensor) -> Tensor | None:
        gains_J = self.chances_of(drafted).sum(0)
        emitted = len(peak_B) + gains_J[:-1].sum()
        now, then = (self.seconds[min(drafted.length + more, len(self.seconds) - 1)] for more in (0, 1))
        return ((emitted + gains_J[-1]) / then < emitted / now).expand(len(peak_B))
