"""EAGLE-1: one decoder layer that guesses the target's next state, and its token by the target's output layer
(arXiv:2401.15077); the same drafter under EAGLE-2's tree (arXiv:2406.16858), trained by HASS (arXiv:2408.15766), or
with FSPAD's changes (arXiv:2408.15562).

Shapes: B rows, N positions, D hidden size.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..config_checks import check_sizes, settings_of
from ..errors import UserError
from ..target.identity import TargetIdentity
from ..target.model import Target
from .eagle_base import FeedbackDrafter, block_beside
from .parts.decoder_block import Attention, BlockConfig, GatedMLP, Sight


@dataclass(frozen=True, kw_only=True)
class EagleConfig:
    """The shape of an EAGLE-1 drafter."""

    bias: bool = True
    """Whether the layer that joins token and state has a bias."""
    steps: int = 1
    """Draft steps trained at every index. 1 is EAGLE; more are HASS's harmonised passes (the paper's is 3), in which a
    step reads the states of the one before it and no gradient goes back through them."""
    noise: float = 0.0
    """Uniform noise between -noise and noise on the target's states in training; the paper's is 0.1."""
    feature_sampling: bool = False
    """Whether a gated MLP, opened by the token alone, corrects the joined state before the layer reads it (FSPAD)."""
    partial_alignment: bool = False
    """Whether the layer gives two states: one for the output layer, which nothing holds to the target's, and one that
    estimates the target's and is fed back (FSPAD)."""
    rope_base: float | None = None
    """Base of the rotary embedding; None takes the target's. The official code's is always 10000."""
    vocabulary_size: int | None = None
    """Entries of a reduced draft vocabulary, the most frequent tokens of the training data; None keeps them all."""

    def __post_init__(self) -> None:
        check_sizes(steps=self.steps, vocabulary_size=self.vocabulary_size)
        if not self.noise >= 0:
            raise UserError(f"noise must not be negative, got {self.noise!r}")


class FeatureSampling(nn.Module):
    """h + down(SiLU(gate(e)) * up(norm(h))): the token, which the target's state leaves open, chooses among what the
    state says (arXiv:2408.15562; the gate reads the bare embedding, as the official code does)."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, embedded_BND: Tensor, hidden_BND: Tensor) -> Tensor:
        """The states as the tokens see them, [B, N, D]."""
        opened_BNI = functional.silu(self.gate_proj(embedded_BND)) * self.up_proj(self.norm(hidden_BND))
        sampled_BND: Tensor = hidden_BND + self.down_proj(opened_BNI)
        return sampled_BND

    @torch.no_grad()
    def silence(self) -> None:
        """Let it add nothing at the start."""
        self.down_proj.weight.zero_()


class BareBlock(nn.Module):
    """A Llama layer without a norm in front of its attention, as EAGLE's only layer is.

    Args:
        config: its shape.
        states: how many states it gives, side by side; its MLP alone tells them apart (arXiv:2408.15562).
    """

    def __init__(self, config: BlockConfig, states: int = 1) -> None:
        super().__init__()
        width, self.states = config.hidden_size, states
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(width, eps=config.norm_eps)
        self.mlp = GatedMLP(width, config.intermediate_size, output_size=states * width)

    def forward(self, hidden_BND: Tensor, sight: Sight) -> Tensor:
        """The residual stream behind the layer, [B, N, states * D]."""
        hidden_BND = hidden_BND + self.self_attn(hidden_BND, sight)
        added: Tensor = self.mlp(self.post_attention_layernorm(hidden_BND))
        return added + torch.cat([hidden_BND] * self.states, dim=-1)

    @torch.no_grad()
    def silence(self) -> None:
        """Let the layer add nothing at the start."""
        self.self_attn.o_proj.weight.zero_()
        self.mlp.down_proj.weight.zero_()


class Eagle(FeedbackDrafter):
    """fc([e(x_{p+1}); f_p]) and a decoder layer estimate f_{p+1}, which the target's output layer reads as its own.

    Own weights, named as in the official code: `fc.{weight,bias}`, `layers.0.self_attn.*`, `layers.0.mlp.*`,
    `layers.0.post_attention_layernorm.weight`, and with a reduced vocabulary its ids, `token_ids` [Q]. The target's
    embedding and output layer are borrowed. Make a new one with `Eagle.create`.

    FSPAD's feature sampling adds `sampling.{norm,gate_proj,up_proj,down_proj}.weight`; its code names them, and `fc`,
    below one more `fc`. With its partial alignment `layers.0.mlp.down_proj.weight` is [2D, I]: its first half leads to
    the output layer, its second half to the estimate.

    Args:
        config: its settings.
        block: the shape of its layer.
        vocab_size: the target's vocabulary.
    """

    family = "eagle"

    def __init__(self, config: EagleConfig, block: BlockConfig, *, vocab_size: int) -> None:
        super().__init__(block, vocab_size=vocab_size, vocabulary_size=config.vocabulary_size)
        self.config = config
        self.fc = nn.Linear(2 * block.hidden_size, block.hidden_size, bias=config.bias)
        self.sampling = FeatureSampling(block) if config.feature_sampling else None
        self.layers = nn.ModuleList([BareBlock(block, states=2 if config.partial_alignment else 1)])

    @classmethod
    def create(cls, config: EagleConfig, target: Target, token_ids_Q: Tensor | None = None) -> "Eagle":
        """A new drafter beside `target`, bound to it, whose layer has the shape of the target's.

        Args:
            token_ids_Q: ids of the reduced draft vocabulary, when `config.vocabulary_size` asks for one.

        Raises:
            UserError: if the ids do not agree with the configuration.
        """
        with target.device:
            drafter = cls(config, block_beside(target, config.rope_base), vocab_size=target.vocab_size)
        drafter._pass_the_state()
        drafter.begin(target, token_ids_Q)
        return drafter

    @torch.no_grad()
    def _pass_the_state(self) -> None:
        """Let the state come through unchanged at first; the official code begins at random, and has to find it."""
        width = self.block.hidden_size
        self.fc.weight[:, width:] = torch.eye(width, device=self.fc.weight.device)
        if self.sampling is not None:
            self.sampling.silence()
        for layer in self._layers():
            layer.silence()

    def _layers(self) -> list[BareBlock]:
        return [layer for layer in self.layers if isinstance(layer, BareBlock)]

    def describe(self) -> dict[str, Any]:
        """The configuration, JSON-ready."""
        return {**asdict(self.config), "block": asdict(self.block)}

    @classmethod
    def rebuild(cls, description: dict[str, Any], identity: TargetIdentity) -> "Eagle":
        """An equal drafter whose weights are still to be loaded. Raises UserError on an unknown description."""
        given = settings_of(description, EagleConfig, "an EAGLE drafter is", "block")
        block = BlockConfig.from_dict(given.pop("block"))
        return cls(EagleConfig(**given), block, vocab_size=identity.vocab_size)

    @property
    def trained_steps(self) -> int:
        """One, or HASS's passes."""
        return self.config.steps

    def estimates(self, steps: int) -> tuple[int, ...]:
        """Step k at index p estimates the target's state at p + 1 + k."""
        return tuple(range(1, 1 + steps))

    def estimated(self, own: list[Tensor]) -> Tensor | None:
        """With partial alignment, the half that is fed back."""
        return torch.stack([self._halves(state)[1] for state in own], dim=2) if self.config.partial_alignment else None

    @property
    def state_size(self) -> int:
        """Two states side by side with partial alignment."""
        return 2 * self.block.hidden_size if self.config.partial_alignment else self.block.hidden_size

    def fuse(self, final_BND: Tensor, taps: dict[int, Tensor]) -> Tensor:
        """The target's final states, with noise in training."""
        return self.disturbed(final_BND.to(self.dtype), self.config.noise)

    def step(self, embedded_BND: Tensor, read_BND: Tensor, sight: Sight) -> Tensor:
        """Estimates of the target's next states, [B, N, D]; behind those for the output layer if they are apart."""
        hidden_BND: Tensor = self.fc(torch.cat([embedded_BND, read_BND], dim=-1))
        if self.sampling is not None:
            hidden_BND = self.sampling(embedded_BND, hidden_BND)
        for layer in self._layers():
            hidden_BND = layer(hidden_BND, sight)
        return hidden_BND

    def feed(self, own: Tensor) -> Tensor:
        """The estimate itself; HASS detaches it, each pass learning to make do with what it gets."""
        return self._halves(own)[1].detach()

    def finish(self, own: Tensor) -> Tensor:
        """The estimate, or the half beside it with partial alignment."""
        return self._halves(own)[0]

    def _halves(self, own: Tensor) -> tuple[Tensor, Tensor]:
        """(what the output layer reads, the estimate of the target's state)."""
        if not self.config.partial_alignment:
            return own, own
        read, estimated = own.chunk(2, dim=-1)
        return read, estimated
