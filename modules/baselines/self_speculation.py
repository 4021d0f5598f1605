"""Self-speculation: some of the target's layers as the draft model, the others skipped (SWIFT arXiv:2410.06916,
Draft & Verify arXiv:2309.08168), or its first layers only.

Shapes: B rows, F new tokens, W cache slots in use, N tokens, D hidden size, L tokens of a text.
"""

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from ..drafters.parts.causal_drafter import CausalDraft
from ..drafters.parts.decoder_block import AttentionContext
from ..errors import UserError
from ..features import Features
from ..interfaces.proposer import Scores
from ..target.attention.segment_attention import mask_arguments
from ..target.layer_skipping import skipping
from ..target.model import Target


class LayerDraft(CausalDraft):
    """Draft model of the target's layers `kept`, with the target's embedding, last norm and output layer.

    It has a cache of its own and reads the prompt itself: its states are those of a model that consists of the kept
    layers. The papers let the skipping pass read the target's cache, whose keys come from the whole model: that saves
    this cache and reading the prompt, and the kept layers then attend to better states than they could have computed.
    For the first layers of a target both are the same states, computed twice here.

    Args:
        target: the model to draft for; nothing is copied.
        kept: layers that are run, ascending.

    Raises:
        UserError: if `kept` is empty, unordered or beyond the target.
    """

    family = "layers"

    def __init__(self, target: Target, kept: Sequence[int]) -> None:
        if not kept or list(kept) != sorted(set(kept)) or kept[0] < 0 or kept[-1] >= target.num_layers:
            raise UserError(
                f"the layers kept must be ascending numbers from 0 to {target.num_layers - 1}, at least one; "
                f"got {tuple(kept)}"
            )
        self.target, self._kept = target, tuple(kept)

    @property
    def kept(self) -> tuple[int, ...]:
        """Layers of the target that are run."""
        return self._kept

    @property
    def num_layers(self) -> int:
        """Number of layers of the target."""
        return self.target.num_layers

    @property
    def device(self) -> torch.device:
        """Device of the target."""
        return self.target.device

    def run(self, tokens_BF: Tensor, attention: AttentionContext, key_positions_BW: Tensor) -> Tensor:
        """One pass of the kept layers."""
        with skipping(self.target.layers, self.kept):
            embedded_BFD = self.target.embed_guesses(tokens_BF)
            return self.target.decoder(  # type: ignore[no-any-return]
                inputs_embeds=embedded_BFD,
                position_ids=attention.positions_BN.clamp(max=self.target.context_length - 1),
                past_key_values=attention.cache,
                use_cache=True,
                key_positions=key_positions_BW,
                **mask_arguments(attention.visible_BNW, self.target.decoder, embedded_BFD),
            ).last_hidden_state

    def read_out(self, final: Tensor) -> Scores:
        """Log-probabilities by the target's output layer."""
        return Scores.from_logits(self.target.logits(final), states_BFHD=final)

    def expand_bytes(self) -> int:
        """Bytes of the kept layers and the output layer."""
        kept = (parameter for layer in self.kept for parameter in self.target.layers[layer].parameters())
        return self.target.output_weight().nbytes + sum(parameter.nbytes for parameter in kept)


def first_layers(target: Target, count: int | None = None) -> LayerDraft:
    """The target's first layers as a draft model; a quarter of them by default."""
    return LayerDraft(target, range(count if count is not None else max(1, target.num_layers // 4)))


def every_other_layer(target: Target) -> LayerDraft:
    """Starting point of SWIFT's search: of the layers between the first and the last, every second one is skipped."""
    last = target.num_layers - 1
    return LayerDraft(target, [layer for layer in range(last + 1) if layer in (0, last) or layer % 2 == 0])


@torch.no_grad()
def search_layers(
    target: Target, texts: Sequence[Sequence[int]], count: int, *, trials: int = 100, seed: int = 0
) -> tuple[tuple[int, ...], float]:
    """The `count` layers that agree best with the whole target on texts of its own (SWIFT, section 4.2).

    One pass over all texts scores a choice; each trial exchanges one kept layer for a skipped one and is kept if it is
    better. SWIFT decides for attention and MLP separately and adds Bayesian steps; here a layer is skipped whole.

    Args:
        texts: token ids, at least two each.
        count: layers to keep; the first and the last are always among them when it is 2 or more.
        trials: exchanges tried.
        seed: seed of the exchanges.

    Returns:
        The layers, ascending, and the share of positions at which their argmax is the target's.

    Raises:
        UserError: if `count` is not between 1 and the number of layers, or there is no text.
    """
    if not 1 <= count <= target.num_layers:
        raise UserError(f"count must be between 1 and the target's {target.num_layers} layers, got {count}")
    if not texts:
        raise UserError("the layers are chosen on texts of the target; give at least one")
    features, rng, last = _batch(texts), random.Random(seed), target.num_layers - 1
    truth_P = _argmax(target, features, range(last + 1))
    kept = sorted({round(place * last / max(1, count - 1)) for place in range(count)})
    score = float((_argmax(target, features, kept) == truth_P).double().mean())
    fixed = {0, last} if count > 1 else set()
    free = [layer for layer in range(last + 1) if layer not in fixed]
    for _ in range(trials if 0 < count - len(fixed) < len(free) else 0):
        leaving = rng.choice([layer for layer in free if layer in kept])
        entering = rng.choice([layer for layer in free if layer not in kept])
        tried = sorted({*kept, entering} - {leaving})
        found = float((_argmax(target, features, tried) == truth_P).double().mean())
        if found > score:
            kept, score = tried, found
    return tuple(kept), score


def _batch(texts: Sequence[Sequence[int]]) -> Features:
    """The texts as rows, padded on the right."""
    width = max(map(len, texts))
    tokens_BL = torch.tensor([[*text, *([0] * (width - len(text)))] for text in texts])
    real_BL = torch.arange(width) < torch.tensor([[len(text)] for text in texts])
    return Features(
        tokens_BL=tokens_BL,
        supervised_BL=real_BL,
        segments_BL=torch.where(real_BL, 0, -1),
        positions_BL=torch.arange(width).expand_as(tokens_BL),
    )


def _argmax(target: Target, features: Features, kept: Sequence[int]) -> Tensor:
    """Most probable next token at every position that is not padding, [P], by the kept layers alone."""
    with skipping(target.layers, kept):
        encoded = target.encode(features)
    final_PD = encoded.final()[encoded.segments_BL >= 0]
    return torch.cat([target.logits(chunk).argmax(-1) for chunk in torch.split(final_PD, 512)])