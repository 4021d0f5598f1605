"""The tokens of each row of a batch, kept on the device.

Shapes: S rows of a state, R rows that change, L places of the text buffer, N new positions, G tokens of a window.
"""

import torch
from torch import Tensor

from ...interfaces.proposer import DraftState, Observation


class Text(DraftState):
    """The tokens of each row, the root last, allocated once.

    Args:
        rows: sequences.
        capacity: most tokens of one.
        margin: places before the first token that hold no token: a window may reach so far back.
        device: where it lives.
    """

    def __init__(self, rows: int, capacity: int, margin: int, device: torch.device) -> None:
        self.margin = margin
        self.tokens_SL = torch.full((rows, margin + capacity + 1), -1, device=device)
        self.roots_S = torch.full((rows,), margin, device=device)

    def append(self, rows_R: Tensor, observation: Observation) -> Tensor:
        """Take in the new tokens and the root behind them; returns the place of each new token, [R, N]."""
        columns_N = torch.arange(observation.tokens_BN.shape[1], device=rows_R.device)
        # What went through the target begins with the former root, so it is written over it. What is written beyond
        # a row's count lies behind its root and is overwritten by what comes next.
        places_RN = self.roots_S[rows_R, None] + columns_N
        self.tokens_SL[rows_R[:, None], places_RN] = observation.tokens_BN
        self.roots_S[rows_R] += observation.counts_B
        self.tokens_SL[rows_R, self.roots_S[rows_R]] = observation.roots_B
        return places_RN

    def clear(self, rows_R: Tensor) -> None:
        """Forget the rows' texts."""
        self.tokens_SL[rows_R] = -1
        self.roots_S[rows_R] = self.margin

    def keep(self, rows_R: Tensor) -> None:
        """Let row r be the former row rows_R[r]."""
        self.tokens_SL, self.roots_S = self.tokens_SL[rows_R], self.roots_S[rows_R]

    def endings(self, rows_R: Tensor, places_RN: Tensor, length: int) -> Tensor:
        """The `length` tokens that end at each place, [R, N, length]; -1 before the text begins."""
        back_G = torch.arange(1 - length, 1, device=places_RN.device)
        return self.tokens_SL[rows_R[:, None, None], places_RN[..., None] + back_G]


def text_of(state: DraftState) -> Text:
    """The state, if it is a text.

    Raises:
        TypeError: if another family made it.
    """
    if not isinstance(state, Text):
        raise TypeError(f"this drafter needs the state that its own start() made, got {type(state).__name__}")
    return state
