"""Weights of other projects: safetensors files alone, since a pickle can run code."""

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ...modules import Target, UserError

_ROUNDING = 1e-2
"""How far an embedding may lie from the target's, relative to its largest element: half precision is closer."""


def read_tensors(folder: Path, file: str) -> dict[str, Tensor]:
    """The tensors of `file`, or else of model.safetensors, in `folder`.

    Raises:
        UserError: if neither is there, or it is damaged or empty.
    """
    path = next((folder / name for name in (file, "model.safetensors") if (folder / name).is_file()), None)
    if path is None:
        stem = Path(file).stem
        raise UserError(
            f"{folder} holds neither {file} nor model.safetensors; a .pt or .bin file is a pickle, which is never "
            "read: convert it first, where you trust it, with safetensors.torch.save_file({name: tensor.clone() for "
            f"name, tensor in torch.load('{stem}.pt', weights_only=True).items()}}, '{file}')")
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except SafetensorError as error:
        raise UserError(f"{path} is not a readable safetensors file ({error}); copy it again") from error
    if not tensors:
        raise UserError(f"{path} holds no tensor; give a folder with a drafter's weights")
    return tensors


def check_embedding(stored_VD: Tensor | None, target: Target, folder: Path) -> None:
    """A drafter that borrows the target's embedding may come with the one it was trained with: they must be the same.

    Raises:
        UserError: if they are not.
    """
    own_VD = target.model.get_input_embeddings().weight.detach()
    if stored_VD is None:
        return
    close = stored_VD.shape == own_VD.shape and bool(
        (stored_VD.to(own_VD) - own_VD).abs().max() <= _ROUNDING * own_VD.abs().max())
    if not close:
        raise UserError(f"the embedding in {folder} is not that of {target.identity.name}: the heads belong to another "
                        "target; load the one they were trained for")
