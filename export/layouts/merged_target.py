"""Adapted target as a folder of its own, which loads without this project and without peft.

As a Hugging Face model only (`merged`), or with Medusa heads among its tensors (`medusa`), the layout of Medusa v1.0:
heads under `medusa_head.` in a shard of their own, their number in the model's config.json.
"""

import json
from dataclasses import replace
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ...modules import Drafter, Medusa, UserError
from ...modules.files.atomic_files import write_file
from ...modules.files.owned_folders import whole_folder
from ..artifact import Artifact, portable
from .medusa import MEDUSA_HEADS, medusa_tensors
from .parts.export_format import ExportFormat
from .parts.layout_folder import EXPORT

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
HEADS = "medusa_head.safetensors"


def export_merged(artifact: Artifact, out: Path) -> None:
    """Write the adapted target as transformers loads it, tokenizer included."""
    with whole_folder(out, EXPORT) as partial:
        _save_target(artifact, partial)
        write_file(partial / "README.md", _readme(artifact, "The drafts are not in this folder."))


def export_medusa_merged(artifact: Artifact, out: Path) -> None:
    """Write the adapted target with Medusa heads among its tensors."""
    drafter = artifact.drafter
    if not isinstance(drafter, Medusa):
        raise UserError(f"the format medusa holds Medusa heads, this artifact is {drafter.family}; export merged, the "
                        "adapted target alone")
    tensors = medusa_tensors(drafter, artifact.target)
    with whole_folder(out, EXPORT) as partial:
        _save_target(artifact, partial)
        _add_shard(partial, {f"medusa_head.{name}": tensor for name, tensor in tensors.items()})
        config = json.loads((partial / "config.json").read_text(encoding="utf-8"))
        config |= {"medusa_num_heads": drafter.config.num_heads, "medusa_num_layers": drafter.config.num_layers}
        write_file(partial / "config.json", json.dumps(config, indent=2) + "\n")
        write_file(partial / "README.md", _readme(artifact, f"{drafter.config.num_heads} Medusa heads are among its "
                                                            "tensors (`medusa_head.`), as in Medusa v1.0."))


def _save_target(artifact: Artifact, folder: Path) -> None:
    # The model as transformers made it: packed linear layers are for decoding here.
    with artifact.target.native() as model:
        model.save_pretrained(folder)
    artifact.target.tokenizer.save_pretrained(folder)


def _add_shard(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Add tensors to a saved model: in a file of their own, with an index of all files."""
    save_file(tensors, folder / HEADS, metadata={"format": "pt"})
    # Readers that look for a single file first would take it for the whole model.
    if (folder / SINGLE).is_file():
        (folder / SINGLE).rename(folder / "model-00001-of-00001.safetensors")
    files: dict[str, str] = {}
    size = 0
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            files |= dict.fromkeys(opened.keys(), file.name)
        size += file.stat().st_size
    write_file(folder / INDEX, json.dumps({"metadata": {"total_size": size}, "weight_map": files}, indent=2) + "\n")


def _readme(artifact: Artifact, drafts: str) -> str:
    name = portable(artifact.identity.name)
    return (f"# {name}, adapted\n\n{name} with the adapter of a draftsmith artifact merged into its weights: its "
            f"answers are no longer those of {name}. {drafts}\n")


MERGED: ExportFormat[Drafter] = ExportFormat(
    name="merged", write_adapted=export_merged, instead="; merged is for an artifact that changes its target")
MEDUSA = replace(MEDUSA_HEADS, write_adapted=export_medusa_merged)
"""Medusa heads alone, or among the tensors of the target that they were trained with."""
