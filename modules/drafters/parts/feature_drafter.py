"""Shared parts of drafters that turn the target's states into states of its output layer (EAGLE, Falcon, Kangaroo).

Shapes: B rows, N positions, D hidden size.
"""

from abc import abstractmethod
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional

from ...compiler import Compiler
from ...config_checks import settings_of
from ...features import Features
from ...interfaces.drafter import DrafterConfig
from ...target.devices.compiled_layers import CompiledLayers
from ...target.loading.identity import TargetIdentity
from ...target.model import Target
from .compiled_blocks import forms_of
from .decoder_block import OFFICIAL_ROPE_BASE, BlockConfig, ResidualLayer
from .rotary import carried_scaling
from .shared_embeddings import BorrowingDrafter

DEPTHS = 6
"""Fewest draft steps that `forward` computes outside training: draft trees are fitted to them."""
FIRST_OFFSET = 2
"""Distance in tokens from a position to the token that its first draft step predicts."""
_PROBE = 64
"""Tokens of the target pass that measures its last norm."""


@dataclass(frozen=True, kw_only=True)
class FeatureConfig(DrafterConfig):
    """Settings that all feature drafters share."""

    rope_base: float | None = None
    """Base of the rotary embedding, without scaling; None takes the target's, with its scaling (linear, dynamic, yarn,
    longrope, llama3). The official code's is always 10000."""


class FeatureDrafter(BorrowingDrafter):
    """A drafter over the target's states whose decoder layers have the shape of the target's.

    Args:
        config: the family's settings.
        block: the shape of its layers.
        vocab_size: the target's vocabulary.
        target_width: width of the target's states; None when it is the layers' width.
    """

    config: FeatureConfig
    config_class: ClassVar[type[FeatureConfig]]
    """The family's own settings."""
    described_as: ClassVar[str]
    """Subject of the error about an unknown description: "a Falcon drafter is"."""

    def __init__(
        self, config: FeatureConfig, block: BlockConfig, *, vocab_size: int, target_width: int | None = None
    ) -> None:
        super().__init__(hidden_size=target_width or block.hidden_size, vocab_size=vocab_size,
                         vocabulary_size=config.vocabulary_size)
        self.config, self.block = config, block

    @classmethod
    def create(cls, config: Any, target: Target, token_ids_Q: Tensor | None = None) -> Self:
        """A new drafter for `target`, initialised and bound to it.

        Args:
            config: the family's settings.
            target: the model it drafts for.
            token_ids_Q: ids of the reduced draft vocabulary, when `config.vocabulary_size` asks for one.

        Raises:
            UserError: if settings, target and ids do not agree.
        """
        config, block = cls.fitted(config, target)
        with target.device:
            drafter = cls(config, block, vocab_size=target.vocab_size)
        drafter.attach(target, token_ids_Q)
        drafter.initialise(target)
        return drafter

    @classmethod
    def fitted(cls, config: Any, target: Target) -> tuple[Any, BlockConfig]:
        """(settings, shape of the layers) for this target. Raises UserError when they do not fit it."""
        return config, block_like(target, config.rope_base)

    @abstractmethod
    def initialise(self, target: Target) -> None:
        """Set the first weights of a new drafter, such as those that pass the target's state on unchanged."""

    def layer_forms(self, compiler: Compiler) -> CompiledLayers:
        """Compiled forms of its decoder layers."""
        return forms_of(self, (ResidualLayer,), compiler)

    @property
    def num_layers(self) -> int:
        """Decoder layers that write keys; one by default."""
        return 1

    @property
    def block_size(self) -> int:
        """Tokens drafted by one run of the layers; one by default."""
        return 1

    def describe(self) -> dict[str, Any]:
        """The settings and the shape of the layers, JSON-ready."""
        given = {name: list(value) if isinstance(value, tuple) else value
                 for name, value in asdict(self.config).items()}
        return {**given, "block": asdict(self.block)}

    @classmethod
    def rebuild(cls, description: dict[str, Any], identity: TargetIdentity) -> Self:
        """An equal drafter whose weights are still to be loaded. Raises UserError on an unknown description."""
        given = settings_of(description, cls.config_class, cls.described_as, "block")
        block = BlockConfig.from_dict(given.pop("block"))
        return cls(cls.config_class(**given), block, vocab_size=identity.vocab_size)


def block_like(target: Target, rope_base: float | None = None) -> BlockConfig:
    """The shape of the target's own layers, its scaling of the rotary embedding included.

    Args:
        rope_base: base of the rotary embedding, without scaling; None takes the target's, or the official code's when
            the target's configuration has none.
    """
    given: dict[str, Any] = target.config.to_dict()
    rope: dict[str, Any] = given.get("rope_parameters") or {}
    # Targets whose layers differ have one set of parameters for each kind of layer.
    rope = rope.get("full_attention", rope)
    own = rope.get("rope_theta") or given.get("rope_theta")
    block = BlockConfig.like(target, rope_base=float(rope_base or own or OFFICIAL_ROPE_BASE))
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
