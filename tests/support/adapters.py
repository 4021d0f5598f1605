"""Adapters with random weights, in folders as peft writes them."""

from pathlib import Path
from typing import Any

import torch


def write_adapter(folder: Path, model: Any, config: Any, *, base: str | None = None) -> Any:
    """Write an adapter of a model; returns the model with it, as peft has it."""
    from peft import get_peft_model

    wrapped: Any = get_peft_model(model, config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for weight in wrapped.parameters():
            if weight.requires_grad:
                weight.data += 0.3 * torch.randn(weight.shape)
    wrapped.peft_config["default"].base_model_name_or_path = base
    wrapped.save_pretrained(folder)
    return wrapped
