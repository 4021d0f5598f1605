"""Settings of a drafter of blocks, and which of them go together."""

from dataclasses import dataclass
from typing import Any, Literal

from ...config_checks import Parts, Size
from ...errors import UserError
from ...parts.feature_drafter import TappedConfig
from .corrections import CORRECTIONS, CorrectionName, Markov


@dataclass(frozen=True, kw_only=True)
class BlockDraftConfig(TappedConfig):
    """The shape of a drafter of blocks."""

    training_only = frozenset({"anchors"})
    ahead = ("block_size",)
    spare = 1
    num_layers: Parts = 2
    """Decoder layers of the backbone; the papers have 5, DSpark's ablation 2."""
    block_size: Parts = 5
    """Slots of a block, S, that of the root's token included."""
    aligned: Literal["next", "same"] = "next"
    """Token that a slot predicts: `next`, the one after its own position (DSpark), or `same`, the one at it (DFlash),
    with which a block drafts a token fewer."""
    causal: bool = True
    """Whether a slot sees the slots before it alone (JetSpec) or the whole block (DFlash, DSpark)."""
    correction: CorrectionName = "none"
    """Lets a guess depend on the tokens before it in its block. `markov`: a low-rank bigram table (DSpark), `gated` and
    `rnn` its two other forms; `selector`: a choice among a slot's 16 likeliest tokens (DFlash 2); `refiner`: a bias by
    all tokens before in the block, mixed place by place (XPress); `gru`: one by these tokens in a recurrent state
    (Domino); `state`: a gated layer that changes the slot's state before the output layer (DFly); `none`: each slot
    guesses alone (DFlash)."""
    rank: Size = 64
    """Rank of the correction, 256 in the papers; of `gru` a quarter of the recurrent state; of `state` the width of its
    gated layer, in the paper the target's."""
    conv: bool = False
    """Whether the slots before it flow into a slot's input and output of each attention and MLP (DFlash 2)."""
    confidence: bool = False
    """Whether the drafter also learns the chance that each of its guesses is accepted, from the slot and the token
    before (DSpark); the policy `confident` ends drafts by it. With a draft vocabulary steps take nearly twice as long,
    since the chance needs the target's whole distribution."""
    residual: bool = False
    """Whether every slot also reads the newest fused state of the text, added to its embedding; no engine does."""
    mask_token_id: int | None = None
    """Token of the target that stands for a mask, whose embedding the slots after the first read; one that no text has.
    None trains a row of the drafter's own, which serving engines cannot hold."""
    anchors: Size | None = None
    """Most places of a row after which a block is trained, drawn anew in each step; None trains one after every token.
    The papers draw 512."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.aligned == "same" and self.block_size == 1:
            raise UserError("block_size is 1 and aligned 'same', and the only slot would predict the token that it "
                            "reads; set block_size to at least 2, or aligned to next")
        if self.qk_norm is False:
            raise UserError("qk_norm is false, and the layers of blocks always have norms of queries and keys, as all "
                            "layouts of them do; leave qk_norm out")
        kind = CORRECTIONS[self.correction]
        if kind.chooses and self.vocabulary_size is not None:
            raise UserError(f"correction is {self.correction!r}, which chooses among all tokens of the target, and "
                            f"vocabulary_size is {self.vocabulary_size}; leave vocabulary_size out, or set correction "
                            "to markov")
        if kind.own_token and self.aligned != "same":
            raise UserError(f"correction is {self.correction!r}, whose slots predict their own token, and aligned is "
                            f"{self.aligned!r}; set aligned to same, or correction to markov")
        if self.correction == "gru" and self.num_steps == 1:
            raise UserError("correction is 'gru', which corrects every guess of a block but the first, and block_size "
                            f"{self.block_size} drafts one token; raise block_size, or set correction to none")
        if self.confidence and kind is not Markov:
            raise UserError(f"confidence reads the table of a Markov head, and correction is {self.correction!r}; set "
                            "confidence to false, or correction to markov")

    def check_training(self, train: Any) -> None:
        """A distribution for confidence to learn from, and no loss of states. Raises UserError."""
        if self.confidence and (train.objective == "hard" or isinstance(train.step_weights, str)):
            raise UserError("confidence learns the acceptance from the target's distribution, with fixed weights of the"
                            f" steps, got objective {train.objective!r} and step_weights {train.step_weights!r}; set "
                            "objective to soft or hard_tvd and step_weights to a number, or confidence to false")
        if train.feature_weight:
            raise UserError(f"feature_weight is {train.feature_weight}, but slots estimate no state of the target; set "
                            "feature_weight to 0")

    def weighed(self, weights: tuple[float, ...], progress: float) -> tuple[float, ...]:
        """Weight of each draft step; with a correction that the slots learn to guess without, first those with it."""
        own = weights[: self.num_steps]
        return own if len(own) == len(weights) else CORRECTIONS[self.correction].weighed(own, progress)

    @property
    def num_steps(self) -> int:
        """Tokens that a block drafts."""
        return self.block_size - (self.aligned == "same")

    def inherits(self, name: str, start: Any) -> bool:
        """Alignment and sight are those asked for, whose defaults are two of several methods; choices among candidates
        have the whole vocabulary."""
        return name not in ("aligned", "causal") and not (
            name == "vocabulary_size" and CORRECTIONS[self.correction].chooses)

    def carries(self, name: str, start: Any) -> bool:
        """Further layers pass the state on, `fc` reads nothing of further taps, and a new correction or a further rank
        of it corrects nothing. These leave all guesses as they were; so do fewer or further slots if they are causal.
        All weights also fit slots of another alignment or sight, which training then has to tell what to guess."""
        former = getattr(start, name)
        match name:
            case "num_layers":
                fits = former < self.num_layers
            case "taps":
                fits = set(former) < set(self.taps or ())
            case "correction":
                fits = former == "none"
            case "rank":
                fits = start.correction == "none" or (
                    self.correction in ("markov", "selector", "state") and former < self.rank)
            case "confidence" | "conv":
                fits = not former
            case _:
                # The refiner's mixture of further slots is none.
                fits = name in ("aligned", "causal", "block_size")
        return super().carries(name, start) or fits
