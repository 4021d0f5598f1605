"""One block of a drafter of blocks in the plainest form: after one position of one text, one softmax over all keys, one
slot at a time."""

import torch
from draftsmith.modules import BlockDraft
from draftsmith.modules.drafters.parts.rotary import rotate, rotation
from torch import Tensor
from torch.nn import functional


def plain_slots(drafter: BlockDraft, taps: dict[int, Tensor], root: int, end: int) -> Tensor:
    """States [K, D] of the slots that guess after position `end` of a text with these tapped states, [L, D] each."""
    config, shape = drafter.config, drafter.block
    joined = torch.cat([taps[layer][: end + 1] for layer in drafter.taps], dim=-1)
    context = functional.rms_norm(joined @ drafter.fc.weight.mT, (joined.shape[-1] // len(drafter.taps),),
                                  drafter.hidden_norm.weight, shape.norm_eps)
    mask = drafter.mask_embedding if config.mask_token_id is None else drafter.embed(
        torch.tensor(config.mask_token_id))
    hidden = torch.stack([drafter.embed(torch.tensor(root)), *[mask] * (config.block_size - 1)])
    group, length = shape.num_heads // shape.num_kv_heads, len(context)
    turns = rotation(torch.arange(length + len(hidden))[None], shape.rope_base, shape.head_dim, shape.rope_scaling)
    for layer in drafter.layers:
        own, normed = layer.self_attn, layer.input_layernorm(hidden)
        read = torch.cat([context, normed])
        query, key, value = (part.view(len(part), -1, shape.head_dim).transpose(0, 1)
                             for part in (own.q_proj(normed), own.k_proj(read), own.v_proj(read)))
        key = rotate(own.k_norm(key)[None], turns)[0].repeat_interleave(group, 0)
        query = rotate(own.q_norm(query)[None], tuple(turn[:, :, length:] for turn in turns))[0]
        value, slots = value.repeat_interleave(group, 0), []
        for slot in range(len(hidden)):
            seen = length + (slot + 1 if config.causal else len(hidden))
            shares = (key[:, :seen] @ query[:, slot, :, None] / shape.head_dim**0.5).softmax(1)
            slots.append((shares * value[:, :seen]).sum(1).flatten())
        hidden = hidden + own.o_proj(torch.stack(slots))
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return drafter.norm(hidden)[config.block_size - config.num_steps :]
