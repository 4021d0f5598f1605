"""Losses over the vocabulary, in chunks: nothing of size tokens x vocabulary outlives its chunk.

Shapes: B rows, L positions, N predicted tokens, K draft steps, D hidden size, V target vocabulary, Q entries of the
draft vocabulary, C columns of sums (`metrics.COLUMNS`).

The batch is cut by *predicted token*, not by index: one chunk holds what all K draft steps guessed about the same
tokens, so that the target's distribution there (soft labels) is computed once for all of them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ..modules.drafter import Drafts
from ..modules.features import Features
from .metrics import COLUMNS, rank_hits, weighted_mean_loss

CHUNK_ELEMENTS = {"cpu": 1 << 23, "cuda": 1 << 26}
"""Logits alive at once, by kind of device: 32 MiB of float32 on a CPU, 256 MiB on a GPU; about three more tensors of
that size stand beside them. On a CPU smaller chunks read the output weight too often and larger ones gain nothing
(`tests/benchmarks/vocabulary_loss.py --chunk`)."""
TRAINED_FACTOR = 4
"""Larger chunks where the output weight is trained: each adds a gradient of the weight's size."""


@dataclass(frozen=True, kw_only=True)
class Supervision:
    """What each of N tokens of the batch teaches the draft steps that predict it. Indices run over the flat batch."""

    sources_NK: Tensor
    """Index at which draft step k predicts the token; where it does not, some index with a finite state."""
    valid_NK: Tensor
    """True where draft step k predicts the token and learns from it."""
    labels_N: Tensor
    """The token's entry in the draft vocabulary."""
    teachers_N: Tensor
    """Index whose final state the target predicts the token from."""
    missed_K: Tensor
    """Labels of each draft step that lie outside the draft vocabulary: they are not learned."""


def supervise(features: Features, offsets: Sequence[int], index_V: Tensor | None = None) -> Supervision:
    """Who predicts which token, by `Features.labels` alone.

    Args:
        features: the batch.
        offsets: how far ahead each draft step predicts.
        index_V: entry of the draft vocabulary for each target token, -1 for none; None for the whole vocabulary.
    """
    tokens_BL = features.tokens_BL
    entries_BL = tokens_BL if index_V is None else index_V[tokens_BL]
    known_BL = entries_BL >= 0
    asked_BLK = torch.stack([_at_predicted(features.labels(offset)[1], offset) for offset in offsets], dim=-1)
    valid_BLK = asked_BLK & known_BL[..., None]
    chosen_N = valid_BLK.any(-1).flatten().nonzero()[:, 0]
    valid_NK = valid_BLK.flatten(0, 1)[chosen_N]
    sources_NK = chosen_N[:, None] - torch.tensor(list(offsets), device=chosen_N.device)
    return Supervision(
        sources_NK=torch.where(valid_NK, sources_NK, chosen_N[:, None] - 1),
        valid_NK=valid_NK,
        labels_N=entries_BL.flatten()[chosen_N],
        teachers_N=chosen_N - 1,
        missed_K=(asked_BLK & ~known_BL[..., None]).sum((0, 1)),
    )


def _at_predicted(valid_BL: Tensor, offset: int) -> Tensor:
    """Move a mask from the index that predicts to the index of the predicted token."""
    moved = torch.zeros_like(valid_BL)
    if offset < valid_BL.shape[1]:
        moved[:, offset:] = valid_BL[:, :-offset]
    return moved


def hard_loss(logits_NQ: Tensor, labels_N: Tensor, _teacher_NQ: Tensor | None) -> Tensor:
    """-log q(label) of each row, in nats, float32."""
    return functional.cross_entropy(_wide(logits_NQ), labels_N, reduction="none")


def soft_loss(logits_NQ: Tensor, _labels_N: Tensor, teacher_NQ: Tensor | None) -> Tensor:
    """-sum p log q of each row, p the target's distribution over the same entries: forward KL up to a constant."""
    if teacher_NQ is None:
        raise ValueError("soft labels need the target's distribution; give a teacher")
    return functional.cross_entropy(_wide(logits_NQ), teacher_NQ, reduction="none")


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


@dataclass(frozen=True, kw_only=True)
class VocabularyLoss:
    """How draft states become a loss: the output layer of each step, the labels, the weights."""

    project: Callable[[Tensor, int], Tensor]
    """Draft logits [..., Q] of a step for its states [..., D]."""
    entries: int
    """Entries Q of the draft vocabulary."""
    weights: tuple[float, ...]
    """Weight of each draft step in the loss."""
    parameters: tuple[nn.Parameter, ...] = ()
    """Trained weights that `project` reads."""
    teacher: Callable[[Tensor], Tensor] | None = None
    """Target logits [..., Q] of final states [..., D]; None teaches the hard labels."""
    chunk_elements: int | None = None
    """Logits alive at once; None takes the device's CHUNK_ELEMENTS."""

    def __call__(self, drafts: Drafts, features: Features, index_V: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return (total, sums_KC): the weighted sum of losses, differentiable, and the sums of `metrics.COLUMNS`.

        The total belongs over `metrics.weighted_mean_loss(sums_KC, weights)[1]`, once both are complete over all
        micro-batches and ranks. A label outside the draft vocabulary is not learned, under hard and soft labels alike:
        there the right token cannot be drafted, and the target's renormalised distribution teaches another one.
        """
        supervision = supervise(features, drafts.offsets, index_V)
        flat_MKD = drafts.hidden_BLKD.flatten(0, 1)
        steps_K = torch.arange(len(drafts.offsets), device=flat_MKD.device)
        hidden_NKD = flat_MKD[supervision.sources_NK, steps_K]
        states_ND = None if self.teacher is None else features.final().flatten(0, 1)[supervision.teachers_N]
        rows = _Rows(self, supervision, states_ND)
        if not torch.is_grad_enabled():
            return rows.sums(hidden_NKD)
        total, sums_KC = _ChunkedSum.apply(rows, hidden_NKD, *self.parameters)  # type: ignore[no-untyped-call]
        return total, sums_KC


class _Rows:
    """The predicted tokens of a batch, cut into chunks."""

    def __init__(self, loss: VocabularyLoss, supervision: Supervision, states_ND: Tensor | None) -> None:
        self.loss, self.supervision, self.states_ND = loss, supervision, states_ND

    def chunks(self, device: torch.device) -> Iterator[slice]:
        """Consecutive ranges of the N tokens, each with the logits of one step within the budget."""
        usual = CHUNK_ELEMENTS.get(device.type, CHUNK_ELEMENTS["cuda"])
        usual *= TRAINED_FACTOR if self.loss.parameters else 1
        size = max(1, (self.loss.chunk_elements or usual) // self.loss.entries)
        return (slice(start, start + size) for start in range(0, len(self.supervision.labels_N), size))

    @torch.no_grad()
    def teach(self, chunk: slice) -> Tensor | None:
        """The target's distribution over the draft vocabulary at the tokens of the chunk, renormalised; [N, Q]."""
        if self.loss.teacher is None or self.states_ND is None:
            return None
        return _wide(self.loss.teacher(self.states_ND[chunk])).softmax(-1)

    def step(self, states_ND: Tensor, step: int, chunk: slice, teacher_NQ: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return (loss, sums_C) of one draft step at the tokens of the chunk; the loss is a sum, without the weight."""
        valid_N, labels_N = self.supervision.valid_NK[chunk, step], self.supervision.labels_N[chunk]
        logits_NQ = self.loss.project(states_ND, step)
        objective = hard_loss if teacher_NQ is None else soft_loss
        loss = torch.where(valid_N, objective(logits_NQ, labels_N, teacher_NQ), 0.0).sum()
        with torch.no_grad():
            hits_R = rank_hits(logits_NQ, labels_N, valid_N)
            sums_C = torch.cat([valid_N.sum()[None], valid_N.new_zeros(1), loss.detach()[None], hits_R])
        return loss, sums_C.to(torch.float64)

    def empty(self, device: torch.device) -> Tensor:
        """Sums before the first chunk: what lies outside the draft vocabulary is known already; [K, C]."""
        sums_KC = torch.zeros(len(self.loss.weights), len(COLUMNS), dtype=torch.float64, device=device)
        sums_KC[:, COLUMNS.index("missed")] = self.supervision.missed_K.to(sums_KC)
        return sums_KC

    def total(self, sums_KC: Tensor, like: Tensor) -> Tensor:
        """The weighted sum of losses."""
        return weighted_mean_loss(sums_KC, self.loss.weights)[0].to(torch.promote_types(like.dtype, torch.float32))

    def sums(self, hidden_NKD: Tensor) -> tuple[Tensor, Tensor]:
        """Return (total, sums_KC) without a gradient."""
        sums_KC = self.empty(hidden_NKD.device)
        for chunk in self.chunks(hidden_NKD.device):
            teacher_NQ = self.teach(chunk)
            for step in range(len(sums_KC)):
                sums_KC[step] += self.step(hidden_NKD[chunk, step], step, chunk, teacher_NQ)[1]
        return self.total(sums_KC, hidden_NKD), sums_KC


class _ChunkedSum(torch.autograd.Function):
    """The sum of a loss over chunks, whose gradient is taken chunk by chunk on the way forward.

    The logits of a chunk are then computed once and never kept: cheaper in time and memory than recomputing them in
    backward. Trained output weights are arguments, so that autograd and DDP see their gradients.
    """

    @staticmethod
    def forward(ctx: Any, rows: _Rows, hidden_NKD: Tensor, *parameters: nn.Parameter) -> tuple[Tensor, Tensor]:
        gradient_NKD = torch.zeros_like(hidden_NKD)
        owned: list[Tensor | None] = [None] * len(parameters)
        sums_KC = rows.empty(hidden_NKD.device)
        for chunk in rows.chunks(hidden_NKD.device):
            teacher_NQ = rows.teach(chunk)
            for step, weight in enumerate(rows.loss.weights):
                with torch.enable_grad():
                    states_ND = hidden_NKD[chunk, step].detach().requires_grad_()
                    loss, sums_C = rows.step(states_ND, step, chunk, teacher_NQ)
                    found = torch.autograd.grad(loss * weight, (states_ND, *parameters), allow_unused=True)
                gradient_NKD[chunk, step] = found[0]
                owned = [_added(total, part) for total, part in zip(owned, found[1:], strict=True)]
                sums_KC[step] += sums_C
        complete = [torch.zeros_like(weight) if part is None else part
                    for weight, part in zip(parameters, owned, strict=True)]
        ctx.save_for_backward(gradient_NKD, *complete)
        ctx.mark_non_differentiable(sums_KC)
        return rows.total(sums_KC, hidden_NKD), sums_KC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor, _sums: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *(gradient * scale.to(gradient.dtype) for gradient in ctx.saved_tensors))


def _added(total: Tensor | None, part: Tensor | None) -> Tensor | None:
    """Sum of two gradients, in the first one's memory."""
    if total is None or part is None:
        return part if total is None else total
    return total.add_(part)
