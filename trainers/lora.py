"""A trained copy of the target: it shares all weights but the low-rank changes of its linear layers, made by peft.

Shapes: R rank, I inputs of a layer, O its outputs.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from peft import LoraConfig as PeftConfig
from peft import inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import nn

from ..modules.config_checks import CheckedSettings, Size
from ..modules.target.adapter import Adapter, LowRank, choose_layers
from ..modules.target.model import Target

_NAME = "default"
ALPHA = 16.0  # The changes are scaled by ALPHA / rank
DROPOUT = 0.05  # Dropout of the inputs of the low-rank changes in training


@dataclass(frozen=True, kw_only=True)
class LoraConfig(CheckedSettings):
    """Size of the low-rank changes of the target's layers, all but the output layer (arXiv:2106.09685)."""

    rank: Size = 32
    """Rank of the change of each layer."""


class LearningTarget(nn.Module):
    """The trained part of a target. Its parameters are the low-rank weights alone; the changed copy is `target`, a
    plain object that is neither saved nor wrapped.

    All other weights of the copy are the original's tensors: the original is not changed, moved or duplicated.

    Args:
        original: the target that is copied.
        config: the size of the changes.
    """

    def __init__(self, original: Target, config: LoraConfig) -> None:
        super().__init__()
        chosen = choose_layers(original.model, (), without=original.head)
        model = original.copy_model()
        # An expression matches whole names; peft would match a list against the ends of names. In a module without a
        # configuration, since peft would add the experts of some models, and refuse layers of Mamba that it fears are
        # read past their modules, as they are in no pass here.
        inject_adapter_in_model(
            PeftConfig(r=config.rank, lora_alpha=ALPHA, lora_dropout=DROPOUT,  # type: ignore[arg-type]
                       target_modules="|".join(f"model.{name}".replace(".", r"\.") for name in chosen)),
            nn.ModuleDict({"model": model}),
        )
        self.names, self.scale = tuple(chosen), ALPHA / config.rank
        self.target = Target(model, original.tokenizer, name=original.identity.name, pack=0)
        # Half precision would lose small updates: trained weights stay in float32.
        wide = torch.promote_types(original.dtype, torch.float32)
        for layer in self._layers():
            layer.lora_A[_NAME].to(wide).requires_grad_(True)
            layer.lora_B[_NAME].to(wide).requires_grad_(True)
        self.a = nn.ParameterList([layer.lora_A[_NAME].weight for layer in self._layers()])
        self.b = nn.ParameterList([layer.lora_B[_NAME].weight for layer in self._layers()])

    def _layers(self) -> Iterator[LoraLayer]:
        for name in self.names:
            layer = self.target.model.get_submodule(name)
            if not isinstance(layer, LoraLayer):
                raise TypeError(f"{name} has no low-rank weights")
            yield layer

    def train(self, mode: bool = True) -> "LearningTarget":
        """Switch the dropout of the low-rank changes; the copied model itself stays in evaluation mode."""
        super().train(mode)
        for layer in self._layers():
            layer.lora_dropout.train(mode)
        return self

    @property
    def unchanged(self) -> bool:
        """True while the copy still equals the original: all changes are zero."""
        return not any(bool(b.any()) for b in self.b)

    def read(self) -> Adapter:
        """A copy of the current weights on the CPU."""
        layers = {name: LowRank(a_RI=a.detach().to("cpu", copy=True), b_OR=b.detach().to("cpu", copy=True))
                  for name, a, b in zip(self.names, self.a, self.b, strict=True)}
        return Adapter(layers, self.scale)

    @torch.no_grad()
    def load(self, adapter: Adapter) -> None:
        """Load an adapter's weights in place."""
        for name, a, b in zip(self.names, self.a, self.b, strict=True):
            a.copy_(adapter.layers[name].a_RI)
            b.copy_(adapter.layers[name].b_OR)
