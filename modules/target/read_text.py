"""Text that the target has read once, and nodes that it reads after any of its tokens, with gradients to them alone.

Shapes: B rows, L positions, N nodes, D hidden size.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from ..features import Features
from .attention.segment_attention import mask_arguments, visible_text
from .attention.tree_attention import place_arguments
from .layer_skipping import later_layers
from .pass_layout import PassLayout

if TYPE_CHECKING:
    from .model import Target


class ReadText:
    """Rows of text with their keys and values in the target, which needs no stored states.

    Nodes see the text up to their anchor, in the anchor's segment, and each other by a mask. Nothing is trained in the
    target: the text is read without a graph, and gradients of the nodes reach their embeddings."""

    def __init__(self, target: "Target", features: Features) -> None:
        self.target, self.features = target, features.to(target.device)
        # Without a configuration: no layer of this cache drops what lies outside a window.
        self.cache = DynamicCache()
        text = self.features
        with torch.no_grad(), torch.autocast(target.device.type, enabled=False):
            embedded_BLD = target.embed_guesses(text.tokens_BL)
            self.final_BLD: Tensor = target.decoder(
                inputs_embeds=embedded_BLD, past_key_values=self.cache, use_cache=True,
                **target.looked_up(text.tokens_BL), **place_arguments(text.positions_BL, text.positions_BL),
                **mask_arguments(visible_text(text, target.decoder), target.decoder, embedded_BLD)).last_hidden_state
        self._layers = [layer for layer in self.cache.layers if isinstance(layer, DynamicLayer)]
        self._read = [(layer.keys, layer.values) for layer in self._layers]

    def read(
        self, embedded_BND: Tensor, anchors_BN: Tensor, ahead_BN: Tensor, sees_NN: Tensor, *, first: int = 0
    ) -> Tensor:
        """Final states [B, N, D] of nodes after the text's tokens; the text stays as it was.

        Each comes after the position `anchors_BN` of its row, `ahead_BN` positions further on, and sees the nodes of
        `sees_NN`, itself among them. `embedded_BND` is what enters the layer `first`."""
        target, text = self.target, self.features
        order_L = torch.arange(text.tokens_BL.shape[1], device=anchors_BN.device)
        segments_BN = text.segments_BL.gather(1, anchors_BN)
        seen_BNL = (text.segments_BL[:, None] == segments_BN[..., None]) & (order_L <= anchors_BN[..., None])
        positions_BN = text.positions_BL.gather(1, anchors_BN) + ahead_BN
        positions_BN = positions_BN.clamp(max=target.context_length - 1)
        layout = PassLayout(positions_BN=positions_BN,
                            visible_BNW=torch.cat([seen_BNL, sees_NN.expand(len(seen_BNL), -1, -1)], dim=2),
                            key_positions_BW=torch.cat([text.positions_BL, positions_BN], dim=1))
        entering = embedded_BND.to(target.dtype)
        # Plain linear layers: packed ones have no gradient.
        with (torch.autocast(target.device.type, enabled=False), target.linears.plain(),
              later_layers(target.layers, first, entering if first else None)):
            final_BND = target.read_nodes(entering, torch.full_like(positions_BN, -1), layout, self.cache)
        for layer, (keys, values) in zip(self._layers, self._read, strict=True):
            layer.keys, layer.values = keys, values
        return final_BND
