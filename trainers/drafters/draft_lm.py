"""Training a draft language model on the target's answers (FastDraft, arXiv:2411.11055, section 3).

The default is sequence-level distillation: cross entropy on the target's answers at several temperatures. A next stage
starts from the exported folder of the one before, `drafter.folder`.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from ...modules.config_checks import Natural, NotNegative
from ...modules.drafters.draft_lm import DraftLM
from ...modules.drafters.draft_lm_config import DraftLMConfig, planned
from ...modules.interfaces.drafter import Drafter
from ...modules.target.loading.hf_folder import folder_digest
from ...modules.target.model import Target
from ..base import DraftModule
from ..train_config import Rate, TrainConfig


@dataclass(frozen=True, kw_only=True)
class DraftLMTrainConfig(TrainConfig):
    """Shape and training of a draft language model."""

    drafter: DraftLMConfig = field(default_factory=DraftLMConfig)
    """The model."""
    lr: Rate = 6e-4
    """Peak learning rate of AdamW; 1e-3 suits a new model, about half of it an initialised one."""
    warmup_steps: Natural = 40
    """Optimizer steps over which the learning rate rises from zero; it falls along a cosine afterwards."""
    weight_decay: NotNegative = 0.01
    """Decoupled weight decay of AdamW; biases and other vectors are exempt."""


class DraftLMModule(DraftModule):
    """A draft language model in training: its state at position p learns the token at p + 1, and with mask tokens also
    those after it.

    Raises:
        UserError: if the model does not fit this target; see DraftModule for others.
    """

    drafter_class = DraftLM
    decay = 1.0  # of all depths
    config: DraftLMTrainConfig
    drafter: DraftLM

    def __init__(
        self, target: Target, config: TrainConfig | None = None, *, token_counts: Tensor | None = None
    ) -> None:
        super().__init__(target, config, token_counts=token_counts)
        planned(self.config.drafter, target)

    def build_drafter(self) -> Drafter:
        """The initial model, bound to the target; the hash of the folder that it came from is noted."""
        # Hashed before it is read: a checkpoint of another model in this folder is refused.
        if self.config.drafter.folder is not None:
            self._folder_digest = folder_digest(Path(self.config.drafter.folder))
        return super().build_drafter()

    def recipe(self) -> dict[str, Any]:
        """The shared settings and the hash of the model in the folder: a checkpoint of another model is refused."""
        folder = {} if self.config.drafter.folder is None else {"model_in_folder": self._folder_digest}
        return {**super().recipe(), **folder}
