"""The segments of packed rows side by side, for what runs through each text in order.

A recurrent network takes one step after the other: segments side by side take as many as the longest of them has
positions, where packed rows take as many as a row has. The positions are laid out as the steps read them, without
gaps: a step holds the segments that are so long, the longest first.

Shapes: B rows, L positions, P positions of all rows, Z width; a leading `...` stands for any dimensions.
"""

import torch
from torch import Tensor
from torch.nn import functional


class SegmentSteps:
    """The order in which the positions of a batch are read; padding counts as a segment.

    Args:
        segments_BL: number of each token's segment; the tokens of a segment are adjacent. The host waits once for its
            device.
    """

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
