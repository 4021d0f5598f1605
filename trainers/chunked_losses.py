"""Losses over the vocabulary in chunks: no tensor of size tokens x vocabulary outlives its chunk.

Shapes: B rows, L positions, N predicted tokens, K draft steps, D hidden size, V target vocabulary, Q entries of the
draft vocabulary, E candidates, C columns of sums (`objectives.COLUMNS`), P places after which drafts start.

The batch is divided by *predicted token*, not by position: one chunk holds the guesses of all K draft steps about the
same tokens, so that the target's distribution there is computed once for all of them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ..modules import Drafts, Features, UserError
from ..modules.verification.sampling import widened
from .objectives import (
    COLUMNS,
    ObjectiveName,
    PathWeights,
    Teacher,
    TeacherOutput,
    accepted,
    balance,
    objective_loss,
    path_weights,
    rank_hits,
    weighted,
)

CHUNK_ELEMENTS = {"cpu": 1 << 23, "cuda": 1 << 26}
"""Logits in memory at once, by kind of device: 32 MiB of float32 on a CPU, 256 MiB on a GPU, plus three to six tensors
of that size, by objective. On a CPU smaller chunks read the output weight too often and larger ones gain nothing."""
TRAINED_FACTOR = 4  # Larger chunks where the output weight is trained: each adds a gradient of the weight's size


@dataclass(frozen=True, kw_only=True)
class Supervision:
    """The N labels of a batch and the draft steps that predict each of them. Positions are those of the flat batch.
    Where drafts start at a few sampled positions, few steps predict the same token: then N counts these positions, each
    with the K labels of its steps."""

    sources_NK: Tensor  # The draft's row at which step k predicts the token; any finite one where it does not
    valid_NK: Tensor  # True where draft step k predicts the token and learns from it
    labels_NK: Tensor  # The token's entry in the draft vocabulary; 0 where it has none, which no draft step learns
    teachers_NK: Tensor  # Position of the final state from which the target predicts the token
    missed_PK: Tensor  # True where the label of a step after place P is outside the draft vocabulary: not learned
    by_token: bool = True  # True if all steps of an entry have one label, and thus one distribution of the target

    def sources(self, states_BLKD: Tensor) -> Tensor:
        """The draft steps' states at the positions that predict the tokens, [N, K, D]."""
        steps_K = torch.arange(states_BLKD.shape[2], device=states_BLKD.device)
        return states_BLKD.flatten(0, 1)[self.sources_NK, steps_K]


def supervise(features: Features, offsets: Sequence[int], index_V: Tensor | None = None,
              valid_BLK: Tensor | None = None, indices_BL: Tensor | None = None) -> Supervision:
    """The labels of a batch, by `Features.labels` alone, and the draft steps that predict them, each `offsets` ahead.
    `index_V` is the entry of the draft vocabulary of each token, -1 for none, None for the whole vocabulary;
    `valid_BLK` is True where a step has a state (None is everywhere), `indices_BL` the index in its row of each
    position with states (None: these are all)."""
    tokens_BL = features.tokens_BL
    entries_BL = tokens_BL if index_V is None else index_V[tokens_BL]
    predicts = [features.labels(offset)[1] for offset in offsets]
    if indices_BL is not None:
        length, rows_B1 = tokens_BL.shape[1], torch.arange(len(tokens_BL), device=tokens_BL.device)[:, None]
        there_BLK = torch.stack([(indices_BL + offset).clamp(max=length - 1) for offset in offsets], dim=-1)
        labelled_BLK = torch.stack([here_BL.gather(1, indices_BL) for here_BL in predicts], dim=-1)
        labelled_BLK = labelled_BLK if valid_BLK is None else labelled_BLK & valid_BLK
        entries_BLK = entries_BL[rows_B1[..., None], there_BLK]
        each_N1 = torch.arange(indices_BL.numel(), device=indices_BL.device)[:, None]
        return Supervision(
            sources_NK=each_N1.expand(-1, len(offsets)), valid_NK=(labelled_BLK & (entries_BLK >= 0)).flatten(0, 1),
            labels_NK=entries_BLK.clamp(min=0).flatten(0, 1), by_token=False,
            teachers_NK=(rows_B1[..., None] * length + there_BLK - 1).flatten(0, 1).clamp(min=0),
            missed_PK=(labelled_BLK & (entries_BLK < 0)).flatten(0, 1))
    if valid_BLK is not None:
        predicts = [labelled_BL & valid_BLK[:, :, step] for step, labelled_BL in enumerate(predicts)]
    outside_BL = entries_BL < 0
    missed = [here_BL & outside_BL.roll(-offset, 1) for here_BL, offset in zip(predicts, offsets, strict=True)]
    # Masks over predicting positions, moved to the positions of the predicted tokens.
    labelled_BLK = torch.stack([functional.pad(here_BL, (offset, 0))[:, : here_BL.shape[1]]
                                for here_BL, offset in zip(predicts, offsets, strict=True)], dim=-1)
    valid_BLK = labelled_BLK & ~outside_BL[..., None]
    predicted_X, most = valid_BLK.any(-1).flatten(), features.labels_at_most
    # Where a bound of their number is known, the host does not wait for it: spare places hold the first token of all,
    # which nothing predicts.
    found_N1 = predicted_X.nonzero() if most is None else torch.nonzero_static(predicted_X, size=most, fill_value=0)
    chosen_N = found_N1[:, 0]
    valid_NK = valid_BLK.flatten(0, 1)[chosen_N]
    sources_NK = torch.stack([chosen_N - offset for offset in offsets], dim=-1)
    return Supervision(
        sources_NK=torch.where(valid_NK, sources_NK, chosen_N[:, None] - 1),
        valid_NK=valid_NK,
        # The first token may have no entry, and -1 is out of a cross entropy's bounds: on a GPU it ends the process.
        labels_NK=entries_BL.flatten()[chosen_N].clamp(min=0)[:, None].expand_as(valid_NK),
        teachers_NK=(chosen_N - 1)[:, None].expand_as(valid_NK),
        missed_PK=torch.stack(missed, dim=-1).flatten(0, 1))


@dataclass(frozen=True, kw_only=True)
class VocabularyLoss:
    """Loss of draft states: the output layer of each step, the objectives, the weights."""

    project: Callable[[Tensor, int], Tensor]  # Draft logits [..., Q] of a step for its states [..., D]
    entries: int  # Logits per token: those of the draft vocabulary
    weights: tuple[float, ...]  # Weight of each draft step in the loss
    parameters: tuple[nn.Parameter, ...] = ()  # Trained weights that `project` reads, or a draft's `candidates`
    objective: ObjectiveName  # Name of the loss of all draft steps
    teacher: Teacher | None = None  # The target's distribution; None when no objective reads it
    feature_weight: float = 0.0  # Weight of the feature loss relative to the objective's 1
    paths: PathWeights | None = None
    """Weights of the steps after each place by the chances of those before, in place of one for each step. A pass
    without gradients over all logits finds these chances first."""
    confidence: Callable[[Tensor, int], Tensor] | None = None
    """The drafter's logit, for its states [..., D] at a step, of the acceptance of what it guesses there; it learns the
    acceptance, which it does not change (arXiv:2607.05147). None for a drafter that does not judge its guesses."""
    imitated: Callable[[Tensor], Tensor] | None = None
    """Logits [..., Q] for draft states [..., D] whose distribution is learned in place of the target's."""
    chunk_elements: int | None = None  # Logits in memory at once; None takes the device's CHUNK_ELEMENTS
    gather: Callable[[Tensor, int], None] | None = None
    """Is given the weighted sum of losses of a draft's choices, differentiable, and their number, in a step of several
    batches: these are balanced once all are counted (`objectives.balance`), and the total leaves them out."""

    def __call__(self, drafts: Drafts, features: Features, index_V: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return (total, sums_KC): the weighted sum of losses, differentiable, and the sums of `COLUMNS`.

        The total is to be divided by `weighted_mean_loss(sums_KC, weights)[1]` once both are complete over all
        micro-batches and ranks. A label outside the draft vocabulary is not learned with any objective: the right token
        cannot be drafted there, and the target's renormalised distribution prefers a wrong one."""
        supervision = supervise(features, drafts.offsets, index_V, drafts.valid_BLK, drafts.indices_BL)
        hidden_NKD = supervision.sources(drafts.hidden_BLKD)
        rows = _Rows(self, supervision, drafts, None if self.teacher is None else features.final().flatten(0, 1))
        if self.paths is not None:
            rows.weigh(self.paths, hidden_NKD.detach())
        chosen, total, sums_KC = _ChunkedSum.apply(  # type: ignore[no-untyped-call]
            rows, torch.is_grad_enabled(), hidden_NKD, *self.parameters)
        if drafts.choices and self.gather is None:
            total = total + balance(sums_KC, self.weights, drafts.choices).to(total) * chosen
        elif drafts.choices and self.gather is not None:
            self.gather(chosen, drafts.choices)
        if not self.feature_weight:
            return total, sums_KC
        apart = drafts.estimated_BLKD
        estimated_NKD = hidden_NKD if apart is None else supervision.sources(apart)
        feature_K, added_KC = feature_loss(estimated_NKD, supervision, drafts, features), torch.zeros_like(sums_KC)
        added_KC[:, COLUMNS.index("feature")] = feature_K.detach()
        added_KC[:, COLUMNS.index("loss")] = self.feature_weight * feature_K.detach()
        return total + self.feature_weight * weighted(feature_K, self.weights), sums_KC + added_KC


def feature_loss(estimated_NKD: Tensor, supervision: Supervision, drafts: Drafts, features: Features) -> Tensor:
    """Smooth L1 loss between each draft state and the target's final state that it estimates; sums over tokens, [K].
    ValueError if the drafter's states estimate none.

    Each token adds the mean over its D components, as in arXiv:2401.15077, section 4.1 (weight 1.0 there, with 0.1 for
    the objective). Positions whose label is not learned are left out."""
    final_MD = features.final().flatten(0, 1)
    if drafts.estimates is None or final_MD.shape[-1] != estimated_NKD.shape[-1]:
        raise UserError("feature_weight is above 0, but the states of this drafter estimate none of the target's; set "
                        "feature_weight to 0")
    ahead_NK = [sources_N + ahead for sources_N, ahead in zip(supervision.sources_NK.unbind(-1), drafts.estimates,
                                                                strict=True)]
    # The source of an invalid step is any position: those beyond the batch are not read.
    places_NK = torch.stack(ahead_NK, dim=-1).clamp(max=len(final_MD) - 1)
    apart_NKD = functional.smooth_l1_loss(widened(estimated_NKD), widened(final_MD[places_NK]), reduction="none")
    return torch.where(supervision.valid_NK, apart_NKD.mean(-1), 0.0).sum(0)


class _Read(NamedTuple):
    """N tokens of a chunk as a draft step reads them: its logits, each one's label among them, whether it learns from
    that, and the target's distribution over the same entries."""

    logits_NQ: Tensor
    labels_N: Tensor
    valid_N: Tensor
    teacher_output: TeacherOutput | None


@dataclass
class _Rows:
    """The predicted tokens of a batch, divided into chunks."""

    loss: VocabularyLoss
    supervision: Supervision
    drafts: Drafts
    final_MD: Tensor | None  # The target's final states; None where nobody reads its distribution
    weights_NK2: Tensor | None = None  # Weight of each entry in the loss and its share in the divisor, or None

    @torch.no_grad()
    def weigh(self, name: PathWeights, hidden_NKD: Tensor) -> None:
        """Find the weights of all entries, for `path_weights`, from all steps of their places."""
        supervision, offsets = self.supervision, self.drafts.offsets
        places = self.drafts.hidden_BLKD.shape[:2].numel()
        valid_NK, steps_K = supervision.valid_NK, torch.arange(len(offsets), device=hidden_NKD.device)
        chances_NK = hidden_NKD.new_ones(valid_NK.shape, dtype=torch.promote_types(hidden_NKD.dtype, torch.float32))
        for chunk, steps, teacher_output in self.chunks(hidden_NKD.device):
            for step in steps:
                if name == "cat" and teacher_output is not None:
                    labels_N1, valid_N = supervision.labels_NK[chunk, step, None], valid_NK[chunk, step]
                    chances_NK[chunk, step] = torch.where(valid_N, teacher_output.p_NQ.gather(1, labels_N1)[:, 0], 0.0)
                    continue
                # With a gradient the output layer runs in the number format of the loss.
                with torch.enable_grad():
                    read = self.read(hidden_NKD[chunk, step], step, chunk, teacher_output)
                if name == "d_pace":
                    chances_N1 = widened(read.logits_NQ).log_softmax(-1).gather(1, read.labels_N[:, None]).exp()
                    chances_NK[chunk, step] = torch.where(read.valid_N, chances_N1[:, 0], 0.0)
                elif read.teacher_output is not None:
                    chances_NK[chunk, step] = accepted(read.logits_NQ, read.teacher_output)
        # By place, with a place more for entries that no step learns there.
        places_NK = torch.where(valid_NK | (not supervision.by_token), supervision.sources_NK, places)
        chances_PK = chances_NK.new_ones(places + 1, len(offsets))
        chances_PK[places_NK, steps_K] = chances_NK
        counted_PK = torch.zeros_like(chances_PK, dtype=torch.bool)
        counted_PK[places_NK, steps_K] = valid_NK
        # A step whose label the draft vocabulary has not is reached too, and never gives that label; its acceptance is
        # known where each place has entries of its own, and elsewhere taken for 1.
        counted_PK[:-1] |= supervision.missed_PK
        if name != "e2e":
            chances_PK[:-1].masked_fill_(supervision.missed_PK, 0.0)
        found = [part_PK[places_NK, steps_K] for part_PK in path_weights(name, chances_PK, counted_PK, offsets)]
        self.weights_NK2 = torch.stack(found, dim=-1)

    def elements(self, device: torch.device, factor: int = 1) -> int:
        """Logits in memory at once, so many times the usual ones."""
        return (self.loss.chunk_elements or CHUNK_ELEMENTS.get(device.type, CHUNK_ELEMENTS["cuda"])) * factor

    @cached_property
    def log_sums_M(self) -> Tensor | None:
        """`Teacher.log_sums` after each position that is read, once for all entries: steps after sampled places predict
        the same tokens many times. None where nothing needs them."""
        teacher, final_MD = self.loss.teacher, self.final_MD
        if teacher is None or final_MD is None or teacher.whole is None:
            return None
        places_NK = self.supervision.teachers_NK[:, :1] if self.supervision.by_token else self.supervision.teachers_NK
        # After few sampled places in long rows the steps read fewer positions than there are, else nearly all of them.
        read_P = places_NK.flatten() if places_NK.numel() < len(final_MD) else slice(None)
        # Half of the usual: of larger pieces of memory the system takes each one back and clears it for the next chunk.
        most = max(1, self.elements(final_MD.device) // 2 // len(teacher.whole.weight_QD))
        read_PD = final_MD[read_P]
        sums_P = torch.cat([teacher.log_sums(read_PD[first : first + most]) for first in range(0, len(read_PD), most)])
        log_sums_M = sums_P.new_zeros(len(final_MD))
        log_sums_M[read_P] = sums_P
        return log_sums_M

    def chunks(self, device: torch.device) -> Iterator[tuple[slice, Sequence[int], TeacherOutput | None]]:
        """Consecutive ranges of the N entries such that one step's logits stay within CHUNK_ELEMENTS, with draft steps
        there, and the target's distribution over the draft vocabulary, computed once for these steps."""
        factor = TRAINED_FACTOR if self.loss.parameters else 1
        size = max(1, self.elements(device, factor) // self.loss.entries)
        every = [step for step, weight in enumerate(self.loss.weights) if weight]
        for steps in [every] if self.supervision.by_token else [(step,) for step in every]:
            for start in range(0, len(self.supervision.valid_NK), size):
                chunk, teacher_output = slice(start, start + size), None
                if self.loss.teacher is not None and self.final_MD is not None:
                    places_N = self.supervision.teachers_NK[chunk, steps[0]]
                    with torch.no_grad():
                        teacher_output = self.loss.teacher(
                            self.final_MD[places_N], None if self.log_sums_M is None else self.log_sums_M[places_N])
                yield chunk, steps, teacher_output

    def read(self, states_ND: Tensor, step: int, chunk: slice, teacher_output: TeacherOutput | None) -> _Read:
        """The logits of a draft step at the tokens of the chunk, and what it learns from there."""
        valid_N, labels_N = self.supervision.valid_NK[chunk, step], self.supervision.labels_NK[chunk, step]
        if self.loss.imitated is not None:
            with torch.no_grad():
                own_NQ = self.loss.imitated(states_ND)
            teacher_output = TeacherOutput(logits_NQ=own_NQ, log_mass_N=own_NQ.new_zeros(len(own_NQ)))
        if step >= self.drafts.choices or self.drafts.candidates is None:
            return _Read(self.loss.project(states_ND, step), labels_N, valid_N, teacher_output)
        # Of the candidates alone, as if each token had a vocabulary of its own.
        tokens_NE, scores_NE = self.drafts.candidates(states_ND)
        label_NE = tokens_NE == labels_N[:, None]
        if teacher_output is not None:
            inside_NE = teacher_output.log_p_NQ.gather(1, tokens_NE)
            teacher_output = TeacherOutput(logits_NQ=inside_NE, log_mass_N=inside_NE.logsumexp(-1))
        return _Read(scores_NE, label_NE.long().argmax(-1), valid_N & label_NE.any(-1), teacher_output)

    def step(self, states_ND: Tensor, step: int, chunk: slice,
             teacher_output: TeacherOutput | None) -> tuple[Tensor, Tensor]:
        """Return (loss, sums_C) of one draft step at the tokens of the chunk; the loss is a sum, without the weight."""
        valid_N, judged = self.supervision.valid_NK[chunk, step], None
        weights_N2 = None if self.weights_NK2 is None else self.weights_NK2[chunk, step]
        if self.loss.confidence is not None:
            # An acceptance does not depend on the label: it is learned where the draft vocabulary has not that, too.
            missed = False if self.supervision.by_token else self.supervision.missed_PK[chunk, step]
            judged = self.loss.confidence(states_ND, step), valid_N | missed
        name: ObjectiveName = "hard" if step < self.drafts.choices else self.loss.objective
        read = self.read(states_ND, step, chunk, teacher_output)
        loss, sums_C = chunk_loss(*read, name, weights_N2, judged)
        sums_C[COLUMNS.index("missed")] += (valid_N & ~read.valid_N).sum()
        return loss, sums_C


class GatheredChoices:
    """The gradients of the losses of a draft's choices in an optimizer step of several micro-batches: their weight is
    known after the last of them."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters, self.choices = [one for one in parameters if one.requires_grad], 0
        self.gradients: list[Tensor | None] = [None] * len(self.parameters)

    def __call__(self, chosen: Tensor, choices: int) -> None:
        """Gather the gradient of a micro-batch's weighted sum of losses of so many choices."""
        found = torch.autograd.grad(chosen, self.parameters, retain_graph=True, allow_unused=True)
        self.choices, self.gradients = choices, [
            one if other is None else other if one is None else one + other
            for one, other in zip(self.gradients, found, strict=True)]

    def add(self, sums_KC: Tensor, weights: Sequence[float], strategy: Any) -> None:
        """Add them to the gradients of the parameters, balanced by the sums of the whole step; Lightning's `strategy`
        adds up those of all processes."""
        if not self.choices:
            return
        factor = balance(sums_KC, weights, self.choices)
        for parameter, own in zip(self.parameters, self.gradients, strict=True):
            if own is not None:
                # All processes have one of the same weights: those that the drafter's choices read.
                added = strategy.reduce(own, reduce_op="sum") * factor.to(own)
                parameter.grad = added if parameter.grad is None else parameter.grad.add_(added)


Judged = tuple[Tensor, Tensor]  # (a drafter's logit of the acceptance of each guess, where it learns that), [N] each


def chunk_loss(logits_NQ: Tensor, labels_N: Tensor, valid_N: Tensor, teacher_output: TeacherOutput | None,
               objective: ObjectiveName, weights_N2: Tensor | None = None,
               judged: Judged | None = None) -> tuple[Tensor, Tensor]:
    """(loss, sums_C) of one draft step's logits at the tokens of a chunk; the loss is a sum, without the weight. The
    step learns from labels that are `valid_N`. `weights_N2` is the weight of each row in the loss, and its share in the
    divisor; `judged`, the drafter's logits of the acceptance of its guesses, add a loss of their own."""
    alpha_N = None
    # Where the mass inside the draft vocabulary is unknown, so is the acceptance.
    if teacher_output is not None and teacher_output.log_mass_N is not None:
        alpha_N = accepted(logits_NQ, teacher_output)
    losses_N = objective_loss(objective, logits_NQ, labels_N, teacher_output)
    weight = 1.0 if weights_N2 is None else weights_N2[:, 0]
    loss = torch.where(valid_N, losses_N * weight, 0.0).sum()
    if judged is not None and alpha_N is not None:
        logits_N, judged_N = judged
        apart_N = functional.binary_cross_entropy_with_logits(widened(logits_N), alpha_N, reduction="none")
        loss = loss + torch.where(judged_N, apart_N * weight, 0.0).sum()
    with torch.no_grad():
        none, count = torch.zeros_like(loss), valid_N.sum()
        share = count if weights_N2 is None else torch.where(valid_N, weights_N2[:, 1], 0.0).sum()
        alpha, known = (none, none) if alpha_N is None else (torch.where(valid_N, alpha_N, 0.0).sum(), count)
        sums = (count, none, loss, alpha, known, none, share)
        hits_R = rank_hits(logits_NQ, labels_N, valid_N)
        return loss, torch.cat([torch.stack([value.to(torch.float64) for value in sums]), hits_R])


class _ChunkedSum(torch.autograd.Function):
    """The sum of a loss over chunks, whose gradient is computed chunk by chunk in forward: logits are computed once and
    never stored, cheaper in time and memory than recomputing them in backward. Trained output weights are arguments, so
    that autograd and DDP see their gradients."""

    @staticmethod
    def forward(ctx: Any, rows: _Rows, learns: bool, hidden_NKD: Tensor, *parameters: nn.Parameter
                ) -> tuple[Tensor, Tensor, Tensor]:
        # Gradients are made here, where the logits are: backward only scales them.
        gradient_NKD = torch.zeros_like(hidden_NKD)
        # Of the choices, and of the other steps.
        owned: list[list[Tensor | None]] = [[None] * len(parameters) for _ in range(2)]
        sums_KC = torch.zeros(len(rows.loss.weights), len(COLUMNS), dtype=torch.float64, device=hidden_NKD.device)
        # No step learns labels outside the draft vocabulary.
        sums_KC[:, COLUMNS.index("missed")] = rows.supervision.missed_PK.sum(0).to(sums_KC)
        for chunk, steps, teacher_output in rows.chunks(hidden_NKD.device):
            for step in steps:
                with torch.set_grad_enabled(learns):
                    states_ND = hidden_NKD[chunk, step].detach().requires_grad_(learns)
                    loss, sums_C = rows.step(states_ND, step, chunk, teacher_output)
                    sums_KC[step] += sums_C
                    if not learns:
                        continue
                    loss = loss * rows.loss.weights[step]
                    found = torch.autograd.grad(loss, (states_ND, *parameters), allow_unused=True)
                gradient_NKD[chunk, step] = found[0]
                # In the memory of the first one: a copy of the output weight is dear.
                kind = int(step >= rows.drafts.choices)
                owned[kind] = [part if total is None else total if part is None else total.add_(part)
                               for total, part in zip(owned[kind], found[1:], strict=True)]
        # DDP waits for a gradient of every trained weight, also where a rank has no label.
        owned[1] = [torch.zeros_like(weight) if one is None and other is None else other
                    for weight, one, other in zip(parameters, *owned, strict=True)]
        ctx.choices = rows.drafts.choices
        ctx.save_for_backward(gradient_NKD, *owned[0], *owned[1])
        ctx.mark_non_differentiable(sums_KC)
        wide = torch.promote_types(hidden_NKD.dtype, torch.float32)
        losses_K, weights = sums_KC[:, COLUMNS.index("loss")], rows.loss.weights
        parts = [weighted(losses_K[part], weights[part]) if weights[part] else losses_K.new_zeros(())
                 for part in (slice(ctx.choices), slice(ctx.choices, None))]
        return parts[0].to(wide), parts[1].to(wide), sums_KC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, chosen: Tensor, others: Tensor, _sums: Tensor) -> tuple[Tensor | None, ...]:
        gradient_NKD, *owned = ctx.saved_tensors
        half, steps = len(owned) // 2, gradient_NKD.shape[1]
        summed = [other * others if one is None else one * chosen if other is None else one * chosen + other * others
                  for one, other in zip(owned[:half], owned[half:], strict=True)]
        scale_K = torch.cat([chosen.expand(ctx.choices), others.expand(steps - ctx.choices)])
        return None, None, gradient_NKD * scale_K[:, None].to(gradient_NKD.dtype), *summed
