"""Training rows written by an existing draft: the artifact they come from, and the objectives that they suit."""

from pathlib import Path

import torch

from ...data import Writer
from ...export import load_artifact
from ...export.artifact_files import CONFIG
from ...modules import UserError
from ...modules.files.atomic_files import file_sha256
from ...trainers import DraftModule
from .workspace import Workspace


def writer_of(workspace: Workspace) -> Writer | None:
    """The draft that the recipe names; None where no draft writes.

    Raises:
        UserError: if the artifact cannot be loaded for the target, or the recipe's objective cannot learn from it.
    """
    config = workspace.recipe.distill
    if config.draft is None:
        return None
    # Nothing is counted yet; whether text is learnt follows from the settings alone.
    counts_V = torch.zeros(workspace.target.vocab_size, dtype=torch.long)
    require_teacher(workspace.recipe.module(workspace.target, counts_V))
    artifact = load_artifact(Path(config.draft), workspace.target, trust=workspace.recipe.trust)
    return Writer.of(artifact.drafter, writer_digest(workspace))


def writer_digest(workspace: Workspace) -> str:
    """Hash of the artifact's config.json, which holds that of its weights; empty where no draft writes."""
    folder = workspace.recipe.distill.draft
    file = None if folder is None else Path(folder) / CONFIG
    return "" if file is None or not file.is_file() else file_sha256(file)


def require_teacher(module: DraftModule) -> None:
    """Refuse to learn text that a draft wrote as if it were the target's. Raises UserError."""
    # Without a teacher the tokens are the labels, as if the target had written them.
    if not module.needs_teacher:
        raise UserError("a draft writes train rows, from which only the target's distribution can be learnt, but "
                        f"objective is {module.config.objective} and the text is learnt as it stands; choose another "
                        "objective, such as soft (and keep: target for Medusa-2), or distil without distill.draft")
