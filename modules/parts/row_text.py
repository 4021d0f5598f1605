"""The tokens of each row of a batch, on the device.

Shapes: S rows of a state, R rows that change, L places of the text buffer, N new positions, G tokens of a window.
"""

import torch
from torch import Tensor

from ..interfaces.proposer import DraftState, Observation
from ..row_buffers import RowBuffer


class Text(DraftState):
    """The tokens of each row, the root last, allocated once.

    Args:
        rows: number of sequences.
        capacity: most tokens of one sequence.
        margin: empty places before the first token, into which a window may reach.
        device: device of the tokens.
    """

    tokens_SL: Tensor  # The tokens, -1 where there is none
    roots_S: Tensor  # Place of the root of each row

    def __init__(self, rows: int, capacity: int, margin: int, device: torch.device) -> None:
        texts = RowBuffer(rows, margin + capacity + 1, blank=-1, device=device, dtype=torch.long)
        places = RowBuffer(rows, blank=margin, device=device, dtype=torch.long)
        self.held, self.tokens_SL, self.roots_S = (texts, places), texts.values, places.values

    def append(self, rows_R: Tensor, observation: Observation) -> Tensor:
        """Add the new tokens and the root after them; returns the place of each new token, [R, N]."""
        columns_N = torch.arange(observation.tokens_BN.shape[1], device=rows_R.device)
        # The processed tokens start with the former root and overwrite it. Tokens beyond a row's count come after its
        # root and are overwritten next time.
        places_RN = self.roots_S[rows_R, None] + columns_N
        self.tokens_SL[rows_R[:, None], places_RN] = observation.tokens_BN
        self.roots_S.index_add_(0, rows_R, observation.counts_B)
        self.tokens_SL[rows_R, self.roots_S[rows_R]] = observation.roots_B
        return places_RN

    def endings(self, rows_R: Tensor, places_RN: Tensor, length: int) -> Tensor:
        """The `length` tokens up to each place, [R, N, length]; -1 before the start of the text."""
        back_G = torch.arange(1 - length, 1, device=places_RN.device)
        return self.tokens_SL[rows_R[:, None, None], places_RN[..., None] + back_G]
