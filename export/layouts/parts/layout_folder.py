"""Folder of a checkpoint in another project's layout: its weights, configuration, and the description for README.md."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ....modules.files.atomic_files import write_file
from .tensor_table import Table, require_table

EXPORT = "export"
"""The kind of every exported folder: one export replaces another."""
ORIGIN = "origin.json"
"""The file that names the artifact of an exported folder."""


@dataclass(frozen=True, kw_only=True)
class Contents:
    """Description of an exported folder for its README.md, without the commands to serve it."""

    title: str
    """Its title, without the target."""
    note: str = ""
    """A sentence that is true of this folder alone; what is true of an engine stands in the guide to it."""
    example: str = ""
    """Python that converts it or decodes with it, with the sentence before it; empty where there is none."""
    table: Table | None = None
    """Names, shapes and number formats of the tensors; None where they are those of transformers."""


def write_layout(folder: Path, file: str, tensors: dict[str, Tensor], table: Table, config: Mapping[str, Any], *,
                 config_file: str = "config.json") -> None:
    """Write the weights as `file`, with their configuration.

    Args:
        folder: an empty one.
        file: name of the file of weights.
        tensors: the weights.
        table: names, shapes and number formats that the layout asks for.
        config: content of the configuration.
        config_file: name of the configuration.

    Raises:
        ValueError: if the weights are not those of the table.
    """
    require_table(tensors, table)
    # transformers refuses a file whose metadata does not say for which library it is.
    save_file(tensors, folder / file, metadata={"format": "pt"})
    write_file(folder / config_file, json.dumps(config, indent=2) + "\n")


def stored(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies in float32 on the CPU: safetensors refuses tensors that share memory."""
    return {name: tensor.detach().to("cpu", torch.float32, copy=True).contiguous() for name, tensor in tensors.items()}


def as_pickle(project: str, file: str, pickle: str) -> str:
    """The lines that convert a file of weights for a project whose code reads a pickle."""
    return (f"{project} reads a pickle:\n\n```python\nimport torch\nfrom safetensors.torch import load_file\n\n"
            f'torch.save(load_file("{file}"), "{pickle}")\n```')
