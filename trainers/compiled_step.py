"""Kernels of a training step on an accelerator: the vocabulary loss compiled for each chunk, and flex attention.

Neither changes what is computed. What cannot be compiled is computed as on a machine without a compiler, and
`refusals` says why.
"""

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import nn

from ..modules.compiler import Compiler
from ..modules.drafters.parts.decoder_block import Attention
from ..modules.target.flex_segments import FlexAttention, HeadShape
from ..modules.target.model import Target
from .chunked_losses import Measure, compiled_measure, measured

Compile = bool | Literal["auto"]
"""Setting: true, false, or true on CUDA alone."""


class CompiledStep:
    """The compiled kernels of a training step.

    Args:
        compiler: makes the kernels; None for none.
    """

    def __init__(self, compiler: Compiler | None) -> None:
        self.compiler = compiler
        self.measure: Measure = measured if compiler is None else compiled_measure(compiler)
        self.flex: FlexAttention | None = None
        self._said = set[str]()

    @classmethod
    def on(cls, device: torch.device, setting: Compile) -> "CompiledStep":
        """By the setting, on a device."""
        wanted = device.type == "cuda" if setting == "auto" else setting
        return cls(Compiler() if wanted else None)

    def try_attention(self, target: Target, drafter: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
        """Compile flex attention for the heads of target and drafter, and try it out.

        Args:
            dtype: number format of the drafter's heads in training.
        """
        if self.compiler is None:
            return
        # A compiler of its own: where attention fails, the loss may be compiled nevertheless.
        apart = Compiler(self.compiler.backend)
        apart.watch = self.compiler.watch
        self.flex = FlexAttention(apart)
        self.flex.probe(_head_shapes(target.config) | _own_shapes(drafter), device, dtype)

    def attention(self) -> AbstractContextManager[None]:
        """A block in which training rows attend by flex attention, where that runs."""
        return nullcontext() if self.flex is None else self.flex.used()

    def complain(self) -> None:
        """Warn once of each refusal."""
        for reason in self.refusals:
            if reason not in self._said:
                self._said.add(reason)
                warnings.warn(f"train.compile: some of the training step is computed without: {reason}", stacklevel=2)

    @property
    def refusals(self) -> tuple[str, ...]:
        """Reasons that something is computed without a compiler although it was to be compiled."""
        said = ["" if self.compiler is None else self.compiler.refusal, "" if self.flex is None else self.flex.refusal]
        return tuple(filter(None, dict.fromkeys(said)))


def _own_shapes(drafter: nn.Module) -> set[HeadShape]:
    """The heads of a drafter's own layers."""
    shapes = set[HeadShape]()
    for part in drafter.modules():
        if isinstance(part, Attention):
            shapes.add((part.config.num_heads, part.config.num_kv_heads, part.config.head_dim))
        elif {"layer_idx", "config"} <= vars(part).keys():
            # The attention of a draft language model, which is transformers'.
            shapes |= _head_shapes(part.config)
    return shapes


def _head_shapes(config: Any) -> set[HeadShape]:
    """The heads of a target, by its configuration."""
    given = config.to_dict()
    heads = int(given["num_attention_heads"])
    width = int(given.get("head_dim") or given["hidden_size"] // heads)
    return {(heads, int(given.get("num_key_value_heads") or heads), width)}
