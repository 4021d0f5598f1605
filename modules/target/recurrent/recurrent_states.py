"""The states of the target's recurrent layers in each row after its committed tokens."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ...token_tree import TokenTree
from .recurrent_passes import NodePass, Place, running


class RecurrentStates:
    """The states of the target's recurrent layers, and the inputs that their convolutions still see, of each row: those
    after the committed tokens. A pass leaves them as they are; the commit of a path changes them."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.held: dict[Place, Tensor] = {}  # The state of each place, [rows, ...]; none before the first commit
        self.work: NodePass | None = None  # The running pass, or the last one until its commit

    @contextmanager
    def reading(self, tree: TokenTree, rows: slice | Tensor) -> Iterator[None]:
        """A block whose layers read the nodes of a tree after the states of these rows."""

        def former(place: Place) -> Tensor | None:
            held = self.held.get(place)
            return None if held is None else held[_there(rows, held)]

        self.work = NodePass(tree, former)
        with running(self.work):
            yield

    def commit(self, rows: slice | Tensor, path_BP: Tensor, counts_B: Tensor) -> None:
        """Let the last pass's rows have the states after a path of its nodes; a row of none keeps its own."""
        for place, (device, left) in ({} if self.work is None else self.work.left).items():
            counts = counts_B.to(device)
            state = left.after(path_BP.to(device), counts)
            held = self.held.setdefault(place, state.new_zeros(self.rows, *state.shape[1:]))
            there = _there(rows, held)
            taken_B = (counts > 0).view(-1, *(1 for _ in state.shape[1:]))
            held[there] = torch.where(taken_B, state.to(held.dtype), held[there])
        self.work = None

    def clear(self, rows: int | slice) -> None:
        """Let these rows start anew."""
        for held in self.held.values():
            held[rows] = 0

    def copy(self, source: int, destination: int) -> None:
        """Let a row have the states of another."""
        for held in self.held.values():
            held[destination] = held[source]


def _there(rows: slice | Tensor, held: Tensor) -> slice | Tensor:
    """Rows of a tensor, on its device."""
    return rows if isinstance(rows, slice) else rows.to(held.device)


class RecurrentCache(Cache):
    """A cache of transformers whose recurrent layers leave what they compute to the running pass. They ask for their
    states by these names and are given none, as at the start of a text, and so take the way of several tokens."""

    states: RecurrentStates | None  # The recurrent states of the rows; None where no layer has any

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """None; the layer runs from here on."""
        if self.states is None or self.states.work is None:
            raise ValueError("a recurrent layer runs outside a pass that knows its states")
        self.states.work.layer = layer_idx

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """None."""

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        """The new inputs of a convolution alone."""
        return conv_states

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        """The given state."""
        return recurrent_states
