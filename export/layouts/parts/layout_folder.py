"""Folder of a checkpoint in another project's layout: its weights, configuration, and the description for README.md,
with names, shapes and number formats of its tensors."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from ....modules.files.atomic_files import write_file

EXPORT = "export"  # The kind of every exported folder: one export replaces another
ORIGIN = "origin.json"  # The file that names the artifact of an exported folder
_NUMBER = re.compile(r"\d+")


class TensorForm(NamedTuple):
    """Shape and number format of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32


Table = Mapping[str, TensorForm]  # The tensors of a file, by name


@dataclass(frozen=True, kw_only=True)
class Contents:
    """Description of an exported folder for its README.md, without the commands to serve it."""

    title: str  # Its title, without the target
    note: str = ""  # A sentence that is true of this folder alone; what is true of an engine stands in the guide to it
    example: str = ""
    """Python that converts it or decodes with it, with the sentence before it; empty where there is none."""
    table: Table | None = None
    """Names, shapes and number formats of the tensors; None where they are those of transformers."""


def write_layout(folder: Path, file: str, tensors: dict[str, Tensor], config: Mapping[str, Any], *,
                 config_file: str = "config.json") -> Table:
    """Write the weights as `file` into an empty folder, with their configuration; returns their table."""
    # transformers refuses a file whose metadata does not say for which library it is.
    save_file(tensors, folder / file, metadata={"format": "pt"})
    write_file(folder / config_file, json.dumps(config, indent=2) + "\n")
    return forms_of(tensors)


def forms_of(tensors: Mapping[str, Tensor]) -> dict[str, TensorForm]:
    """Shapes and number formats of tensors."""
    return {name: TensorForm(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def stored(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies in float32 on the CPU, but for the ids of a reduced vocabulary, which each layout holds in its own way:
    safetensors refuses tensors that share memory."""
    return {name: tensor.detach().to("cpu", torch.float32, copy=True).contiguous() for name, tensor in tensors.items()
            if name != "token_ids"}


def as_pickle(project: str, file: str, pickle: str) -> str:
    """The lines that convert a file of weights for a project whose code reads a pickle."""
    return (f"{project} reads a pickle:\n\n```python\nimport torch\nfrom safetensors.torch import load_file\n\n"
            f'torch.save(load_file("{file}"), "{pickle}")\n```')


def table_text(table: Table) -> str:
    """The table in Markdown; names that differ by a number alone, such as those of equal heads, share a line."""
    def form(item: tuple[str, TensorForm]) -> tuple[str, TensorForm]:
        return _NUMBER.sub("{}", item[0]), item[1]

    lines = ["| tensor | shape | number format |", "|---|---|---|"]
    for (_, (shape, dtype)), same in groupby(sorted(table.items(), key=lambda item: (form(item), item[0])), key=form):
        names = [name for name, _ in same]
        name = f"`{names[0]}`" if len(names) == 1 else f"`{names[0]}` to `{names[-1]}` ({len(names)})"
        lines.append(f"| {name} | {list(shape)} | {str(dtype).removeprefix('torch.')} |")
    return "\n".join(lines)
