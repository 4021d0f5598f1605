"""The steps of training in the plainest form: one softmax over all keys there are, under a written-out mask; FSPAD's
changes at one index."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

import torch
from draftsmith.modules import Eagle, Features
from draftsmith.modules.parts.attention import rotate, rotation
from draftsmith.modules.parts.decoder_block import AttentionContext
from torch import Tensor


def plain_steps(features: Features, window: int | None = None) -> Iterator[AttentionContext]:
    """The attentions of successive steps: T x (T J) scores, step 0 causal, all later steps on the diagonal alone. The
    query of step j is j places ahead of its index, and its window with it."""
    held: dict[int, list[tuple[Tensor, Tensor]]] = {}
    order_L = torch.arange(features.tokens_BL.shape[1])
    for step in count():
        near_LL = order_L[:, None] + step - order_L < (window or len(order_L) + step)
        yield PlainSight(positions_BN=features.positions_BL + step, visible_BNW=features.visible() & near_LL, held=held)


@dataclass(frozen=True, kw_only=True)
class PlainSight(AttentionContext):
    held: dict[int, list[tuple[Tensor, Tensor]]]  # Keys and values by layer

    def attend(self, layer: int, query_BHNE: Tensor, key_BGNE: Tensor, value_BGNE: Tensor) -> Tensor:
        groups, held = query_BHNE.shape[1] // key_BGNE.shape[1], self.held.setdefault(layer, [])
        held.append((key_BGNE.repeat_interleave(groups, 1), value_BGNE.repeat_interleave(groups, 1)))
        keys, values = (torch.cat(parts, 2) for parts in zip(*held, strict=True))
        diagonal = torch.eye(query_BHNE.shape[2], dtype=torch.bool).expand_as(self.visible_BNW)
        mask = torch.cat([self.visible_BNW, *[diagonal] * (len(held) - 1)], dim=2)[:, None]
        scores = query_BHNE @ keys.mT / query_BHNE.shape[-1] ** 0.5
        return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ values


def harmonised(drafter: Eagle, final_LD: Tensor, embedded_LD: Tensor, passes: int) -> list[Tensor]:
    """HASS's passes over one text (arXiv:2408.15766, section 3.2): the states [L, D] of each pass.

    Stream 0 are the target's states, stream k those of pass k - 1 shifted right by one. A query of pass k reads the key
    at distance d from stream k - d, from stream 0 where d is larger.
    """
    block, config, length = drafter.layers[0], drafter.block, len(final_LD)
    attention, positions, streams, outputs = block.self_attn, torch.arange(length)[None], [final_LD], []
    distance = torch.arange(length)[:, None] - torch.arange(length)
    for k in range(passes):
        inputs = [drafter.fc(torch.cat([embedded_LD, stream], dim=-1)) for stream in streams]
        heads = [[layer(part).view(1, length, -1, config.head_dim).transpose(1, 2) for part in inputs]
                 for layer in (attention.q_proj, attention.k_proj, attention.v_proj)]
        turns = rotation(positions, config.rope_base, config.head_dim)
        query = rotate(heads[0][k], turns)
        group = config.num_heads // config.num_kv_heads
        keys = [rotate(key, turns).repeat_interleave(group, 1) for key in heads[1]]
        source = (k - distance).clamp(min=0)
        scores = sum((query @ key.mT) * (source == number) for number, key in enumerate(keys)) / config.head_dim**0.5
        shares = scores.masked_fill(distance < 0, -torch.inf).softmax(-1)
        mixed = sum((shares * (source == number)) @ value.repeat_interleave(group, 1)
                    for number, value in enumerate(heads[2]))
        hidden = inputs[k] + attention.o_proj(mixed.transpose(1, 2).flatten(2))[0]
        outputs.append(hidden + block.mlp(block.post_attention_layernorm(hidden)))
        streams.append(torch.cat([final_LD[:1], outputs[-1][:-1]]).detach())
    return outputs


def fspad(own: dict[str, Tensor], embedded_D: Tensor, read_D: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """(logit half, fed half) of an index that attends to itself alone, so that attention gives back its value
    (arXiv:2408.15562)."""
    def normed(state: Tensor, weight: Tensor) -> Tensor:
        return weight * state / (state.square().mean() + 1e-6).sqrt()

    def gated(gate: Tensor, up: Tensor) -> Tensor:
        return gate / (1 + (-gate).exp()) * up

    state = own["fc.weight"] @ torch.cat([embedded_D, read_D]) + own["fc.bias"]
    up = own["sampling.up_proj.weight"] @ normed(state, own["sampling.norm.weight"])
    state = state + own["sampling.down_proj.weight"] @ gated(own["sampling.gate_proj.weight"] @ embedded_D, up)
    layer = {name.removeprefix("layers.0."): weight for name, weight in own.items()}
    value = (layer["self_attn.v_proj.weight"] @ state).view(-1, 8).repeat_interleave(group, 0).flatten()
    state = state + layer["self_attn.o_proj.weight"] @ value
    read = normed(state, layer["post_attention_layernorm.weight"])
    added = gated(layer["mlp.gate_proj.weight"] @ read, layer["mlp.up_proj.weight"] @ read)
    first, second = (layer["mlp.down_proj.weight"] @ added).view(2, -1)
    return state + first, state + second
