"""Compiled forms of the layers that drafters train: decoder blocks, whose attention stays apart, and plain layers.

Shapes: B rows, N tokens of a pass, H heads, E head dimension.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from ..compiler import Compiler
from ..target.attention.tree_attention import Asked, attend_apart, attending
from ..target.devices.compiled_layers import Form
from .decoder_block import Attention, AttentionContext, BlockConfig
from .rotary import Rotation


@dataclass(frozen=True, kw_only=True)
class ApartContext(AttentionContext):
    """The context of a compiled block: the rotation of its positions, and attention that its pass has set."""

    turns: Rotation  # Cosines and signed sines of the positions

    def rotation(self, config: BlockConfig) -> Rotation:
        """The rotation that was computed outside."""
        return self.turns

    def attend(self, layer: int, query_BHNE: Tensor, key_BGNE: Tensor, value_BGNE: Tensor) -> Tensor:
        """Attention output by the operation of compiled layers, [B, H, N, E]."""
        mixed_BNHE: Tensor = attend_apart(query_BHNE, key_BGNE, value_BGNE)
        return mixed_BNHE.transpose(1, 2)


def of_block(_compiler: Compiler, form: Form, layer: nn.Module) -> Form:
    """The forward of a layer by its compiled form. A layer with attention gets its context as the last argument."""
    attention = next((part for part in layer.modules() if isinstance(part, Attention)), None)
    return partial(form, layer) if attention is None else partial(_in_context, form, layer, attention)


def _in_context(form: Form, layer: nn.Module, own: Attention, *given: Any) -> Any:
    *states, context = given

    def attend(asked: Asked) -> Tensor:
        mixed_BHNE: Tensor = context.attend(own.layer, asked.query, asked.key, asked.value)
        return mixed_BHNE.transpose(1, 2).contiguous()

    apart = ApartContext(positions_BN=context.positions_BN, visible_BNW=context.visible_BNW,
                         turns=context.rotation(own.config))
    with attending(attend):
        return form(layer, *states, apart)
