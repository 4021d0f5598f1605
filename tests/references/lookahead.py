"""Plain twin of virtual nodes: the model runs once for every position and copy, over the text and its virtual nodes."""

from collections.abc import Sequence

import torch
from draftsmith.modules import HiddenTransfer, PromptTokens, Target
from torch import Tensor, nn


@torch.no_grad()
def states_after(drafter: PromptTokens | HiddenTransfer, target: Target, text: Sequence[int]) -> Tensor:
    """Final states [K, D] of the steps after the last token of a text, by transformers' own model."""
    copies = []
    for copy in range(drafter.copies):
        slots = range(copy, drafter.virtual_nodes, drafter.copies)
        copies.append(_one_copy(drafter, target, list(text), list(slots)))
    return torch.stack(copies).mean(0)


def _one_copy(drafter: PromptTokens | HiddenTransfer, target: Target, text: list[int], slots: list[int]) -> Tensor:
    if isinstance(drafter, PromptTokens):
        ahead = drafter.prompts[slots].to(target.dtype)
    else:
        ahead = torch.zeros(len(slots), target.hidden_size, dtype=target.dtype)
    embedded = torch.cat([target.embed(torch.tensor(text)), ahead])[None]
    with target.native() as model:
        decoder = model.get_decoder()

        def enter(_layer: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            hidden = args[0].clone()
            assert isinstance(drafter, HiddenTransfer)
            for slot in slots:
                hidden[0, len(text) + slot] = drafter.maps[slot](hidden[0, len(text) - 1])
            return (hidden, *args[1:])

        handles = ([decoder.layers[drafter.layer].register_forward_pre_hook(enter)]
                   if isinstance(drafter, HiddenTransfer) else [])
        final = decoder(inputs_embeds=embedded, use_cache=False).last_hidden_state
        for handle in handles:
            handle.remove()
    found: Tensor = final[0, len(text) :]
    return found
