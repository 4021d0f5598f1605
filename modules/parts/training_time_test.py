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

A drafter of blocks over the target's states (DFlash, arXiv:2602.06036) has keys of the text that are no layer's output:
the S slots of a block see those up to the position p after which the block starts, and each other.

Masks after some positions of a text (P-EAGLE, arXiv:2602.01469) are read in one pass with it: the d-th mask of p stands
for step d, and fewer positions have it than have the one before.

With a window a draft step sees as many keys of the text fewer as it is places ahead of p: its own draft is nearer.

Shapes: B rows, L positions, A of them after which blocks start, K positions of a block, S slots of one, H query heads,
G key-value heads, R query heads of one, E head dimension, J steps, X head dimension with room for the diagonal."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from ..features import Features
from ..target.attention.segment_attention import AttentionForm, Segments, Sight, additive, attend_inside, narrowed
from .attention import attend_segments
from .decoder_block import AttentionContext

_ROOM = 8  # Components added to a head; two are used, but fused kernels need a multiple of eight


@dataclass
class _Keys:
    """Keys and values of one layer: step 0, with room for the diagonal where the kernel needs it, and later steps."""

    past_BGLX: tuple[Tensor, Tensor]
    own: list[tuple[Tensor, Tensor]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class StepAttention(AttentionContext):
    """Attention context of one step; the steps of a rollout share their keys."""

    step: int  # Number of the step; step 0 reads the target's states, each later one the step before it
    keys: dict[int, _Keys]  # Keys by layer, written by step 0
    sights: dict[int, Sight]  # Sight of the text by the places that a step is ahead, see `_sight`

    def attend(self, layer: int, query_BHNE: Tensor, key_BGNE: Tensor, value_BGNE: Tensor) -> Tensor:
        """Attention output over step 0 and the heads' own positions, [B, H, L, E]."""
        if self.step == 0:
            as_it_is = _needs_no_room(self.visible_BNW, query_BHNE)
            self.keys[layer] = _Keys((key_BGNE, value_BGNE) if as_it_is else _with_room(key_BGNE, value_BGNE))
            return super().attend(layer, query_BHNE, key_BGNE, value_BGNE)
        held = self.keys[layer]
        held.own.append((key_BGNE, value_BGNE))
        return _joined(query_BHNE, held, _sight(self, self.step, key_BGNE, self.sights))


def step_attentions(text: AttentionContext) -> Iterator[StepAttention]:
    """Attention contexts of steps 0, 1, 2, ... over a batch with the context of its text."""
    keys, sights = dict[int, _Keys](), dict[int, Sight]()
    for step in count():
        yield StepAttention(positions_BN=text.positions_BN + step, visible_BNW=text.visible_BNW, window=text.window,
                            step=step, keys=keys, sights=sights)


@dataclass(frozen=True, kw_only=True)
class BlockAttention(AttentionContext):
    """Attention context of one block after every position; the queries of its K positions are concatenated, [K * L]."""

    block: int
    """Number of the block; block 0 reads the target's states, each later one the estimates of the one before it."""
    size: int  # Positions of a block, K
    written: dict[int, tuple[Tensor, Tensor]]  # Keys and values of the text by layer, written by block 0
    keys: dict[int, _Keys]
    """These keys and values, with room for the diagonal where needed, and those of later blocks; created by block 1."""
    sights: dict[int, Sight]  # Sight of the text by the places that a block's end is ahead, see `_sight`

    def attend(self, layer: int, query_BHNE: Tensor, key_BGNE: Tensor, value_BGNE: Tensor) -> Tensor:
        """Attention output over the text and the blocks after the heads' own positions, [B, H, K * L, E]."""
        keys, values = key_BGNE.chunk(self.size, dim=2), value_BGNE.chunk(self.size, dim=2)
        if self.block == 0:
            # The last query of a block is at the position itself; the others are repeated, and their keys are known.
            self.written[layer] = keys[-1], values[-1]
            read = [super(BlockAttention, self).attend(layer, query_BHLE, keys[-1], values[-1])
                    for query_BHLE in query_BHNE.chunk(self.size, dim=2)]
            return torch.cat(read, dim=2)
        if layer not in self.keys:
            as_it_is = _needs_no_room(self.visible_BNW, query_BHNE)
            self.keys[layer] = _Keys(self.written[layer] if as_it_is else _with_room(*self.written[layer]))
        held, visible = self.keys[layer], _sight(self, self.block * self.size, key_BGNE, self.sights)
        held.own += zip(keys, values, strict=True)
        read = [_joined(query_BHLE, held, visible) for query_BHLE in query_BHNE.chunk(self.size, dim=2)]
        return torch.cat(read, dim=2)


def block_attentions(text: AttentionContext, size: int) -> Iterator[BlockAttention]:
    """Attention contexts of blocks 0, 1, 2, ... over a batch with the context of its text, and a draft that starts
    after every position: block b ends b K positions after it, with K the `size`."""
    written, keys, sights = dict[int, tuple[Tensor, Tensor]](), dict[int, _Keys](), dict[int, Sight]()
    for block in count():
        first = size * (block - 1) + 1
        positions_BN = torch.cat([text.positions_BN + first + place for place in range(size)], dim=1)
        yield BlockAttention(positions_BN=positions_BN, visible_BNW=text.visible_BNW, window=text.window, block=block,
                             size=size, written=written, keys=keys, sights=sights)


@dataclass(frozen=True, kw_only=True)
class SlotAttention(AttentionContext):
    """Attention context of the slots of one block after each of A positions; the queries of the slots are concatenated,
    [S * A]. Memory grows with A and with the text, not with their product but for the mask of sampled positions."""

    slots: int  # Slots of a block, S
    causal: bool  # Whether a slot sees those before it and itself alone, or all slots of its block
    text: dict[int, tuple[Tensor, Tensor]]
    """Keys and values of the text by layer, [B, G, L, E] each, to be filled before the slots run."""
    sights: dict[int, Sight] = field(default_factory=dict, compare=False)
    """Sight of the text by the places that a slot is ahead, see `_sight`."""

    @classmethod
    def after(cls, text: AttentionContext, features: Features, indices_BA: Tensor | None, slots: int, *, causal: bool
              ) -> "SlotAttention":
        """The context of blocks whose first slot is one position after each index in a row; None for all indices."""
        found = text if indices_BA is None else _at(text, features, indices_BA)
        positions_BN = torch.cat([found.positions_BN + 1 + slot for slot in range(slots)], dim=1)
        return cls(positions_BN=positions_BN, visible_BNW=found.visible_BNW, window=text.window, slots=slots,
                   causal=causal, text={})

    def attend(self, layer: int, query_BHNE: Tensor, key_BGNE: Tensor, value_BGNE: Tensor) -> Tensor:
        """Attention output over the text and the slots of the heads' own block, [B, H, S * A, E]."""
        past = self.text[layer]
        if not _needs_no_room(self.visible_BNW, query_BHNE):
            past = _with_room(*past)
        own = list(zip(key_BGNE.chunk(self.slots, dim=2), value_BGNE.chunk(self.slots, dim=2), strict=True))
        read = [_joined(query_BHAE, _Keys(past, own[: slot + 1] if self.causal else own),
                        _sight(self, 1 + slot, key_BGNE, self.sights))
                for slot, query_BHAE in enumerate(query_BHNE.chunk(self.slots, dim=2))]
        return torch.cat(read, dim=2)


@dataclass(frozen=True, kw_only=True)
class MaskAttention(AttentionContext):
    """Attention context of a text and, after it, of masks, depth by depth: those of one depth belong to the first of
    the positions of the depth before. Memory grows with the masks, but for the mask of what their positions see."""

    text: AttentionContext  # The context of the text alone
    anchors: AttentionContext  # That of the positions that have masks, A of them
    counts: Sequence[int]  # Masks of each depth, falling
    sights: dict[int, Sight]  # What these positions see of the text by the places that a mask is ahead, see `_sight`

    @classmethod
    def after(cls, text: AttentionContext, features: Features, order_BL: Tensor, counts: Sequence[int]
              ) -> "MaskAttention":
        """The context of rows and of the masks of so many of their positions, in this order."""
        anchors = _at(text, features, order_BL[:, : max(counts, default=0)])
        positions = [anchors.positions_BN[:, :size] + depth for depth, size in enumerate(counts, 1)]
        return cls(positions_BN=torch.cat([text.positions_BN, *positions], dim=1), visible_BNW=text.visible_BNW,
                   text=text, anchors=anchors, counts=counts, sights={})

    def attend(self, layer: int, query_BHNE: Tensor, key_BGNE: Tensor, value_BGNE: Tensor) -> Tensor:
        """Attention output of the text over itself, and of each mask over the text and its own position's masks."""
        sizes = [query_BHNE.shape[2] - sum(self.counts), *self.counts]
        queries, keys, values = (torch.split(states, sizes, dim=2) for states in (query_BHNE, key_BGNE, value_BGNE))
        read, past = [self.text.attend(layer, queries[0], keys[0], values[0])], _with_room(keys[0], values[0])
        for depth, size in enumerate(self.counts, 1):
            pairs = zip(keys[1 : depth + 1], values[1 : depth + 1], strict=True)
            own = [(key[:, :, :size], value[:, :, :size]) for key, value in pairs]
            visible = cast(Tensor, _sight(self.anchors, depth, key_BGNE, self.sights))[:, :, :size]
            read.append(_joined(queries[depth], _Keys(past, own), visible))
        return torch.cat(read, dim=2)


def _at(text: AttentionContext, features: Features, indices_BA: Tensor) -> AttentionContext:
    """The context of these positions of a text alone."""
    order_L = torch.arange(features.segments_BL.shape[1], device=indices_BA.device)
    own_BA1 = features.segments_BL.gather(1, indices_BA)[..., None]
    seen_BAL = (features.segments_BL[:, None] == own_BA1) & (order_L <= indices_BA[..., None])
    return AttentionContext(positions_BN=text.positions_BN.gather(1, indices_BA), visible_BNW=seen_BAL,
                            window=text.window)


def _needs_no_room(visible: Sight, query_BHLE: Tensor) -> bool:
    """True where the attention over step 0 comes with its log-sum-exp: by segments on a CPU."""
    return isinstance(visible, Segments) and query_BHLE.device.type == "cpu"


def _sight(context: AttentionContext, ahead: int, like: Tensor, made: dict[int, Sight]) -> Sight:
    """Sight of the text of queries so many places ahead of their positions: a mask with one more key for every
    position, as numbers to add to the scores. All layers share it, and without a window all steps: each would convert a
    boolean mask to such numbers and keep its own copy for backward. Segments stay segments."""
    window = None if context.window is None else context.window - ahead
    if (place := 0 if window is None else ahead) not in made:
        visible = narrowed(context.visible_BNW, window)
        made[place] = visible if isinstance(visible, Segments) else additive(
            functional.pad(visible, (0, 1), value=True)[:, None], like.dtype)
    return made[place]


def _with_room(key_BGLE: Tensor, value_BGLE: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values with one more key, which every position sees, for the diagonal's score and share. The score of
    that key is the sum of the query's two added components; the second one holds the rounding error of the first."""
    keys, values = (functional.pad(states, (0, _ROOM, 0, 1)) for states in (key_BGLE, value_BGLE))
    size = key_BGLE.shape[-1]
    diagonal_X = torch.zeros(size + _ROOM, dtype=keys.dtype, device=keys.device)
    marks = torch.zeros_like(diagonal_X)
    diagonal_X[size : size + 2], marks[size] = 1, 1
    last_L1 = torch.arange(keys.shape[2], device=keys.device)[:, None] == keys.shape[2] - 1
    return torch.where(last_L1, diagonal_X, keys), torch.where(last_L1, marks, values)


def _joined(query_BHLE: Tensor, held: _Keys, visible: Sight) -> Tensor:
    """Attention over step 0 and the diagonal as one softmax, [B, H, L, E]. With d the log-sum-exp of the diagonal
    scores, softmax over [step 0, d] gives the final weights of step 0 and the total weight of the diagonal, which the
    diagonal's own softmax distributes."""
    if isinstance(visible, Segments) and query_BHLE.device.type == "cpu":
        return attend_segments(query_BHLE, *held.past_BGLX, visible, held.own)
    size = query_BHLE.shape[-1]
    scale = size**-0.5
    rows, heads, length, _ = query_BHLE.shape
    query_BGRLE = query_BHLE.view(rows, held.past_BGLX[0].shape[1], -1, length, size)
    # Scores of the keys of the steps before at the queries' own positions, float32 or wider.
    own_scores = [(query_BGRLE * key_BGLE[:, :, None]).sum(-1) for key_BGLE, _ in held.own]
    scores_BHLJ = torch.stack(own_scores, dim=-1).flatten(1, 2)
    scores_BHLJ = scores_BHLJ.to(torch.promote_types(scores_BHLJ.dtype, torch.float32)) * scale
    total_BHL1 = scores_BHLJ.logsumexp(-1, keepdim=True)
    # The log-sum-exp as two components of the queries' type, whose sum it is: half precision alone would round it.
    wanted_BHL1 = total_BHL1 / scale
    high_BHL1 = wanted_BHL1.to(query_BHLE.dtype)
    low_BHL1 = (wanted_BHL1 - high_BHL1.to(wanted_BHL1.dtype)).to(query_BHLE.dtype)
    room_BHLX = functional.pad(torch.cat([high_BHL1, low_BHL1], dim=-1), (0, _ROOM - 2))
    wide_BHLX, (keys, values) = torch.cat([query_BHLE, room_BHLX], dim=-1), held.past_BGLX
    if isinstance(visible, Segments):
        first = keys[:, :, -1:], values[:, :, -1:]
        mixed_BHLX = attend_inside(wide_BHLX, keys[:, :, :-1], values[:, :, :-1], visible,
                                   AttentionForm(scaling=scale), first)
    else:
        mixed_BHLX = functional.scaled_dot_product_attention(wide_BHLX, keys, values, attn_mask=visible,
                                                             scale=scale, enable_gqa=heads != keys.shape[1])
    shares_BGRLJ = (scores_BHLJ - total_BHL1).exp().to(query_BHLE.dtype).view(*query_BGRLE.shape[:4], -1)
    own_BGRLE = torch.zeros_like(query_BGRLE)
    for step, (_, value_BGLE) in enumerate(held.own):
        own_BGRLE = own_BGRLE + shares_BGRLJ[..., step, None] * value_BGLE[:, :, None]
    return mixed_BHLX[..., :size] + mixed_BHLX[..., size : size + 1] * own_BGRLE.flatten(1, 2)
