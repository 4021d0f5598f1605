"""Kernels of a training step on an accelerator: the vocabulary loss compiled for each chunk, and flex attention.

Neither changes what is computed. What cannot be compiled is computed as on a machine without a compiler, and
`refusals` says why.
"""

import warnings
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ...modules.compiler import Compiler
from ...modules.drafters.parts.decoder_block import Attention
from ...modules.features import Features
from ...modules.target.attention.flex_segments import FlexAttention, HeadShape
from ...modules.target.model import Target
from ..losses.chunked_losses import Measure, chunk_loss, compiled_measure

PROBED = 8
"""Tokens of each conversation of the row on which the target is tried out."""


class CompiledStep:
    """The compiled kernels of a training step.

    Args:
        compiler: makes the kernels; None for none.
    """

    def __init__(self, compiler: Compiler | None) -> None:
        self.compiler = compiler
        self.measure: Measure = chunk_loss if compiler is None else compiled_measure(compiler)
        self.flex: FlexAttention | None = None
        # A refusal is repeated at every step; the warning is not.
        self._said = set[str]()

    @classmethod
    def on(cls, device: torch.device, setting: bool | Literal["auto"]) -> "CompiledStep":
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
        shapes = set(target.head_shapes)
        for part in drafter.modules():
            if isinstance(part, Attention):
                shapes.add((part.config.num_heads, part.config.num_kv_heads, *2 * (part.config.head_dim,)))
            elif {"layer_idx", "config"} <= vars(part).keys():
                # The attention of a draft language model, which is transformers'.
                shapes.add(_head_shape(part.config))
        self.flex.probe(shapes, device, dtype)
        # The heads alone may work where a whole pass of this target does not.
        if not self.flex.refusal:
            self.flex.probe_pass(partial(_states, target))

    def attention(self) -> AbstractContextManager[None]:
        """A block in which training rows attend by flex attention, where that runs."""
        return nullcontext() if self.flex is None else self.flex.used()

    def complain(self) -> None:
        """Warn once of each refusal."""
        for reason in self.refusals:
            if reason not in self._said:
                self._said.add(reason)
                warnings.warn(f"train.compile: part of the training step is not compiled: {reason}; set train.compile: "
                              "false to compile nothing", stacklevel=2)

    @property
    def refusals(self) -> tuple[str, ...]:
        """Reasons that something is computed without a compiler although it was to be compiled."""
        said = ["" if self.compiler is None else self.compiler.refusal, "" if self.flex is None else self.flex.refusal]
        return tuple(filter(None, dict.fromkeys(said)))


def _states(target: Target) -> Tensor:
    """Final states [L, D] of a packed row of two conversations; processes that share the target call it together."""
    tokens_BL = target.readable_tokens(2 * PROBED)[None]
    order_BL = torch.arange(2 * PROBED, device=tokens_BL.device)[None]
    return target.encode(Features(
        tokens_BL=tokens_BL, supervised_BL=torch.ones_like(tokens_BL, dtype=torch.bool),
        segments_BL=order_BL // PROBED, positions_BL=order_BL % PROBED)).final()[0]


def _head_shape(config: Any) -> HeadShape:
    """The heads of a draft language model, by its configuration, in which some models have them under other names."""
    # As a dictionary: a configuration whose layers differ refuses to tell of all of them at once.
    given, heads = config.to_dict(), int(config.num_attention_heads)
    width = int(given.get("head_dim") or config.hidden_size // heads)
    return heads, int(given.get("num_key_value_heads") or heads), width, width
