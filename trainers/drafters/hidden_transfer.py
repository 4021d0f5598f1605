"""Training Hidden Transfer maps through the target's later layers (arXiv:2404.12022)."""

from dataclasses import dataclass, field

from torch import Tensor

from ...modules.drafters.hidden_transfer import HiddenTransfer, HiddenTransferConfig
from ...modules.target.model import Target
from .lookahead_base import LookaheadModule, LookaheadTrainConfig


@dataclass(frozen=True, kw_only=True)
class HiddenTransferTrainConfig(LookaheadTrainConfig):
    """Shape and training of Hidden Transfer maps."""

    lr: float = 1e-3
    """Peak learning rate of AdamW."""
    drafter: HiddenTransferConfig = field(default_factory=HiddenTransferConfig)
    """The maps."""


class HiddenTransferModule(LookaheadModule):
    """Hidden Transfer maps in training: map k learns the target's distribution k + 2 places ahead."""

    drafter_class = HiddenTransfer
    config: HiddenTransferTrainConfig
    drafter: HiddenTransfer

    def __init__(
        self, target: Target, config: HiddenTransferTrainConfig | None = None, *, token_counts: Tensor | None = None
    ) -> None:
        super().__init__(target, config or HiddenTransferTrainConfig(), token_counts=token_counts)
