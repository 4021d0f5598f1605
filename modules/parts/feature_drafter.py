"""Shared parts of drafters that turn the target's states into states of its output layer (EAGLE, Falcon, Kangaroo).

Shapes: B rows, N positions, D hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..config_checks import Positive
from ..errors import UserError
from ..features import Features
from ..interfaces.drafter import DrafterConfig
from ..interfaces.proposer import State
from ..target.loading.model_parts import rope_by_kind
from ..target.model import Target
from .decoder_block import OFFICIAL_ROPE_BASE, BlockConfig, ResidualLayer
from .rotary import carried_scaling
from .shared_embeddings import BorrowingDrafter

DEPTHS = 6  # Fewest draft steps that `forward` computes outside training: draft trees are fitted to them
FIRST_OFFSET = 2  # Distance in tokens from a position to the token that its first draft step predicts
_PROBE = 64  # Tokens of the target pass that measures its last norm


@dataclass(frozen=True, kw_only=True)
class FeatureConfig(DrafterConfig):
    """Settings that all feature drafters share."""

    rope_base: Positive | None = None
    """Base of the rotary embedding, without scaling; None takes the target's, with its scaling (linear, dynamic, yarn,
    longrope, llama3). The official code's is always 10000."""


class FeatureDrafter(BorrowingDrafter[State]):
    """A drafter over the target's states whose decoder layers have the shape of the target's.

    Args:
        config: the family's settings.
        sizes: of the target.
        block: the shape of its layers.
    """

    config: FeatureConfig
    block: BlockConfig
    has_block = True
    compiled_kinds: tuple[type[nn.Module], ...] = (ResidualLayer,)
    num_layers: int = 1  # Decoder layers that write keys
    block_size: int = 1  # Tokens drafted by one run of the layers

    @classmethod
    def fitted(cls, config: Any, target: Target) -> tuple[Any, BlockConfig]:
        """(settings, shape of the layers) for this target. Raises UserError when they do not fit it."""
        return config, block_like(target, config.rope_base)

    def tapped(self, taps: dict[int, Tensor]) -> list[Tensor]:
        """The tapped states in the weights' number format, ascending by layer. Raises ValueError if one is missing."""
        if missing := [layer for layer in self.taps if layer not in taps]:
            raise ValueError(f"the outputs of the target's layers {missing} are missing; encode with drafter.taps")
        return [taps[layer].to(self.dtype) for layer in self.taps]


def chosen_taps(taps: Sequence[int] | None, target: Target) -> tuple[int, ...]:
    """The tapped layers of this target.

    Raises:
        UserError: if a tap is not a layer of the target.
    """
    layers, last = target.num_layers, target.num_layers - 1
    if taps is None:
        return tuple(sorted({min(1, last), max(0, layers // 2 - 1), max(0, layers - 4)}))
    for tap in taps:
        if tap == layers:
            raise UserError(f"tap {tap} would be the state after the last norm of {target.identity.name}, which is no "
                            f"layer's output; its last layer is {last}, choose from 0 to {last}")
        if not 0 <= tap < layers:
            raise UserError(f"tap {tap} is not a layer of {target.identity.name}; choose from 0 to {last}")
    return tuple(taps)


def check_ascending(taps: Sequence[int] | None) -> None:
    """Refuse tapped layers that are none, or out of order. Raises UserError."""
    if taps is not None and (not taps or list(taps) != sorted(set(taps))):
        raise UserError(f"taps must be ascending numbers of layers, at least one, got {list(taps)}")


def columns_for(taps: Sequence[int], former_EF: Tensor, former_taps: Sequence[int]) -> Tensor:
    """The weight of a layer that joins tapped states, with columns of zeros for taps that are not among the former."""
    former_ETD = torch.unflatten(former_EF.detach(), 1, (len(former_taps), -1))
    columns_ETD = former_ETD.new_zeros(len(former_ETD), len(taps), former_ETD.shape[-1])
    columns_ETD[:, [taps.index(tap) for tap in former_taps]] = former_ETD
    return columns_ETD.flatten(1)


def block_like(target: Target, rope_base: float | None = None) -> BlockConfig:
    """The shape of the target's own layers, its scaling of the rotary embedding included.

    Args:
        rope_base: base of the rotary embedding, without scaling; None takes the target's, or the official code's when
            the target's configuration has none.
    """
    given: dict[str, Any] = target.config.to_dict()
    kinds = rope_by_kind(given.get("rope_parameters"))
    # A drafter's layers see the whole text, as the target's layers with full attention do.
    rope = kinds.get("full_attention") or next(iter(kinds.values()))
    own = rope.get("rope_theta") or given.get("rope_theta") or OFFICIAL_ROPE_BASE
    block = BlockConfig.like(target, rope_base=float(own if rope_base is None else rope_base))
    if rope_base is not None:
        return block
    return replace(block, rope_scaling=carried_scaling(rope, block.head_dim, target.context_length))


@torch.no_grad()
def last_norm(target: Target, eps: float) -> Tensor:
    """The weight [D] with which RMSNorm of the last layer's output fits the target's final states best.

    It is exactly the target's own weight if its last norm is an RMSNorm.
    """
    last = target.num_layers - 1
    tokens = target.readable_tokens(min(_PROBE, target.context_length)).tolist()
    encoded = target.encode(Features.from_rows([(tokens, [True] * len(tokens))]), (last,))
    wide = torch.promote_types(target.dtype, torch.float32)
    final_ND, last_ND = encoded.final()[0].to(wide), encoded.taps[last][0].to(wide)
    normed_ND = functional.rms_norm(last_ND, last_ND.shape[-1:], eps=eps)
    return (final_ND * normed_ND).sum(0) / normed_ND.square().sum(0)
