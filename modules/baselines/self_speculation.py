"""Self-speculation: some of the target's layers as the draft model, the others skipped (SWIFT arXiv:2410.06916,
Draft & Verify arXiv:2309.08168), or its first layers only.

Shapes: B rows, F new tokens, W cache slots in use."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import UserError
from ..interfaces.proposer import Scores
from ..parts.causal_drafter import CausalDraft
from ..parts.decoder_block import AttentionContext
from ..target.attention.segment_attention import mask_arguments
from ..target.attention.tree_attention import place_arguments
from ..target.model import Target
from ..target.partial_passes import skipping


class LayerDraft(CausalDraft):
    """Draft model of the target's layers `kept`, ascending, with its embedding, last norm and output layer; nothing is
    copied.

    It has a cache of its own and reads the prompt itself: its states are those of a model that consists of the kept
    layers. The papers let the skipping pass read the target's cache, whose keys come from the whole model: that saves
    this cache and reading the prompt, and the kept layers then attend to better states than they could have computed.
    For the first layers of a target both are the same states, computed twice here. Raises UserError if `kept` is empty,
    unordered or beyond the target, or its layers cannot be run apart."""

    family = "layers"

    def __init__(self, target: Target, kept: Sequence[int]) -> None:
        target.require_plain_layers("self-speculation")
        if not kept or list(kept) != sorted(set(kept)) or kept[0] < 0 or kept[-1] >= target.num_layers:
            raise UserError(
                f"the layers kept must be ascending numbers from 0 to {target.num_layers - 1}, at least one; "
                f"got {tuple(kept)}")
        self.target, self.kept, self.num_layers = target, tuple(kept), target.num_layers
        self.cache_groups = target.cache_groups

    @property
    def device(self) -> torch.device:
        """Device of the target."""
        return self.target.device

    def run(self, tokens_BF: Tensor, attention: AttentionContext, key_positions_BW: Tensor) -> Tensor:
        """One pass of the kept layers."""
        with skipping(self.target.layers, self.kept):
            embedded_BFD = self.target.embed_guesses(tokens_BF)
            # Guesses may reach beyond the context, position ids may not; such guesses are cut off with the answer.
            return self.target.decoder(  # type: ignore[no-any-return]
                inputs_embeds=embedded_BFD,
                past_key_values=attention.cache,
                use_cache=True,
                **self.target.looked_up(tokens_BF),
                **place_arguments(attention.positions_BN.clamp(max=self.target.context_length - 1), key_positions_BW),
                **mask_arguments(attention.visible_BNW, self.target.decoder, embedded_BFD),
            ).last_hidden_state

    def read_out(self, final: Tensor) -> Scores:
        """Log-probabilities by the target's output layer."""
        return Scores.from_logits(self.target.logits(final), states_BFHD=final)


def first_layers(target: Target, count: int | None = None) -> LayerDraft:
    """The target's first layers as a draft model; a quarter of them by default."""
    return LayerDraft(target, range(count if count is not None else max(1, target.num_layers // 4)))


def every_other_layer(target: Target) -> LayerDraft:
    """SWIFT without its search: of the layers between the first and the last, every second one is skipped."""
    last = target.num_layers - 1
    return LayerDraft(target, [layer for layer in range(last + 1) if layer in (0, last) or layer % 2 == 0])
