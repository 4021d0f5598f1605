"""Folders of tiny random targets with a head of their own, in the layouts of DeepSeek-V3, Qwen3-Next, Qwen3.5, GLM-4.5
and MiMo."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from draftsmith.modules import Target, TargetConfig, load_target
from draftsmith.modules.target.loading.tiny_model import tiny_tokenizer
from safetensors.torch import load_file, save_file
from support.architectures import random_model, random_trait
from support.recurrent_models import recurrent_model
from support.wrappers import random_wrapper
from torch import Tensor
from transformers import AutoModelForCausalLM


@dataclass(frozen=True)
class Line:
    """A line of models by the names that its checkpoints have."""

    target: Callable[..., Any]  # Makes a random target, given `vocab_size`
    head: dict[str, Any]  # Settings of a model with one layer of the head's kind
    names: dict[str, str]  # Its tensors: `enorm`, `hnorm`, `eh_proj`, `norm` and the start of its layer's names
    copies: tuple[str, ...] = ()  # Names of copies of the target's embedding and output layer
    state_first: bool = False  # Whether the projection reads the state first
    less_one: bool = False  # Whether its norms hold weights less 1


_DEEPSEEK = {"enorm": "model.layers.3.enorm", "hnorm": "model.layers.3.hnorm", "eh_proj": "model.layers.3.eh_proj",
             "norm": "model.layers.3.shared_head.norm", "layer": "model.layers.3."}
_QWEN = {"enorm": "mtp.pre_fc_norm_embedding", "hnorm": "mtp.pre_fc_norm_hidden", "eh_proj": "mtp.fc",
         "norm": "mtp.norm", "layer": "mtp.layers.0."}
_FULL = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
_COPIES = ("model.layers.3.embed_tokens.weight", "model.layers.3.shared_head.head.weight")
LINES = {
    "deepseek-v3": Line(lambda **more: random_trait("deepseek-v3", torch.float32, **more),
                        {"num_hidden_layers": 1, "first_k_dense_replace": 0}, _DEEPSEEK, _COPIES),
    "qwen3-next": Line(lambda **more: recurrent_model("Qwen3Next", **more), _FULL, _QWEN, less_one=True),
    "qwen3.5-text": Line(lambda **more: recurrent_model("Qwen3_5Text", **more), _FULL, _QWEN, less_one=True),
    # As it is published: a model of pictures too.
    "qwen3.5": Line(lambda **more: random_wrapper("qwen3_5", **more), _FULL, _QWEN, less_one=True),
    "glm-4.5": Line(lambda **more: random_model("Glm4Moe", first_k_dense_replace=1, n_routed_experts=4,
                                                n_shared_experts=1, **more),
                    {"num_hidden_layers": 1, "first_k_dense_replace": 0}, _DEEPSEEK, _COPIES),
    # MiMo's layers are those of Qwen2, and transformers has no class of its name.
    "mimo": Line(lambda **more: random_model("Qwen2", **more), _FULL, {
        "enorm": "model.mtp_layers.0.token_layernorm", "hnorm": "model.mtp_layers.0.hidden_layernorm",
        "eh_proj": "model.mtp_layers.0.input_proj", "norm": "model.mtp_layers.0.final_layernorm",
        "layer": "model.mtp_layers.0."}, state_first=True),
}


def with_head(line: str, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Write a random target with a random head among its tensors."""
    known, tokenizer = LINES[line], tiny_tokenizer()
    model = known.target(vocab_size=len(tokenizer), max_position_embeddings=256).to(dtype)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(1)
    own = model.config.get_text_config()
    config = type(own)(**(own.to_dict() | known.head))
    layer, width = AutoModelForCausalLM.from_config(config, dtype=dtype), config.hidden_size
    with TemporaryDirectory() as apart:
        layer.save_pretrained(apart)
        made = load_file(Path(apart, "model.safetensors"))
    head = {known.names["layer"] + name.removeprefix("model.layers.0."): 0.3 * torch.randn(tensor.shape)
            + (tensor.ndim == 1 and not known.less_one)
            for name, tensor in made.items() if name.startswith("model.layers.0.")}
    for name, shape in (("enorm", (width,)), ("hnorm", (width,)), ("norm", (width,)), ("eh_proj", (width, 2 * width))):
        head[f"{known.names[name]}.weight"] = (0.3 * torch.randn(shape) + (name != "eh_proj") * (not known.less_one))
    shared = (model.get_input_embeddings().weight, model.get_output_embeddings().weight)
    head |= dict(zip(known.copies, shared, strict=False))
    change(folder, {name: tensor.detach().to(dtype).clone() for name, tensor in head.items()})
    return folder


def change(folder: Path, tensors: dict[str, Tensor | None]) -> None:
    """Replace, add, or for None remove tensors of a folder's only file."""
    held = load_file(folder / "model.safetensors") | tensors
    save_file({name: tensor for name, tensor in held.items() if tensor is not None}, folder / "model.safetensors",
              metadata={"format": "pt"})


def load(folder: Path, dtype: Any = "float32") -> Target:
    """The target of a folder."""
    return load_target(TargetConfig(name=str(folder), dtype=dtype))
