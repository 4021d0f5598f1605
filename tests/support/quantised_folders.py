"""Folders of the tiny random model with quantised weights, written without the packages that read them."""

import json
from pathlib import Path
from typing import Any

import torch
from draftsmith.modules.target.loading.tiny_model import tiny_model, tiny_tokenizer
from safetensors.torch import save_file
from torch import Tensor, nn


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
