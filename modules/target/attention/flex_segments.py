"""Attention of training rows inside their segments by torch's flex attention: one kernel for a whole packed row, which
skips the blocks of other segments, of later tokens and of those beyond a window.

What a token sees is a range of its row: from the first token of its segment, or of its window, up to itself. So the
blocks of a block mask follow from the bounds of the ranges in a block of queries; no mask of all positions is ever made
(`create_block_mask` makes one of L x L), and the host does not wait for the bounds. Padding is a segment like the
others, so that no softmax is over nothing.

Shapes: B rows, L positions, H query heads, G key-value heads, E width of a key, X width of a value, Q blocks of
queries, K blocks of keys.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from ...compiler import Compiler, bounded
from ...errors import UserError
from ...features import Features
from .scored_attention import PLAIN, AttentionForm

BLOCK = 128
"""Queries and keys of a block."""
HeadShape = tuple[int, int, int, int]
"""Query heads, key-value heads, width of a key, and width of a value."""
_PROBED, _MOST_GAP = 2 * BLOCK, 0.05
"""Tokens of the row on which it is tried out; the largest relative error there, in half precision too."""


class FlexAttention:
    """torch's flex attention, compiled.

    Args:
        compiler: makes its kernels. Without one it is computed with scores of all positions, for tests.
    """

    def __init__(self, compiler: Compiler | None) -> None:
        self.run: Callable[..., Any] = flex_attention
        if compiler is not None:
            self.run = compiler.compiled(flex_attention, dynamic=None)
        self.compiler = compiler
        self._failed = ""

    @property
    def refusal(self) -> str:
        """The reason that it does not run here; empty where it does, and before it was tried."""
        return self._failed or ("" if self.compiler is None else self.compiler.refusal)

    def probe(self, shapes: set[HeadShape], device: torch.device, dtype: torch.dtype) -> None:
        """Try it out on a short row for heads of these shapes: its output and its gradients must be those of a mask."""
        for shape in sorted(shapes):
            try:
                gap = self._gap(shape, device, dtype)
            except (RuntimeError, FailOnRecompileLimitHit) as error:
                self._failed = f"flex attention does not run here ({str(error).splitlines()[0][:200]})"
                return
            if not gap <= _MOST_GAP:
                self._failed = f"flex attention differs here by {gap:.1%} from attention with a mask"
                return

    def probe_pass(self, states: Callable[[], Tensor]) -> None:
        """Try it out in a model, whose states of a packed row must be those with a mask: some models do not hand the
        segments on to their attention.

        Args:
            states: computes them, with a mask outside of `used`.
        """
        with torch.no_grad():
            wanted = states()
            try:
                with self.used():
                    found = states()
            except UserError as error:
                self._failed = f"flex attention does not run in this target ({error})"
                return
        gap = float(_relative(found, wanted))
        if not gap <= _MOST_GAP:
            self._failed = f"with flex attention the target's states differ by {gap:.1%} from those with a mask"

    def _gap(self, shape: HeadShape, device: torch.device, dtype: torch.dtype) -> float:
        """The largest relative error of output and gradients, in the Euclidean norm."""
        heads, groups, width, wide = shape
        generator = torch.Generator().manual_seed(0)
        *given, outer = (torch.randn(1, count, _PROBED, size, generator=generator).to(device, dtype).requires_grad_()
                         for count, size in ((heads, width), (groups, width), (groups, wide), (heads, wide)))
        order_L = torch.arange(_PROBED, device=device)
        segments_BL = (order_L >= _PROBED // 3)[None].long()
        seen_BLL = (segments_BL[:, :, None] == segments_BL[:, None]) & (order_L[:, None] >= order_L)
        mixed, sums = FlexSegments(self, segments_BL).attend_with_sums(*given)
        scores = (given[0] @ given[1].repeat_interleave(heads // groups, 1).mT).float() * width**-0.5
        scores = scores.masked_fill(~seen_BLL[:, None], -torch.inf)
        wanted = scores.softmax(-1).to(dtype) @ given[2].repeat_interleave(heads // groups, 1)
        found, expected = (
            (out, total, *torch.autograd.grad((out * outer.detach()).sum() + total.sum(), given))
            for out, total in ((mixed, sums), (wanted, scores.logsumexp(-1))))
        # Of a stack: a NaN is the largest.
        return float(torch.stack([_relative(one, other)
                                  for one, other in zip(found, expected, strict=True)]).max().detach())

    @contextmanager
    def used(self) -> Iterator[None]:
        """A block in which training rows attend by it."""
        token = _USED.set(None if self.refusal else self)
        try:
            yield
        finally:
            _USED.reset(token)


def _relative(one: Tensor, other: Tensor) -> Tensor:
    """The difference of two tensors relative to the second one, in the Euclidean norm."""
    share: Tensor = (one - other).float().norm() / other.float().norm()
    return share


_USED: ContextVar[FlexAttention | None] = ContextVar("flex attention of training rows", default=None)


class FlexSegments:
    """The segments of training rows, as ranges of what each token sees; the tokens of each must be adjacent.

    Args:
        flex: computes the attention.
        segments_BL: number of each token's segment; -1 for padding.
        block: tokens of a block.
    """

    def __init__(self, flex: FlexAttention, segments_BL: Tensor, block: int = BLOCK) -> None:
        self.flex, self.block = flex, block
        self.order_L = torch.arange(segments_BL.shape[1], device=segments_BL.device)
        starts_BL = torch.ones_like(segments_BL, dtype=torch.bool)
        starts_BL[:, 1:] = segments_BL[:, 1:] != segments_BL[:, :-1]
        self.first_BL = torch.where(starts_BL, self.order_L, 0).cummax(1).values
        """Place of the first token of each token's segment."""
        self._masks: dict[tuple[int | None, int | None], BlockMask] = {}

    @classmethod
    def asked(cls, features: Features) -> "FlexSegments | None":
        """The segments of a batch where its rows are to attend by flex attention; None elsewhere."""
        flex = _USED.get()
        return None if flex is None else cls(flex, features.segments_BL)

    def attend(self, query_BHLE: Tensor, key_BGLE: Tensor, value_BGLX: Tensor, form: AttentionForm = PLAIN) -> Tensor:
        """Attention output [B, H, L, X] inside the segments, with scores capped as in arXiv:2408.00118 (section 2)."""
        bound = 0.0 if form.softcap is None else form.softcap

        def capped(score: Tensor, *_places: Tensor) -> Tensor:
            return bound * torch.tanh(score / bound)

        with bounded():
            found = self.flex.run(
                query_BHLE, key_BGLE, value_BGLX, score_mod=None if form.softcap is None else capped,
                block_mask=self.mask(form.reach), scale=form.scaling,
                enable_gqa=query_BHLE.shape[1] != key_BGLE.shape[1],
                return_aux=None if form.sinks_H is None else AuxRequest(lse=True))
        if form.sinks_H is None:
            plain_BHLX: Tensor = found
            return plain_BHLX
        # With the log-sum-exp s of the scores and the sink z, the keys get exp(s) / (exp(s) + exp(z)) of all weight.
        share_BHL = torch.sigmoid(found[1].lse - form.sinks_H.to(found[1].lse.dtype)[:, None])
        shared_BHLX: Tensor = found[0] * share_BHL[..., None].to(query_BHLE.dtype)
        return shared_BHLX

    def attend_with_sums(self, query_BHLE: Tensor, key_BGLE: Tensor, value_BGLE: Tensor) -> tuple[Tensor, Tensor]:
        """(attention output [B, H, L, E], the log-sum-exp of its scores [B, H, L] in float32 or wider)."""
        with bounded():
            mixed_BHLE, made = self.flex.run(
                query_BHLE, key_BGLE, value_BGLE, block_mask=self.mask(PLAIN.reach),
                enable_gqa=query_BHLE.shape[1] != key_BGLE.shape[1], return_aux=AuxRequest(lse=True))
        return mixed_BHLE, made.lse

    def mask(self, reach: tuple[int | None, int | None]) -> BlockMask:
        """The block mask of layers with this window and this chunk; all layers of a pass share it."""
        if reach in self._masks:
            return self._masks[reach]
        window, chunk = reach
        # Each token sees the range from its least place up to its own.
        least_BL = self.first_BL if window is None else torch.maximum(self.first_BL, self.order_L - window + 1)
        if chunk is not None:
            least_BL = torch.maximum(least_BL, self.order_L - (self.order_L - self.first_BL) % chunk)
        rows, length = least_BL.shape
        blocks = -(-length // self.block)
        beyond = blocks * self.block - length
        pad = torch.nn.functional.pad
        # Tokens beyond the row must neither widen the range of their block nor narrow what all of it sees.
        lowest_BQ1 = pad(least_BL, (0, beyond), value=length).view(rows, blocks, self.block).amin(-1)[..., None]
        highest_BQ1 = pad(least_BL, (0, beyond), value=0).view(rows, blocks, self.block).amax(-1)[..., None]
        key_K = torch.arange(blocks, device=least_BL.device)
        before_QK = key_K < key_K[:, None]
        seen_BQK = (lowest_BQ1 < (key_K + 1) * self.block) & (key_K <= key_K[:, None])
        whole_BQK = (highest_BQ1 <= key_K * self.block) & before_QK

        def sees(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key <= query) & (key >= least_BL[row, query])

        # Of a block that all of its queries see whole, the kernel computes no mask.
        self._masks[reach] = BlockMask.from_kv_blocks(
            *_ordered(seen_BQK & ~whole_BQK), *_ordered(whole_BQK), BLOCK_SIZE=self.block, mask_mod=sees,
            seq_lengths=(length, length))
        return self._masks[reach]


def _ordered(chosen_BQK: Tensor) -> tuple[Tensor, Tensor]:
    """(number of chosen blocks [B, 1, Q], all blocks with the chosen ones first [B, 1, Q, K]), int32."""
    order_BQK = chosen_BQK.byte().argsort(dim=-1, descending=True, stable=True)
    return chosen_BQK.sum(-1, dtype=torch.int32)[:, None], order_BQK.to(torch.int32)[:, None].contiguous()
