"""Acceptance heads in the layout of Kaffaljidhmah2/SpecDec_pp (arXiv:2405.19715); no serving engine reads it.

Residual block l is `model.{l}.linear.{weight,bias}` [D, D], [D], the output layer `model.{L}.{weight,bias}` [2, D], [2]
with L blocks; the second class is acceptance. The official code repeats one block by mistake and stores it L times.

Shapes: D width of the drafter's states.
"""

from pathlib import Path

import torch
from torch import Tensor

from ...modules import AcceptanceHead, AcceptanceHeadConfig, Drafter, UserError
from ..artifact import Artifact
from ..weight_checks import require_weights
from .parts.export_format import ExportFormat, ExportSettings
from .parts.layout_folder import Contents, as_pickle, stored, write_layout
from .parts.safetensors_reader import Checkpoint
from .parts.tensor_table import Table, TensorForm

HEAD_FILE = "model.safetensors"
"""The official code reads the same tensors from pytorch_model.bin."""


def export_head(artifact: Artifact, folder: Path, settings: ExportSettings) -> Contents:
    """Write an acceptance head of an artifact into an empty folder.

    Raises:
        UserError: if the artifact has no head for the temperature of the settings, or several where none is named, or
            the head's blocks are separate.
    """
    heads, temperature = artifact.heads, settings.temperature
    held = ", ".join(f"{one:g}" for one in sorted(heads))
    if not heads:
        raise UserError("the format specdec holds an acceptance head, and this artifact has none; train one "
                        "with draftsmith specdec")
    if temperature is None and len(heads) > 1:
        raise UserError(f"the format specdec holds one acceptance head, and this artifact has heads for the "
                        f"temperatures {held}; choose one with --temperature {max(heads):g}")
    if temperature is not None and temperature not in heads:
        raise UserError(f"this artifact has no acceptance head for temperature {temperature:g}, only for {held}; "
                        f"choose one of these, or train one with draftsmith specdec --temperatures '[{temperature:g}]'")
    chosen = heads[next(iter(heads)) if temperature is None else temperature]
    return Contents(title="Acceptance head", table=export_specdec(chosen.head, folder), paragraphs=(
        f"It judges the tokens of a {artifact.drafter.family} drafter by that drafter's states, for answers and drafts "
        f"sampled at {chosen.setting}: the layout itself says neither. Its rule: drafts of {chosen.least} to "
        f"{chosen.most} tokens end at a risk above {chosen.threshold:g}.",
        "The layout is that of Kaffaljidhmah2/SpecDec_pp, which reads a pickle:",
        as_pickle(HEAD_FILE, "pytorch_model.bin")))


def export_specdec(head: AcceptanceHead, folder: Path) -> Table:
    """Write a head into an empty folder as the official code stores it, in safetensors; returns its tensors.

    Raises:
        UserError: if its blocks are separate, which the official code cannot hold.
    """
    layers = head.config.num_layers
    if layers > 1 and not head.config.tie_blocks:
        raise UserError(f"the official code applies one block {layers} times, this head has {layers} separate ones; "
                        "train it with head.tie_blocks: true")
    tensors: dict[str, Tensor] = {f"model.{layers}.{name}": tensor for name, tensor in head.output.state_dict().items()}
    for layer in range(layers):
        tensors |= {f"model.{layer}.{name}": tensor for name, tensor in head.blocks[0].state_dict().items()}
    table = {f"model.{layers}.weight": TensorForm((2, head.width)), f"model.{layers}.bias": TensorForm((2,))}
    for layer in range(layers):
        table |= {f"model.{layer}.linear.weight": TensorForm((head.width, head.width)),
                  f"model.{layer}.linear.bias": TensorForm((head.width,))}
    write_layout(folder, HEAD_FILE, stored(tensors), table, {"hidden_size": head.width, "num_layers": layers})
    return table


def read_specdec(given: Checkpoint) -> AcceptanceHead:
    """A head in the official layout. Equal blocks become one.

    Raises:
        UserError: if a tensor is missing, unknown, not finite or of another shape than config.json says.
    """
    tensors, config = given.tensors(), given.said
    require_weights(tensors, {}, str(given.folder))
    try:
        width, layers = int(config["hidden_size"]), int(config["num_layers"])
        blocks = [{part: tensors[f"model.{layer}.linear.{part}"] for part in ("weight", "bias")}
                  for layer in range(layers)]
        # The official code stores its one block for each layer.
        tied = layers > 1 and all(torch.equal(block[part], blocks[0][part]) for block in blocks for part in block)
        head = AcceptanceHead(AcceptanceHeadConfig(num_layers=layers, tie_blocks=tied), width)
        state = {f"output.{part}": tensors[f"model.{layers}.{part}"] for part in ("weight", "bias")}
        # A tensor that nothing reads shows that the folder is of another kind.
        if len(tensors) != 2 * (layers + 1):
            raise KeyError(f"{len(tensors)} tensors where {layers} blocks have {2 * (layers + 1)}")
        kept = blocks[:1] if tied else blocks
        head.load_state_dict(state | {f"blocks.{layer}.linear.{part}": tensor for layer, block in enumerate(kept)
                                      for part, tensor in block.items()})
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"{given.folder} is no acceptance head of SpecDec++ ({' '.join(str(error).split())}); give the "
                        "folder that its training wrote") from error
    return head.eval()


SPECDEC: ExportFormat[Drafter] = ExportFormat(
    name="specdec", content="acceptance heads", write_head=export_head, read_head=read_specdec, opens=("temperature",),
    file=HEAD_FILE)
