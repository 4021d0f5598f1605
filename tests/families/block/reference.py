"""One block of a drafter of blocks in the plainest form: after one position of one text, one softmax over all keys, one
slot at a time."""

import math
from typing import Any

import torch
from draftsmith.modules import BlockDraft
from draftsmith.modules.families.block.corrections import SlotConvolution
from draftsmith.modules.parts.attention import rotate, rotation
from torch import Tensor
from torch.nn import functional


def plain_slots(drafter: BlockDraft, taps: dict[int, Tensor], root: int, end: int, *, whole: bool = False) -> Tensor:
    """States [K, D] of the slots that guess, or of the whole block, after position `end` of a text with these tapped
    states, [L, D] each."""
    config, shape = drafter.config, drafter.block
    joined = torch.cat([taps[layer][: end + 1] for layer in drafter.taps], dim=-1)
    context = functional.rms_norm(joined @ drafter.fc.weight.mT, (joined.shape[-1] // len(drafter.taps),),
                                  drafter.hidden_norm.weight, shape.norm_eps)
    mask = drafter.mask_embedding if config.mask_token_id is None else drafter.embed(torch.tensor(config.mask_token_id))
    hidden = torch.stack([drafter.embed(torch.tensor(root)), *[mask] * (config.block_size - 1)])
    hidden = hidden + context[-1] if config.residual else hidden
    group, length = shape.num_heads // shape.num_kv_heads, len(context)
    turns = rotation(torch.arange(length + len(hidden))[None], shape.rope_base, shape.head_dim, shape.rope_scaling)
    for layer in drafter.layers:
        own, normed = layer.self_attn, layer.input_layernorm(hidden)
        before, normed = normed, convolved(layer.attention_conv, normed, normed, 0)
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
        hidden = hidden + convolved(layer.attention_conv, own.o_proj(torch.stack(slots)), before, 1)
        before = layer.post_attention_layernorm(hidden)
        added = layer.mlp(convolved(layer.mlp_conv, before, before, 0))
        hidden = hidden + convolved(layer.mlp_conv, added, before, 1)
    return drafter.norm(hidden)[0 if whole else config.block_size - config.num_steps :]


def plain_state(drafter: BlockDraft, slot_D: Tensor, before: int) -> Tensor:
    """The state [D] of a slot that the correction `state` changes after this token, in the plainest form."""
    own, eps = drafter.correction, drafter.block.norm_eps
    embedded_D = drafter.output_rows().target.model.get_input_embeddings().weight[before]
    parts = [part / (part.square().mean() + eps).sqrt() * norm.weight
             for part, norm in ((slot_D, own.hidden_norm), (embedded_D, own.embed_norm))]
    gate, up = (layer.weight @ torch.cat(parts) for layer in (own.mlp.gate_proj, own.mlp.up_proj))
    return slot_D + own.mlp.down_proj.weight @ (gate / (1 + (-gate).exp()) * up)


def convolved(conv: SlotConvolution | None, states_SD: Tensor, read_SD: Tensor, side: int) -> Tensor:
    """The states of one block convolved on a side of a sublayer that read `read_SD`, tap by tap and slot by slot."""
    if conv is None:
        return states_SD
    slots = []
    for slot in range(len(states_SD)):
        kernels = (conv.kernel_projection.weight @ read_SD[slot]).view(2, 2, -1)[side]
        parts = [(conv.base_kernel[side, tap] + kernels[tap].repeat_interleave(16)) * states_SD[slot - tap]
                 for tap in range(2) if slot >= tap]
        slots.append(torch.stack(parts).sum(0))
    return torch.stack(slots)


def plain_refiner(own: Any, block_SD: Tensor, before: list[int]) -> Tensor:
    """The bias [V] of XPress for the guess after these tokens of the block, the root first, entry by entry of the sum
    over places; before the first slot's guess stands the root too."""
    place, rank = len(before), own.rank
    parts = []
    for slot, token in enumerate([before[0], *before]):
        read = torch.cat([own.down_h.weight @ block_SD[slot], own.down_g.weight @ block_SD.mean(0),
                          own.w1.weight[token]])
        parts.append(own.in_proj.weight @ read)
    mixed = [float(parts[place][channel]) + sum(float(own.mix["L"][channel, place, slot] * parts[slot][channel])
                                                for slot in range(place + 1)) for channel in range(rank)]
    x = torch.tensor(mixed, dtype=block_SD.dtype)
    inner = functional.silu(own.mlp.gate_proj.weight @ x) * (own.mlp.up_proj.weight @ x)
    return own.w2.weight @ (x + own.mlp.down_proj.weight @ inner)


def plain_gru(own: Any, slot_D: Tensor, before: list[Tensor]) -> Tensor:
    """The bias [V] of Domino for the guess of a slot after the tokens with these embeddings, the root's first, gate by
    gate and component by component."""
    if len(before) == 1:
        return torch.zeros(own.embed_proj[2].out_features, dtype=slot_D.dtype)
    size = own.path_size
    read, kept = (own.prefix_gru[f"weight_{side}_l0"].weight for side in ("ih", "hh"))
    state = [0.0] * size
    for embedded in before:
        held, following = torch.tensor(state, dtype=slot_D.dtype), []
        for place in range(size):
            reset, update, new = ((float(read[place + gate * size] @ embedded), float(kept[place + gate * size] @ held))
                                  for gate in range(3))
            share = 1 / (1 + math.exp(-sum(update)))
            fresh = math.tanh(new[0] + new[1] / (1 + math.exp(-sum(reset))))
            following.append((1 - share) * fresh + share * state[place])
        state = following
    joined = own.embed_proj[0].weight @ torch.cat([slot_D, torch.tensor(state, dtype=slot_D.dtype)])
    return own.embed_proj[2].weight @ (joined / (1 + (-joined).exp()))
