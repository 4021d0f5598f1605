"""Medusa heads in the layout of FasterDecoding/Medusa, which TGI and vLLM up to 0.32 load.

Residual block l of head h is `{h}.{l}.linear.weight` [D, D] and `{h}.{l}.linear.bias` [D], its output layer
`{h}.{L}.weight` [V, D] with L blocks. Head h at position p predicts token p + 2 + h from the target's final state after
the last norm.

Shapes: D hidden size, V target vocabulary.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ...modules import Drafter, Medusa, MedusaConfig, Target, UserError
from ..artifact import portable
from .head_blocks import require_whole_output, tied
from .layout_folder import layout_readme, stored, write_layout, wrong_family
from .safetensors_reader import loaded, read_tensors

MEDUSA_FILE = "medusa_lm_head.safetensors"
"""The name that TGI requires; vLLM takes any."""
_TENSOR = re.compile(r"(?:medusa_heads?\.)?(\d+)\.(\d+)\.(linear\.weight|linear\.bias|weight)")


def export_medusa(drafter: Drafter, target: Target, out: Path) -> None:
    """Write Medusa heads as FasterDecoding/Medusa, TGI and vLLM up to 0.32 load them.

    A shared output layer is written once for each head, since vLLM reads no other form. A reduced draft vocabulary
    with a shared layer becomes the whole one: the same heads over more rows. A reduced layer of
    its own has no rows to write for the other tokens and is refused.

    Raises:
        UserError: if the drafter is of another family, its own output layer is reduced, or the target's has a bias.
    """
    if not isinstance(drafter, Medusa):
        raise wrong_family("medusa", "Medusa heads", drafter)
    write_layout(out, MEDUSA_FILE, medusa_tensors(drafter, target), _config(drafter, target), _readme(drafter, target))


def medusa_tensors(drafter: Medusa, target: Target) -> dict[str, Tensor]:
    """The heads under their FasterDecoding names, in float32 on the CPU, each tensor with memory of its own.

    Raises:
        UserError: if their own output layer is reduced, or the target's has a bias.
    """
    require_whole_output(drafter)
    if getattr(target.head, "bias", None) is not None:
        raise UserError(f"the output layer of {target.identity.name} has a bias, for which the layout has no place; "
                        "decode the artifact with draftsmith")
    tensors: dict[str, Tensor] = {}
    for head, blocks in enumerate(drafter.heads):
        for layer in range(drafter.config.num_layers):
            # The layout stores a tied block as often as it is applied.
            block = [*blocks.children()][0 if drafter.config.tie_blocks else layer]
            for name, tensor in block.state_dict().items():
                tensors[f"{head}.{layer}.{name}"] = tensor
        output = drafter.output_parameters(head)
        tensors[f"{head}.{drafter.config.num_layers}.weight"] = output[0] if output else target.output_weight()
    own = stored(tensors)
    _check(own, drafter)
    return own


def import_medusa(folder: Path, target: Target) -> Medusa:
    """Read Medusa heads in the FasterDecoding layout (safetensors only) and bind them to `target`.

    The number of heads and blocks is counted in the weights: some official configs state it wrongly. Where all blocks
    of every head are equal they were one block in the official code, and stay one (`tie_blocks`). Heads without output
    layers share the target's.

    Raises:
        UserError: if there is no safetensors file, a tensor is missing, unknown, or of another shape than the target's.
    """
    blocks, outputs = _own_names(read_tensors(folder, MEDUSA_FILE), folder)
    heads = 1 + max([*outputs, *(head for head, _, _ in blocks)])
    layers = 1 + max((layer for _, layer, _ in blocks), default=-1)
    shared = layers > 1 and tied(blocks, first=0)
    config = MedusaConfig(num_heads=heads, num_layers=layers, tie_blocks=shared, output="copy" if outputs else "shared")
    state = {f"outputs.{head}.weight": tensor for head, tensor in outputs.items()}
    state |= {f"heads.{head}.{layer}.{part}": tensor for (head, layer, part), tensor in blocks.items()
              if layer == 0 or not shared}
    return loaded(Medusa.create(config, target), state, target, f"the Medusa heads in {folder} do not fit")


def _own_names(tensors: Mapping[str, Tensor], folder: Path) -> tuple[dict[tuple[int, int, str], Tensor],
                                                                     dict[int, Tensor]]:
    """(blocks by head, layer and name within the block; output layers by head)."""
    blocks: dict[tuple[int, int, str], Tensor] = {}
    outputs: dict[int, Tensor] = {}
    for name, tensor in tensors.items():
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise UserError(f"{folder} holds {name!r}, no tensor of Medusa heads; give a folder with only the heads")
        if match[3] == "weight":
            outputs[int(match[1])] = tensor
        else:
            blocks[int(match[1]), int(match[2]), match[3]] = tensor
    return blocks, outputs


def _config(drafter: Medusa, target: Target) -> dict[str, Any]:
    # No "architectures": TGI recognises Medusa by its absence. Without medusa_fc_bias vLLM drops the biases silently.
    return {
        "base_model_name_or_path": portable(target.identity.name),
        "hidden_size": drafter.hidden_size,
        "medusa_fc_bias": True,
        "medusa_num_heads": drafter.config.num_heads,
        "medusa_num_layers": drafter.config.num_layers,
        "vocab_size": drafter.vocab_size,
    }


def _check(tensors: Mapping[str, Tensor], drafter: Medusa) -> None:
    """Check names and shapes of all tensors: engines ignore missing and unknown ones silently."""
    width, layers = drafter.hidden_size, drafter.config.num_layers
    expected: dict[str, tuple[int, ...]] = {}
    for head in range(drafter.config.num_heads):
        for layer in range(layers):
            expected[f"{head}.{layer}.linear.weight"] = (width, width)
            expected[f"{head}.{layer}.linear.bias"] = (width,)
        expected[f"{head}.{layers}.weight"] = (drafter.vocab_size, width)
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if found != expected:
        wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
        raise ValueError(f"the export would hold wrong tensors: {', '.join(wrong[:5])}")


def _readme(drafter: Medusa, target: Target) -> str:
    heads = drafter.config.num_heads
    return layout_readme(
        "Medusa heads", target,
        f"{heads} heads in the layout of FasterDecoding/Medusa. Serve them with",
        "* Text Generation Inference: `text-generation-launcher --model-id THIS_FOLDER --speculate "
        f"{heads}`\n"
        "* vLLM up to 0.32 (removed later): `--speculative-config '{\"method\": \"medusa\", "
        f"\"model\": \"THIS_FOLDER\", \"num_speculative_tokens\": {heads}}}'`",
        "These engines draft a chain from the best token of each head; the tree of the artifact is not used there.",
    )
