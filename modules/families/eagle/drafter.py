"""EAGLE-1: one decoder layer that predicts the target's next state, from which the target's output layer reads a token
(arXiv:2401.15077); the same drafter with EAGLE-2's tree (arXiv:2406.16858), trained by HASS (arXiv:2408.15766), or with
FSPAD's changes (arXiv:2408.15562).

Shapes: B rows, N positions, D hidden size."""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...config_checks import NotNegative, Parts
from ...errors import UserError
from ...interfaces.drafter import FamilyCard, Training
from ...parts.decoder_block import AttentionContext, BlockConfig, ResidualLayer, RMSNorm
from ...parts.feature_drafter import EagleDrafter, FeatureConfig
from ...parts.shared_embeddings import Sizes
from ...target.model import Target


@dataclass(frozen=True, kw_only=True)
class EagleConfig(FeatureConfig):
    """The shape of an EAGLE-1 drafter."""

    training_only = frozenset({"steps", "noise"})
    ahead = ("steps",)
    bias: bool = True
    """Whether the layer that combines token and state has a bias."""
    steps: Parts = 1
    """Draft steps trained at each position. 1 is EAGLE; more are HASS's harmonised passes (3 in the paper): each reads
    the states of the one before it, without a gradient through them."""
    noise: NotNegative = 0.0
    """Uniform noise between -noise and noise on the target's states in training; the paper's is 0.1."""
    feature_sampling: bool = False
    """Whether an MLP gated by the token alone corrects the combined state before the layer reads it (FSPAD)."""
    partial_alignment: bool = False
    """Whether the layer has two output states: one for the output layer, which no loss compares with the target's, and
    one that estimates the target's state and is fed back (FSPAD)."""

    def check_training(self, train: Any) -> None:
        """A loss for each state. Raises UserError."""
        if self.partial_alignment and not train.feature_weight:
            raise UserError("partial_alignment has a state that only feature_weight trains, got feature_weight "
                            f"{train.feature_weight}; set it above 0 (the paper's weights make it 10), or "
                            "partial_alignment to false")


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


class BareBlock(ResidualLayer):
    """A Llama layer without a norm before its attention: EAGLE's only layer. Several output `states` are concatenated;
    they differ by the MLP alone (arXiv:2408.15562)."""

    def __init__(self, config: BlockConfig, states: int = 1) -> None:
        super().__init__(config, states=states)
        self.states = states

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
    the output layer, the second half to the estimate."""

    family = "eagle"
    card = FamilyCard(
        name="EAGLE-1", papers=("2401.15077", "2408.15766", "2408.15562"),
        guesses="one decoder layer predicts the target's next state; HASS (`steps`) and FSPAD are settings",
        cost="few trained weights; one layer run for each level of the tree")
    config: EagleConfig
    config_class = EagleConfig
    # HASS weights its passes equally; the paper's weights are 1.0 for states and 0.1 for the objective.
    trained_as = Training(objective="soft", feature_weight=10.0, decay=1.0, offsets=True)

    def __init__(self, config: EagleConfig, sizes: Sizes, block: BlockConfig) -> None:
        super().__init__(config, sizes, block)
        width, states = block.hidden_size, 2 if config.partial_alignment else 1
        self.trained_steps, self.state_size = config.steps, states * width
        self.fc = nn.Linear(2 * width, width, bias=config.bias)
        self.sampling = FeatureSampling(block) if config.feature_sampling else None
        self.layers = nn.ModuleList([BareBlock(block, states)])

    def initialise(self, target: Target) -> None:
        """Set weights that pass the state on unchanged; the official code starts with random ones."""
        width = self.block.hidden_size
        self.fc.weight[:, width:] = torch.eye(width, device=self.fc.weight.device)
        if self.sampling is not None:
            self.sampling.down_proj.weight.zero_()
        cast(BareBlock, self.layers[0]).zero_output()

    def fuse(self, final_BND: Tensor, taps: dict[int, Tensor]) -> Tensor:
        """The target's final states, with noise in training."""
        return self.with_noise(final_BND.to(self.dtype), self.config.noise)

    def step(self, embedded_BND: Tensor, read_BND: Tensor, attention: AttentionContext) -> Tensor:
        """Estimates of the target's next states, [B, N, D]; with partial alignment after the output layer's states."""
        hidden_BND: Tensor = self.fc(torch.cat([embedded_BND, read_BND], dim=-1))
        if self.sampling is not None:
            hidden_BND = self.sampling(embedded_BND, hidden_BND)
        return cast(Tensor, self.layers[0](hidden_BND, attention))
