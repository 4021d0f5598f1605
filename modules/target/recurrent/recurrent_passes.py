"""Passes through transformers' recurrent layers whose rows are no plain texts: nodes of trees, and packed segments; and
the states of these layers in each row after its committed tokens.

The layers call their convolution and their recurrence by functions of their module. These are replaced once by ones
that ask the running pass; outside a pass they are transformers' own.

Shapes: B rows, N nodes, W taps of a convolution, D channels, X columns: those before the pass and those of its nodes.
"""

import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import wraps
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.cache_utils import Cache

from ...token_tree import TokenTree
from ..attention.segment_attention import Segments, Span
from .scans import SCANS, Branches, Columns, Committed, Scan

Function = Callable[..., Any]
Place = tuple[int, str, int]  # A layer, the function that it calls, and the number of this call in the layer
_CONVOLUTION = "causal_conv1d_fn"


@dataclass(frozen=True)
class LayerCall:
    """A call of a function by a recurrent layer."""

    function: Function
    positional: tuple[str, ...]  # The arguments that are given by their place: fast kernels have other names for these
    given: dict[str, Any]  # All arguments by transformers' names

    def again(self, **changes: Any) -> Any:
        """The answer of the function to other arguments."""
        given = {**self.given, **changes}
        placed = [given.pop(name) for name in self.positional]
        return self.function(*placed, **given)


_RUNNING: ContextVar["NodePass | SegmentPass | None"] = ContextVar("recurrent pass", default=None)


@contextmanager
def running(work: "NodePass | SegmentPass | None") -> Iterator[None]:
    """A block whose recurrent layers ask this pass; without one they run as transformers made them."""
    token = _RUNNING.set(work)
    try:
        yield
    finally:
        _RUNNING.reset(token)


def install(decoder: nn.Module) -> bool:
    """Let the recurrent layers of a decoder ask the running pass; False where it has none of a known kind."""
    found = False
    for name in {type(module).__module__ for module in decoder.modules()}:
        functions = vars(sys.modules[name])
        for known in (_CONVOLUTION, *SCANS):
            if known in functions:
                found = True
                if not hasattr(functions[known], "asks_the_pass"):
                    functions[known] = _asking(functions[known], SCANS.get(known))
    return found


def _asking(function: Function, scan: Scan | None) -> Function:
    """A function of recurrent layers that leaves its work to the running pass, if there is one."""
    names = tuple(inspect.signature(function).parameters)

    @wraps(function)
    def asking(*args: Any, **kwargs: Any) -> Any:
        if (work := _RUNNING.get()) is None:
            return function(*args, **kwargs)
        call = LayerCall(function, names[: len(args)], {**dict(zip(names, args, strict=False)), **kwargs})
        return work.convolve(call) if scan is None else work.scan(scan, call)

    asking.asks_the_pass = True  # type: ignore[attr-defined]
    return asking


class NodePass:
    """A pass of the nodes of trees, one a row, or of prompts. `former` gives the state of a place in these rows before
    the pass; None where none was committed."""

    def __init__(self, tree: TokenTree, former: Callable[[Place], Tensor | None]) -> None:
        self.tree, self.former = tree, former
        self.left: dict[Place, tuple[torch.device, Branches]] = {}  # Of each place for the commit, with its device
        self.layer = -1  # The layer that runs
        self._calls = Counter[tuple[int, str]]()
        self._trees, self._windows = {tree.tokens_BN.device: tree}, dict[tuple[int, torch.device], Tensor]()

    def _place(self, kind: str) -> Place:
        self._calls[self.layer, kind] += 1
        return self.layer, kind, self._calls[self.layer, kind] - 1

    def convolve(self, call: LayerCall) -> Tensor:
        """Each node's output, of its nearest ancestors and the committed columns before them."""
        states_BDN, taps = call.given["hidden_states"], call.given["weight"].shape[-1]
        place = self._place("convolution")
        former_BDX = self.former(place)
        if former_BDX is None:
            former_BDX = states_BDN.new_zeros(*states_BDN.shape[:2], taps - 1)
        columns_BDX = torch.cat([former_BDX.to(states_BDN.dtype), states_BDN], dim=2)
        if self.tree.prompt:
            self.left[place] = columns_BDX.device, Columns(columns_BDX, None)
            out_BDX: Tensor = call.again(hidden_states=columns_BDX)
            return out_BDX[:, :, taps - 1 :]
        windows_BNW = self._nearest(taps, columns_BDX.device)
        self.left[place] = columns_BDX.device, Columns(columns_BDX, windows_BNW)
        # The layer's own function over the windows laid side by side; of each the last output has seen no other.
        index_B1M = windows_BNW.flatten(1)[:, None].expand(-1, columns_BDX.shape[1], -1)
        out_BDM: Tensor = call.again(hidden_states=columns_BDX.gather(2, index_B1M))
        return out_BDM[:, :, taps - 1 :: taps]

    def _nearest(self, taps: int, device: torch.device) -> Tensor:
        """The column of each tap of each node, [B, N, W]: its nearest ancestors and itself, the farthest first."""
        if (taps, device) not in self._windows:
            ancestors_BNN = self._tree_on(device).ancestors_BNN
            depths_BN = ancestors_BNN.sum(-1) - 1
            columns = []
            for distance in reversed(range(taps)):
                there_BNN = ancestors_BNN & (depths_BN[:, None] == (depths_BN - distance)[:, :, None])
                before_BN = taps - 1 - distance + depths_BN
                columns.append(torch.where(depths_BN >= distance, taps - 1 + there_BNN.byte().argmax(-1), before_BN))
            self._windows[taps, device] = torch.stack(columns, dim=-1)
        return self._windows[taps, device]

    def _tree_on(self, device: torch.device) -> TokenTree:
        """The tree where a layer is."""
        if device not in self._trees:
            tree = self.tree
            self._trees[device] = replace(tree, ancestors_BNN=tree.ancestors_BNN.to(device),
                                          parents_BN=tree.parents_BN.to(device), real_BN=tree.real_BN.to(device))
        return self._trees[device]

    def scan(self, scan: Scan, call: LayerCall) -> Any:
        """The outputs of the nodes, and a state that nobody reads."""
        place = self._place(call.function.__name__)
        former = self.former(place)
        if self.tree.prompt and scan.initial is not None:
            out, left = self._along(scan, call, former)
        else:
            out, left = scan.nodes(call.given, former, self._tree_on(call.given[scan.tokenwise[0]].device))
        self.left[place] = out.device, left
        return out, out.new_zeros(len(out))

    def _along(self, scan: Scan, call: LayerCall, former: Tensor | None) -> tuple[Tensor, Branches]:
        """Prompts by the layer's own code, those of one length at once: padding would be added to their states."""
        counts = self.tree.real_BN.sum(-1).tolist()
        whole, states = torch.empty(0), torch.empty(0)
        for count in sorted(set(counts)):
            rows = [row for row, other in enumerate(counts) if other == count]
            pieces = {name: call.given[name][rows].narrow(scan.time, 0, count) for name in scan.tokenwise}
            asked = {str(scan.initial): None if former is None else former[rows], scan.final: True}
            out, state = call.again(**pieces, **asked)
            if not states.numel():
                whole = out.new_zeros(len(counts), self.tree.size, *out.shape[2:])
                states = state.new_zeros(len(counts), *state.shape[1:])
            whole[rows, :count], states[rows] = out, state
        return whole, Committed(states)


class SegmentPass:
    """A pass of training rows whose segments are texts of their own."""

    def __init__(self, segments: Segments) -> None:
        # Segments of about one length run side by side, padded to the longest: at most twice as many tokens.
        spans = sorted(segments.spans, key=_tokens)
        self._groups = [list(group) for _, group in groupby(spans, key=lambda span: _tokens(span).bit_length())]

    def convolve(self, call: LayerCall) -> Tensor:
        out: Tensor = self._apart(call, ("hidden_states",), 2)
        return out

    def scan(self, scan: Scan, call: LayerCall) -> Any:
        return self._apart(call, scan.tokenwise, scan.time)

    def _apart(self, call: LayerCall, tokenwise: tuple[str, ...], time: int) -> Any:
        if not self._groups:
            # Padding alone: whatever is computed is read by nobody.
            return call.again()
        named = [name for name in tokenwise if call.given.get(name) is not None]
        moved = {name: call.given[name].transpose(1, time) for name in named}
        whole: Tensor | None = None
        for group in self._groups:
            longest = _tokens(group[-1])
            pieces = {}
            for name in named:
                texts = [moved[name][row, span] for row, span in group]
                texts = [pad(text, (0, 0) * (text.dim() - 1) + (0, longest - len(text))) for text in texts]
                pieces[name] = torch.stack(texts).transpose(1, time)
            out = call.again(**pieces)
            answer = (out[0] if isinstance(out, tuple) else out).transpose(1, time)
            if whole is None:
                whole = answer.new_zeros(*moved[named[0]].shape[:2], *answer.shape[2:])
            for (row, span), text in zip(group, answer, strict=True):
                whole[row, span] = text[: span.stop - span.start]
        assert whole is not None
        result = whole.transpose(1, time)
        return (result, None) if isinstance(out, tuple) else result


def _tokens(span: Span) -> int:
    """The number of tokens of a segment."""
    return int(span[1].stop - span[1].start)


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
        self.work = NodePass(tree, lambda place: (
            None if (held := self.held.get(place)) is None else
            held[rows if isinstance(rows, slice) else rows.to(held.device)]))
        with running(self.work):
            yield

    def commit(self, rows: slice | Tensor, path_BP: Tensor, counts_B: Tensor) -> None:
        """Let the last pass's rows have the states after a path of its nodes; a row of none keeps its own."""
        for place, (device, left) in ({} if self.work is None else self.work.left).items():
            counts = counts_B.to(device)
            state = left.after(path_BP.to(device), counts)
            held = self.held.setdefault(place, state.new_zeros(self.rows, *state.shape[1:]))
            there = rows if isinstance(rows, slice) else rows.to(held.device)
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
        return conv_states

    update_recurrent_state = update_conv_state  # type: ignore[assignment]
