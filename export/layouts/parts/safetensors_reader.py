"""Reader of drafters in other projects' layouts: safetensors files only, since a pickle can run code."""

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ....modules import Drafter, Target, UserError
from ....modules.files.atomic_files import file_sha256
from ....modules.files.json_records import read_object
from ....modules.target.draft_vocabulary import require_distinct
from ....modules.target.loading.hf_folder import refuse_adapter
from ....modules.target.loading.stored_weights import check_claims
from ...weight_checks import require_weights

_ROUNDING = 1e-2
"""Largest difference of an embedding from the target's, relative to its largest element: half precision is closer."""
_SINGLE = "model.safetensors"
_LAYERS = "transformer_layer_config"  # The section of the speculators library with the shape of the layers
_INNER = ("dflash_config", "dspark_config")  # Sections with settings of drafters of blocks
_EVERYWHERE: dict[str, tuple[Any, ...]] = {
    "is_causal": (None, True), "use_bidirectional_attention": (None, False), "quantization_config": (None,)}
"""Settings of all layouts, with the values that can be read: every drafter here sees the text before a token alone, and
weights of fewer bits are for serving."""
D = TypeVar("D", bound=Drafter)


class Checkpoint:
    """A published checkpoint: its configuration and its files of weights, which are not read yet.

    Args:
        folder: of the checkpoint.
        file: of the weights; model.safetensors, or its shards, are read where there is no such file.
        config_file: of the configuration.
        bare: whether there need be no configuration.
    """

    def __init__(self, folder: Path, file: str, config_file: str, *, bare: bool = False) -> None:
        if not folder.is_dir():
            raise UserError(f"there is no folder {folder}; give the one that holds the checkpoint")
        self.folder, self.config = folder, folder / config_file
        if not self.config.is_file():
            refuse_adapter(folder)
        whole = next((folder / name for name in (file, _SINGLE) if (folder / name).is_file()), None)
        # Shards, as transformers names them today and as it once did.
        shards = (path for pattern in ("model-*.safetensors", "model.safetensors-*.safetensors")
                  for path in folder.glob(pattern))
        self.files = sorted(shards) if whole is None else [whole]
        if not self.files:
            found = sorted(path.name for path in folder.iterdir() if path.suffix in (".pt", ".pth", ".bin"))
            raise UserError(
                f"{folder} holds neither {file} nor {_SINGLE}; a .pt or .bin file is a pickle, which is never "
                "read: if you trust it, convert it first with safetensors.torch.save_file({name: tensor.clone() for "
                f"name, tensor in torch.load('{(found or [f'{Path(file).stem}.pt'])[0]}', weights_only=True)"
                f".items()}}, '{file}')")
        said = {} if bare and not self.config.is_file() else read_object(self.config, "copy it again")
        check_claims(said, str(folder))
        if said.get("format") == "draftsmith":
            raise UserError(f"{folder} is an artifact already; use it as it is, as in draftsmith evaluate --artifact "
                            f"{folder}")
        self.said: dict[str, Any] = (layers if isinstance(layers := said.get(_LAYERS), dict) else {}) | said
        """Its configuration."""
        self.by_speculators = _LAYERS in said  # Whether it is in the layout of the speculators library

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Its configuration, in which a key of an inner section goes before the same one at the top, as in vLLM."""
        first, second = (self.said.get(name) or {} for name in _INNER)
        return {**self.said, **first, **second}

    def require(self, known: Mapping[str, tuple[Any, ...]], target: Target) -> None:
        """Refuse a setting whose value is none of the known ones, and another vocabulary than the target's. Raises
        UserError."""
        said = self.settings
        for key, values in {**_EVERYWHERE, **known}.items():
            if key in said and said[key] not in values:
                able = ", ".join(json.dumps(value) for value in values if value is not None) or "null"
                raise UserError(f"{self.config} says {key}: {json.dumps(said[key])}; only {able} can be imported, "
                                "choose such a checkpoint")
        if (tokens := self.said.get("vocab_size")) not in (None, target.vocab_size):
            raise UserError(f"{self.config} says vocab_size: {json.dumps(tokens)}, but {target.identity.name} has "
                            f"{target.vocab_size} tokens; load the target it was trained for with --target.name")

    def tensors(self) -> dict[str, Tensor]:
        """Its tensors by name. Raises UserError if a file is damaged, there is no tensor, or one is not finite."""
        found: dict[str, Tensor] = {}
        for path in self.files:
            try:
                found |= load_file(path)
            except SafetensorError as error:
                raise UserError(f"{path} is not a readable safetensors file ({error}); copy it again") from error
        if not found:
            raise UserError(f"{self.files[0]} holds no tensor; give a folder with a drafter's weights")
        # Before any of them is compared with the target's, which a value that is no number would never equal.
        require_weights(found, found, str(self.folder))
        return found

    def origin(self, format_name: str) -> dict[str, Any]:
        """Provenance of an import: its layout, the last part of the folder's path, the hash of each file of weights."""
        return {"format": format_name, "folder": self.folder.absolute().name,
                "files": {path.name: file_sha256(path) for path in self.files}}


def loaded(drafter: D, tensors: dict[str, Tensor], target: Target, folder: Path) -> D:
    """The drafter with these weights, on the target's device in at least float32, bound to the target.

    Raises:
        UserError: if a tensor is missing, unknown, of another shape or not finite, or the draft vocabulary holds an id
            twice.
    """
    try:
        drafter.load_state_dict(tensors)
    except RuntimeError as error:
        raise UserError(f"the {drafter.family} drafter in {folder} does not fit its configuration or "
                        f"{target.identity.name} (width {target.hidden_size}, {target.vocab_size} tokens): "
                        f"{' '.join(str(error).split())}; choose a checkpoint made for this target") from error
    # Loading accepts whole numbers, nan and an id that occurs twice without a word.
    require_weights(tensors, drafter.state_dict(), "the imported drafter")
    require_distinct(drafter.token_ids_Q)
    # Half precision would lose what a checkpoint in float32 was trained to.
    drafter.to(device=target.device, dtype=torch.promote_types(target.dtype, torch.float32))
    drafter.bind(target)
    return drafter.eval()


def check_embedding(stored_VD: Tensor | None, target: Target, folder: Path) -> None:
    """Check that an embedding stored with a drafter is the target's, which the drafter uses here. Raises UserError if
    it is another one."""
    check_borrowed(stored_VD, target.model.get_input_embeddings().weight, "embedding", target, folder)


def check_borrowed(stored_VD: Tensor | None, own_VD: Tensor, part: str, target: Target, folder: Path) -> None:
    """A check that a stored matrix, if any, is the target's, whose name is `part`. Raises UserError."""
    if stored_VD is None:
        return
    # Checkpoints are often in half precision, the target in another format: equality to the bit is too strict.
    own_VD = own_VD.detach()
    close = stored_VD.shape == own_VD.shape and bool(
        (stored_VD.to(own_VD) - own_VD).abs().max() <= _ROUNDING * own_VD.abs().max())
    if not close:
        raise UserError(f"the {part} in {folder} is not that of {target.identity.name}: the weights belong to another "
                        "target; load the one it was trained for")
