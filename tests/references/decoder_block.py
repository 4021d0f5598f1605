"""A decoder block in the plainest form: one query at a time, one head at a time, a list of keys, no cache."""

import math

import torch
from draftsmith.modules.parts.decoder_block import DecoderBlock
from torch import Tensor


def norm(state_D: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    return weight_D * state_D / torch.sqrt((state_D**2).mean() + eps)


def turn(head_E: Tensor, position: int, base: float) -> Tensor:
    half = len(head_E) // 2
    turned = head_E.clone()
    for j in range(half):
        angle = position * base ** (-j / half)
        turned[j] = head_E[j] * math.cos(angle) - head_E[j + half] * math.sin(angle)
        turned[j + half] = head_E[j + half] * math.cos(angle) + head_E[j] * math.sin(angle)
    return turned


def block(module: DecoderBlock, hidden_ND: Tensor, positions: list[int], seen: list[list[int]]) -> Tensor:
    """The block's outputs [N, D]; token n stands at positions[n] and attends to the tokens seen[n]."""
    config, attention, outputs = module.self_attn.config, module.self_attn, []
    normed = [norm(state, module.input_layernorm.weight, config.norm_eps) for state in hidden_ND]
    shape, group = (-1, config.head_dim), config.num_heads // config.num_kv_heads
    for token, state in enumerate(hidden_ND):
        queries, mixed = attention.q_proj(normed[token]).view(shape), []
        for head in range(config.num_heads):
            query = turn(queries[head], positions[token], config.rope_base)
            keys = [turn(attention.k_proj(normed[n]).view(shape)[head // group], positions[n], config.rope_base)
                    for n in seen[token]]
            share = torch.stack([query @ key / math.sqrt(config.head_dim) for key in keys]).softmax(0)
            values = [attention.v_proj(normed[n]).view(shape)[head // group] for n in seen[token]]
            mixed.append(sum(weight * value for weight, value in zip(share, values, strict=True)))
        state = state + attention.o_proj(torch.cat(mixed))
        outputs.append(state + module.mlp(norm(state, module.post_attention_layernorm.weight, config.norm_eps)))
    return torch.stack(outputs)
