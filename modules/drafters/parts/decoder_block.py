"""Decoder blocks that a drafter trains: normalisation, rotary embedding, grouped-query attention and a gated MLP.

They are Llama's, with Llama's parameter names, so that official checkpoints map one to one. Every pass has an explicit
boolean mask; training rows, chunks of a prompt and tree nodes differ in their masks alone (`block_cache.py`). Training
on a CPU uses the segments of the rows in place of the mask (`segment_attention.py`).

Shapes: B rows, N tokens of a pass, W keys they may see, D hidden size, H heads, G key-value heads, E head dimension.
"""

from dataclasses import dataclass, field
from typing import Any, get_type_hints

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ...config_checks import check_sizes
from ...errors import UserError
from ...features import Features
from ...json_records import MistypedError, typed_fields
from ...target.kv_cache import RowCache
from ...target.model import Target
from .segment_attention import Span, attend_segments, segment_spans

Rotation = tuple[Tensor, Tensor]
"""Cosines and signed sines of a rotary embedding, [B, 1, N, E] each."""
OFFICIAL_ROPE_BASE = 10_000.0
"""Base of the rotary embedding in the official Hydra, EAGLE-1 and Kangaroo code, whatever the target's base."""


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """The shape of a decoder block."""

    hidden_size: int
    """Width D of the residual stream."""
    intermediate_size: int
    """Width of the gated MLP."""
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key-value heads; a divisor of `num_heads`."""
    head_dim: int
    """Width E of a head; even, since the rotary embedding rotates pairs."""
    norm_eps: float = 1e-6
    """Added to the mean square inside RMSNorm."""
    rope_base: float = OFFICIAL_ROPE_BASE
    """Base of the rotary embedding's frequencies."""

    def __post_init__(self) -> None:
        check_sizes(hidden_size=self.hidden_size, intermediate_size=self.intermediate_size, num_heads=self.num_heads,
                    num_kv_heads=self.num_kv_heads, head_dim=self.head_dim)
        if self.num_heads % self.num_kv_heads:
            raise UserError(f"num_kv_heads must divide num_heads ({self.num_heads}), got {self.num_kv_heads}")
        if self.head_dim % 2:
            raise UserError(f"head_dim must be even for the rotary embedding, got {self.head_dim}")
        if not (self.norm_eps > 0 and self.rope_base > 0):
            raise UserError(f"norm_eps and rope_base must be above 0, got {self.norm_eps} and {self.rope_base}")

    @classmethod
    def like(cls, target: Target, *, rope_base: float = OFFICIAL_ROPE_BASE) -> "BlockConfig":
        """The shape of the target's own layers; Llama's values where its configuration has none."""
        given: dict[str, Any] = {**target.config.to_dict(), "num_heads": target.config.num_attention_heads}
        heads = int(given["num_heads"])
        return cls(
            hidden_size=target.hidden_size,
            intermediate_size=int(given.get("intermediate_size") or 4 * target.hidden_size),
            num_heads=heads,
            num_kv_heads=int(given.get("num_key_value_heads") or heads),
            head_dim=int(given.get("head_dim") or target.hidden_size // heads),
            norm_eps=float(given.get("rms_norm_eps") or cls.norm_eps),
            rope_base=rope_base,
        )

    @classmethod
    def from_dict(cls, description: dict[str, Any]) -> "BlockConfig":
        """The inverse of `dataclasses.asdict`. Raises UserError if a field is missing, unknown or of the wrong kind."""
        try:
            kinds = get_type_hints(cls)
            return cls(**typed_fields(description, {name: kinds[name] for name in sorted(kinds)}))
        except MistypedError as error:
            raise UserError(f"the description of a decoder block is damaged: {error}; copy or train the artifact "
                            "again") from error


@dataclass(frozen=True, kw_only=True)
class AttentionContext:
    """Positions, visible keys and cache of the tokens of one pass."""

    positions_BN: Tensor
    """Position id of each token, int64."""
    visible_BNW: Tensor
    """True where a token sees a key. Every token must see at least one, such as itself."""
    cache: RowCache | None = None
    """The cache of keys and values; None when the tokens see each other alone."""
    spans: tuple[Span, ...] | None = None
    """The segments that the mask stands for, where attention computes them one by one."""
    tables: dict[tuple[float, int], Rotation] = field(default_factory=dict, compare=False)
    """Rotations of the positions by base and width of a head, computed once for queries, keys and all layers."""

    @classmethod
    def training(cls, features: Features) -> "AttentionContext":
        """The context of training rows: each token of a packed row sees its own segment up to itself."""
        return cls(positions_BN=features.positions_BL, visible_BNW=features.visible(),
                   spans=segment_spans(features.segments_BL))

    def rotation(self, base: float, size: int) -> Rotation:
        """Cosines and signed sines by which heads of width `size` rotate at these positions."""
        if (base, size) not in self.tables:
            self.tables[base, size] = rotation(self.positions_BN, base, size)
        return self.tables[base, size]

    def attend(self, layer: int, query_BHNE: Tensor, key_BGNE: Tensor, value_BGNE: Tensor) -> Tensor:
        """Attention output of a layer's heads, [B, H, N, E]; the new keys and values are added to the cache."""
        if self.spans is not None:
            return attend_segments(self.spans, query_BHNE, key_BGNE, value_BGNE)
        if self.cache is not None:
            key_BGNE, value_BGNE = self.cache.write(layer, key_BGNE, value_BGNE)
        grouped = query_BHNE.shape[1] != key_BGNE.shape[1]
        return functional.scaled_dot_product_attention(
            query_BHNE, key_BGNE, value_BGNE, attn_mask=self.visible_BNW[:, None], enable_gqa=grouped
        )


def rotation(positions_BN: Tensor, base: float, size: int) -> Rotation:
    """The rotary position embedding of these positions (arXiv:2104.09864, eq. 34), angles in float32.

    Args:
        positions_BN: position ids.
        base: of the frequencies.
        size: head dimension E; element j rotates with j + E/2.
    """
    order = torch.arange(size // 2, device=positions_BN.device, dtype=torch.float32)
    angles_B1NJ = positions_BN[:, None, :, None].float() * base ** (-order / (size // 2))
    cosine, sine = angles_B1NJ.cos(), angles_B1NJ.sin()
    return torch.cat([cosine, cosine], dim=-1), torch.cat([-sine, sine], dim=-1)


def rotate(heads_BHNE: Tensor, turns: Rotation) -> Tensor:
    """Heads rotated by their positions, in their own number format."""
    rotated: Tensor = _Rotated.apply(heads_BHNE, *turns)  # type: ignore[no-untyped-call]
    return rotated


class _Rotated(torch.autograd.Function):
    """A rotation, whose backward pass is the rotation back: autograd would keep and add up four products."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        return (heads * cosine + _halves_swapped(heads) * sine).to(heads.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (cosine, sine) = outer, ctx.saved_tensors
        return (grad * cosine + _halves_swapped(grad * sine)).to(grad.dtype), None, None


def _halves_swapped(states: Tensor) -> Tensor:
    return states.roll(states.shape[-1] // 2, -1)


class RMSNorm(nn.RMSNorm):
    """torch's RMSNorm over the last dimension, in training with a backward pass of its own.

    torch has a fused one on GPUs alone, and only where states and weight have one number format; elsewhere autograd
    keeps every intermediate result.
    """

    def forward(self, x: Tensor) -> Tensor:
        """The normalised states, in their own number format."""
        if not torch.is_grad_enabled() or (x.device.type == "cuda" and x.dtype == self.weight.dtype):
            return super().forward(x)
        normed: Tensor = _Normed.apply(x, self.weight, self.eps)  # type: ignore[no-untyped-call]
        return normed


class _Normed(torch.autograd.Function):
    """x / sqrt(mean(x^2) + eps) * weight, computed in float32 or wider."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        shrink = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight_D, shrink)
        return (wide * shrink).mul_(weight_D).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (x, weight_D, shrink) = outer, ctx.saved_tensors
        normed = x * shrink
        pulled = grad * normed
        weight_grad_D = pulled.flatten(0, -2).sum(0).to(weight_D.dtype)
        along = (pulled @ weight_D.to(pulled.dtype))[..., None].div_(x.shape[-1])
        x_grad = (grad * weight_D).sub_(normed.mul_(along)).mul_(shrink)
        return x_grad.to(x.dtype), weight_grad_D, None


class Attention(nn.Module):
    """Grouped-query attention with rotary positions and a boolean mask.

    Args:
        config: the shape of its block.
        layer: number of its layer in the cache.
        input_size: width of its input when that is not the block's (EAGLE-3 concatenates two states).
    """

    def __init__(self, config: BlockConfig, layer: int = 0, *, input_size: int | None = None) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        width = config.hidden_size if input_size is None else input_size
        self.q_proj = nn.Linear(width, config.num_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(width, config.num_kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(width, config.num_kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * config.head_dim, config.hidden_size, bias=False)

    def forward(self, hidden_BND: Tensor, attention: AttentionContext) -> Tensor:
        """The attention output, [B, N, D]."""
        turns = attention.rotation(self.config.rope_base, self.config.head_dim)
        query, key = (rotate(self._heads(layer(hidden_BND)), turns) for layer in (self.q_proj, self.k_proj))
        mixed_BHNE = attention.attend(self.layer, query, key, self._heads(self.v_proj(hidden_BND)))
        mixed_BND: Tensor = self.o_proj(mixed_BHNE.transpose(1, 2).flatten(2))
        return mixed_BND

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.view(*projected.shape[:2], -1, self.config.head_dim).transpose(1, 2)


class GatedMLP(nn.Module):
    """down(SiLU(gate(x)) * up(x)) (SwiGLU, arXiv:2002.05202).

    Args:
        width: width of the input.
        intermediate_size: width of the gated layer.
        output_size: width of the output when that is not `width`.
    """

    def __init__(self, width: int, intermediate_size: int, *, output_size: int | None = None) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, intermediate_size, bias=False)
        self.up_proj = nn.Linear(width, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, width if output_size is None else output_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """The update of states [..., D]: [..., D], or [..., output_size] when that is given."""
        added: Tensor = self.down_proj(functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return added


class ResidualLayer(nn.Module):
    """A layer whose attention and MLP add to a residual stream."""

    self_attn: Attention
    mlp: GatedMLP

    @torch.no_grad()
    def zero_output(self) -> None:
        """Initialise the layer to add nothing: the residual stream passes unchanged, and gradients still flow."""
        self.self_attn.o_proj.weight.zero_()
        self.mlp.down_proj.weight.zero_()


class DecoderBlock(ResidualLayer):
    """A Llama layer: normalisation, attention and the MLP on a residual stream."""

    def __init__(self, config: BlockConfig, layer: int = 0) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)

    def forward(self, hidden_BND: Tensor, attention: AttentionContext) -> Tensor:
        """The residual stream after the block, [B, N, D]."""
        hidden_BND = hidden_BND + self.self_attn(self.input_layernorm(hidden_BND), attention)
        passed_BND: Tensor = hidden_BND + self.mlp(self.post_attention_layernorm(hidden_BND))
        return passed_BND
