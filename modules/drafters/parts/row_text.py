"""The tokens of each row of a batch, on the device.

Shapes: S rows of a state, R rows that change, L places of the text buffer, N new positions, G tokens of a window.
"""

import torch
from torch import Tensor

from ...interfaces.proposer import DraftState, Observation
from ...row_buffers import RowBuffer


class Text(DraftState):
    """The tokens of each row, the root last, allocated once.

    Args:
        rows: number of sequences.
        capacity: most tokens of one sequence.
        margin: empty places before the first token, into which a window may reach.
        device: device of the tokens.
    """

    def __init__(self, rows: int, capacity: int, margin: int, device: torch.device) -> None:
        self.texts = RowBuffer(rows, margin + capacity + 1, blank=-1, device=device, dtype=torch.long)
        self.places = RowBuffer(rows, blank=margin, device=device, dtype=torch.long)

    @property
    def tokens_SL(self) -> Tensor:
        """The tokens, -1 where there is none."""
        return self.texts.values

    @property
    def roots_S(self) -> Tensor:
        """Place of the root of each row."""
        return self.places.values

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

    def clear(self, rows_R: Tensor) -> None:
        """Delete the rows' texts."""
        self.texts.clear(rows_R)
        self.places.clear(rows_R)

    def keep(self, rows_R: Tensor) -> None:
        """Keep the rows `rows_R`, in that order."""
        self.texts.keep(rows_R)
        self.places.keep(rows_R)

    def endings(self, rows_R: Tensor, places_RN: Tensor, length: int) -> Tensor:
        """The `length` tokens up to each place, [R, N, length]; -1 before the start of the text."""
        back_G = torch.arange(1 - length, 1, device=places_RN.device)
        return self.tokens_SL[rows_R[:, None, None], places_RN[..., None] + back_G]


def text_of(state: DraftState) -> Text:
    """The given state as a `Text`.

    Raises:
        TypeError: if it is another family's state.
    """
    if not isinstance(state, Text):
        raise TypeError(f"this drafter needs the state that its own start() made, got {type(state).__name__}")
    return state
