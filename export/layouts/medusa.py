"""Medusa heads in the layout of FasterDecoding/Medusa, which TGI and vLLM up to 0.32 load.

Shapes: D hidden size, Q entries of the draft vocabulary.
"""

import shlex
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from ...modules import Medusa, MedusaConfig, Target
from ...modules.families.medusa.layout import BLOCK, FIRST, OFFICIAL, READ
from ...modules.interfaces.layout import there
from ...modules.target.draft_vocabulary import over_all_tokens
from ..artifact import portable
from .medusa_vllm import blocks_of, take_output
from .parts.export_format import ExportFormat, ExportSettings, ImportSettings, Served
from .parts.head_blocks import output_bias, own_names, tied
from .parts.layout_folder import Contents, stored, write_layout
from .parts.safetensors_reader import Checkpoint

MEDUSA_FILE = "medusa_lm_head.safetensors"  # The name that TGI requires; vLLM takes any


def export_medusa(drafter: Medusa, target: Target, folder: Path, settings: ExportSettings) -> Contents:
    """Write Medusa heads as FasterDecoding/Medusa, TGI and vLLM up to 0.32 load them.

    An output layer of all heads is written once for each, since no engine but vLLM has a place for a single one. A
    reduced draft vocabulary becomes the whole one. With a shared layer these are the same heads over more rows; own
    layers get rows for the other tokens that never win (`over_all_tokens`).
    """
    # TGI recognises Medusa by the absence of "architectures". Without medusa_fc_bias vLLM drops the biases silently.
    config = {
        "base_model_name_or_path": portable(target.identity.name),
        "hidden_size": drafter.hidden_size,
        "medusa_fc_bias": True,
        "medusa_num_heads": drafter.config.num_heads,
        "medusa_num_layers": drafter.config.num_layers,
        "vocab_size": drafter.vocab_size,
    }
    table = write_layout(folder, MEDUSA_FILE, medusa_tensors(drafter, target), config)
    return Contents(title="Medusa heads", table=table)


def medusa_tensors(drafter: Medusa, target: Target) -> dict[str, Tensor]:
    """The heads under their FasterDecoding names, in float32 on the CPU, each tensor with memory of its own."""
    layers = drafter.config.num_layers
    tensors = blocks_of(drafter)
    for head in range(drafter.config.num_heads):
        own = drafter.output_parameters(head)
        tensors[f"outputs.{head}.weight"] = (
            over_all_tokens(own[0], drafter.token_ids_Q, drafter.vocab_size) if own else target.output_weight())
    return stored({str(there(name, OFFICIAL, layers=layers)): tensor for name, tensor in tensors.items()})


def read_medusa(given: Checkpoint, target: Target, settings: ImportSettings) -> tuple[Medusa, dict[str, Tensor]]:
    """Medusa heads in the layout of FasterDecoding or of vLLM.

    The number of heads and blocks is counted in the weights: some official configs state it wrongly. Where all blocks
    of every head are equal they were one block in the official code, and stay one (`tie_blocks`); so do equal output
    layers (`output: one_copy`). Heads without output layers share the target's.

    Raises:
        UserError: if a tensor is unknown, or the draft vocabulary is not one of the target's.
    """
    tensors = given.tensors()
    one_QD, ids_Q = take_output(tensors, target, given.folder)
    state = own_names(tensors, READ, given, "Medusa heads")
    blocks = {name: tensor for name, tensor in state.items() if name.startswith("heads.")}
    outputs = {name: tensor for name, tensor in state.items() if name not in blocks}
    heads, layers = (1 + max((int(name.split(".")[place]) for name in names), default=-1)
                     for place, names in ((1, state), (2, blocks)))
    # Heads trained apart never have equal layers [Q, D]: equal ones are one layer, written once for each head.
    first_QD = outputs.get("outputs.0.weight")
    if one_QD is None and first_QD is not None and len(outputs) > 1 and all(
            torch.equal(first_QD, other) for other in outputs.values()):
        one_QD = first_QD
    output: Literal["shared", "copy", "one_copy"] = "copy" if outputs else "shared"
    if one_QD is not None:
        output, outputs = "one_copy", {"outputs.0.weight": one_QD}
    # The official code applied one block repeatedly and stored it as often.
    shared = tied(blocks, BLOCK, FIRST) if layers > 1 else None
    config = MedusaConfig(num_heads=heads, num_layers=layers, tie_blocks=shared is not None, output=output,
                          vocabulary_size=None if ids_Q is None else len(ids_Q))
    ids = {} if ids_Q is None else {"token_ids": ids_Q}
    return Medusa.create(config, target, ids_Q), {**ids, **outputs, **(blocks if shared is None else shared)}


MEDUSA_HEADS = ExportFormat(
    name="medusa", content="Medusa heads", families=(Medusa,),
    readers={"Text Generation Inference": "", "vLLM": " up to 0.32"},
    refusal=lambda drafter, target: output_bias(target), write=export_medusa, read=read_medusa,
    file=MEDUSA_FILE, bare=True,
    vllm=lambda drafter: Served(method={"method": "medusa"}, loader={}, tokens=drafter.config.num_heads),
    others=lambda drafter, places: {"Text Generation Inference": shlex.join([
        "text-generation-launcher", "--model-id", places.folder, "--speculate", str(drafter.config.num_heads)])},
)
