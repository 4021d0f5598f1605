"""Draft language models read from an ordinary Hugging Face folder."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from ...errors import UserError
from ...files.bounded_reading import without_marks
from ...files.fingerprints import files_digest
from ..attention.tree_attention import NAME, attend_by, register
from ..model import Target
from ..submodel import is_causal_lm
from .claimed_sizes import check_claims, check_layers, check_parameters, stored_bytes
from .quantisation import quantisation_of, read_quantised
from .stored_weights import require_finite

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
                        "to load; merge the adapter into its model, save that and give its folder")


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
        check_claims(PreTrainedConfig.get_config_dict(folder)[0], str(folder))
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
    check_layers(config.num_hidden_layers, folder, str(folder))
    try:
        with torch.device("meta"):
            sketch = AutoModelForCausalLM.from_config(config, trust_remote_code=False)  # type: ignore[no-untyped-call]
        check_parameters(sketch, stored_bytes(folder), str(folder))
        with without_bars():
            model = read_quantised(folder, name, quantisation_of(config, None, name), torch.device("cpu"),
                                   dtype=torch.float32, config=config, trust_remote_code=False)
            require_finite(model, name)
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
