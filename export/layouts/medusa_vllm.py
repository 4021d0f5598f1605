"""Medusa heads with one output layer for all of them, whole or over a reduced vocabulary, in vLLM's own layout.

vLLM 0.33 has no Medusa.

Shapes: D hidden size, Q entries of the draft vocabulary.
"""

from pathlib import Path

import torch
from torch import Tensor

from ...modules import Medusa, Target, UserError
from ...modules.families.medusa.layout import BLOCK, FIRST, OUTPUT, TOKENS, VLLM
from ...modules.interfaces.layout import there
from ..artifact import portable
from .parts.export_format import ExportFormat, ExportSettings, Served
from .parts.head_blocks import output_bias, repeated
from .parts.layout_folder import Contents, stored, write_layout

VLLM_FILE = "model.safetensors"  # vLLM takes any name


def export_medusa_vllm(drafter: Medusa, target: Target, folder: Path, settings: ExportSettings) -> Contents:
    """Write Medusa heads with one output layer as vLLM up to 0.32 loads them, in a small file: a row for each entry of
    the draft vocabulary, once."""
    reduced = drafter.config.vocabulary_size
    # The keys of vLLM's class, not those of FasterDecoding: by `medusa_num_heads` Text Generation Inference would take
    # the folder for one that it can load. Without medusa_fc_bias vLLM drops the biases silently.
    config = {
        "architectures": ["MedusaModel"],
        "base_model_name_or_path": portable(target.identity.name),
        "hidden_size": drafter.hidden_size,
        "medusa_fc_bias": True,
        "model_type": "medusa",
        "num_heads": drafter.config.num_heads,
        "num_hidden_layers": drafter.config.num_layers,
        "original_lm_head": True,
        "read_by": "vLLM up to 0.32; not Text Generation Inference",
        "vocab_size": drafter.vocab_size,
        **({} if reduced is None else {"truncated_vocab_size": reduced}),
    }
    table = write_layout(folder, VLLM_FILE, vllm_tensors(drafter, target), config)
    return Contents(title="Medusa heads", table=table)


def _refusal(drafter: Medusa, target: Target) -> str:
    """The refusal of heads that have more than one output layer, or a bias in it; empty for any other."""
    return output_bias(target) if drafter.config.output != "copy" else (
        "these heads have an output layer each, the layout has one for all of them; train with output: one_copy or "
        "output: shared")


def vllm_tensors(drafter: Medusa, target: Target) -> dict[str, Tensor]:
    """The heads under vLLM's names, in float32 on the CPU, with the draft vocabulary in ascending order."""
    blocks = {str(there(name, VLLM)): tensor for name, tensor in blocks_of(drafter).items()}
    ids_Q, own = drafter.token_ids_Q, drafter.output_parameters(0)
    if ids_Q is None:
        return stored(blocks | {OUTPUT: own[0] if own else target.output_weight()})
    # vLLM passes over a map of the whole vocabulary: in ascending order that changes nothing.
    sorted_Q, order_Q = ids_Q.sort()
    weight_QD = own[0][order_Q] if own else target.output_weight()[sorted_Q]
    return stored(blocks | {OUTPUT: weight_QD}) | {TOKENS: sorted_Q.cpu().clone()}


def blocks_of(drafter: Medusa) -> dict[str, Tensor]:
    """The residual blocks, a tied one as often as it is applied: the layouts know no other form."""
    blocks = drafter.heads.state_dict(prefix="heads.")
    return repeated(blocks, BLOCK, FIRST, drafter.config.num_layers) if drafter.config.tie_blocks else blocks


def take_output(tensors: dict[str, Tensor], target: Target, folder: Path) -> tuple[Tensor | None, Tensor | None]:
    """(the output layer of all heads [Q, D], target ids of its rows [Q]), taken out of `tensors`; None if not there.

    Where the layer has more rows than the map has entries, those that the map names are its own, as in vLLM.

    Raises:
        UserError: if there is a map without a layer, or it names no tokens of the target.
    """
    weight_QD, ids_Q = tensors.pop(OUTPUT, None), tensors.pop(TOKENS, None)
    if ids_Q is None:
        return weight_QD, None
    if weight_QD is None:
        raise UserError(f"{folder} holds {TOKENS} without {OUTPUT}; a reduced vocabulary needs one output layer of "
                        "all heads: copy the folder again")
    if ids_Q.is_floating_point() or not bool(((ids_Q >= 0) & (ids_Q < target.vocab_size)).all()):
        raise UserError(f"{TOKENS} in {folder} must hold tokens from 0 to {target.vocab_size - 1}, those of "
                        f"{target.identity.name}; choose a checkpoint made for this target")
    # Of a layer over the whole vocabulary the map picks the rows, as in vLLM.
    ids_Q = ids_Q.to(torch.int64)
    return weight_QD if len(weight_QD) <= len(ids_Q) else weight_QD[ids_Q], ids_Q


def _served(drafter: Medusa) -> Served:
    # vLLM 0.32 reads `token_map` and does not count it, so that its check of missing weights would end it.
    loader = {} if drafter.config.vocabulary_size is None else {"enable_weights_track": False}
    return Served(method={"method": "medusa"}, loader=loader, tokens=drafter.config.num_heads)


MEDUSA_VLLM = ExportFormat(name="medusa-vllm", content="Medusa heads", readers={"vLLM": " up to 0.32 in a small file"},
                           families=(Medusa,), refusal=_refusal, write=export_medusa_vllm, vllm=_served)
