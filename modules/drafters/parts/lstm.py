"""A long short-term memory whose state is known after every position, so that a draft can continue from any of them.

torch's own LSTM returns the cell after the last position alone; the arithmetic is the same, gate by gate
(arXiv:1402.1128, without peepholes).

Shapes: B rows, N positions, Z input width, D hidden size, G gates (4 D: input, forget, cell, output), M layers; a
leading `...` stands for any batch dimensions.
"""

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

Memory = tuple[Tensor, Tensor]
"""(output, cell) of each layer, [M, ..., D] each."""


class LSTMLayer(nn.Module):
    """One LSTM layer. Its weights are torch's: `input.{weight,bias}` is `{weight,bias}_ih`, `hidden.*` is `*_hh`."""

    def __init__(self, input_size: int, size: int) -> None:
        super().__init__()
        self.input = nn.Linear(input_size, 4 * size)
        self.hidden = nn.Linear(size, 4 * size)

    def forward(self, read_BNZ: Tensor, output_BD: Tensor, cell_BD: Tensor) -> Memory:
        """(output, cell) after every position, [B, N, D] each.

        Args:
            read_BNZ: the input.
            output_BD: the output before the first position.
            cell_BD: the cell before the first position.
        """
        gates_BNG = self.input(read_BNZ) + self.hidden.bias
        weight_GD = self.hidden.weight
        given = gates_BNG.to(weight_GD.dtype), weight_GD, output_BD, cell_BD
        # In the weight's own precision: rounding would add up from position to position.
        with torch.autocast(read_BNZ.device.type, enabled=False):
            if torch.is_grad_enabled():
                return cast(Memory, _Recurrence.apply(*given))  # type: ignore[no-untyped-call]
            outputs, cells = zip(*((output_BD, cell_BD) for output_BD, cell_BD, _ in _walk(*given)), strict=True)
            return torch.stack(outputs, dim=1), torch.stack(cells, dim=1)

    def step(self, read: Tensor, output: Tensor, cell: Tensor) -> Memory:
        """(output, cell) after one more position, [..., D] each."""
        return _cell_step(self.input(read) + self.hidden(output), cell)[:2]

    @torch.no_grad()
    def zero_output(self) -> None:
        """Initialise the output to zero through the cell's candidate values, which gradients still reach."""
        for weight in self.parameters():
            weight.chunk(4)[2].zero_()


class LSTM(nn.Module):
    """Stacked layers, each reading the output of the one below.

    Args:
        input_size: width of the first layer's input.
        size: width of the outputs.
        num_layers: number of layers.
        dropout: share of the components between two layers that training drops.
    """

    def __init__(self, input_size: int, size: int, num_layers: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.size, self.dropout = size, dropout
        self.layers = nn.ModuleList(LSTMLayer(size if layer else input_size, size) for layer in range(num_layers))

    def zero_memory(self, rows: int) -> Memory:
        """The memory before the first position, [M, B, D] each."""
        weight = next(self.parameters())
        zeros = weight.new_zeros(len(self.layers), rows, self.size)
        return zeros, zeros

    def forward(self, read_BNZ: Tensor, before: Memory) -> Memory:
        """(outputs, cells) of the layers after every position, [M, B, N, D] each."""
        outputs, cells = [], []
        for layer, output_BD, cell_BD in zip(self._each(), *before, strict=True):
            output_BND, cell_BND = layer(read_BNZ, output_BD, cell_BD)
            outputs.append(output_BND)
            cells.append(cell_BND)
            read_BNZ = self._dropped(output_BND)
        return torch.stack(outputs), torch.stack(cells)

    def step(self, read: Tensor, before: Memory) -> Memory:
        """(outputs, cells) of the layers after one more position, [M, ..., D] each."""
        outputs, cells = [], []
        for layer, output, cell in zip(self._each(), *before, strict=True):
            output_after, cell_after = layer.step(read, output, cell)
            outputs.append(output_after)
            cells.append(cell_after)
            read = self._dropped(output_after)
        return torch.stack(outputs), torch.stack(cells)

    def _dropped(self, output: Tensor) -> Tensor:
        """The next layer's input."""
        return functional.dropout(output, self.dropout, self.training) if self.dropout else output

    def zero_output(self) -> None:
        """Initialise the last layer's output to zero."""
        self._each()[-1].zero_output()

    def _each(self) -> list[LSTMLayer]:
        return [layer for layer in self.layers if isinstance(layer, LSTMLayer)]


def _cell_step(gates: Tensor, cell: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(output, cell, activated gates) after a position, of the gates' sums and the cell before it."""
    enter, forget, candidate, emit = gates.chunk(4, dim=-1)
    enter, forget, candidate, emit = enter.sigmoid(), forget.sigmoid(), candidate.tanh(), emit.sigmoid()
    cell = forget * cell + enter * candidate
    return emit * cell.tanh(), cell, torch.cat([enter, forget, candidate, emit], dim=-1)


def _walk(gates_BNG: Tensor, weight_GD: Tensor, output_BD: Tensor, cell_BD: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The result of `_cell_step` at position after position."""
    for gates_BG in gates_BNG.unbind(1):
        sums_BG = torch.addmm(gates_BG, output_BD, weight_GD.mT)
        output_BD, cell_BD, activated_BG = _cell_step(sums_BG, cell_BD)
        yield output_BD, cell_BD, activated_BG


class _Recurrence(torch.autograd.Function):
    """All positions in order; the weight's gradient is one product at the end, in place of one for each position."""

    @staticmethod
    def forward(ctx: Any, gates_BNG: Tensor, weight_GD: Tensor, output_BD: Tensor, cell_BD: Tensor) -> Memory:
        walked = zip(*_walk(gates_BNG, weight_GD, output_BD, cell_BD), strict=True)
        output_BND, cell_BND, activated_BNG = (torch.stack(parts, dim=1) for parts in walked)
        ctx.save_for_backward(output_BD, cell_BD, output_BND, cell_BND, activated_BNG, weight_GD)
        return output_BND, cell_BND

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_output_BND: Tensor, d_cell_BND: Tensor) -> tuple[Tensor | None, ...]:
        first_output_BD, first_cell_BD, output_BND, cell_BND, activated_BNG, weight_GD = ctx.saved_tensors
        before_BND = torch.cat([first_cell_BD[:, None], cell_BND[:, :-1]], dim=1)
        d_output_BD, d_cell_BD, gates = torch.zeros_like(first_output_BD), torch.zeros_like(first_cell_BD), []
        for place in reversed(range(d_output_BND.shape[1])):
            gates_BG, d_cell_BD = _back(d_output_BND[:, place] + d_output_BD, d_cell_BND[:, place] + d_cell_BD,
                                        activated_BNG[:, place], before_BND[:, place], cell_BND[:, place])
            gates.append(gates_BG)
            d_output_BD = gates_BG @ weight_GD
        gates_BNG = torch.stack(gates[::-1], dim=1)
        read_BND = torch.cat([first_output_BD[:, None], output_BND[:, :-1]], dim=1)
        return gates_BNG, gates_BNG.flatten(0, 1).mT @ read_BND.flatten(0, 1), d_output_BD, d_cell_BD


def _back(d_output_BD: Tensor, d_cell_BD: Tensor, activated_BG: Tensor, before_BD: Tensor, after_BD: Tensor) -> Memory:
    """Gradients of the gates' sums [B, G] and of the cell before, from those of output and cell."""
    enter, forget, candidate, emit = activated_BG.chunk(4, dim=-1)
    bounded = after_BD.tanh()
    d_cell_BD = d_cell_BD + d_output_BD * emit * (1 - bounded**2)
    gates = (d_cell_BD * candidate * enter * (1 - enter), d_cell_BD * before_BD * forget * (1 - forget),
             d_cell_BD * enter * (1 - candidate**2), d_output_BD * bounded * emit * (1 - emit))
    return torch.cat(gates, dim=-1), d_cell_BD * forget
