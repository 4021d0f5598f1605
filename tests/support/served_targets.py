"""Folders of tiny random targets of the kinds that people serve."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from draftsmith.modules.target.loading.tiny_model import tiny_tokenizer
from support.architectures import random_trait
from support.quantised_folders import write_quantised
from support.recurrent_models import recurrent_model
from support.wrappers import random_wrapper


def saved(model: Callable[..., Any], folder: Path) -> Path:
    """Write a random model and the tests' tokenizer as a folder of Hugging Face."""
    tokenizer = tiny_tokenizer()
    model(vocab_size=len(tokenizer), max_position_embeddings=256).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def quantised(folder: Path) -> Path:
    """Write a random model whose linear layers are stored in float8."""
    write_quantised(folder, {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
                    torch.float8_e4m3fn, "weight_scale_inv", blocks=True)
    return folder


SERVED: dict[str, Callable[[Path], Path]] = {
    "gated delta rule and experts": partial(saved, partial(recurrent_model, "Qwen3Next")),
    "Mamba-2 and layers without either": partial(saved, partial(recurrent_model, "NemotronH")),
    "sinks": partial(saved, partial(random_trait, "gpt-oss", torch.float32)),
    "latent attention": partial(saved, partial(random_trait, "deepseek-v3", torch.float32)),
    "layers of unlike shape": partial(saved, partial(random_trait, "gemma4", torch.float32)),
    "keys of earlier layers": partial(saved, partial(random_trait, "gemma4-e2b", torch.float32)),
    "chunks": partial(saved, partial(random_trait, "llama4", torch.float32)),
    "pictures": partial(saved, partial(random_wrapper, "qwen3_vl")),
    "quantised": quantised,
}
"""Functions that write one into a folder."""
