"""A long short-term memory whose state is known after every position, so that a draft can continue from any of them,
and the order in which it reads packed rows.

torch's own LSTM returns the cell after the last position alone; the arithmetic is the same, gate by gate
(arXiv:1402.1128, without peepholes).

Sequences are read side by side, so that they take as many steps as the longest of them has positions, where packed rows
would take as many as a row has. Their positions lie one step after another, without gaps: the first positions of all
sequences, then the second ones, the longest sequence first: those that a step holds are the first ones of the step
before it.

Shapes: B sequences or rows, L positions of a row, N positions of each sequence, P positions of all, S sequences of a
step, Z input width, D hidden size, G gates (4 D: input, forget, cell, output), M layers; `...` any dimensions."""

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

Memory = tuple[Tensor, Tensor]  # (output, cell) of each layer, [M, ..., D] each


class LSTMLayer(nn.Module):
    """One LSTM layer. Its weights are torch's: `input.{weight,bias}` is `{weight,bias}_ih`, `hidden.*` is `*_hh`."""

    def __init__(self, input_size: int, size: int) -> None:
        super().__init__()
        self.input = nn.Linear(input_size, 4 * size)
        self.hidden = nn.Linear(size, 4 * size)

    def forward(self, read_PZ: Tensor, output_BD: Tensor, cell_BD: Tensor, sizes: Sequence[int] | None) -> Memory:
        """(output, cell) after every position, [P, D] each, of those before the first; `sizes` as for `through`."""
        if sizes is None:
            return _cell_step(self.input(read_PZ) + self.hidden(output_BD), cell_BD)[:2]
        gates_PG = self.input(read_PZ) + self.hidden.bias
        weight_GD = self.hidden.weight
        given = gates_PG.to(weight_GD.dtype), weight_GD, output_BD, cell_BD, tuple(sizes)
        # In the weight's own precision: rounding would add up from position to position.
        with torch.autocast(read_PZ.device.type, enabled=False):
            if torch.is_grad_enabled():
                return cast(Memory, _Recurrence.apply(*given))  # type: ignore[no-untyped-call]
            outputs, cells, _ = zip(*_walk(*given), strict=True)
            return torch.cat(outputs), torch.cat(cells)


class LSTM(nn.Module):
    """Stacked layers, each reading the output of the one below, of which training drops a share of the components."""

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
        """(outputs, cells) of the layers after every position of sequences of one length, [M, B, N, D] each."""
        rows, length, _ = read_BNZ.shape
        memory = self.through(read_BNZ.transpose(0, 1).flatten(0, 1), before, (rows,) * length)
        output_MBND, cell_MBND = (torch.unflatten(part, 1, (length, rows)).transpose(1, 2) for part in memory)
        return output_MBND, cell_MBND

    def through(self, read_PZ: Tensor, before: Memory, sizes: Sequence[int] | None = None) -> Memory:
        """(outputs, cells) of the layers after every position of sequences of any length, [M, P, D] each, whose input
        is read step after step, of the memory before the first positions, [M, B, D] each. `sizes` are the sequences of
        each step, from B on falling; None for one more position of each, [..., D] throughout."""
        outputs, cells = [], []
        for layer, output_BD, cell_BD in zip(self.layers, *before, strict=True):
            output_PD, cell_PD = layer(read_PZ, output_BD, cell_BD, sizes)
            outputs.append(output_PD)
            cells.append(cell_PD)
            read_PZ = functional.dropout(output_PD, self.dropout, self.training)
        return torch.stack(outputs), torch.stack(cells)


def _cell_step(gates: Tensor, cell: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(output, cell, activated gates) after a position, of the gates' sums and the cell before it."""
    enter, forget, candidate, emit = gates.chunk(4, dim=-1)
    enter, forget, candidate, emit = enter.sigmoid(), forget.sigmoid(), candidate.tanh(), emit.sigmoid()
    cell = forget * cell + enter * candidate
    return emit * cell.tanh(), cell, torch.cat([enter, forget, candidate, emit], dim=-1)


def _walk(gates_PG: Tensor, weight_GD: Tensor, output_BD: Tensor, cell_BD: Tensor,
          sizes: tuple[int, ...]) -> Iterator[tuple[Tensor, ...]]:
    """The result of `_cell_step` at step after step."""
    for gates_SG in torch.split(gates_PG, list(sizes)):
        count = len(gates_SG)
        sums_SG = torch.addmm(gates_SG, output_BD[:count], weight_GD.mT)
        output_BD, cell_BD, activated_SG = _cell_step(sums_SG, cell_BD[:count])
        yield output_BD, cell_BD, activated_SG


def _one_before(first_BD: Tensor, after_PD: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """The values before each position, [P, D], of those before the first ones and those after each."""
    steps = first_BD, *torch.split(after_PD, list(sizes))
    return torch.cat([step[:count] for step, count in zip(steps, sizes, strict=False)])


class _Recurrence(torch.autograd.Function):
    """All steps in order; the weight's gradient is one product at the end, in place of one for each step."""

    @staticmethod
    def forward(ctx: Any, gates_PG: Tensor, weight_GD: Tensor, output_BD: Tensor, cell_BD: Tensor,
                sizes: tuple[int, ...]) -> Memory:
        walked = zip(*_walk(gates_PG, weight_GD, output_BD, cell_BD, sizes), strict=True)
        output_PD, cell_PD, activated_PG = (torch.cat(parts) for parts in walked)
        ctx.sizes = sizes
        ctx.save_for_backward(output_BD, cell_BD, output_PD, cell_PD, activated_PG, weight_GD)
        return output_PD, cell_PD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_output_PD: Tensor, d_cell_PD: Tensor) -> tuple[Tensor | None, ...]:
        first_output_BD, first_cell_BD, output_PD, cell_PD, activated_PG, weight_GD = ctx.saved_tensors
        before_PD = _one_before(first_cell_BD, cell_PD, ctx.sizes)
        parts = d_output_PD, d_cell_PD, activated_PG, before_PD, cell_PD
        steps = [torch.split(part, list(ctx.sizes)) for part in parts]
        d_output_SD, d_cell_SD, gates = d_output_PD[:0], d_cell_PD[:0], []
        for own_output_SD, own_cell_SD, activated_SG, before_SD, after_SD in reversed(list(zip(*steps, strict=True))):
            # Sequences that end at this step have no gradient from a later one.
            ended = (0, 0, 0, len(own_output_SD) - len(d_output_SD))
            d_output_SD = own_output_SD + functional.pad(d_output_SD, ended)
            d_cell_SD = own_cell_SD + functional.pad(d_cell_SD, ended)
            enter, forget, candidate, emit = activated_SG.chunk(4, dim=-1)
            bounded = after_SD.tanh()
            d_cell_SD = d_cell_SD + d_output_SD * emit * (1 - bounded**2)
            # sigmoid' = s (1 - s) and tanh' = 1 - t^2: the gates' sums are not needed, the activated ones are enough.
            gates_SG = torch.cat([d_cell_SD * candidate * enter * (1 - enter),
                                  d_cell_SD * before_SD * forget * (1 - forget),
                                  d_cell_SD * enter * (1 - candidate**2),
                                  d_output_SD * bounded * emit * (1 - emit)], dim=-1)
            gates.append(gates_SG)
            d_cell_SD = d_cell_SD * forget
            d_output_SD = gates_SG @ weight_GD
        gates_PG = torch.cat(gates[::-1])
        read_PD = _one_before(first_output_BD, output_PD, ctx.sizes)
        return gates_PG, gates_PG.mT @ read_PD, d_output_SD, d_cell_SD, None


class SegmentSteps:
    """The order in which the positions of a batch are read; the tokens of a segment are adjacent, and padding counts as
    one. The host waits once for its device."""

    def __init__(self, segments_BL: Tensor) -> None:
        self.shape, total = segments_BL.shape, segments_BL.numel()
        starts_P = functional.pad(segments_BL[:, 1:] != segments_BL[:, :-1], (1, 0), value=True).flatten()
        order_P = torch.arange(total, device=starts_P.device)
        step_P = order_P - (order_P * starts_P).cummax(0).values
        segment_P = starts_P.cumsum(0) - 1
        length_P = torch.zeros_like(order_P).scatter_add_(0, segment_P, torch.ones_like(order_P))[segment_P]
        # By step, then by falling length, then by segment: those of a step are the first ones of the step before it.
        self.order_P = ((step_P * (total + 1) + total - length_P) * total + segment_P).argsort()
        self.place_P = self.order_P.argsort()
        counts = torch.zeros_like(order_P).scatter_add_(0, step_P, torch.ones_like(order_P)).tolist()
        self.sizes = tuple(count for count in counts if count)  # Segments of each step, falling

    def split(self, packed_BLZ: Tensor) -> Tensor:
        """The positions in the order of the steps, [P, Z]."""
        return packed_BLZ.flatten(0, 1)[self.order_P]

    def join(self, steps: Tensor) -> Tensor:
        """The packed rows [..., B, L, Z] of positions [..., P, Z] in the order of the steps."""
        return torch.unflatten(steps[..., self.place_P, :], -2, self.shape)
