"""A long short-term memory whose state is known behind every position, so that a draft can go on from any of them.

torch's own gives the state behind the last position alone, and cannot begin anew inside a row; its arithmetic is the
same, gate by gate (arXiv:1402.1128, without peepholes).

Shapes: B rows, N positions, Z width of what is read, D hidden size, G gates (4 D: input, forget, cell, output), M
layers; a leading `...` stands for any rows, side by side.
"""

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

Memory = tuple[Tensor, Tensor]
"""What each layer says and what it keeps, [M, ..., D] each."""


class LSTMLayer(nn.Module):
    """One layer. Its weights are torch's: `input.{weight,bias}` is `{weight,bias}_ih`, `hidden.*` is `*_hh`."""

    def __init__(self, input_size: int, size: int) -> None:
        super().__init__()
        self.input = nn.Linear(input_size, 4 * size)
        self.hidden = nn.Linear(size, 4 * size)

    def forward(self, read_BNZ: Tensor, said_BD: Tensor, kept_BD: Tensor, going_BN: Tensor) -> Memory:
        """What it says and keeps behind every position, [B, N, D] each.

        Args:
            read_BNZ: what it reads.
            said_BD: what it said before the first position.
            kept_BD: what it kept there.
            going_BN: False where a position begins anew, with nothing before it.
        """
        gates_BNG = self.input(read_BNZ) + self.hidden.bias
        weight_GD = self.hidden.weight
        given = gates_BNG.to(weight_GD.dtype), weight_GD, said_BD, kept_BD, going_BN.to(weight_GD.dtype)[..., None]
        # In the weight's own precision: rounding would add up from position to position.
        with torch.autocast(read_BNZ.device.type, enabled=False):
            if torch.is_grad_enabled():
                return cast(Memory, _Recurrence.apply(*given))  # type: ignore[no-untyped-call]
            said, kept = zip(*((said_BD, kept_BD) for said_BD, kept_BD, _ in _walk(*given)), strict=True)
            return torch.stack(said, dim=1), torch.stack(kept, dim=1)

    def step(self, read: Tensor, said: Tensor, kept: Tensor) -> Memory:
        """The same behind one more position of each of any rows, [..., D] each."""
        return _passed(self.input(read) + self.hidden(said), kept)[:2]

    @torch.no_grad()
    def silence(self) -> None:
        """Let it say nothing at the start: nothing is offered to be kept, so that gradients reach what would be."""
        for weight in self.parameters():
            weight.chunk(4)[2].zero_()


class LSTM(nn.Module):
    """Layers above each other, each reading what the one below says.

    Args:
        input_size: width of what the first one reads.
        size: width of what they say.
        num_layers: how many.
    """

    def __init__(self, input_size: int, size: int, num_layers: int) -> None:
        super().__init__()
        self.size = size
        self.layers = nn.ModuleList(LSTMLayer(size if layer else input_size, size) for layer in range(num_layers))

    def blank(self, rows: int) -> Memory:
        """What is known before the first position, [M, B, D] each."""
        weight = next(self.parameters())
        nothing = weight.new_zeros(len(self.layers), rows, self.size)
        return nothing, nothing

    def forward(self, read_BNZ: Tensor, before: Memory, going_BN: Tensor) -> Memory:
        """What the layers say and keep behind every position, [M, B, N, D] each."""
        said, kept = [], []
        for layer, said_BD, kept_BD in zip(self._each(), *before, strict=True):
            said_BND, kept_BND = layer(read_BNZ, said_BD, kept_BD, going_BN)
            said.append(said_BND)
            kept.append(kept_BND)
            read_BNZ = said_BND
        return torch.stack(said), torch.stack(kept)

    def step(self, read: Tensor, before: Memory) -> Memory:
        """The same behind one more position of each of any rows, [M, ..., D] each."""
        said, kept = [], []
        for layer, said_before, kept_before in zip(self._each(), *before, strict=True):
            read, held = layer.step(read, said_before, kept_before)
            said.append(read)
            kept.append(held)
        return torch.stack(said), torch.stack(kept)

    def silence(self) -> None:
        """Let the last layer say nothing at the start."""
        self._each()[-1].silence()

    def _each(self) -> list[LSTMLayer]:
        return [layer for layer in self.layers if isinstance(layer, LSTMLayer)]


def _passed(gates: Tensor, kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What is said, what is kept and the opened gates behind a position, of its gates' sums and what was kept."""
    taken, held, offered, shown = gates.chunk(4, dim=-1)
    taken, held, offered, shown = taken.sigmoid(), held.sigmoid(), offered.tanh(), shown.sigmoid()
    kept = held * kept + taken * offered
    return shown * kept.tanh(), kept, torch.cat([taken, held, offered, shown], dim=-1)


def _walk(
    gates_BNG: Tensor, weight_GD: Tensor, said_BD: Tensor, kept_BD: Tensor, going_BN1: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """What `_passed` gives at position after position."""
    for gates_BG, going_B1 in zip(gates_BNG.unbind(1), going_BN1.unbind(1), strict=True):
        sums_BG = torch.addmm(gates_BG, said_BD * going_B1, weight_GD.mT)
        said_BD, kept_BD, opened_BG = _passed(sums_BG, kept_BD * going_B1)
        yield said_BD, kept_BD, opened_BG


class _Recurrence(torch.autograd.Function):
    """Position after position; the gradient of the weight is one product at the end, not one a position."""

    @staticmethod
    def forward(
        ctx: Any, gates_BNG: Tensor, weight_GD: Tensor, said_BD: Tensor, kept_BD: Tensor, going_BN1: Tensor
    ) -> Memory:
        walked = zip(*_walk(gates_BNG, weight_GD, said_BD, kept_BD, going_BN1), strict=True)
        said_BND, kept_BND, opened_BNG = (torch.stack(parts, dim=1) for parts in walked)
        ctx.save_for_backward(said_BD, kept_BD, said_BND, kept_BND, opened_BNG, weight_GD, going_BN1)
        return said_BND, kept_BND

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, said_BND: Tensor, kept_BND: Tensor) -> tuple[Tensor | None, ...]:
        first_said_BD, first_kept_BD, told_BND, held_BND, opened_BNG, weight_GD, going_BN1 = ctx.saved_tensors
        before_BND = torch.cat([first_kept_BD[:, None], held_BND[:, :-1]], dim=1) * going_BN1
        said_BD, kept_BD, gates = torch.zeros_like(first_said_BD), torch.zeros_like(first_kept_BD), []
        for place in reversed(range(said_BND.shape[1])):
            gates_BG, kept_BD = _back(said_BND[:, place] + said_BD, kept_BND[:, place] + kept_BD,
                                      opened_BNG[:, place], before_BND[:, place], held_BND[:, place])
            gates.append(gates_BG)
            said_BD, kept_BD = (gates_BG @ weight_GD) * going_BN1[:, place], kept_BD * going_BN1[:, place]
        gates_BNG = torch.stack(gates[::-1], dim=1)
        read_BND = torch.cat([first_said_BD[:, None], told_BND[:, :-1]], dim=1) * going_BN1
        return gates_BNG, gates_BNG.flatten(0, 1).mT @ read_BND.flatten(0, 1), said_BD, kept_BD, None


def _back(said_BD: Tensor, kept_BD: Tensor, opened_BG: Tensor, before_BD: Tensor, after_BD: Tensor) -> Memory:
    """Gradients of the gates' sums [B, G] and of what was kept before, of those of what is said and kept."""
    taken, held, offered, shown = opened_BG.chunk(4, dim=-1)
    bounded = after_BD.tanh()
    kept_BD = kept_BD + said_BD * shown * (1 - bounded**2)
    gates = (kept_BD * offered * taken * (1 - taken), kept_BD * before_BD * held * (1 - held),
             kept_BD * taken * (1 - offered**2), said_BD * bounded * shown * (1 - shown))
    return torch.cat(gates, dim=-1), kept_BD * held
