"""What a recipe holds. Its keys are the arguments of `run`, `distill` and `train`."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ..data import DistillConfig, PromptConfig
from ..data.datamodule import BatchConfig
from ..export import EvaluateConfig
from ..modules import Target, TargetConfig, UserError
from ..modules.tuning.held_out_ranks import MAX_RANK
from ..trainers import DraftModule
from .chat_settings import TemplateConfig


@dataclass(frozen=True, kw_only=True)
class TreeConfig:
    """The static draft tree: searched on held-out text, cut to the size that pays on this machine."""

    max_nodes: int = 64
    """Nodes of the tree in the artifact, root included, in best-first order."""
    size: int | None = None
    """Nodes to draft on this machine, root included; None measures what a pass costs here and takes the best."""
    max_rank: int = MAX_RANK
    """Guesses of one node that the tree may use; 1 makes it a chain."""

    def __post_init__(self) -> None:
        if self.max_nodes < 2:
            raise UserError(f"tree.max_nodes must be at least 2 (a root and one guess), got {self.max_nodes}")
        if not 1 <= self.max_rank <= MAX_RANK:
            raise UserError(f"tree.max_rank must lie between 1 (a chain) and {MAX_RANK}, got {self.max_rank}")
        if self.size is not None and not 1 <= self.size <= self.max_nodes:
            raise UserError(f"tree.size must lie between 1 and tree.max_nodes {self.max_nodes}, got {self.size}")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """From a target to a verified draft."""

    out: Path
    """Folder of the run: data, train, artifact, evaluation.json, report.html."""
    model: Callable[[Target], DraftModule]
    """The drafter's family: class_path of its LightningModule, and init_args with its settings."""
    target: TargetConfig = field(default_factory=TargetConfig)
    """The frozen language model."""
    template: TemplateConfig = field(default_factory=TemplateConfig)
    """Settings of its chat template."""
    prompts: PromptConfig = field(default_factory=PromptConfig)
    """Where training prompts come from."""
    distill: DistillConfig = field(default_factory=DistillConfig)
    """How much the target answers, and how."""
    data: Path | None = None
    """Folder of data that another run distilled; None distils into the folder of this run."""
    references: Path | None = None
    """File of the target's own answers to held-out prompts, read and added to; runs that share it answer them once."""
    batch: BatchConfig = field(default_factory=BatchConfig)
    """Training batches."""
    tree: TreeConfig = field(default_factory=TreeConfig)
    """The draft tree."""
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    """What is decoded and what is timed at the end."""
