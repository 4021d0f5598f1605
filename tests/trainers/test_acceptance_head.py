"""Acceptance heads: shape, loss against the plain twin, what they learn, and how well they are calibrated."""

from dataclasses import replace

import pytest
import torch
from draftsmith.modules import (
    AcceptanceHead,
    AcceptanceHeadConfig,
    Examples,
    RejectionRisk,
    SamplingSetting,
    StoppedChain,
    UserError,
)
from draftsmith.trainers import acceptance_head
from draftsmith.trainers.acceptance_head import HeadFitConfig, fit_head, weighted_loss
from references import specdec
from support.drafters import DepthDrafter

TOKENS = 8
CHANCES = torch.tensor([0.95, 0.9, 0.95, 0.97, 0.9, 0.1, 0.05, 0.0])  # Tokens from 5 on are hardly ever accepted


LINE = [0, 1, 6, 2, 3, 4]  # A draft with one token that is rejected


def examples(count: int, seed: int) -> Examples:
    """States that say which token was drafted, with its chance."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(TOKENS, (count,), generator=generator)
    return Examples(states_ED=torch.eye(TOKENS)[tokens], chances_E=CHANCES[tokens])


def test_the_loss_is_the_twins() -> None:
    logits = torch.randn(50, 2, dtype=torch.float64)
    chances = torch.rand(50, dtype=torch.float64)
    total, weight = weighted_loss(logits, chances, HeadFitConfig(reject_weight=6.0))
    plain = specdec.weighted_loss(logits.softmax(-1)[:, 1].tolist(), chances.tolist(), 1.0, 6.0)
    assert float(total / weight) == pytest.approx(plain, rel=1e-9)


def test_a_head_is_an_output_layer_on_residual_blocks() -> None:
    head = AcceptanceHead(AcceptanceHeadConfig(num_layers=3), 16)
    assert sum(weight.numel() for weight in head.parameters()) == 3 * (16 * 16 + 16) + 2 * 16 + 2
    with torch.no_grad():
        for weight in head.parameters():
            weight.normal_()
    hidden = states = torch.randn(5, 16)
    for layer in range(3):
        linear = head.blocks[layer].linear
        hidden = hidden + torch.nn.functional.silu(linear(hidden))
    torch.testing.assert_close(head(states), head.output(hidden))
    torch.testing.assert_close(head.log_acceptance(states).exp(), head(states).softmax(-1)[:, 1])


def test_a_head_learns_where_drafts_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance_head, "EPOCHS", 20)
    fitted = fit_head(examples(4000, 1), examples(500, 2), AcceptanceHeadConfig(num_layers=1),
                      HeadFitConfig(lr=1e-2, reject_weight=1.0))
    assert fitted.epoch > 0
    estimates = fitted.head.log_acceptance(torch.eye(TOKENS)).exp()
    assert float((estimates - CHANCES).abs().max()) < 0.05

    class Spelling(DepthDrafter):
        """Drafts the tokens 0 1 6 2 3 4; the state at each says which it is."""

        def expand(self, state, frontier):  # type: ignore[no-untyped-def]
            return replace(super().expand(state, frontier), states_BFHD=torch.eye(TOKENS)[None, None, [7, *LINE]])

    line = torch.full((6, TOKENS), -9.0)
    line[torch.arange(6), torch.tensor(LINE)] = 0.0
    drafter = Spelling(line)
    rule = RejectionRisk(fitted.head.log_acceptance, SamplingSetting(), 0.5, 1)
    tree = StoppedChain(6, rule).grow(drafter, drafter.start(1, 64), torch.tensor([7]))
    assert tree.tokens_BN[0][tree.real_BN[0]].tolist()[1:] == [0, 1, 6, 2]


def test_a_heavy_rejection_makes_the_head_cautious_by_a_known_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance_head, "EPOCHS", 40)
    config = HeadFitConfig(lr=1e-2, reject_weight=6.0)
    fitted = fit_head(examples(4000, 1), examples(500, 2), AcceptanceHeadConfig(num_layers=1), config)
    odds = fitted.head.log_acceptance(torch.eye(TOKENS)).exp().logit().exp()
    # Of the estimated odds the weight is a divisor, where an acceptance is neither sure nor impossible.
    freed = 6 * odds / (1 + 6 * odds)
    assert float((freed - CHANCES)[:-1].abs().max()) < 0.05
    assert float((odds / (1 + odds)).mean()) < float(CHANCES.mean()) - 0.05


def test_a_fit_depends_on_its_seed_alone() -> None:
    shape, config = AcceptanceHeadConfig(num_layers=2), HeadFitConfig()
    weights = []
    for noise in (1, 2):
        torch.manual_seed(noise)
        weights.append(fit_head(examples(300, 1), examples(50, 2), shape, config).head.state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_fit_without_examples_or_that_diverges_is_refused() -> None:
    none = Examples(states_ED=torch.zeros(0, TOKENS), chances_E=torch.zeros(0))
    with pytest.raises(UserError, match=r"examples to learn and to hold out, got 0 and 50; raise labels.examples, or"):
        fit_head(none, examples(50, 1), AcceptanceHeadConfig(), HeadFitConfig())
    wild = Examples(states_ED=torch.full((64, TOKENS), torch.inf), chances_E=torch.full((64,), 0.5))
    with pytest.raises(UserError, match=r"the loss is nan after epoch 1; lower fit.lr"):
        fit_head(wild, wild, AcceptanceHeadConfig(), HeadFitConfig())
