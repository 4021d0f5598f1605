"""The segments of packed rows as rows of their own, for what runs through each text in order.

A recurrent network takes one step after the other: segments side by side take as many as the longest of them has
positions, where packed rows take as many as a row has.

Shapes: B rows, L positions, S segments, N positions of the longest segment, Z width; a leading `...` stands for any
dimensions.
"""

import torch
from torch import Tensor
from torch.nn import functional


class SegmentRows:
    """The places of a batch's positions in rows of one segment each; padding counts as a segment.

    Args:
        segments_BL: number of each token's segment; the tokens of a segment are adjacent. The host waits once for its
            device.
    """

    def __init__(self, segments_BL: Tensor) -> None:
        self.shape = segments_BL.shape
        starts_BL = functional.pad(segments_BL[:, 1:] != segments_BL[:, :-1], (1, 0), value=True)
        starts_P = starts_BL.flatten()
        self.row_P = starts_P.cumsum(0) - 1
        order_P = torch.arange(len(starts_P), device=starts_P.device)
        self.place_P = order_P - (order_P * starts_P).cummax(0).values
        last_row, last_place = torch.stack([self.row_P[-1], self.place_P.max()]).tolist()
        self.count, self.longest = last_row + 1, last_place + 1

    def split(self, packed_BLZ: Tensor) -> Tensor:
        """One row for each segment, [S, N, Z]; zero after its end."""
        rows_SNZ = packed_BLZ.new_zeros(self.count, self.longest, packed_BLZ.shape[-1])
        return rows_SNZ.index_put((self.row_P, self.place_P), packed_BLZ.flatten(0, 1))

    def join(self, rows: Tensor) -> Tensor:
        """The packed rows [..., B, L, Z] of segments [..., S, N, Z]."""
        found = rows[..., self.row_P, self.place_P, :]
        return torch.unflatten(found, -2, self.shape)
