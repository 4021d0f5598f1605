"""The recipe: arguments of `run`, `distill`, `train` and `plan`."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

from ..data import DistillConfig, PromptConfig
from ..data.batches.datamodule import BatchConfig
from ..export import EvaluateConfig
from ..export.stored_drafter import load_drafter
from ..modules import Target, TargetConfig, UserError
from ..modules.config_checks import CheckedSettings, Whole
from ..modules.policies.registry import MOST
from ..trainers import DraftModule, TrainConfig
from ..trainers.families import family_module
from ..trainers.train_config import Start
from .chat_settings import TemplateConfig


@dataclass(frozen=True, kw_only=True)
class TreeConfig(CheckedSettings):
    """The static draft tree: searched on held-out text, cut to the size that pays on this machine."""

    section: ClassVar[str] = "tree"

    searched_nodes: Annotated[int, Field(ge=2, le=MOST)] = 64
    """Nodes of the tree that is searched and stored in the artifact, root included, best ones first."""
    used_nodes: Whole | None = None
    """Number of these nodes that are drafted on this machine, root included, for greedy and for sampled rows; None
    measures the cost of a pass here and takes the best number for each, for sampled rows none where none pays."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.used_nodes is not None and self.used_nodes > self.searched_nodes:
            raise UserError(f"tree.used_nodes must lie between 1 and tree.searched_nodes {self.searched_nodes}, got "
                            f"{self.used_nodes}")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """From a target to a verified draft."""

    out: Path
    """Folder of the run: data, train, artifact, evaluation.json, report.html."""
    family: str
    """Family of the drafter by name, or with --trust the dotted path of a DraftModule subclass outside the package."""
    train: TrainConfig
    """Training; its field `drafter` is the recipe's section `drafter`."""
    target: TargetConfig = field(default_factory=TargetConfig)
    """The frozen language model."""
    template: TemplateConfig = field(default_factory=TemplateConfig)
    """Settings of its chat template."""
    prompts: PromptConfig = field(default_factory=PromptConfig)
    """Origin of the training prompts."""
    distill: DistillConfig = field(default_factory=DistillConfig)
    """Number and sampling of the target's answers."""
    data: Path | None = None
    """Folder of data that another run distilled; None distils into the folder of this run."""
    references: Path | None = None
    """File of the target's own answers to held-out prompts, read and added to; shared by several runs, made once."""
    batch: BatchConfig = field(default_factory=BatchConfig)
    """Training batches."""
    tree: TreeConfig = field(default_factory=TreeConfig)
    """The draft tree."""
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    """Evaluation at the end: decoded prompts and timing."""
    trust: bool = False
    """Import the class that the recipe or an artifact names outside the package, which runs its code. Given on the
    command line, never in a recipe."""
    retarget: bool = False
    """Let `train.start` be an artifact of another target: an older version, a fine-tune or a quantised form of the same
    architecture with the same sizes and vocabulary. The draft then borrows from the new one."""

    def __post_init__(self) -> None:
        if self.retarget and self.train.start is None:
            raise UserError("retarget is true, and nothing is carried over to this target; name the artifact with "
                            "train.start, or leave --retarget out")

    def module(self, target: Target, label_weights: Tensor) -> DraftModule:
        """A new LightningModule of the recipe's family, its drafter not built yet.

        Raises:
            UserError: if the family, its settings or the start do not fit the target.
        """
        module = family_module(self.family, trust=self.trust)(target, self.train, token_counts=label_weights)
        if self.train.start is not None:
            stored = load_drafter(Path(self.train.start), target, trust=self.trust, retarget=self.retarget)
            module.continue_from(Start(drafter=stored.drafter, adapter=stored.adapter,
                                       weights_sha256=stored.config["weights_sha256"]))
        return module
