"""Medusa heads in the layout of FasterDecoding/Medusa, which TGI and vLLM up to 0.32 load; and with one output layer
for all of them, whole or over a reduced vocabulary, in vLLM's own. vLLM 0.33 has no Medusa.

Shapes: D hidden size, Q entries of the draft vocabulary."""

import shlex
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from ...modules import Medusa, MedusaConfig, Target, UserError
from ...modules.families.medusa.layout import BLOCK, FIRST, OFFICIAL, OUTPUT, READ, TOKENS, VLLM
from ...modules.interfaces.layout import there
from ...modules.target.draft_vocabulary import over_all_tokens
from .parts.checkpoint import Checkpoint, Contents, output_bias, own_names, repeated, stored, tied, write_layout
from .parts.export_format import ExportFormat, ExportSettings, ImportSettings, Served, target_name

MEDUSA_FILE = "medusa_lm_head.safetensors"  # The name that TGI requires; vLLM takes any


def export_medusa(drafter: Medusa, target: Target, folder: Path, settings: ExportSettings) -> Contents:
    """Write Medusa heads as FasterDecoding/Medusa, TGI and vLLM up to 0.32 load them."""
    # TGI recognises Medusa by the absence of "architectures". Without medusa_fc_bias vLLM drops the biases silently.
    config = {"base_model_name_or_path": target_name(target), "hidden_size": drafter.hidden_size,
              "medusa_fc_bias": True, "medusa_num_heads": drafter.config.num_heads,
              "medusa_num_layers": drafter.config.num_layers, "vocab_size": drafter.vocab_size}
    return Contents(title="Medusa heads",
                    table=write_layout(folder, MEDUSA_FILE, medusa_tensors(drafter, target), config))


def medusa_tensors(drafter: Medusa, target: Target) -> dict[str, Tensor]:
    """The heads under their FasterDecoding names, in float32 on the CPU, each tensor with memory of its own.

    An output layer of all heads is written once for each, since no engine but vLLM has a place for a single one. A
    reduced draft vocabulary becomes the whole one. With a shared layer these are the same heads over more rows; own
    layers get rows for the other tokens that never win (`over_all_tokens`)."""
    tensors = blocks_of(drafter)
    for head in range(drafter.config.num_heads):
        own = drafter.output_parameters(head)
        tensors[f"outputs.{head}.weight"] = (
            over_all_tokens(own[0], drafter.token_ids_Q, drafter.vocab_size) if own else target.output_weight())
    return stored({str(there(name, OFFICIAL, layers=drafter.config.num_layers)): tensor
                   for name, tensor in tensors.items()})


def blocks_of(drafter: Medusa) -> dict[str, Tensor]:
    """The residual blocks, a tied one as often as it is applied: the layouts know no other form."""
    blocks = drafter.heads.state_dict(prefix="heads.")
    return repeated(blocks, BLOCK, FIRST, drafter.config.num_layers) if drafter.config.tie_blocks else blocks


def export_medusa_vllm(drafter: Medusa, target: Target, folder: Path, settings: ExportSettings) -> Contents:
    """Write Medusa heads with one output layer as vLLM up to 0.32 loads them, in a small file: a row for each entry of
    the draft vocabulary, once, in ascending order."""
    reduced, ids_Q, own = drafter.config.vocabulary_size, drafter.token_ids_Q, drafter.output_parameters(0)
    tensors = {str(there(name, VLLM)): tensor for name, tensor in blocks_of(drafter).items()}
    # vLLM passes over a map of the whole vocabulary: in ascending order that changes nothing.
    order_Q = slice(None) if ids_Q is None else ids_Q.sort().indices
    tensors[OUTPUT] = own[0][order_Q] if own else target.output_weight() if ids_Q is None else (
        target.output_weight()[ids_Q[order_Q]])
    tokens = {} if ids_Q is None else {TOKENS: ids_Q[order_Q].cpu().clone()}
    # The keys of vLLM's class, not those of FasterDecoding: by `medusa_num_heads` Text Generation Inference would take
    # the folder for one that it can load. Without medusa_fc_bias vLLM drops the biases silently.
    config = {"architectures": ["MedusaModel"], "base_model_name_or_path": target_name(target),
              "hidden_size": drafter.hidden_size, "medusa_fc_bias": True, "model_type": "medusa",
              "num_heads": drafter.config.num_heads, "num_hidden_layers": drafter.config.num_layers,
              "original_lm_head": True, "read_by": "vLLM up to 0.32; not Text Generation Inference",
              "vocab_size": drafter.vocab_size, **({} if reduced is None else {"truncated_vocab_size": reduced})}
    return Contents(title="Medusa heads",
                    table=write_layout(folder, MEDUSA_VLLM.file, stored(tensors) | tokens, config))


def read_medusa(given: Checkpoint, target: Target, settings: ImportSettings) -> tuple[Medusa, dict[str, Tensor]]:
    """Medusa heads in the layout of FasterDecoding or of vLLM.

    The number of heads and blocks is counted in the weights: some official configs state it wrongly. Where all blocks
    of every head are equal they were one block in the official code, and stay one (`tie_blocks`); so do equal output
    layers (`output: one_copy`). Heads without output layers share the target's. Raises UserError if a tensor is
    unknown, or the draft vocabulary is not one of the target's."""
    tensors = given.tensors()
    one_QD, ids_Q = tensors.pop(OUTPUT, None), tensors.pop(TOKENS, None)
    if ids_Q is not None:
        if one_QD is None:
            raise UserError(f"{given.folder} holds {TOKENS} without {OUTPUT}; a reduced vocabulary needs one output "
                            "layer of all heads: copy the folder again")
        if ids_Q.is_floating_point() or not bool(((ids_Q >= 0) & (ids_Q < target.vocab_size)).all()):
            raise UserError(f"{TOKENS} in {given.folder} must hold tokens from 0 to {target.vocab_size - 1}, those of "
                            f"{target.identity.name}; choose a checkpoint made for this target")
        ids_Q = ids_Q.to(torch.int64)
        # Of a layer over the whole vocabulary the map picks the rows, as in vLLM.
        one_QD = one_QD if len(one_QD) <= len(ids_Q) else one_QD[ids_Q]
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
    vllm=lambda drafter: Served(method={"method": "medusa"}, loader={}),
    others=lambda drafter, places: {"Text Generation Inference": shlex.join([
        "text-generation-launcher", "--model-id", places.folder, "--speculate", str(drafter.config.num_heads)])})
MEDUSA_VLLM = ExportFormat(
    name="medusa-vllm", content="Medusa heads", readers={"vLLM": " up to 0.32 in a small file"}, families=(Medusa,),
    write=export_medusa_vllm, refusal=lambda drafter, target: (
        output_bias(target) if drafter.config.output != "copy" else "these heads have an output layer each, the layout "
        "has one for all of them; train with output: one_copy or output: shared"),
    # vLLM 0.32 reads `token_map` and does not count it, so that its check of missing weights would end it.
    vllm=lambda drafter: Served(method={"method": "medusa"}, loader=(
        {} if drafter.config.vocabulary_size is None else {"enable_weights_track": False})))
