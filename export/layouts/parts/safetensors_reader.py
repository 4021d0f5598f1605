"""Reader of drafters in other projects' layouts: safetensors files only, since a pickle can run code."""

from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ....modules import Drafter, Target, UserError
from ....modules.files.json_records import read_object
from ....modules.target.draft_vocabulary import require_distinct
from ...weight_checks import require_weights

_ROUNDING = 1e-2
"""Largest difference of an embedding from the target's, relative to its largest element: half precision is closer."""
D = TypeVar("D", bound=Drafter)


def read_checkpoint(folder: Path, file: str, config_file: str | None = "config.json"
                    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(the tensors, the configuration) of a published checkpoint.

    Args:
        folder: of the checkpoint.
        file: of the weights; model.safetensors is read where there is no such file.
        config_file: of the configuration; None for a layout whose tensors say everything.

    Raises:
        UserError: if a file is missing or damaged, or there is no tensor.
    """
    path = next((folder / name for name in (file, "model.safetensors") if (folder / name).is_file()), None)
    if path is None:
        stem = Path(file).stem
        raise UserError(
            f"{folder} holds neither {file} nor model.safetensors; a .pt or .bin file is a pickle, which is never "
            "read: if you trust it, convert it first with safetensors.torch.save_file({name: tensor.clone() for "
            f"name, tensor in torch.load('{stem}.pt', weights_only=True).items()}}, '{file}')")
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except SafetensorError as error:
        raise UserError(f"{path} is not a readable safetensors file ({error}); copy it again") from error
    if not tensors:
        raise UserError(f"{path} holds no tensor; give a folder with a drafter's weights")
    return tensors, {} if config_file is None else read_object(folder / config_file, "copy it again")


def loaded(drafter: D, tensors: dict[str, Tensor], target: Target, mismatch: str) -> D:
    """The drafter with these weights, on the target's device in at least float32, bound to the target.

    Args:
        mismatch: start of the error message, up to the name of the target.

    Raises:
        UserError: if a tensor is missing, unknown, of another shape or not finite, or the draft vocabulary holds an id
            twice.
    """
    try:
        drafter.load_state_dict(tensors)
    except RuntimeError as error:
        raise UserError(f"{mismatch} {target.identity.name} (width {target.hidden_size}, {target.vocab_size} tokens): "
                        f"{' '.join(str(error).split())}; choose a checkpoint made for this target") from error
    # Loading accepts whole numbers, nan and an id that occurs twice without a word.
    require_weights(tensors, drafter.state_dict(), "the imported drafter")
    require_distinct(drafter.token_ids_Q)
    # Half precision would lose what a checkpoint in float32 was trained to.
    drafter.to(device=target.device, dtype=torch.promote_types(target.dtype, torch.float32))
    drafter.bind(target)
    return drafter.eval()


def check_embedding(stored_VD: Tensor | None, target: Target, folder: Path) -> None:
    """Check that an embedding stored with a drafter is the target's, which the drafter uses here.

    Raises:
        UserError: if it is another one.
    """
    own_VD = target.model.get_input_embeddings().weight.detach()
    if stored_VD is None:
        return
    # Checkpoints are often in half precision, the target in another format: equality to the bit is too strict.
    close = stored_VD.shape == own_VD.shape and bool(
        (stored_VD.to(own_VD) - own_VD).abs().max() <= _ROUNDING * own_VD.abs().max())
    if not close:
        raise UserError(f"the embedding in {folder} is not that of {target.identity.name}: the heads belong to another "
                        "target; load the one they were trained for")
