"""Checkpoints in other projects' layouts, as folders that are written and read: weights in safetensors files only,
since a pickle can run code, a configuration, and the description for README.md with the table of the tensors."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ....modules import Drafter, Target, UserError
from ....modules.files.atomic_files import file_sha256, write_file
from ....modules.files.json_records import read_object
from ....modules.interfaces.layout import Pairs, here
from ....modules.parts.decoder_block import BlockConfig
from ....modules.target.draft_vocabulary import require_distinct
from ....modules.target.loading.hf_folder import refuse_adapter
from ....modules.target.loading.stored_weights import check_claims
from ...stored_drafter import require_weights

EXPORT = "export"  # The kind of every exported folder: one export replaces another
ORIGIN = "origin.json"  # The file that names the artifact of an exported folder
WHOLE = "model.safetensors"  # The file of weights in most layouts, by the name that transformers gives it
_NUMBER = re.compile(r"\d+")
_ROUNDING = 1e-2  # Largest difference from the target's embedding by its largest element: half precision is closer
_LAYERS = "transformer_layer_config"  # The section of the speculators library with the shape of the layers
_INNER = ("dflash_config", "dspark_config")  # Sections with settings of drafters of blocks
_EVERYWHERE: dict[str, tuple[Any, ...]] = {
    "is_causal": (None, True), "use_bidirectional_attention": (None, False), "quantization_config": (None,)}
"""Settings of all layouts, with the values that can be read: every drafter here sees the text before a token alone, and
weights of fewer bits are for serving."""
D = TypeVar("D", bound=Drafter)


# Writing --------------------------------------------------------------------------------------------------------------


class TensorForm(NamedTuple):
    """Shape and number format of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32


Table = Mapping[str, TensorForm]  # The tensors of a file, by name


@dataclass(frozen=True, kw_only=True)
class Contents:
    """Description of an exported folder for its README.md, without the commands to serve it."""

    title: str  # Its title, without the target
    note: str = ""  # A sentence that is true of this folder alone; what is true of an engine stands in the guide to it
    example: str = ""  # Python that converts it or decodes with it, with the sentence before it; empty for none
    table: Table | None = None  # Names, shapes and formats of the tensors; None where they are those of transformers


def write_layout(folder: Path, file: str, tensors: dict[str, Tensor], config: Mapping[str, Any], *,
                 config_file: str = "config.json") -> Table:
    """Write the weights as `file` into an empty folder, with their configuration; returns their table."""
    # transformers refuses a file whose metadata does not say for which library it is.
    save_file(tensors, folder / file, metadata={"format": "pt"})
    write_file(folder / config_file, json.dumps(config, indent=2) + "\n")
    return {name: TensorForm(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def stored(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies in float32 on the CPU, but for the ids of a reduced vocabulary, which each layout holds in its own way:
    safetensors refuses tensors that share memory."""
    return {name: tensor.detach().to("cpu", torch.float32, copy=True).contiguous() for name, tensor in tensors.items()
            if name != "token_ids"}


def as_pickle(project: str, file: str, pickle: str) -> str:
    """The lines that convert a file of weights for a project whose code reads a pickle."""
    return (f"{project} reads a pickle:\n\n```python\nimport torch\nfrom safetensors.torch import load_file\n\n"
            f'torch.save(load_file("{file}"), "{pickle}")\n```')


def table_text(table: Table) -> str:
    """The table in Markdown; names that differ by a number alone, such as those of equal heads, share a line."""
    def form(item: tuple[str, TensorForm]) -> tuple[str, TensorForm]:
        return _NUMBER.sub("{}", item[0]), item[1]

    lines = ["| tensor | shape | number format |", "|---|---|---|"]
    for (_, (shape, dtype)), same in groupby(sorted(table.items(), key=lambda item: (form(item), item[0])), key=form):
        names = [name for name, _ in same]
        name = f"`{names[0]}`" if len(names) == 1 else f"`{names[0]}` to `{names[-1]}` ({len(names)})"
        lines.append(f"| {name} | {list(shape)} | {str(dtype).removeprefix('torch.')} |")
    return "\n".join(lines)


# Reading --------------------------------------------------------------------------------------------------------------


class Checkpoint:
    """A published checkpoint: its configuration, which there need not be of a `bare` one, and its files of weights,
    which are not read yet: `file`, else model.safetensors or its shards."""

    def __init__(self, folder: Path, file: str, config_file: str, *, bare: bool = False) -> None:
        if not folder.is_dir():
            raise UserError(f"there is no folder {folder}; give the one that holds the checkpoint")
        self.folder, self.config = folder, folder / config_file
        if not self.config.is_file():
            refuse_adapter(folder)
        whole = next((folder / name for name in (file, WHOLE) if (folder / name).is_file()), None)
        # Shards, as transformers names them today and as it once did.
        shards = (path for pattern in ("model-*.safetensors", "model.safetensors-*.safetensors")
                  for path in folder.glob(pattern))
        self.files = sorted(shards) if whole is None else [whole]
        if not self.files:
            found = sorted(path.name for path in folder.iterdir() if path.suffix in (".pt", ".pth", ".bin"))
            raise UserError(
                f"{folder} holds neither {file} nor {WHOLE}; a .pt or .bin file is a pickle, which is never "
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
        """Refuse a setting with an unknown value, and another vocabulary than the target's. Raises UserError."""
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
    """The drafter with these weights, on the target's device in at least float32, bound to the target. Raises UserError
    if a tensor is missing, unknown, of another shape or not finite, or the draft vocabulary holds an id twice."""
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


def check_borrowed(stored_VD: Tensor | None, target: Target, folder: Path, rows_VD: Tensor | None = None) -> None:
    """Refuse a matrix stored with a drafter, if any, that is not the target's embedding, which the drafter uses here,
    or these rows of its output layer. Raises UserError."""
    if stored_VD is None:
        return
    part = "embedding" if rows_VD is None else "output layer"
    own_VD = (target.model.get_input_embeddings().weight if rows_VD is None else rows_VD).detach()
    # Checkpoints are often in half precision, the target in another format: equality to the bit is too strict.
    if stored_VD.shape != own_VD.shape or not bool(
            (stored_VD.to(own_VD) - own_VD).abs().max() <= _ROUNDING * own_VD.abs().max()):
        raise UserError(f"the {part} in {folder} is not that of {target.identity.name}: the weights belong to another "
                        "target; load the one it was trained for")


# What several layouts cannot hold, and blocks of heads ----------------------------------------------------------------


def output_bias(target: Target) -> str:
    """The refusal of a target whose output layer has a bias, for which the layouts of Medusa, EAGLE and Kangaroo have
    no place: engines take its matrix alone. Empty for any other."""
    return "" if getattr(target.head, "bias", None) is None else (
        f"the output layer of {target.identity.name} has a bias, for which the layout has no place; decode the "
        "artifact with draftsmith")


def head_width(block: BlockConfig) -> str:
    """The refusal of heads that are not as wide as the official code computes, which reads no key; else empty."""
    return "" if block.num_heads * block.head_dim == block.hidden_size else (
        f"the official code has heads of {block.hidden_size} / {block.num_heads} elements, this drafter of "
        f"{block.head_dim}; decode it with draftsmith")


def repeated(state: Mapping[str, Tensor], later: str, first: str, count: int) -> dict[str, Tensor]:
    """The tensors of heads with a tied block, named `first`, as often as it is applied, which layouts call `later`."""
    return {again: tensor for name, tensor in state.items() for layer in range(max(1, count))
            if (again := here(name, ((first, later),), l=layer) or name)}


def tied(state: Mapping[str, Tensor], later: str, first: str) -> dict[str, Tensor] | None:
    """The same the other way around: without the blocks that equal the first one; None where one of them does not."""
    # Independent training never leaves two blocks equal, so that equal ones were one.
    firsts = {name: here(name, ((later, first),)) or name for name in state}
    equal = all(one in state and torch.equal(state[one], state[name]) for name, one in firsts.items())
    return {name: state[name] for name in firsts.values()} if equal else None


def own_names(tensors: Mapping[str, Tensor], pairs: Pairs, given: Checkpoint, content: str) -> dict[str, Tensor]:
    """A checkpoint's tensors by their names here. Raises UserError for one of another name."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if (own := here(name, pairs)) is None:
            raise UserError(f"{given.folder} holds {name!r}, no tensor of {content}; give a folder with only the "
                            "heads, or choose another --format")
        found[own] = tensor
    return found
