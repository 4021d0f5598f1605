"""A draft that writes training rows: which artifact it is, and who may learn from its words."""

from pathlib import Path

import torch

from ..data import Writer
from ..export import load_artifact
from ..export.artifact import CONFIG
from ..modules import UserError
from ..trainers import DraftModule
from .workspace import Workspace, sha256


def writer_of(workspace: Workspace) -> Writer | None:
    """The draft that the recipe names; None where no draft writes.

    Raises:
        UserError: if the artifact cannot be loaded beside the target, or the recipe's objective cannot learn from it.
    """
    config = workspace.recipe.distill
    if config.draft is None:
        return None
    # Nothing is counted yet; what the family needs to know is told by its settings.
    counts_V = torch.zeros(workspace.target.vocab_size, dtype=torch.long)
    require_teacher(workspace.recipe.model(workspace.target, token_counts=counts_V))  # type: ignore[call-arg]
    artifact = load_artifact(Path(config.draft), workspace.target)
    return Writer.of(artifact.drafter, config.draft_tokens, writer_digest(workspace))


def writer_digest(workspace: Workspace) -> str:
    """Hash of the artifact, whose config.json vouches for its weights; empty without one, or before there is one."""
    folder = workspace.recipe.distill.draft
    file = None if folder is None else Path(folder) / CONFIG
    return "" if file is None or not file.is_file() else sha256(file)


def require_teacher(module: DraftModule) -> None:
    """Refuse to learn a draft's own words as if the target had said them. Raises UserError."""
    if module.learns_text:
        raise UserError("a draft writes train rows, from which only the target's distribution can be learnt, but "
                        f"objective is {module.config.objective} and the text is learnt as it stands; choose another "
                        "objective, such as soft (and keep: target for Medusa-2), or distil without distill.draft")
