"""Kangaroo in the plainest form: one query at a time, the whole text again for every token, no cache, one sequence."""

import math

import torch
from draftsmith.modules import Kangaroo, Target
from references.decoder_block import norm, turn
from torch import Tensor


def adapter(drafter: Kangaroo, exits_LD: Tensor) -> Tensor:
    """The adapter's states [L, D] from the first layers' outputs along one text."""
    layer, shape, outputs = drafter.layers[0], (-1, drafter.block.head_dim), []
    attention, config = layer.self_attn, drafter.block
    normed, group = [norm(exit_D, layer.input_layernorm.weight, config.norm_eps) for exit_D in exits_LD], \
        config.num_heads // config.num_kv_heads
    for place, exit_D in enumerate(exits_LD):
        mixed = []
        for head, query in enumerate(attention.q_proj(normed[place]).view(shape)):
            query = turn(query, place, config.rope_base)
            keys = [turn(attention.k_proj(state).view(shape)[head // group], seen, config.rope_base)
                    for seen, state in enumerate(normed[: place + 1])]
            shares = torch.stack([query @ key / math.sqrt(config.head_dim) for key in keys]).softmax(0)
            values = [attention.v_proj(state).view(shape)[head // group] for state in normed[: place + 1]]
            mixed.append(sum(share * value for share, value in zip(shares, values, strict=True)))
        outputs.append(norm(exit_D + attention.o_proj(torch.cat(mixed)), drafter.norm.weight, config.norm_eps))
    return torch.stack(outputs)


def draft_logits(drafter: Kangaroo, target: Target, text: list[int]) -> Tensor:
    """Draft logits [Q] of the token after a text, by the model as transformers made it."""
    with target.native() as model:
        exits_LD = model(torch.tensor([text]), output_hidden_states=True).hidden_states[drafter.exit_layer][0]
    return drafter.project(adapter(drafter, exits_LD)[-1], 0)


def chain(drafter: Kangaroo, target: Target, text: list[int]) -> list[int]:
    """The tokens drafted after a text: at most gamma, up to the first whose distribution peaks below eta."""
    drafted: list[int] = []
    while len(drafted) < drafter.config.gamma:
        chances = draft_logits(drafter, target, [*text, *drafted]).softmax(-1)
        drafted.append(int(chances.argmax()))
        if float(chances.max()) < drafter.config.eta:
            break
    return drafted
