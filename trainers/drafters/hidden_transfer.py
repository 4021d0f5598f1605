"""Training Hidden Transfer maps through the target's later layers (arXiv:2404.12022)."""

from dataclasses import dataclass, field

from ...modules.drafters.hidden_transfer import HiddenTransfer, HiddenTransferConfig
from ..train_config import Rate
from .lookahead_base import LookaheadModule, LookaheadTrainConfig


@dataclass(frozen=True, kw_only=True)
class HiddenTransferTrainConfig(LookaheadTrainConfig):
    """Shape and training of Hidden Transfer maps."""

    lr: Rate = 1e-3
    """Peak learning rate of AdamW."""
    drafter: HiddenTransferConfig = field(default_factory=HiddenTransferConfig)
    """The maps."""


class HiddenTransferModule(LookaheadModule):
    """Hidden Transfer maps in training: map k learns the target's distribution k + 2 places ahead."""

    drafter_class = HiddenTransfer
    config: HiddenTransferTrainConfig
    drafter: HiddenTransfer
