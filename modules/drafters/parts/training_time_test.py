"""Attention of the training-time test: draft steps trained as while drafting, from all positions at once.

Step j of position p attends to step 0's keys at its segment's positions up to p and to its own position's keys of the
steps 1 to j (training-time test, arXiv:2503.01840, section 3.2; the streams of HASS, arXiv:2408.15766, section 3.2,
numbered by the start of the draft). These are the keys in the cache of a draft that is j tokens deep.

With several layers each has its own keys: in every layer a draft reads the keys that this layer wrote for the target's
states up to p and for the draft itself; a layer's input at step j is the output of the layer below at step j.

No score of step j is computed against another position's keys of the steps before: the attention over step 0 is
combined with the few diagonal scores by their log-sum-exp: memory grows with J, not with J times the length squared.

A drafter of blocks (Falcon, arXiv:2412.12639) has several positions in one step: those of a block see each other, the
blocks before it and the text up to the start of the draft.

Shapes: B rows, L positions, K positions of a block, H query heads, G key-value heads, R query heads of a key-value
head, E head dimension, J steps, X head dimension with room for the diagonal.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from ...features import Features
from ...target.tree_attention import additive
from .decoder_block import AttentionContext
from .segment_attention import attend_segments

_ROOM = 8
"""Components added to a head; two are used, but fused kernels need a multiple of eight."""


@dataclass
class _Keys:
    """Keys and values of one layer: step 0, where a mask stands next to them with room for the diagonal, and the steps
    after it."""

    past_BGLX: tuple[Tensor, Tensor]
    mask_B1LL: Tensor | None = None
    own: list[tuple[Tensor, Tensor]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class StepAttention(AttentionContext):
    """Attention context of one step; the steps of a rollout share their keys."""

    step: int
    """Number of the step; step 0 reads the target's states, each later one the step before it."""
    keys: dict[int, _Keys]
    """Keys by layer, written by step 0."""

    def attend(self, layer: int, query_BHNE: Tensor, key_BGNE: Tensor, value_BGNE: Tensor) -> Tensor:
        """Attention output over step 0 and the heads' own positions, [B, H, L, E]."""
        if self.spans is not None:
            held = self.keys.setdefault(layer, _Keys((key_BGNE, value_BGNE)))
            if self.step:
                held.own.append((key_BGNE, value_BGNE))
            return attend_segments(self.spans, query_BHNE, *held.past_BGLX, held.own)
        if self.step == 0:
            below = next(iter(self.keys.values()), None)
            mask = self._additive(key_BGNE.dtype) if below is None else below.mask_B1LL
            self.keys[layer] = _Keys(_with_room(key_BGNE, value_BGNE), mask)
            return super().attend(layer, query_BHNE, key_BGNE, value_BGNE)
        held = self.keys[layer]
        held.own.append((key_BGNE, value_BGNE))
        return _joined(query_BHNE, held)

    def _additive(self, dtype: torch.dtype) -> Tensor:
        """The mask, with one more key for every position, as numbers to add to the scores; all layers share it. Each
        step would convert a boolean mask to such numbers and keep its own copy for backward."""
        return additive(functional.pad(self.visible_BNW, (0, 1), value=True)[:, None], dtype)


class Rollout:
    """Attention contexts of successive steps over a batch."""

    def __init__(self, features: Features) -> None:
        self.first = AttentionContext.training(features)
        self.keys: dict[int, _Keys] = {}

    def __call__(self, step: int) -> AttentionContext:
        """Attention context of step `step`; call it for the steps in order."""
        return StepAttention(
            positions_BN=self.first.positions_BN + step, visible_BNW=self.first.visible_BNW, spans=self.first.spans,
            step=step, keys=self.keys,
        )


@dataclass(frozen=True, kw_only=True)
class BlockAttention(AttentionContext):
    """Attention context of one block after every position; the queries of its K positions are concatenated, [K * L]."""

    block: int
    """Number of the block; block 0 reads the target's states, each later one the estimates of the one before it."""
    size: int
    """Positions of a block, K."""
    written: dict[int, tuple[Tensor, Tensor]]
    """Keys and values of the text by layer, written by block 0."""
    keys: dict[int, _Keys]
    """These keys and values with room for the diagonal, and those of the later blocks; created by block 1."""

    def attend(self, layer: int, query_BHNE: Tensor, key_BGNE: Tensor, value_BGNE: Tensor) -> Tensor:
        """Attention output over the text and the blocks after the heads' own positions, [B, H, K * L, E]."""
        keys, values = key_BGNE.chunk(self.size, dim=2), value_BGNE.chunk(self.size, dim=2)
        if self.block == 0:
            # The last query of a block is at the position itself; the others are repeated, and their keys are known.
            self.written[layer] = keys[-1], values[-1]
            return super().attend(layer, query_BHNE, keys[-1], values[-1])
        if layer not in self.keys:
            visible_BLX = functional.pad(self.visible_BNW, (0, 1), value=True)
            self.keys[layer] = _Keys(_with_room(*self.written[layer]), additive(visible_BLX[:, None], key_BGNE.dtype))
        held = self.keys[layer]
        held.own += zip(keys, values, strict=True)
        return torch.cat([_joined(query_BHLE, held) for query_BHLE in query_BHNE.chunk(self.size, dim=2)], dim=2)


class BlockRollout:
    """Attention contexts of successive blocks over a batch, with a draft that starts after every position.

    Args:
        features: the batch.
        size: positions of a block.
    """

    def __init__(self, features: Features, size: int) -> None:
        self.first, self.size = AttentionContext.training(features), size
        self.written: dict[int, tuple[Tensor, Tensor]] = {}
        self.keys: dict[int, _Keys] = {}

    def __call__(self, block: int) -> AttentionContext:
        """Attention context of block `block`; call it in order. Block b ends b K positions after the position."""
        first, visible_BLL = self.size * (block - 1) + 1, self.first.visible_BNW
        positions = [self.first.positions_BN + first + place for place in range(self.size)]
        return BlockAttention(
            positions_BN=torch.cat(positions, dim=1),
            visible_BNW=visible_BLL if block else visible_BLL.repeat(1, self.size, 1),
            block=block, size=self.size, written=self.written, keys=self.keys,
        )


def _with_room(key_BGLE: Tensor, value_BGLE: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values with one more key, which every position sees, for the diagonal's score and share.

    The score of that key is the sum of the query's two added components; the second one holds the rounding error of the
    first.
    """
    keys, values = (functional.pad(states, (0, _ROOM, 0, 1)) for states in (key_BGLE, value_BGLE))
    size = key_BGLE.shape[-1]
    diagonal_X = torch.zeros(size + _ROOM, dtype=keys.dtype, device=keys.device)
    marks = torch.zeros_like(diagonal_X)
    diagonal_X[size : size + 2], marks[size] = 1, 1
    last_L1 = torch.arange(keys.shape[2], device=keys.device)[:, None] == keys.shape[2] - 1
    return torch.where(last_L1, diagonal_X, keys), torch.where(last_L1, marks, values)


def _joined(query_BHLE: Tensor, held: _Keys) -> Tensor:
    """Attention over step 0 and the diagonal as one softmax, [B, H, L, E].

    With d the log-sum-exp of the diagonal scores, softmax over [step 0, d] gives the final weights of step 0 and the
    total weight of the diagonal, which the diagonal's own softmax distributes.
    """
    (keys, values), size = held.past_BGLX, query_BHLE.shape[-1]
    scale = size**-0.5
    rows, heads, length, _ = query_BHLE.shape
    query_BGRLE = query_BHLE.view(rows, keys.shape[1], -1, length, size)
    scores = [(query_BGRLE * key_BGLE[:, :, None]).sum(-1) for key_BGLE, _ in held.own]
    scores_BHLJ = torch.stack(scores, dim=-1).flatten(1, 2)
    scores_BHLJ = scores_BHLJ.to(torch.promote_types(scores_BHLJ.dtype, torch.float32)) * scale
    total_BHL1 = scores_BHLJ.logsumexp(-1, keepdim=True)
    mixed_BHLX = functional.scaled_dot_product_attention(
        torch.cat([query_BHLE, _split(total_BHL1 / scale, query_BHLE)], dim=-1), keys, values,
        attn_mask=held.mask_B1LL, scale=scale, enable_gqa=heads != keys.shape[1],
    )
    shares_BGRLJ = (scores_BHLJ - total_BHL1).exp().to(query_BHLE.dtype).view(*query_BGRLE.shape[:4], -1)
    own_BGRLE = torch.zeros_like(query_BGRLE)
    for step, (_, value_BGLE) in enumerate(held.own):
        own_BGRLE = own_BGRLE + shares_BGRLJ[..., step, None] * value_BGLE[:, :, None]
    return mixed_BHLX[..., :size] + mixed_BHLX[..., size : size + 1] * own_BGRLE.flatten(1, 2)


def _split(total_BHL1: Tensor, like: Tensor) -> Tensor:
    """The number as components of the queries' type whose sum it is, [B, H, L, 8]."""
    high = total_BHL1.to(like.dtype)
    low = (total_BHL1 - high.to(total_BHL1.dtype)).to(like.dtype)
    return functional.pad(torch.cat([high, low], dim=-1), (0, _ROOM - 2))
