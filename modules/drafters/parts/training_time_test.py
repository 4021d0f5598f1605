"""What the steps of a drafter see that is trained as it drafts: all positions at once, each going on by itself.

Step j of index p attends to step 0's keys at its segment's indices up to p and to its own index's keys of the steps 1
to j (training-time test, arXiv:2503.01840, section 3.2; the streams of HASS, arXiv:2408.15766, section 3.2, seen from
where a draft begins). That is what a draft j tokens deep reads from its cache.

With several layers each does so with its own keys: a draft reads in every layer what that layer wrote of the target's
states up to p, and of the draft itself; the states that a layer reads at step j are those of the layer below at step j.

No score of step j is formed against another index's keys of the steps before: the attention over step 0 is joined with
the few diagonal scores by their log-sum-exp, and memory grows with J, not with J times the length squared.

A drafter of blocks (Falcon, arXiv:2412.12639) takes several indices at a step: those of a block see each other, the
blocks before it and the text up to where it began.

Shapes: B rows, L positions, K indices of a block, H query heads, G key-value heads, R query heads of a key-value head,
E head dimension, J steps, X head dimension with room for the diagonal.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from ...features import Features
from ...target.tree_attention import additive
from .decoder_block import Sight

_ROOM = 8
"""Components added to a head; two are used, but fused kernels want a multiple of eight."""


@dataclass
class _Keys:
    """What one layer has written: step 0 with room for the diagonal, and the steps after it."""

    past_BGLX: tuple[Tensor, Tensor]
    mask_B1LL: Tensor
    own: list[tuple[Tensor, Tensor]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class StepSight(Sight):
    """What one step sees; the steps of a rollout share their keys."""

    step: int
    """Step 0 reads the target's states, every later one the step before it."""
    keys: dict[int, _Keys]
    """By layer; written by step 0."""

    def mix(self, layer: int, query_BHNE: Tensor, key_BGNE: Tensor, value_BGNE: Tensor) -> Tensor:
        """What the heads take from step 0 and from their own index, [B, H, L, E]."""
        if self.step == 0:
            below = next(iter(self.keys.values()), None)
            mask = self._additive(key_BGNE.dtype) if below is None else below.mask_B1LL
            self.keys[layer] = _Keys(_with_room(key_BGNE, value_BGNE), mask)
            return super().mix(layer, query_BHNE, key_BGNE, value_BGNE)
        held = self.keys[layer]
        held.own.append((key_BGNE, value_BGNE))
        return _joined(query_BHNE, held)

    def _additive(self, dtype: torch.dtype) -> Tensor:
        """What is visible, and one more key for every index, as numbers to be added to the scores: a boolean mask would
        be turned into that by each step, which would keep its own for backward. All layers share it."""
        return additive(functional.pad(self.visible_BNW, (0, 1), value=True)[:, None], dtype)


class Rollout:
    """The sights of successive steps over a batch."""

    def __init__(self, features: Features) -> None:
        self.first = Sight.training(features)
        self.keys: dict[int, _Keys] = {}

    def __call__(self, step: int) -> Sight:
        """What step `step` sees; ask for the steps in order."""
        return StepSight(
            positions_BN=self.first.positions_BN + step, visible_BNW=self.first.visible_BNW, step=step, keys=self.keys
        )


@dataclass(frozen=True, kw_only=True)
class BlockSight(Sight):
    """What one block behind every index sees; the queries of its K indices stand one after the other, [K * L]."""

    block: int
    """Block 0 reads the target's states, every later one the estimates of the one before it."""
    size: int
    """Indices of a block, K."""
    written: dict[int, tuple[Tensor, Tensor]]
    """Keys and values of the text, by layer; block 0 writes them."""
    keys: dict[int, _Keys]
    """The same with room for the diagonal, and the blocks behind them; block 1 makes them."""

    def mix(self, layer: int, query_BHNE: Tensor, key_BGNE: Tensor, value_BGNE: Tensor) -> Tensor:
        """What the heads take from the text and from the blocks behind their own index, [B, H, K * L, E]."""
        keys, values = key_BGNE.chunk(self.size, dim=2), value_BGNE.chunk(self.size, dim=2)
        if self.block == 0:
            # The last query of a block stands at its index itself; the others are asked again, their keys known.
            self.written[layer] = keys[-1], values[-1]
            return super().mix(layer, query_BHNE, keys[-1], values[-1])
        if layer not in self.keys:
            visible_BLX = functional.pad(self.visible_BNW, (0, 1), value=True)
            self.keys[layer] = _Keys(_with_room(*self.written[layer]), additive(visible_BLX[:, None], key_BGNE.dtype))
        held = self.keys[layer]
        held.own += zip(keys, values, strict=True)
        return torch.cat([_joined(query_BHLE, held) for query_BHLE in query_BHNE.chunk(self.size, dim=2)], dim=2)


class BlockRollout:
    """The sights of successive blocks over a batch, each begun behind every index.

    Args:
        features: the batch.
        size: indices of a block.
    """

    def __init__(self, features: Features, size: int) -> None:
        self.first, self.size = Sight.training(features), size
        self.written: dict[int, tuple[Tensor, Tensor]] = {}
        self.keys: dict[int, _Keys] = {}

    def __call__(self, block: int) -> Sight:
        """What block `block` sees; ask in order. Block 0 ends at its index, block b ends b K behind it."""
        first, visible_BLL = self.size * (block - 1) + 1, self.first.visible_BNW
        positions = [self.first.positions_BN + first + place for place in range(self.size)]
        return BlockSight(
            positions_BN=torch.cat(positions, dim=1),
            visible_BNW=visible_BLL if block else visible_BLL.repeat(1, self.size, 1),
            block=block, size=self.size, written=self.written, keys=self.keys,
        )


def _with_room(key_BGLE: Tensor, value_BGLE: Tensor) -> tuple[Tensor, Tensor]:
    """One more key, which every index sees: its score is what a query says of its diagonal, its value marks the share.

    The score of that key is the sum of the query's two added components, the second holding what rounding took from
    the first.
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

    With d the log-sum-exp of the diagonal scores, softmax over [step 0, d] gives step 0 its final weights and the
    diagonal its total one, which its own softmax divides.
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
    """The number in components of the queries' type that add up to it, [B, H, L, 8]."""
    high = total_BHL1.to(like.dtype)
    low = (total_BHL1 - high.to(total_BHL1.dtype)).to(like.dtype)
    return functional.pad(torch.cat([high, low], dim=-1), (0, _ROOM - 2))
