"""Medusa heads in the layout of FasterDecoding/Medusa, which TGI and vLLM up to 0.32 load.

Residual block l of head h is `{h}.{l}.linear.weight` [D, D] and `{h}.{l}.linear.bias` [D], its output layer
`{h}.{L}.weight` [V, D] with L blocks. Head h at position p predicts token p + 2 + h from the target's final state after
the last norm.

Shapes: D hidden size, V target vocabulary, Q entries of the draft vocabulary.
"""

import re
import shlex
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from ...modules import Medusa, MedusaConfig, Target, UserError
from ...modules.target.draft_vocabulary import over_all_tokens
from ..artifact import portable
from .medusa_vllm import BLOCK, OUTPUT_OF_HEAD, take_output
from .parts.export_format import ExportFormat, ExportSettings, ImportSettings, Served
from .parts.head_blocks import medusa_blocks, output_bias, tied
from .parts.layout_folder import Contents, stored, write_layout
from .parts.safetensors_reader import Checkpoint
from .parts.tensor_table import TensorForm

MEDUSA_FILE = "medusa_lm_head.safetensors"
"""The name that TGI requires; vLLM takes any."""
_BLOCK = re.compile(r"(?:medusa_heads?\.)?(\d+)\.(\d+)\.linear\.(weight|bias)")
_OUTPUT = re.compile(r"(?:medusa_heads?\.)?(\d+)\.\d+\.weight")


def export_medusa(drafter: Medusa, target: Target, folder: Path, settings: ExportSettings) -> Contents:
    """Write Medusa heads as FasterDecoding/Medusa, TGI and vLLM up to 0.32 load them.

    An output layer of all heads is written once for each, since no engine but vLLM has a place for a single one. A
    reduced draft vocabulary becomes the whole one. With a shared layer these are the same heads over more rows; own
    layers get rows for the other tokens that never win (`over_all_tokens`).
    """
    width, layers = drafter.hidden_size, drafter.config.num_layers
    table: dict[str, TensorForm] = {}
    for head in range(drafter.config.num_heads):
        for layer in range(layers):
            table[f"{head}.{layer}.linear.weight"] = TensorForm((width, width))
            table[f"{head}.{layer}.linear.bias"] = TensorForm((width,))
        table[f"{head}.{layers}.weight"] = TensorForm((drafter.vocab_size, width))
    # TGI recognises Medusa by the absence of "architectures". Without medusa_fc_bias vLLM drops the biases silently.
    config = {
        "base_model_name_or_path": portable(target.identity.name),
        "hidden_size": width,
        "medusa_fc_bias": True,
        "medusa_num_heads": drafter.config.num_heads,
        "medusa_num_layers": layers,
        "vocab_size": drafter.vocab_size,
    }
    write_layout(folder, MEDUSA_FILE, medusa_tensors(drafter, target), table, config)
    return Contents(title="Medusa heads", table=table)


def medusa_tensors(drafter: Medusa, target: Target) -> dict[str, Tensor]:
    """The heads under their FasterDecoding names, in float32 on the CPU, each tensor with memory of its own."""
    tensors = {f"{head}.{layer}.{part}": tensor for (head, layer, part), tensor in medusa_blocks(drafter).items()}
    for head in range(drafter.config.num_heads):
        own = drafter.output_parameters(head)
        tensors[f"{head}.{drafter.config.num_layers}.weight"] = (
            over_all_tokens(own[0], drafter.token_ids_Q, drafter.vocab_size) if own else target.output_weight())
    return stored(tensors)


def read_medusa(given: Checkpoint, target: Target, settings: ImportSettings) -> tuple[Medusa, dict[str, Tensor]]:
    """Medusa heads in the layout of FasterDecoding or of vLLM.

    The number of heads and blocks is counted in the weights: some official configs state it wrongly. Where all blocks
    of every head are equal they were one block in the official code, and stay one (`tie_blocks`); so do equal output
    layers (`output: one_copy`). Heads without output layers share the target's.

    Raises:
        UserError: if a tensor is unknown, or the draft vocabulary is not one of the target's.
    """
    tensors, folder = given.tensors(), given.folder
    one_QD, ids_Q = take_output(tensors, target, folder)
    blocks: dict[tuple[int, int, str], Tensor] = {}
    outputs: dict[int, Tensor] = {}
    for name, tensor in tensors.items():
        if match := _BLOCK.fullmatch(name) or BLOCK.fullmatch(name):
            blocks[int(match[1]), int(match[2]), f"linear.{match[3]}"] = tensor
        elif match := _OUTPUT.fullmatch(name) or OUTPUT_OF_HEAD.fullmatch(name):
            outputs[int(match[1])] = tensor
        else:
            raise UserError(f"{folder} holds {name!r}, no tensor of Medusa heads; give a folder with only the "
                            "heads, or choose another --format")
    output: Literal["shared", "copy", "one_copy"] = "copy" if outputs else "shared"
    heads = 1 + max([*outputs, *(head for head, _, _ in blocks)], default=-1)
    # Heads trained apart never have equal layers [Q, D]: equal ones are one layer, written once for each head.
    first_QD, others = outputs.get(0), [tensor for head, tensor in outputs.items() if head]
    if one_QD is None and first_QD is not None and others and all(torch.equal(first_QD, other) for other in others):
        one_QD = first_QD
    if one_QD is not None:
        output, outputs = "one_copy", {0: one_QD}
    layers = 1 + max((layer for _, layer, _ in blocks), default=-1)
    # The official code applied one block repeatedly and stored it as often.
    shared = layers > 1 and tied(blocks, first=0)
    config = MedusaConfig(num_heads=heads, num_layers=layers, tie_blocks=shared, output=output,
                          vocabulary_size=None if ids_Q is None else len(ids_Q))
    state = {} if ids_Q is None else {"token_ids": ids_Q}
    state |= {f"outputs.{head}.weight": tensor for head, tensor in outputs.items()}
    state |= {f"heads.{head}.{layer}.{part}": tensor for (head, layer, part), tensor in blocks.items()
              if layer == 0 or not shared}
    return Medusa.create(config, target, ids_Q), state


MEDUSA_HEADS = ExportFormat(
    name="medusa", content="Medusa heads", families=(Medusa,),
    readers={"Text Generation Inference": "", "vLLM": " up to 0.32"},
    refusal=lambda drafter, target: output_bias(target), write=export_medusa, read=read_medusa,
    file=MEDUSA_FILE, bare=True,
    vllm=lambda drafter: Served(method={"method": "medusa"}, loader={}, tokens=drafter.config.num_heads),
    others=lambda drafter, places: {"Text Generation Inference": shlex.join([
        "text-generation-launcher", "--model-id", places.folder, "--speculate", str(drafter.config.num_heads)])},
)
