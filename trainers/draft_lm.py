"""Training a draft language model: on text, then on the target's answers (FastDraft, arXiv:2411.11055, section 3).

The default is sequence-level distillation: cross-entropy on what the target wrote, at several temperatures. Stages
chain through `drafter.folder`: the folder that the last one exported.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from ..modules.drafters.draft_lm import DraftLM
from ..modules.drafters.draft_lm_config import DraftLMConfig, planned
from ..modules.errors import UserError
from ..modules.features import Features
from ..modules.target.hf_folder import folder_digest
from ..modules.target.model import Target
from .base import DraftModule, Learned, TrainConfig
from .draft_vocabulary import reduced_vocabulary


@dataclass(frozen=True, kw_only=True)
class DraftLMTrainConfig(TrainConfig):
    """How a draft language model is shaped and trained."""

    drafter: DraftLMConfig = field(default_factory=DraftLMConfig)
    """The model."""
    lr: float = 6e-4
    """Peak learning rate of AdamW; a new model bears 1e-3, a begun one about half of it."""
    warmup_steps: int = 40
    """Optimizer steps over which the learning rate rises from zero; a cosine takes it back afterwards."""
    weight_decay: float = 0.01
    """Decoupled weight decay of AdamW; biases and other vectors are exempt."""
    decay: float = 1.0
    """Weight of depth k in the loss is decay ** k, with mask tokens; exits all weigh the same (arXiv:2407.01955)."""
    learn: Literal["answers", "text"] = "answers"
    """`answers` learns what the assistant wrote, `text` every token there is, prompts included."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.learn not in ("answers", "text"):
            raise UserError(f"learn must be 'answers' or 'text', got {self.learn!r}")


class DraftLMModule(DraftModule):
    """A draft language model in training: its state at index p learns the token at p + 1, and with mask tokens those
    behind it too.

    Args:
        target: the frozen model.
        config: model and training; the defaults when left out.
        token_counts: how often each token is a label, [V]; a reduced draft vocabulary is chosen by it.

    Raises:
        UserError: if the model cannot be made beside this target, or a reduced vocabulary does not fit.
    """

    config: DraftLMTrainConfig
    drafter: DraftLM

    def __init__(
        self, target: Target, config: DraftLMTrainConfig | None = None, *, token_counts: Tensor | None = None
    ) -> None:
        super().__init__(target, config or DraftLMTrainConfig(), token_counts=token_counts)
        planned(self.config.drafter, target)
        self._token_ids_Q = reduced_vocabulary(self.config.drafter.vocabulary_size, token_counts, target)

    def build_drafter(self) -> DraftLM:
        """The model as it begins."""
        if self.config.drafter.folder is not None:
            self._begun_with = folder_digest(Path(self.config.drafter.folder))
        return DraftLM.create(self.config.drafter, self.target, self._token_ids_Q)

    def weights(self, steps: int) -> tuple[float, ...]:
        """Exits weigh the same, depths fade."""
        return (1.0,) * steps if self.config.drafter.exits else super().weights(steps)

    def recipe(self) -> dict[str, Any]:
        """Also which model stood in the folder: a run does not go on from the checkpoint of another one."""
        begun = {} if self.config.drafter.folder is None else {"model_in_folder": self._begun_with}
        return {**super().recipe(), **begun}

    def loss(self, features: Features) -> Learned:
        """What a batch teaches: its answers, or all of its text."""
        if self.config.learn == "text":
            features = replace(features, supervised_BL=features.segments_BL >= 0)
        return super().loss(features)
