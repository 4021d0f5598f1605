"""Fitting of an acceptance head to stored examples (SpecDec++, arXiv:2405.19715).

Shapes: E examples, N of a batch, D width of the drafter's states."""

import copy
import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from ..modules import AcceptanceHead, AcceptanceHeadConfig, Examples, UserError
from ..modules.config_checks import CheckedSettings, Positive
from .optimizers import warmup_cosine

BATCH_SIZE = 512  # Examples of an optimizer step
WARMUP_SHARE = 0.03  # Share of the steps over which the learning rate rises from zero; it falls along a cosine then
HELD_OUT = 0.1  # Share of the examples that choose the epoch and that a head is not fitted to
EPOCHS = 3  # Passes over the examples; the head with the smallest held-out loss is kept
SEED = 0  # Seed of the order of the examples and of the first weights


@dataclass(frozen=True, kw_only=True)
class HeadFitConfig(CheckedSettings):
    """Settings of the fit."""

    section: ClassVar[str] = "fit"

    lr: Positive = 5e-4
    """Peak learning rate of AdamW; the paper's is 5e-5 for a head of 4096."""
    reject_weight: Positive = 6.0
    """Weight of a rejection in the loss, where an acceptance has 1; above 1 the head is too cautious on purpose."""


@dataclass(frozen=True, kw_only=True)
class HeadFit:
    """A fitted head and what it does on held-out examples."""

    head: AcceptanceHead  # The head with the smallest held-out loss
    epoch: int  # The epoch after which it was; 0 before the first
    loss: float  # Its weighted held-out loss, in nats


def weighted_loss(logits_N2: Tensor, chances_N: Tensor, config: HeadFitConfig) -> tuple[Tensor, Tensor]:
    """(sum, total weight) of the binary cross entropy with soft labels (arXiv:2405.19715, section 3.2).

    w (1 - P) (-log(1 - P')) + P (-log P'), weighted by w (1 - P) + P, where w is `reject_weight`."""
    weights_N2 = torch.stack([config.reject_weight * (1 - chances_N), chances_N], dim=-1)
    # Either logarithm by itself: that of a softmax would be 0 where the gap is large.
    gaps_N2 = torch.stack([logits_N2[..., 0] - logits_N2[..., 1], logits_N2[..., 1] - logits_N2[..., 0]], dim=-1)
    return -(weights_N2 * functional.logsigmoid(gaps_N2)).sum(), weights_N2.sum()


def fit_head(learned: Examples, held_out: Examples, shape: AcceptanceHeadConfig, config: HeadFitConfig,
             device: torch.device | str = "cpu") -> HeadFit:
    """A new head of a shape, on a device, fitted to `learned` in float32; `held_out` chooses the epoch. Raises
    UserError if there are no examples, or the loss is not finite."""
    if not len(learned.chances_E) or not len(held_out.chances_E):
        raise UserError(f"a head needs examples to learn and to hold out, got {len(learned.chances_E)} and "
                        f"{len(held_out.chances_E)}; raise labels.examples, or give data with more prompts")
    generator = torch.Generator().manual_seed(SEED)
    # The first weights depend on the seed alone, and the random numbers outside do not change.
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        head = AcceptanceHead(shape, learned.states_ED.shape[1]).to(device)
    steps = EPOCHS * math.ceil(len(learned.chances_E) / BATCH_SIZE)
    optimizer = torch.optim.AdamW(head.parameters(), lr=config.lr, weight_decay=0.0)
    factor = warmup_cosine(max(1, round(WARMUP_SHARE * steps)), steps)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    # The untrained head counts too: with few examples no epoch may be better.
    best = _measured(head, held_out, config, 0)
    for epoch in range(1, EPOCHS + 1):
        order_E = torch.randperm(len(learned.chances_E), generator=generator)
        for chosen_N in torch.split(order_E, BATCH_SIZE):
            total, weight = weighted_loss(head(learned.states_ED[chosen_N].to(device)),
                                          learned.chances_E[chosen_N].to(device), config)
            optimizer.zero_grad()
            torch.autograd.backward(total / weight)
            optimizer.step()
            scheduler.step()
        now = _measured(head, held_out, config, epoch)
        if not math.isfinite(now.loss):
            raise UserError(f"the loss is {now.loss} after epoch {epoch}; lower fit.lr {config.lr:g}")
        best = now if now.loss < best.loss else best
    return best


@torch.no_grad()
def _measured(head: AcceptanceHead, held_out: Examples, config: HeadFitConfig, epoch: int) -> HeadFit:
    """The head as it is now, on held-out examples."""
    device = head.output.weight.device
    logits_E2 = torch.cat([head(part.to(device)).cpu() for part in torch.split(held_out.states_ED, 4096)])
    total, weight = weighted_loss(logits_E2, held_out.chances_E, config)
    return HeadFit(head=copy.deepcopy(head), epoch=epoch, loss=float(total / weight))
