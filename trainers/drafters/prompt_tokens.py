"""Training prompt tokens through the frozen target (arXiv:2405.18628, section 3.2)."""

from dataclasses import dataclass, field

from ...modules.drafters.prompt_tokens import PromptTokens, PromptTokensConfig
from ..train_config import Rate
from .lookahead_base import LookaheadModule, LookaheadTrainConfig


@dataclass(frozen=True, kw_only=True)
class PromptTokensTrainConfig(LookaheadTrainConfig):
    """Shape and training of prompt tokens."""

    lr: Rate = 1e-2
    """Peak learning rate of AdamW; the official code's, for the few weights there are."""
    drafter: PromptTokensConfig = field(default_factory=PromptTokensConfig)
    """The prompt tokens."""


class PromptTokensModule(LookaheadModule):
    """Prompt tokens in training: token k learns the target's distribution k + 2 places ahead."""

    drafter_class = PromptTokens
    config: PromptTokensTrainConfig
    drafter: PromptTokens
