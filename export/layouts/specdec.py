"""Acceptance heads in the layout of Kaffaljidhmah2/SpecDec_pp (arXiv:2405.19715); no serving engine reads it.

Residual block l is `model.{l}.linear.{weight,bias}` [D, D], [D], the output layer `model.{L}.{weight,bias}` [2, D], [2]
with L blocks; the second class is acceptance. The official code repeats one block by mistake and stores it L times.

Shapes: D width of the drafter's states.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from ...modules import AcceptanceHead, AcceptanceHeadConfig, UserError
from ...modules.atomic_files import write_file
from ...modules.owned_folders import whole_folder
from .layout_folder import EXPORT, stored
from .safetensors_reader import read_config, read_tensors

HEAD_FILE = "model.safetensors"


def export_specdec(head: AcceptanceHead, out: Path) -> Path:
    """Write a head as the official code stores it, in safetensors; returns its folder.

    Raises:
        UserError: if its blocks are separate, which the official code cannot hold, or `out` cannot be written.
    """
    layers = head.config.num_layers
    if layers > 1 and not head.config.tie_blocks:
        raise UserError(f"the official code applies one block {layers} times, this head has {layers} separate ones; "
                        "train it with head.tie_blocks: true")
    tensors: dict[str, Tensor] = {f"model.{layers}.{name}": tensor for name, tensor in head.output.state_dict().items()}
    for layer in range(layers):
        tensors |= {f"model.{layer}.{name}": tensor for name, tensor in head.blocks[0].state_dict().items()}
    with whole_folder(out, EXPORT) as partial:
        save_file(stored(tensors), partial / HEAD_FILE, metadata={"format": "pt"})
        write_file(partial / "config.json", json.dumps({"hidden_size": head.width, "num_layers": layers}) + "\n")
    return out


def import_specdec(folder: Path) -> AcceptanceHead:
    """Read a head in the official layout (safetensors only). Equal blocks become one.

    Raises:
        UserError: if a file is missing, or a tensor is missing, unknown or of another shape than config.json says.
    """
    config, tensors = read_config(folder / "config.json"), read_tensors(folder, HEAD_FILE)
    try:
        width, layers = int(config["hidden_size"]), int(config["num_layers"])
        blocks = [{part: tensors[f"model.{layer}.linear.{part}"] for part in ("weight", "bias")}
                  for layer in range(layers)]
        tied = layers > 1 and all(torch.equal(block[part], blocks[0][part]) for block in blocks for part in block)
        head = AcceptanceHead(AcceptanceHeadConfig(num_layers=layers, tie_blocks=tied), width)
        state = {f"output.{part}": tensors[f"model.{layers}.{part}"] for part in ("weight", "bias")}
        if len(tensors) != 2 * (layers + 1):
            raise KeyError(f"{len(tensors)} tensors where {layers} blocks have {2 * (layers + 1)}")
        kept = blocks[:1] if tied else blocks
        head.load_state_dict(state | {f"blocks.{layer}.linear.{part}": tensor for layer, block in enumerate(kept)
                                      for part, tensor in block.items()})
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"{folder} is no acceptance head of SpecDec++ ({' '.join(str(error).split())}); give the "
                        "folder that its training wrote") from error
    return head.eval()
