"""Decoder blocks that a drafter trains: normalisation, rotary embedding, grouped-query attention and a gated MLP.

They are Llama's, with Llama's parameter names, so that official checkpoints map one to one. Every pass has an explicit
boolean mask; training rows, chunks of a prompt and tree nodes differ in their masks alone (`block_cache.py`). Training
on a CPU uses the segments of the rows in place of the mask (`attention.py`).

Shapes: B rows, N tokens of a pass, W keys they may see, D hidden size, H heads, G key-value heads, E head dimension."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ..config_checks import CheckedSettings, Parts, Positive, Size
from ..errors import UserError
from ..features import Features
from ..files.json_records import MistypedError, kinds_of, typed_fields
from ..target.attention.segment_attention import (
    AttentionForm,
    Segments,
    Sight,
    attend_inside,
    narrowed,
    visible_text,
)
from ..target.attention.tree_attention import attend_apart, attending
from ..target.devices.compiled_layers import Compiler, Form
from ..target.kv_cache import RowCache
from ..target.model import Target
from .attention import SCALINGS, Rotation, attend_segments, rotate, rotation

OFFICIAL_ROPE_BASE = 10_000.0
"""Base of the rotary embedding in the official Hydra, EAGLE-1 and Kangaroo code, whatever the target's base."""


@dataclass(frozen=True, kw_only=True)
class BlockConfig(CheckedSettings):
    """The shape of a decoder block."""

    hidden_size: Size
    """Width D of the residual stream."""
    intermediate_size: Size
    """Width of the gated MLP."""
    num_heads: Parts
    """Query heads."""
    num_kv_heads: Parts
    """Key-value heads; a divisor of `num_heads`."""
    head_dim: Size
    """Width E of a head; even, since the rotary embedding rotates pairs."""
    norm_eps: Positive = 1e-6
    """Added to the mean square inside RMSNorm."""
    rope_base: Positive = OFFICIAL_ROPE_BASE
    """Base of the rotary embedding's frequencies."""
    rope_scaling: dict[str, Any] | None = None
    """Scaling of these frequencies as transformers writes it, see `carried_scaling`; None for none."""
    qk_norm: bool = False
    """Whether every head's query and key have an RMSNorm before the rotation, as in Qwen3."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_heads % self.num_kv_heads:
            raise UserError(f"num_kv_heads must divide num_heads ({self.num_heads}), got {self.num_kv_heads}")
        if self.head_dim % 2:
            raise UserError(f"head_dim must be even for the rotary embedding, got {self.head_dim}")
        if self.rope_scaling is not None and self.rope_scaling.get("rope_type") not in SCALINGS:
            raise UserError(f"rope_type of rope_scaling must be one of {', '.join(SCALINGS)}, got "
                            f"{self.rope_scaling.get('rope_type')!r}")

    @classmethod
    def like(cls, target: Target, *, rope_base: float = OFFICIAL_ROPE_BASE) -> "BlockConfig":
        """The shape of the target's own layers; Llama's values where its configuration has none. The MLP is dense: next
        to a mixture of experts it is as wide as those that a token passes. Latent attention becomes grouped attention
        with heads of 128 numbers, eight of them with keys."""
        given: dict[str, Any] = target.config.to_dict()
        width, heads = target.hidden_size, int(target.config.num_attention_heads)
        shared, head_dim = int(given.get("num_key_value_heads") or heads), int(given.get("head_dim") or width // heads)
        if given.get("kv_lora_rank"):
            heads, head_dim = (width // 128, 128) if width % 128 == 0 else (1, width)
            shared = math.gcd(heads, 8)
        return cls(hidden_size=width, intermediate_size=_active_width(target.config) or 4 * width, num_heads=heads,
                   num_kv_heads=shared, head_dim=head_dim, norm_eps=float(given.get("rms_norm_eps") or cls.norm_eps),
                   rope_base=rope_base)

    @classmethod
    def from_dict(cls, description: dict[str, Any]) -> "BlockConfig":
        """The inverse of `dataclasses.asdict`. Raises UserError if a field is missing, unknown or of the wrong kind."""
        try:
            # A description that says nothing about scaling or norms is that of a block without them.
            return cls(**typed_fields({"rope_scaling": None, "qk_norm": False, **description}, kinds_of(cls)))
        except MistypedError as error:
            raise UserError(f"the description of a decoder block is damaged: {error}; copy or train the artifact "
                            "again") from error


def _active_width(config: Any) -> int:
    """Numbers inside the MLPs of a layer that a token passes, by a text config; 0 where it names none."""
    def stated(*names: str) -> int:
        """The first of these fields that is a number, each under the name that some architectures have for it."""
        return next((value for name in names if isinstance(value := getattr(config, name, None), int)), 0)

    one = stated("moe_intermediate_size", "intermediate_size")
    chosen = stated("num_experts_per_tok", "moe_topk", "top_k_experts")
    if not (chosen and stated("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")):
        return stated("intermediate_size")
    shared = stated("shared_expert_intermediate_size", "shared_intermediate_size")
    return chosen * one + (shared or one * stated("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"))


@dataclass(frozen=True, kw_only=True)
class AttentionContext:
    """Positions, visible keys and cache of the tokens of one pass."""

    positions_BN: Tensor  # Position id of each token, int64
    visible_BNW: Sight
    """True where a token sees a key. Every token must see at least one, such as itself. For training rows on a CPU, and
    for long ones elsewhere, the segments that see themselves causally."""
    cache: RowCache | None = None  # The cache of keys and values; None when the tokens see each other alone
    key_positions: Callable[[], Tensor] | None = field(default=None, compare=False)
    """Position ids of the keys [B, W], where they are known, for layers of transformers with a window."""
    window: int | None = None
    """Newest tokens of the text that a token sees, itself included, which `visible_BNW` holds too; None for all."""
    tables: dict[str, Rotation] = field(default_factory=dict, compare=False)
    """Rotations of the positions by kind, computed once for queries, keys and all layers."""

    @classmethod
    def training(cls, features: Features, window: int | None = None) -> "AttentionContext":
        """The context of training rows: each token of a packed row sees its own segment up to itself, or the newest
        tokens of it. They are counted by their order: position ids may have a gap (`train.positions.offset`)."""
        # On a GPU one launch for each segment, and the wait for their borders, cost more than a mask.
        on_cpu = features.tokens_BL.device.type == "cpu"
        visible = Segments.of(features) if on_cpu else visible_text(features)
        return cls(positions_BN=features.positions_BL, visible_BNW=narrowed(visible, window), window=window)

    def rotation(self, config: BlockConfig) -> Rotation:
        """Cosines and signed sines by which the heads of such a block rotate at these positions."""
        kind = str((config.rope_base, config.head_dim, config.rope_scaling))
        if kind not in self.tables:
            self.tables[kind] = rotation(self.positions_BN, config.rope_base, config.head_dim, config.rope_scaling)
        return self.tables[kind]

    def attend(self, layer: int, query_BHNE: Tensor, key_BGNE: Tensor, value_BGNE: Tensor) -> Tensor:
        """Attention output of a layer's heads, [B, H, N, E]; the new keys and values are added to the cache."""
        if self.cache is not None:
            key_BGNE, value_BGNE = self.cache.write(layer, key_BGNE, value_BGNE)
        if isinstance(self.visible_BNW, Segments):
            attend = attend_segments if query_BHNE.device.type == "cpu" else attend_inside
            return attend(query_BHNE, key_BGNE, value_BGNE, self.visible_BNW)
        grouped = query_BHNE.shape[1] != key_BGNE.shape[1]
        return functional.scaled_dot_product_attention(query_BHNE, key_BGNE, value_BGNE,
                                                       attn_mask=self.visible_BNW[:, None], enable_gqa=grouped)


class RMSNorm(nn.RMSNorm):
    """torch's RMSNorm over the last dimension, in training with a backward pass of its own. torch has a fused one on
    GPUs alone, where states and weight have one number format; elsewhere autograd keeps every intermediate result."""

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
        normed: Tensor = (wide * shrink).mul_(weight_D).to(x.dtype)
        return normed

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
    """Grouped-query attention with rotary positions and a boolean mask: layer number `layer` in the cache, whose input
    is `input_size` wide where that is not the block's width (EAGLE-3 concatenates two states)."""

    def __init__(self, config: BlockConfig, layer: int = 0, *, input_size: int | None = None) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        width = config.hidden_size if input_size is None else input_size
        self.q_proj = nn.Linear(width, config.num_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(width, config.num_kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(width, config.num_kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * config.head_dim, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(config.head_dim, eps=config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, eps=config.norm_eps) if config.qk_norm else None

    def forward(self, hidden_BND: Tensor, attention: AttentionContext) -> Tensor:
        """The attention output, [B, N, D]."""
        turns = attention.rotation(self.config)
        # Each is rotated as it is made, so that what came before the rotation is freed: a long prompt feels it. It also
        # feels the pair of `keys`, which would keep the values in memory once the cache has them.
        query = rotate(self._heads(hidden_BND, self.q_proj, self.q_norm), turns)
        key = rotate(self._heads(hidden_BND, self.k_proj, self.k_norm), turns)
        mixed_BHNE = attention.attend(self.layer, query, key, self._heads(hidden_BND, self.v_proj, None))
        mixed_BND: Tensor = self.o_proj(mixed_BHNE.transpose(1, 2).flatten(2))
        return mixed_BND

    def keys(self, hidden_BND: Tensor, attention: AttentionContext) -> tuple[Tensor, Tensor]:
        """Keys and values of these states at the positions of the context, [B, G, N, E] each."""
        key = rotate(self._heads(hidden_BND, self.k_proj, self.k_norm), attention.rotation(self.config))
        return key, self._heads(hidden_BND, self.v_proj, None)

    def _heads(self, hidden_BND: Tensor, layer: nn.Module, norm: nn.Module | None) -> Tensor:
        """A projection of the states by heads, [B, heads, N, E]."""
        heads_BHNE = torch.unflatten(layer(hidden_BND), -1, (-1, self.config.head_dim)).transpose(1, 2)
        return heads_BHNE if norm is None else norm(heads_BHNE)


class GatedMLP(nn.Module):
    """down(SiLU(gate(x)) * up(x)) (SwiGLU, arXiv:2002.05202), from `width` to `output_size`, by default `width`."""

    def __init__(self, width: int, intermediate_size: int, *, output_size: int | None = None) -> None:
        super().__init__()
        self.recomputed = False
        """Whether training computes the gated states again in the backward pass, in place of keeping them."""
        self.gate_proj = nn.Linear(width, intermediate_size, bias=False)
        self.up_proj = nn.Linear(width, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, width if output_size is None else output_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """The update of states [..., D]: [..., D], or [..., output_size] when that is given."""
        if self.recomputed and self.training and torch.is_grad_enabled():
            # Nothing in it is random.
            kept: Tensor = checkpoint(self._gated, hidden, use_reentrant=False, preserve_rng_state=False)
            return kept
        return self._gated(hidden)

    def _gated(self, hidden: Tensor) -> Tensor:
        added: Tensor = self.down_proj(functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return added


class ResidualLayer(nn.Module):
    """A layer whose attention and MLP add to a residual stream, with RMSNorms of these names before the attention; the
    MLP's output is `states` times as wide as the stream."""

    input_layernorm: RMSNorm

    def __init__(self, config: BlockConfig, layer: int = 0, *, norms: Sequence[str] = (), input_size: int | None = None,
                 states: int = 1) -> None:
        super().__init__()
        width = config.hidden_size
        for name in norms:
            self.add_module(name, RMSNorm(width, eps=config.norm_eps))
        self.self_attn = Attention(config, layer, input_size=input_size)
        self.post_attention_layernorm = RMSNorm(width, eps=config.norm_eps)
        self.mlp = GatedMLP(width, config.intermediate_size, output_size=states * width)

    @torch.no_grad()
    def zero_output(self) -> None:
        """Initialise the layer to add nothing: the residual stream passes unchanged, and gradients still flow."""
        self.self_attn.o_proj.weight.zero_()
        self.mlp.down_proj.weight.zero_()


class DecoderBlock(ResidualLayer):
    """A Llama layer, with `qk_norm` a Qwen3 one: normalisation, attention and the MLP on a residual stream."""

    def __init__(self, config: BlockConfig, layer: int = 0) -> None:
        super().__init__(config, layer, norms=("input_layernorm",))

    def forward(self, hidden_BND: Tensor, attention: AttentionContext) -> Tensor:
        """The residual stream after the block, [B, N, D]."""
        hidden_BND = hidden_BND + self.self_attn(self.input_layernorm(hidden_BND), attention)
        passed_BND: Tensor = hidden_BND + self.mlp(self.post_attention_layernorm(hidden_BND))
        return passed_BND


# Compiled forms -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ApartContext(AttentionContext):
    """The context of a compiled block: the rotation of its positions, and attention that its pass has set."""

    turns: Rotation  # Cosines and signed sines of the positions

    def rotation(self, config: BlockConfig) -> Rotation:
        """The rotation that was computed outside."""
        return self.turns

    def attend(self, layer: int, query_BHNE: Tensor, key_BGNE: Tensor, value_BGNE: Tensor) -> Tensor:
        """Attention output by the operation of compiled layers, [B, H, N, E]."""
        mixed_BNHE: Tensor = attend_apart(query_BHNE, key_BGNE, value_BGNE)
        return mixed_BNHE.transpose(1, 2)


def of_block(_compiler: Compiler, form: Form, layer: nn.Module) -> Form:
    """The forward of a layer by its compiled form. A layer with attention gets its context as the last argument."""
    attention = next((part for part in layer.modules() if isinstance(part, Attention)), None)
    return partial(form, layer) if attention is None else partial(_in_context, form, layer, attention)


def _in_context(form: Form, layer: nn.Module, own: Attention, *given: Any) -> Any:
    *states, context = given

    def attend(query: Tensor, key: Tensor, value: Tensor, _form: AttentionForm) -> Tensor:
        mixed_BHNE: Tensor = context.attend(own.layer, query, key, value)
        return mixed_BHNE.transpose(1, 2).contiguous()

    apart = ApartContext(positions_BN=context.positions_BN, visible_BNW=context.visible_BNW,
                         turns=context.rotation(own.config))
    with attending(attend):
        return form(layer, *states, apart)
