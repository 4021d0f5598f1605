"""Draft language models of an ordinary Hugging Face folder, and a target's own head: tensors in its files that guess a
token further ahead (multi-token prediction, DeepSeek-V3, arXiv:2412.19437, section 2.2), which transformers leaves out.

Models with several such modules in a row have them numbered; the first one is read and the others are left alone, as
vLLM does with MiMo-V2. Of DeepSeek-V3 and GLM-4.5 it takes them by turns where a draft is longer than one token."""

import hashlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...errors import UserError
from ...files.atomic_files import files_digest
from ...files.json_records import read_object, record_of, without_marks
from ..attention.tree_attention import NAME, attend_by, register
from ..model import Target
from ..submodel import is_causal_lm, new_model
from . import stored_weights as weights
from .model_parts import decoder_of, whole

_MODEL_FILES = ("config.json", "*.safetensors", "*.bin", "*.index.json")
"""Files that define the model in a Hugging Face folder; the tokenizer only decides whether it fits."""


@contextmanager
def without_bars() -> Iterator[None]:
    """Block in which transformers shows no bars of the weights that it reads; on a terminal those of downloads, which
    take minutes, stay."""
    from huggingface_hub.utils.tqdm import enable_progress_bars
    from transformers import modeling_gguf_pytorch_utils
    from transformers.utils import logging

    gguf: Any = modeling_gguf_pytorch_utils
    shown, former = logging.is_progress_bar_enabled(), gguf.tqdm
    # No switch of transformers reaches the bar of a GGUF file's tensors.
    gguf.tqdm = partial(former, disable=True)
    if shown:
        # It silences the hub's bars as well.
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        if sys.stderr.isatty():
            enable_progress_bars()
    try:
        yield
    finally:
        gguf.tqdm = former
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def refuse_adapter(folder: Path) -> None:
    """Refuse the folder of an adapter, as PEFT writes it. Raises UserError."""
    if (folder / "adapter_config.json").exists():
        raise UserError(f"the folder {str(folder)!r} holds an adapter (adapter_config.json), which names another model "
                        "to load; give that as target.name and this folder as target.adapter, or merge the adapter "
                        "into its model, save that and give its folder")


def read_config(folder: Path, target: Target) -> Any:
    """The configuration of the causal language model in a Hugging Face folder. UserError if there is none, it cannot be
    read, or its vocabulary or tokenizer is not the target's."""
    from transformers import AutoConfig, PreTrainedConfig

    refuse_adapter(folder)
    folder = without_marks(folder)
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} holds no config.json; give a folder written by save_pretrained or by "
                        "draftsmith export --format huggingface")
    try:
        weights.check_claims(PreTrainedConfig.get_config_dict(folder)[0], str(folder))
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _unreadable(folder, error) from error
    if config.get_text_config() is not config:
        raise UserError(f"{folder} holds a {type(config).__name__}, which reads more than text, and a draft model "
                        "reads text alone; give the folder of a language model")
    if not is_causal_lm(config):
        raise UserError(f"{folder} holds a {type(config).__name__}, no causal language model; give the folder of one")
    require_vocabulary(config.vocab_size, target, str(folder))
    _require_tokenizer(folder, target)
    return config


def read_model(folder: Path, target: Target) -> Any:
    """The causal language model in a Hugging Face folder, in float32. UserError if `read_config` refuses it, or its
    weights cannot be read, are not whole or not finite."""
    from transformers import AutoModelForCausalLM

    config, name, folder = read_config(folder, target), f"the model in {folder}", without_marks(folder)
    stored = weights.check_layers(config.num_hidden_layers, folder, str(folder))
    try:
        with torch.device("meta"):
            sketch = AutoModelForCausalLM.from_config(config, trust_remote_code=False)  # type: ignore[no-untyped-call]
        weights.check_parameters(sketch, stored, str(folder))
        with without_bars():
            form = weights.quantisation_of(config, None, name)
            model = weights.read_quantised(folder, name, form, torch.device("cpu"), dtype=torch.float32, config=config,
                                           trust_remote_code=False)
            weights.require_finite(model, name)
    except UserError:
        raise
    except (OSError, ValueError, KeyError, SafetensorError, RuntimeError) as error:
        raise _unreadable(folder, error) from error
    register()
    attend_by(model, NAME)
    return model


def folder_digest(folder: Path) -> str:
    """Hash of the model in a Hugging Face folder: of its configuration and weights, see `files_digest`."""
    return files_digest(folder, _MODEL_FILES)


def _unreadable(folder: Path, error: Exception) -> UserError:
    reason = " ".join(str(error).split()) or type(error).__name__
    return UserError(f"the model in {folder} cannot be read ({reason}); copy or export it again")


def require_vocabulary(size: int, target: Target, name: str) -> None:
    """Refuse a draft with more or fewer tokens than the target. Raises UserError."""
    if size != target.vocab_size:
        raise UserError(f"the draft model {name} has a vocabulary of {size} tokens, {target.identity.name} one of "
                        f"{target.vocab_size}; a draft must have the target's own: choose one of its family, or train "
                        "one from scratch (leave folder out)")


def _require_tokenizer(folder: Path, target: Target) -> None:
    """Refuse a folder whose tokenizer gives ids another meaning than the target's; the sketch of a target has none to
    compare."""
    from transformers import AutoTokenizer

    if target.tokenizer is None or not (folder / "tokenizer.json").is_file():
        return
    theirs = AutoTokenizer.from_pretrained(folder, trust_remote_code=False).get_vocab()
    ours = target.tokenizer.get_vocab()
    if theirs != ours:
        odd = min(dict(theirs.items() ^ ours.items()).items(), key=lambda item: (item[1], item[0]))
        raise UserError(f"the tokenizer in {folder} has {len(theirs)} tokens, {target.identity.name}'s {len(ours)}; "
                        f"they differ first at id {odd[1]} ({odd[0]!r}): the same ids would mean other words; choose "
                        "a draft with the target's tokenizer, or train one from scratch (leave folder out)")


LAYER, NORM = "model.layers.0.", "model.norm.weight"  # transformers' names in a model with one layer
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, kw_only=True)
class HeadNames:
    """Names of a head's tensors, as a line of models stores them."""

    prefix: str  # Start of all of them; {layers} stands for the number of the target's layers
    token_norm: str
    state_norm: str
    projection: str
    last_norm: str
    layer: str = ""  # Start of the names of the decoder layer, after the prefix
    state_first: bool = False  # Whether the projection reads the state before the token's embedding


NAMES = (
    # Qwen3-Next and Qwen3.5; DeepSeek-V3 and GLM-4.5; MiMo; MiMo-V2.
    HeadNames(prefix="mtp.", token_norm="pre_fc_norm_embedding", state_norm="pre_fc_norm_hidden", projection="fc",
              last_norm="norm", layer="layers.0."),
    HeadNames(prefix="model.layers.{layers}.", token_norm="enorm", state_norm="hnorm", projection="eh_proj",
              last_norm="shared_head.norm"),
    HeadNames(prefix="model.mtp_layers.0.", token_norm="token_layernorm", state_norm="hidden_layernorm",
              projection="input_proj", last_norm="final_layernorm", state_first=True),
    HeadNames(prefix="model.mtp.layers.0.", token_norm="enorm", state_norm="hnorm", projection="eh_proj",
              last_norm="final_layernorm"),
)  # The order of token and state is the one in which vLLM's model of each line concatenates them


@dataclass(frozen=True, kw_only=True)
class NativeHead:
    """The head in a folder, whose tensors are not read yet."""

    folder: Path
    names: HeadNames
    files: dict[str, Path]  # File of each of its tensors
    renamed: dict[str, str]  # Its tensors by our names: of a model with one layer, and `enorm`, `hnorm`, `eh_proj`
    shared: dict[str, Path]  # Files of copies of the target's embedding and output layer that are stored next to it

    @classmethod
    def find(cls, target: Target, folder: Path | None = None) -> "NativeHead":
        """The head of a target, in its own folder or in another one. UserError if there is none, a file is damaged, or
        two hold the same tensor of it."""
        folder, held, twice = folder or own_folder(target), dict[str, Path](), dict[str, Path]()
        # As engines do: what an index leaves out is of another download or in another format.
        files, remedy = sorted(folder.glob("*.safetensors")), "copy it again"
        if (index := folder / _INDEX).is_file():
            listed = read_object(index, remedy).get("weight_map")
            places = record_of(dict[str, str], listed, f"the weight_map of {index}", remedy)
            files = sorted({folder / name for name in places.values()})
        for file in files:
            try:
                with safe_open(file, framework="pt") as opened:
                    names_here = dict.fromkeys(opened.keys(), file)
                twice |= {name: held[name] for name in names_here if name in held}
                held |= names_here
            except (OSError, SafetensorError) as error:
                raise UserError(f"{file} is no readable safetensors file ({error}); copy it again") from error
        asked = []
        for names in NAMES:
            prefix = names.prefix.format(layers=target.num_layers)
            asked.append(f"{prefix}{names.projection}.weight")
            if asked[-1] not in held:
                continue
            renamed = {f"{prefix}{theirs}.weight": ours for theirs, ours in (
                (names.token_norm, "enorm.weight"), (names.state_norm, "hnorm.weight"),
                (names.projection, "eh_proj.weight"), (names.last_norm, NORM))}
            shared = {name: file for name, file in held.items() if name.startswith(prefix) and name.endswith(
                ("embed_tokens.weight", "head.weight"))}
            if lost := sorted(renamed.keys() - held.keys()):
                raise UserError(f"the head in {folder} lacks {', '.join(lost)}; copy or save the target again")
            for name in sorted(name for name in twice if name.startswith(prefix)):
                raise UserError(f"{twice[name]} and {held[name]} both hold {name}, and engines differ in which one "
                                "they read; remove the one that the target does not need")
            start = prefix + names.layer
            renamed |= {name: LAYER + name.removeprefix(start) for name in held
                        if name.startswith(start) and name not in renamed and name not in shared}
            return cls(folder=folder, names=names, files={name: held[name] for name in renamed}, renamed=renamed,
                       shared=shared)
        raise UserError(f"{target.identity.name} brings no head for a token further ahead: {folder} holds none of the "
                        f"tensors {', '.join(asked)}; choose a target with one, or another family, such as eagle3")

    @property
    def digest(self) -> str:
        """Hash of its tensors, wherever they are stored."""
        digest = hashlib.sha256()
        for name, file in sorted(self.files.items()):
            with safe_open(file, framework="pt") as opened:
                tensor = opened.get_tensor(name)
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
            digest.update(memoryview(tensor.contiguous().flatten().view(torch.uint8).numpy()))
        return digest.hexdigest()

    @property
    def sparse(self) -> bool:
        """True if its layer has a mixture of experts."""
        return any(".mlp.experts." in name for name in self.renamed.values())

    def read(self, target: Target, config: Any) -> dict[str, Tensor]:
        """Its tensors in float32: `enorm.weight`, `hnorm.weight`, `eh_proj.weight`, and `decoder.*` of a model with one
        layer, which has this configuration. UserError if one is missing, of another shape, in fewer bits or not finite,
        or the head has an embedding or an output layer of its own."""
        for name, file in self.shared.items():
            own_VD = whole(target.model.get_input_embeddings().weight if "embed" in name else target.output_weight())
            with safe_open(file, framework="pt") as opened:
                stored = opened.get_tensor(name)
            if stored.shape != own_VD.shape or not torch.equal(stored.to(own_VD), own_VD):
                raise UserError(f"{file} holds {name} with other values than {target.identity.name}, and engines let a "
                                "head read the target's own; choose a head that shares them")
        found = {}
        for name, file in self.files.items():
            with safe_open(file, framework="pt") as opened:
                if (kind := opened.get_slice(name).get_dtype()) not in _FLOATS:
                    raise UserError(f"{file} holds {name} in {kind}, and a head is read unquantised alone; choose the "
                                    "target's unquantised weights")
                found[self.renamed[name]] = tensor = opened.get_tensor(name).float()
            if not weights.all_finite(tensor):
                raise UserError(f"{file} holds {name} with values that are not finite (nan or inf); save or copy the "
                                "target again")
        width = target.hidden_size
        expected = {"enorm.weight": (width,), "hnorm.weight": (width,), "eh_proj.weight": (width, 2 * width)}
        for name, shape in expected.items():
            if tuple(found[name].shape) != shape:
                theirs = next(one for one, ours in self.renamed.items() if ours == name)
                raise UserError(f"{self.files[theirs]} holds {theirs} of shape {list(found[name].shape)}, "
                                f"{target.identity.name} is {width} wide and asks for {list(shape)}; choose the "
                                "target of this head")
        # Experts are stored one by one and read as one tensor: what transformers does with a model's files.
        apart = {name: found.pop(name) for name in expected}
        blank = torch.zeros(config.vocab_size, width)
        tensors = {**found, "model.embed_tokens.weight": blank, "lm_head.weight": blank.clone()}
        where = f"the head in {self.folder}, read as {LAYER}*,"
        try:
            with without_bars():
                model = weights.read_model_whole(None, where, config=config, dtype=torch.float32, state_dict=tensors)
        except RuntimeError as error:
            raise UserError(f"the experts of {where} lack a tensor, or one has another shape; copy or save the target "
                            "again") from error
        return apart | {f"decoder.{name}": tensor for name, tensor in decoder_of(model).state_dict().items()
                        if name != "embed_tokens.weight"}

    def stored(self, tensors: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
        """The inverse of `read`: tensors by the names that the target's files have."""
        model = new_model(config)
        decoder_of(model).load_state_dict({name.removeprefix("decoder."): tensor for name, tensor in tensors.items()
                                           if name.startswith("decoder.")}, strict=False)
        with TemporaryDirectory() as folder, without_bars():
            model.save_pretrained(folder, max_shard_size="1TB")
            with safe_open(Path(folder, _SINGLE), framework="pt") as opened:
                found = {name: opened.get_tensor(name) for name in opened.keys()} | tensors  # noqa: SIM118
        return {theirs: found[ours] for theirs, ours in self.renamed.items()}


def own_folder(target: Target) -> Path:
    """The folder with a target's files. Raises UserError for one that was not read from safetensors files."""
    folder: Path | None = getattr(target.model, "stored_in", None)
    if folder is None or not folder.is_dir():
        raise UserError(f"{target.identity.name} was not read from a folder of safetensors files, which alone can hold "
                        "a head of its own; choose such a target, or another family, such as eagle3")
    return folder
