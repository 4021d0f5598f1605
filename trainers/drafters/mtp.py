"""Training a target's own head over several of its steps (FastMTP, arXiv:2509.18362)."""

from dataclasses import dataclass, field

from ...modules.drafters.mtp import Mtp, MtpConfig
from ..base import DraftModule
from ..train_config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class MtpTrainConfig(TrainConfig):
    """Training of a target's own head."""

    drafter: MtpConfig = field(default_factory=MtpConfig)
    """The drafter."""


class MtpModule(DraftModule):
    """A target's own head in training: step k at position p learns the token at p + 2 + k from the true tokens before
    it and its own states."""

    drafter_class = Mtp
    decay = 0.6  # FastMTP's
    config: MtpTrainConfig
    drafter: Mtp
