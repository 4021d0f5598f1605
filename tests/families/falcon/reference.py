"""Falcon's blocks in the plainest form: torch's own LSTM over everything read so far, again for every block, and one
softmax over all of its states."""

import torch
from draftsmith.modules import Falcon
from draftsmith.modules.families.falcon.recurrence import LSTM
from draftsmith.modules.parts.decoder_block import AttentionContext
from torch import Tensor, nn


def torch_lstm(own: LSTM) -> nn.LSTM:
    """The same weights under the names of the official code."""
    theirs = nn.LSTM(own.layers[0].input.in_features, own.size, len(own.layers), batch_first=True)
    names = {"ih": "input", "hh": "hidden"}
    state = own.state_dict()
    theirs.to(state["layers.0.input.weight"].dtype).load_state_dict({
        f"{kind}_{side}_l{layer}": state[f"layers.{layer}.{name}.{kind}"]
        for kind in ("weight", "bias") for side, name in names.items() for layer in range(len(own.layers))})
    return theirs


def told(drafter: Falcon, final_LD: Tensor, embedded_LD: Tensor, end: int, blocks: int) -> list[Tensor]:
    """The estimates after index `end` of a text alone; index p reads the embedding [p] and state [p]."""
    size, width, network, found = drafter.config.block_size, final_LD.shape[1], torch_lstm(drafter.lstm), list[Tensor]()
    read = [torch.cat([embedded_LD[place], final_LD[place]]) for place in range(end + 1)]
    for last in range(end, end + blocks * size, size):
        states = network(torch.stack(read)[None])[0][0]
        states = states + torch.stack(read)[:, width:]
        places = torch.arange(last - size + 1, last + 1)
        asked = torch.where(places[:, None] >= 0, states[places.clamp(min=0)], 0)
        sees = (torch.arange(last + 1 + size) <= last).expand(1, last + 1 + size, -1)
        attention = AttentionContext(positions_BN=torch.cat([torch.arange(last + 1), places])[None], visible_BNW=sees)
        found += drafter.layers[0](torch.cat([states, asked])[None], attention)[0, last + 1 :]
        read += [torch.cat([embedded_LD[last + 1 + place], found[place - size]]) for place in range(size)]
    return found
