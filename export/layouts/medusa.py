"""Medusa heads in the layout of FasterDecoding/Medusa, which TGI and vLLM up to 0.32 load.

Residual block l of head h is `{h}.{l}.linear.weight` [D, D] and `{h}.{l}.linear.bias` [D], its output layer
`{h}.{L}.weight` [V, D] with L blocks. Head h at position p predicts token p + 2 + h from the target's final state after
the last norm.

Shapes: D hidden size, V target vocabulary.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ...modules import Drafter, Medusa, MedusaConfig, Target, UserError
from ...modules.atomic_files import whole_folder, write_file
from ..artifact import portable

MEDUSA_FILE = "medusa_lm_head.safetensors"
"""The name that TGI insists on; vLLM takes any."""
_OWNED = frozenset({"config.json", MEDUSA_FILE, "README.md"})
_TENSOR = re.compile(r"(?:medusa_heads?\.)?(\d+)\.(\d+)\.(linear\.weight|linear\.bias|weight)")


def export_medusa(drafter: Drafter, target: Target, out: Path) -> None:
    """Write Medusa heads as FasterDecoding/Medusa, TGI and vLLM up to 0.32 load them.

    A shared output layer is written out once for each head, since vLLM knows no other way. A reduced draft vocabulary
    with a shared layer becomes the whole one: the same heads over more rows. An own reduced layer has no rows to write
    for the other tokens and is refused.

    Raises:
        UserError: if the drafter is no Medusa, its own output layer is reduced, or the target's has a bias.
    """
    if not isinstance(drafter, Medusa):
        raise UserError(f"the format medusa holds Medusa heads, this artifact is {drafter.family}; export that "
                        "family in its own format")
    tensors = medusa_tensors(drafter, target)
    with whole_folder(out, _OWNED) as partial:
        save_file(tensors, partial / MEDUSA_FILE, metadata={"format": "pt"})
        write_file(partial / "config.json", json.dumps(_medusa_config(drafter, target), indent=2) + "\n")
        write_file(partial / "README.md", _medusa_readme(drafter, target))


def medusa_tensors(drafter: Medusa, target: Target) -> dict[str, Tensor]:
    """The heads under their FasterDecoding names, in float32 on the CPU, each tensor with memory of its own.

    Raises:
        UserError: if their own output layer is reduced, or the target's has a bias.
    """
    if drafter.config.output == "copy" and drafter.token_ids_Q is not None:
        raise UserError(f"these heads have own output layers over {drafter.config.vocabulary_size} tokens; the layout "
                        "needs a row for every token: train with output: shared, or with vocabulary_size: null")
    if getattr(target.head, "bias", None) is not None:
        raise UserError(f"the output layer of {target.identity.name} has a bias, for which the layout has no place")
    tensors: dict[str, Tensor] = {}
    for head, blocks in enumerate(drafter.heads):
        for layer in range(drafter.config.num_layers):
            # A tied block is stored as often as it is passed through: the layout knows no other way.
            block = [*blocks.children()][0 if drafter.config.tie_blocks else layer]
            for name, tensor in block.state_dict().items():
                tensors[f"{head}.{layer}.{name}"] = tensor
        output = drafter.output_parameters(head)
        tensors[f"{head}.{drafter.config.num_layers}.weight"] = output[0] if output else target.output_weight()
    own = {name: tensor.detach().to("cpu", torch.float32, copy=True).contiguous() for name, tensor in tensors.items()}
    _check_medusa(own, drafter)
    return own


def import_medusa(folder: Path, target: Target) -> Medusa:
    """Read Medusa heads in the FasterDecoding layout (safetensors only) and bind them to `target`.

    The number of heads and blocks is counted in the weights: official configs are known to state it wrongly. Where all
    blocks of every head are equal they were one block in the official code, and stay one (`tie_blocks`). Heads without
    output layers share the target's.

    Raises:
        UserError: if there is no safetensors file, a tensor is missing, unknown, or of another shape than the target's.
    """
    tensors = _read_foreign(folder)
    heads = 1 + max(head for head, _, _ in tensors)
    layers = 1 + max((layer for _, layer, part in tensors if part != "weight"), default=-1)
    own = any(part == "weight" for _, _, part in tensors)
    tied = layers > 1 and _tied(tensors)
    config = MedusaConfig(num_heads=heads, num_layers=layers, tie_blocks=tied, output="copy" if own else "shared")
    drafter = Medusa.create(config, target)
    state: dict[str, Tensor] = {}
    for (head, layer, part), tensor in tensors.items():
        if part == "weight":
            state[f"outputs.{head}.weight"] = tensor
        elif layer == 0 or not tied:
            state[f"heads.{head}.{layer}.{part}"] = tensor
    try:
        drafter.load_state_dict(state)
    except RuntimeError as error:
        raise UserError(f"the Medusa heads in {folder} do not fit {target.identity.name} (width {target.hidden_size}, "
                        f"{target.vocab_size} tokens): {' '.join(str(error).split())}") from error
    return drafter.eval()


def _tied(tensors: Mapping[tuple[int, int, str], Tensor]) -> bool:
    """Whether every block is equal to the first of its head; independent training never leaves them so."""
    firsts = ((tensors.get((head, 0, part)), tensor) for (head, _, part), tensor in tensors.items() if part != "weight")
    return all(first is not None and torch.equal(first, tensor) for first, tensor in firsts)


def _read_foreign(folder: Path) -> dict[tuple[int, int, str], Tensor]:
    path = next((folder / name for name in (MEDUSA_FILE, "model.safetensors") if (folder / name).is_file()), None)
    if path is None:
        raise UserError(f"{folder} holds neither {MEDUSA_FILE} nor model.safetensors; a .pt or .bin file is a pickle, "
                        "which is never read: convert it to safetensors first")
    try:
        raw = load_file(path)
    except SafetensorError as error:
        raise UserError(f"{path} is not a readable safetensors file ({error}); copy it again") from error
    found: dict[tuple[int, int, str], Tensor] = {}
    for name, tensor in raw.items():
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise UserError(f"{path} holds {name!r}, no tensor of Medusa heads; give a folder with heads alone")
        found[int(match[1]), int(match[2]), match[3]] = tensor
    if not found:
        raise UserError(f"{path} holds no tensor; give a folder with Medusa heads")
    return found


def _medusa_config(drafter: Medusa, target: Target) -> dict[str, Any]:
    # No "architectures": TGI takes its absence for Medusa. Without medusa_fc_bias vLLM drops the biases silently.
    return {
        "base_model_name_or_path": portable(target.identity.name),
        "hidden_size": drafter.hidden_size,
        "medusa_fc_bias": True,
        "medusa_num_heads": drafter.config.num_heads,
        "medusa_num_layers": drafter.config.num_layers,
        "vocab_size": drafter.vocab_size,
    }


def _check_medusa(tensors: Mapping[str, Tensor], drafter: Medusa) -> None:
    """Engines ignore missing and unknown tensors silently, so the whole table is checked here."""
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


def _medusa_readme(drafter: Medusa, target: Target) -> str:
    return (
        f"# Medusa heads for {portable(target.identity.name)}\n\n"
        f"{drafter.config.num_heads} heads in the layout of FasterDecoding/Medusa. Serve them with\n\n"
        "* Text Generation Inference: `text-generation-launcher --model-id THIS_FOLDER --speculate "
        f"{drafter.config.num_heads}`\n"
        "* vLLM up to 0.32 (removed later): `--speculative-config '{\"method\": \"medusa\", "
        f"\"model\": \"THIS_FOLDER\", \"num_speculative_tokens\": {drafter.config.num_heads}}}'`\n\n"
        "These engines draft a chain from the best token of each head; the tree of the artifact is not used there.\n"
    )
