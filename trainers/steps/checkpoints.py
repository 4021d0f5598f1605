"""Atomic checkpoints, safe against a kill at any moment, and trained weights."""

import io
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ...modules.errors import UserError
from ...modules.files.atomic_files import file_sha256, write_atomically

PARTS = {"state_dict": dict, "optimizer_states": list, "lr_schedulers": list, "loops": dict, "callbacks": dict,
         "global_step": int, "epoch": int, "pytorch-lightning_version": str, "draftsmith": dict}  # Read parts and types


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's checkpoints, written atomically and read without executing any code from them."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write the checkpoint; see `write_atomically`."""
        # Into memory first: on a full disk torch.save raises a RuntimeError like that of a programming error.
        content = io.BytesIO()
        torch.save(checkpoint, content)
        write_atomically(Path(path), lambda partial: partial.write_bytes(content.getbuffer()))

    def load_checkpoint(self, path: str | Path, map_location: Any = "cpu", weights_only: bool | None = True) -> Any:
        """Read tensors and plain values only. Raises UserError when the file is damaged."""
        try:
            # torch itself checks no sums: a flipped bit would be another weight.
            with zipfile.ZipFile(path) as archive:
                if (damaged := archive.testzip()) is not None:
                    raise zipfile.BadZipFile(f"wrong checksum of {damaged}")
            content = torch.load(path, map_location="cpu", weights_only=True)
        except (RuntimeError, OSError, EOFError, pickle.UnpicklingError, ValueError, KeyError, AssertionError,
                zipfile.BadZipFile) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise UserError(f"the checkpoint {path} is damaged ({reason}); delete it to start training "
                            "again") from error
        parts = content if isinstance(content, dict) else {}
        if wrong := [name for name, kind in PARTS.items() if not isinstance(parts.get(name), kind)]:
            raise UserError(f"the checkpoint {path} is damaged ({wrong[0]} is not as it was written); delete it to "
                            "start training again")
        return content


def save_weights(path: Path, weights: Mapping[str, Tensor]) -> str:
    """Write weights as safetensors, the same bytes for the same weights; returns their SHA-256 in hex."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    write_atomically(path, lambda partial: save_file(plain, partial))
    return file_sha256(path)


def load_weights(path: Path, sha256: str) -> dict[str, Tensor]:
    """Read weights on the CPU. Raises UserError when the file is missing or is not the one with this hash."""
    try:
        if file_sha256(path) != sha256:
            raise SafetensorError("they are not the ones that training saved")
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"the trained weights {path} cannot be read ({error}); delete that folder to train "
                        "again") from error


def require_same_settings(stored: dict[str, Any], own: dict[str, Any]) -> None:
    """Refuse a checkpoint of a run with other settings. Raises UserError, which names each difference."""
    former, wanted = _flat(stored), _flat(own)
    if changed := [name for name in wanted if wanted[name] != former.get(name)]:
        listed = ", ".join(f"{name} is {wanted[name]!r}, was {former.get(name)!r}" for name in changed)
        raise UserError(f"the run in this folder was started with other settings ({listed}); choose another --out "
                        "folder, or go back to those settings")


def _flat(nested: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in nested.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat
