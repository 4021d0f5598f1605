"""Batches from rows of tokens and states: padded one conversation a row, or packed several to a row.

Shapes: N tokens of a piece, B rows, L positions in a row, D hidden size of the target.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..modules import Features, UserError

OPEN_BINS = 16
"""Rows that wait for a piece that fits."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One conversation, or a window of one."""

    tokens_N: Tensor
    """Token ids."""
    supervised_N: Tensor
    """Written by the assistant, bool."""
    first: int = 0
    """Position of the first token in its conversation."""
    final_ND: Tensor | None = None
    """The target's final states; None when the target computes them in the step."""
    taps: dict[int, Tensor] = field(default_factory=dict)
    """Outputs of the tapped layers by layer index, each [N, D]."""


def plan_bins(lengths: Sequence[int], row_length: int) -> list[list[int]]:
    """Distribute pieces over rows of `row_length` tokens, in order: each goes into the fullest open row that has room.

    Args:
        lengths: tokens of each piece.
        row_length: tokens of a row.

    Returns:
        The pieces of each row by index; every piece stands in exactly one.

    Raises:
        UserError: if a piece is longer than a row.
    """
    if max(lengths, default=0) > row_length:
        raise UserError(f"row_length {row_length} is shorter than a piece of {max(lengths)} tokens; raise it")
    closed: list[list[int]] = []
    still_open: list[tuple[int, list[int]]] = []
    for index, length in enumerate(lengths):
        fitting = [place for place, (used, _) in enumerate(still_open) if used + length <= row_length]
        if fitting:
            used, row = still_open.pop(max(fitting, key=lambda place: still_open[place][0]))
        else:
            used, row = 0, []
            if len(still_open) == OPEN_BINS:
                closed.append(still_open.pop(max(range(OPEN_BINS), key=lambda place: still_open[place][0]))[1])
        row.append(index)
        still_open.append((used + length, row))
    return closed + [row for _, row in still_open]


def pack(rows: Sequence[Sequence[Piece]], row_length: int | None = None) -> Features:
    """Lay the pieces of each row one after another as isolated segments, padded on the right.

    Args:
        rows: the pieces of each row; a row may be empty, but not all of them.
        row_length: tokens of a row; None takes the longest.

    Raises:
        UserError: if a row does not fit.
    """
    used = max(sum(len(piece.tokens_N) for piece in row) for row in rows)
    width = used if row_length is None else row_length
    if used > width:
        raise UserError(f"row_length {width} is shorter than a row of {used} tokens; raise it")
    shape = (len(rows), width)
    tokens_BL = torch.zeros(shape, dtype=torch.int64)
    supervised_BL = torch.zeros(shape, dtype=torch.bool)
    segments_BL = torch.full(shape, -1, dtype=torch.int64)
    positions_BL = torch.zeros(shape, dtype=torch.int64)
    for row, start, segment, piece in _places(rows):
        stop = start + len(piece.tokens_N)
        tokens_BL[row, start:stop] = piece.tokens_N
        supervised_BL[row, start:stop] = piece.supervised_N
        segments_BL[row, start:stop] = segment
        positions_BL[row, start:stop] = torch.arange(piece.first, piece.first + stop - start)
    final_BLD, taps, missing_BL = _pack_states(rows, shape)
    return Features(
        tokens_BL=tokens_BL,
        supervised_BL=supervised_BL,
        segments_BL=segments_BL,
        positions_BL=positions_BL,
        final_BLD=final_BLD,
        missing_BL=missing_BL,
        taps=taps,
    )


def pad(pieces: Sequence[Piece]) -> Features:
    """One piece a row, padded on the right to the longest."""
    return pack([[piece] for piece in pieces])


def _places(rows: Sequence[Sequence[Piece]]) -> list[tuple[int, int, int, Piece]]:
    """(row, first index, segment, piece) of every piece."""
    places = []
    for row, pieces in enumerate(rows):
        start = 0
        for segment, piece in enumerate(pieces):
            places.append((row, start, segment, piece))
            start += len(piece.tokens_N)
    return places


def _pack_states(
    rows: Sequence[Sequence[Piece]], shape: tuple[int, int]
) -> tuple[Tensor | None, dict[int, Tensor], Tensor | None]:
    """(final states, taps, where states are missing) in the places of their tokens, zero elsewhere.

    The first is None when no piece brings states, the last when all do.
    """
    places = _places(rows)
    like = next((piece for *_, piece in places if piece.final_ND is not None), None)
    if like is None or like.final_ND is None:
        return None, {}, None
    final_BLD = torch.zeros(*shape, like.final_ND.shape[1], dtype=like.final_ND.dtype)
    taps = {layer: torch.zeros(*shape, state.shape[1], dtype=state.dtype) for layer, state in like.taps.items()}
    missing_BL = torch.zeros(shape, dtype=torch.bool)
    for row, start, _, piece in places:
        stop = start + len(piece.tokens_N)
        if piece.final_ND is None:
            missing_BL[row, start:stop] = True
            continue
        final_BLD[row, start:stop] = piece.final_ND
        for layer, state in taps.items():
            state[row, start:stop] = piece.taps[layer]
    return final_BLD, taps, missing_BL if bool(missing_BL.any()) else None
