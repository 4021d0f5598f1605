"""The target's own head for a token further ahead (multi-token prediction, DeepSeek-V3, arXiv:2412.19437, section 2.2;
FastMTP, arXiv:2509.18362): one decoder layer of the target's kind over the next token and the target's state.

The state is the target's output after its last norm: the models of DeepSeek-V3, GLM-4.5, Qwen3-Next and Qwen2 return it
so in vLLM, and transformers decodes with it. The head's output after its own last norm is what the output layer reads,
and what the next step reads in place of the target's state; vLLM 0.32 hands on the state before that norm with GLM-4.5
alone. vLLM also blanks a text's first token in some of these heads, which is read here as transformers does.

Shapes: B rows, N positions, L positions of a training row, W keys, D hidden size."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from ...config_checks import CheckedSettings, Parts, settings_of
from ...errors import UserError
from ...features import Features
from ...interfaces.drafter import DrafterConfig, FamilyCard, Training
from ...parts.decoder_block import AttentionContext
from ...parts.feature_drafter import EagleDrafter
from ...parts.shared_embeddings import Sizes
from ...target.attention.segment_attention import mask_arguments, visible_text
from ...target.attention.tree_attention import place_arguments
from ...target.loading.hf_folder import NativeHead
from ...target.loading.model_parts import decoder_of
from ...target.model import Target
from ...target.submodel import config_of, fields_of, new_model, one_layer, window_of


@dataclass(frozen=True, kw_only=True)
class MtpConfig(DrafterConfig):
    """The training of a target's own head, whose shape is that of its files."""

    training_only = frozenset({"steps"})
    steps: Parts = 3
    """Draft steps trained at each position, each from the states of the one before it; FastMTP has 3."""


@dataclass(frozen=True, kw_only=True)
class HeadShape(CheckedSettings):
    """The shape of a target's own head."""

    model: dict[str, Any]  # Configuration of a model that consists of its layer and its last norm
    state_first: bool = False  # Whether the projection reads the state before the token's embedding

    @classmethod
    def from_dict(cls, description: dict[str, Any]) -> Self:
        """The inverse of `dataclasses.asdict`. Raises UserError for another description."""
        return cls(**settings_of(description, cls, "a target's own head is"))


class Mtp(EagleDrafter):
    """norm(layer(eh_proj([enorm(e(x_{p+1})) ; hnorm(h_p)]))), read by the target's output layer. Own weights:
    `enorm.weight`, `hnorm.weight`, `eh_proj.weight` [D, 2D], `decoder.*` under transformers' names of a model with one
    layer, and with a reduced vocabulary its ids, `token_ids` [Q]. The target's embedding and output layer are borrowed.
    `Mtp.create` starts from the head in the target's own files."""

    family = "mtp"
    card = FamilyCard(
        name="the target's own head (MTP)", papers=("2412.19437", "2509.18362"),
        guesses="a decoder layer that the target's files bring along, over its state and the next token, step by step",
        cost="no training before it drafts; one layer of the target's kind for each level of the tree")
    config: MtpConfig  # type: ignore[assignment]
    config_class = MtpConfig
    trained_as = Training(decay=0.6)  # FastMTP's (arXiv:2509.18362)
    block: HeadShape  # type: ignore[assignment]
    block_class = HeadShape
    compiled_kinds = ()
    estimates_states = False

    def __init__(self, config: MtpConfig, sizes: Sizes, block: HeadShape) -> None:
        super().__init__(config, sizes, block)
        self.trained_steps, width = config.steps, sizes.hidden_size
        self.decoder: Any = decoder_of(new_model(config_of(block.model)))
        self.enorm, self.hnorm = (copy.deepcopy(self.decoder.norm) for _ in range(2))
        # The target's is borrowed.
        self.decoder.set_input_embeddings(nn.Identity())
        self.eh_proj = nn.Linear(2 * width, width, bias=False)

    # Making one ------------------------------------------------------------------------------------------------------

    @classmethod
    def native(cls, target: Target, folder: Path | None = None) -> Self:
        """The head in the target's own folder, or in another one, not bound. Raises UserError if there is none, or it
        does not fit the target."""
        if not hasattr(target.decoder, "norm"):
            # Looked for first: most such targets bring none, and the message then says that.
            NativeHead.find(target, folder)
            raise UserError("a head is read as a layer with a last norm like the target's, and the decoder of "
                            f"{target.identity.architecture} has none of that name (norm); choose another family, "
                            "such as medusa or eagle3")
        if target.device.type == "meta":
            # A sketch has no files: its head is of the kind of its last layer.
            sparse = any(".experts." in name for name, _ in target.layers[-1].named_parameters())
            with target.device:
                return cls(MtpConfig(), target, HeadShape(model=fields_of(one_layer(target, sparse=sparse))))
        head = NativeHead.find(target, folder)
        config = one_layer(target, sparse=head.sparse)
        drafter = cls(MtpConfig(), target, HeadShape(model=fields_of(config), state_first=head.names.state_first))
        drafter.load_state_dict(head.read(target, config))
        return drafter

    @classmethod
    def create(cls, config: Any, target: Target, token_ids_Q: Tensor | None = None, start: Self | None = None) -> Self:
        """A new drafter for `target`, bound to it: without a start it is the head in the target's files. Raises
        UserError if there is none, or settings, target, ids and start do not agree."""
        return super().create(config, target, token_ids_Q, cls.native(target) if start is None else start)

    @classmethod
    def fitted(cls, config: MtpConfig, target: Target) -> tuple[MtpConfig, Any]:
        """(settings, None): a start has the shape of the layer."""
        return config, None

    def initialise(self, target: Target) -> None:
        """Nothing: all weights are taken over from a start."""

    def bind(self, target: Target) -> None:
        """Borrow the target's embedding and output layer. Raises UserError when they do not fit."""
        super().bind(target)
        if target.dtype == torch.float64:
            # As the target's own: torch has no float64 product over grouped experts.
            self.decoder.set_experts_implementation("eager")

    # Passes ----------------------------------------------------------------------------------------------------------

    @property
    def window(self) -> int | None:
        """The window of the target's layers, if the head has one."""
        return window_of(self.decoder.config)

    def fuse(self, final_BND: Tensor, taps: dict[int, Tensor]) -> Tensor:
        """The target's final states."""
        return final_BND.to(self.dtype)

    def step(self, embedded_BND: Tensor, read_BND: Tensor, attention: AttentionContext) -> Tensor:
        """The head's states after its last norm, [B, N, D]."""
        parts = (self.enorm(embedded_BND), self.hnorm(read_BND))
        joined_BND = self.eh_proj(torch.cat(parts[::-1] if self.block.state_first else parts, dim=-1))
        places_BN = attention.positions_BN
        keys_BW = places_BN if attention.key_positions is None else attention.key_positions()
        return cast(Tensor, self.decoder(
            inputs_embeds=joined_BND, past_key_values=attention.cache, use_cache=True,
            **place_arguments(places_BN, keys_BW), **mask_arguments(attention.visible_BNW, self.decoder, joined_BND),
        ).last_hidden_state)

    def feed(self, own: Tensor) -> Tensor:
        """The state itself with its gradient, so that a step also learns to serve the next ones."""
        return own

    def contexts(self, features: Features) -> Iterator[AttentionContext]:
        """Attention contexts of successive steps in training: a step reads the keys of the first one up to its
        position, and its own position's of the steps after that, as while drafting."""
        positions_BL, visible, cache = features.positions_BL, visible_text(features, self.decoder), DynamicCache()
        for step in count():
            if step:
                itself_LL = torch.eye(positions_BL.shape[1], dtype=torch.bool, device=positions_BL.device)
                text_BLL = features.visible()
                visible = torch.cat([text_BLL, itself_LL.expand_as(text_BLL).repeat(1, 1, step)], dim=-1)
            keys_BW = torch.cat([positions_BL + place for place in range(step + 1)], dim=1)
            # A bound method, since a function would see the keys of the step at which it is called.
            yield AttentionContext(positions_BN=positions_BL + step, visible_BNW=visible, cache=cast(Any, cache),
                                   key_positions=keys_BW.detach)
