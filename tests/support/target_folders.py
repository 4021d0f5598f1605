"""Folders of tiny random targets of the kinds that people serve: quantised, with heads of their own, as GGUF."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gguf
import torch
from draftsmith.modules import Target, TargetConfig, load_target
from draftsmith.modules.target.loading.tiny_model import tiny_model, tiny_tokenizer
from safetensors.torch import load_file, save_file
from support.targets import random_model, random_trait, random_wrapper, recurrent_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM


def compressed_tensors(kind: str, ignore: list[str]) -> dict[str, Any]:
    """The quantization_config of a folder whose linear layers have a scale for each row, activations rounded too."""
    common = {"num_bits": 8, "type": kind, "symmetric": True}
    return {"quant_method": "compressed-tensors", "quantization_status": "compressed", "format": f"{kind}-quantized",
            "ignore": ignore, "config_groups": {"group_0": {
                "targets": ["Linear"], "weights": {**common, "strategy": "channel", "dynamic": False},
                "input_activations": {**common, "strategy": "token", "dynamic": True}}}}


def write_quantised(folder: Path, settings: dict[str, Any], rounded_to: torch.dtype, scale_name: str = "weight_scale",
                    *, blocks: bool = False, whole: bool = False) -> dict[str, Tensor]:
    """Write the folder and return the values that its tensors stand for, by their names in the model."""
    model, stored, values = tiny_model(), dict[str, Tensor](), dict[str, Tensor]()
    largest = 127.0 if rounded_to is torch.int8 else torch.finfo(rounded_to).max
    linear = {f"{name}.weight" for name, module in model.named_modules()
              if isinstance(module, nn.Linear) and (whole or name != "lm_head")}
    for name, value in model.state_dict().items():
        if name not in linear:
            stored[name] = values[name] = value.clone()
            continue
        scale = (value.abs().max()[None, None] if blocks else value.abs().amax(1, keepdim=True)) / largest
        scaled = value / scale
        stored[name] = (scaled.round() if rounded_to is torch.int8 else scaled).to(rounded_to)
        stored[f"{name.removesuffix('weight')}{scale_name}"] = scale
        values[name] = stored[name].float() * scale
    model.config.quantization_config = settings
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"architectures": ["LlamaForCausalLM"]}))
    tiny_tokenizer().save_pretrained(folder)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return values


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


SPECIAL = (gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL)  # Kinds of the first tokens


def write_vocabulary(file: Path, size: int) -> Path:
    """Write the tokens <0>, <1> and so on, as SentencePiece has them; returns the file."""
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([f"<{token}>" for token in range(size)])
    writer.add_token_scores([-float(token) for token in range(size)])
    writer.add_token_types([*SPECIAL, *[gguf.TokenType.NORMAL] * (size - len(SPECIAL))])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
