"""Folder of a checkpoint in another project's layout: weights, config.json and README.md."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ....modules import Target
from ....modules.files.atomic_files import write_file
from ....modules.files.owned_folders import whole_folder
from ...artifact import portable
from .tensor_table import Table, require_table, with_table

EXPORT = "export"
"""The kind of every exported folder: one export replaces another."""


def write_layout(out: Path, file: str, tensors: dict[str, Tensor], table: Table, config: Mapping[str, Any],
                 readme: str, *, config_file: str = "config.json") -> None:
    """Write the weights as `file`, with their configuration and README.md, or nothing at all.

    Args:
        out: new, empty, or an earlier export.
        file: name of the file of weights.
        tensors: the weights.
        table: names, shapes and number formats that the layout asks for; README.md ends with it.
        config: content of the configuration.
        readme: start of README.md.
        config_file: name of the configuration.

    Raises:
        ValueError: if the weights are not those of the table.
        UserError: if `out` holds other files or cannot be written.
    """
    # Before the folder is touched: an earlier export stays where the new one would be wrong.
    require_table(tensors, table)
    with whole_folder(out, EXPORT) as partial:
        # transformers refuses a file whose metadata does not say for which library it is.
        save_file(tensors, partial / file, metadata={"format": "pt"})
        write_file(partial / config_file, json.dumps(config, indent=2) + "\n")
        write_file(partial / "README.md", with_table(readme, file, table))


def stored(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies in float32 on the CPU: safetensors refuses tensors that share memory."""
    return {name: tensor.detach().to("cpu", torch.float32, copy=True).contiguous() for name, tensor in tensors.items()}


def layout_readme(title: str, target: Target, *paragraphs: str) -> str:
    """README.md: the title, the name of the target, and the paragraphs."""
    return "\n\n".join([f"# {title} for {portable(target.identity.name)}", *paragraphs]) + "\n"
