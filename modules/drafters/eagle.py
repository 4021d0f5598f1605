"""EAGLE-1: one decoder layer that predicts the target's next state, from which the target's output layer reads a token
(arXiv:2401.15077); the same drafter with EAGLE-2's tree (arXiv:2406.16858), trained by HASS (arXiv:2408.15766), or with
FSPAD's changes (arXiv:2408.15562).

Shapes: B rows, N positions, D hidden size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..config_checks import check_sizes
from ..errors import UserError
from ..interfaces.family_card import FamilyCard
from ..target.model import Target
from .eagle_base import EagleDrafter
from .parts.decoder_block import Attention, AttentionContext, BlockConfig, GatedMLP, ResidualLayer, RMSNorm
from .parts.feature_drafter import FeatureConfig


@dataclass(frozen=True, kw_only=True)
class EagleConfig(FeatureConfig):
    """The shape of an EAGLE-1 drafter."""

    bias: bool = True
    """Whether the layer that combines token and state has a bias."""
    steps: int = 1
    """Draft steps trained at each position. 1 is EAGLE; more are HASS's harmonised passes (3 in the paper): each reads
    the states of the one before it, without a gradient through them."""
    noise: float = 0.0
    """Uniform noise between -noise and noise on the target's states in training; the paper's is 0.1."""
    feature_sampling: bool = False
    """Whether an MLP gated by the token alone corrects the combined state before the layer reads it (FSPAD)."""
    partial_alignment: bool = False
    """Whether the layer has two output states: one for the output layer, which no loss compares with the target's, and
    one that estimates the target's state and is fed back (FSPAD)."""

    def __post_init__(self) -> None:
        check_sizes(steps=self.steps, vocabulary_size=self.vocabulary_size)
        if not self.noise >= 0:
            raise UserError(f"noise must not be negative, got {self.noise!r}")


class FeatureSampling(nn.Module):
    """h + down(SiLU(gate(e)) * up(norm(h))): the state h with its components gated by the token e, which the state does
    not determine (arXiv:2408.15562; the gate reads the embedding without a norm, as in the official code)."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, embedded_BND: Tensor, hidden_BND: Tensor) -> Tensor:
        """The corrected states, [B, N, D]."""
        gated_BNI = functional.silu(self.gate_proj(embedded_BND)) * self.up_proj(self.norm(hidden_BND))
        sampled_BND: Tensor = hidden_BND + self.down_proj(gated_BNI)
        return sampled_BND

    @torch.no_grad()
    def zero_output(self) -> None:
        """Initialise the correction to zero."""
        self.down_proj.weight.zero_()


class BareBlock(ResidualLayer):
    """A Llama layer without a norm before its attention: EAGLE's only layer.

    Args:
        config: its shape.
        states: number of output states, concatenated; they differ by the MLP alone (arXiv:2408.15562).
    """

    def __init__(self, config: BlockConfig, states: int = 1) -> None:
        super().__init__()
        width, self.states = config.hidden_size, states
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(width, eps=config.norm_eps)
        self.mlp = GatedMLP(width, config.intermediate_size, output_size=states * width)

    def forward(self, hidden_BND: Tensor, attention: AttentionContext) -> Tensor:
        """The residual stream after the layer, [B, N, states * D]."""
        hidden_BND = hidden_BND + self.self_attn(hidden_BND, attention)
        added: Tensor = self.mlp(self.post_attention_layernorm(hidden_BND))
        return added + torch.cat([hidden_BND] * self.states, dim=-1)


class Eagle(EagleDrafter):
    """fc([e(x_{p+1}); f_p]) and a decoder layer estimate f_{p+1}, the input of the target's output layer.

    Own weights, named as in the official code: `fc.{weight,bias}`, `layers.0.self_attn.*`, `layers.0.mlp.*`,
    `layers.0.post_attention_layernorm.weight`, and with a reduced vocabulary its ids, `token_ids` [Q]. The target's
    embedding and output layer are borrowed. Make a new one with `Eagle.create`.

    FSPAD's feature sampling adds `sampling.{norm,gate_proj,up_proj,down_proj}.weight`; in its code these and `fc` are
    inside another `fc`. With its partial alignment `layers.0.mlp.down_proj.weight` is [2D, I]: the first half leads to
    the output layer, the second half to the estimate.

    Args:
        config: its settings.
        block: the shape of its layer.
        vocab_size: the target's vocabulary.
    """

    family = "eagle"
    card = FamilyCard(
        name="EAGLE-1", papers=("2401.15077", "2408.15766", "2408.15562"),
        guesses="one decoder layer predicts the target's next state; HASS (`steps`) and FSPAD are settings",
        cost="few trained weights; one layer run for each level of the tree",
    )
    config: EagleConfig
    config_class = EagleConfig
    described_as = "an EAGLE drafter is"

    def __init__(self, config: EagleConfig, block: BlockConfig, *, vocab_size: int) -> None:
        super().__init__(config, block, vocab_size=vocab_size)
        self.fc = nn.Linear(2 * block.hidden_size, block.hidden_size, bias=config.bias)
        self.sampling = FeatureSampling(block) if config.feature_sampling else None
        self.layers = nn.ModuleList([BareBlock(block, states=2 if config.partial_alignment else 1)])

    @torch.no_grad()
    def initialise(self, target: Target) -> None:
        """Set weights that pass the state on unchanged; the official code starts with random ones."""
        width = self.block.hidden_size
        self.fc.weight[:, width:] = torch.eye(width, device=self.fc.weight.device)
        if self.sampling is not None:
            self.sampling.zero_output()
        for layer in self._layers():
            layer.zero_output()

    def _layers(self) -> list[BareBlock]:
        return [layer for layer in self.layers if isinstance(layer, BareBlock)]

    @property
    def trained_steps(self) -> int:
        """One, or the number of HASS's passes."""
        return self.config.steps

    def estimates(self, steps: int) -> tuple[int, ...]:
        """Step k at position p estimates the target's state at p + 1 + k."""
        return tuple(range(1, 1 + steps))

    def estimated(self, own: list[Tensor]) -> Tensor | None:
        """The half that is fed back, with partial alignment; otherwise None."""
        return torch.stack([self._halves(state)[1] for state in own], dim=2) if self.config.partial_alignment else None

    @property
    def state_size(self) -> int:
        """The width of one state, or of two with partial alignment."""
        return 2 * self.block.hidden_size if self.config.partial_alignment else self.block.hidden_size

    def fuse(self, final_BND: Tensor, taps: dict[int, Tensor]) -> Tensor:
        """The target's final states, with noise in training."""
        return self.with_noise(final_BND.to(self.dtype), self.config.noise)

    def step(self, embedded_BND: Tensor, read_BND: Tensor, attention: AttentionContext) -> Tensor:
        """Estimates of the target's next states, [B, N, D]; with partial alignment after the output layer's states."""
        hidden_BND: Tensor = self.fc(torch.cat([embedded_BND, read_BND], dim=-1))
        if self.sampling is not None:
            hidden_BND = self.sampling(embedded_BND, hidden_BND)
        for layer in self._layers():
            hidden_BND = layer(hidden_BND, attention)
        return hidden_BND

    def feed(self, own: Tensor) -> Tensor:
        """The estimate, detached as in HASS: a pass learns from its input and does not train the pass before it."""
        return self._halves(own)[1].detach()

    def finish(self, own: Tensor) -> Tensor:
        """The estimate; with partial alignment the half for the output layer."""
        return self._halves(own)[0]

    def _halves(self, own: Tensor) -> tuple[Tensor, Tensor]:
        """(state for the output layer, estimate of the target's state)."""
        if not self.config.partial_alignment:
            return own, own
        read, estimated = own.chunk(2, dim=-1)
        return read, estimated
