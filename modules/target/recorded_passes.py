"""Verifying passes at fixed addresses and shapes, recorded once for each shape and replayed: CUDA graphs.

A pass of few tokens takes a GPU less time than the host needs to launch its thousand kernels. A graph launches all of
them at once, but with the very same tensors: what a pass reads is copied into buffers that stay, and everything it
writes is written in place. Trees are padded to a few numbers of nodes, batches to a few numbers of rows, and the cache
is read up to a few numbers of slots; each combination has a record of its own, made when it is first needed.

Shapes: B rows, N nodes, W cache slots that are read, D hidden size.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..token_tree import TokenTree
from .kv_cache import RowCache
from .pass_layout import PassLayout
from .pass_output import PassOutput

if TYPE_CHECKING:
    from .model import Target

Body = Callable[[], None]
"""A computation that reads and writes the same tensors whenever it is called."""
Recorder = Callable[[Body], Body]
"""Records a computation: the result repeats its operations on the same tensors, without running its Python code.
Recording runs that code once, and changes no tensor that was there before, unless it is made to run the computation
first."""
NO_CUDA = "there is no CUDA device"
_LEAST_SLOTS = 128
"""Fewest cache slots that a record reads, unless the cache has fewer."""
_WARM_UP = 3
"""Runs before a graph is captured, in which libraries allocate what they keep."""


class Shape(NamedTuple):
    """Numbers of rows, nodes and cache slots of one record."""

    rows: int
    nodes: int
    slots: int


def recorder_for(device: torch.device, runs: int = _WARM_UP) -> Recorder | str:
    """The recorder of a device, which runs a computation so often before, or the reason why there is none."""
    return partial(record_cuda_graph, device, runs=runs) if device.type == "cuda" else NO_CUDA


def record_cuda_graph(device: torch.device, body: Body, *, runs: int = _WARM_UP) -> Body:
    """A CUDA graph of a computation, captured after some runs on a stream of its own.

    Raises:
        RuntimeError: if the computation makes the host wait, which no graph can hold.
    """
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(runs):
                body()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            body()
    return graph.replay


def steps_to(largest: int, least: int = 1) -> list[int]:
    """The largest number and its halves, rounded up, down to the least one; ascending.

    Trees of a policy that all have the largest size need no padding.
    """
    found = [largest]
    while found[-1] > least:
        found.append(max(least, -(-found[-1] // 2)))
    return found[::-1]


class RecordedPasses:
    """The recorded passes of a batch of rows.

    Args:
        target: runs them.
        cache: of the rows, written in place. Its storage must stay where it is.
        taps: layers whose outputs the passes give.
        rows: most rows of a pass.
        nodes: most nodes of a tree.
        record: records a pass.
    """

    def __init__(
        self, target: "Target", cache: RowCache, taps: Sequence[int], rows: int, nodes: int, record: Recorder
    ) -> None:
        self.target, self.cache, self.taps, self.record = target, cache, tuple(taps), record
        self.row_steps, self.node_steps = steps_to(rows), steps_to(nodes)
        self.slot_steps = steps_to(cache.capacity, min(_LEAST_SLOTS, cache.capacity))
        self.passes: dict[Shape, _Pass] = {}

    def refusal(self, active: int, tree: TokenTree, select_BM: Tensor | None) -> str:
        """The reason that a pass over the first rows cannot be one of these; empty where it can."""
        if tree.virtual is not None:
            return "the drafter's virtual nodes enter the pass in ways that change from pass to pass"
        if select_BM is not None:
            return "the logits of some nodes alone are wanted"
        if tree.size > self.node_steps[-1]:
            return f"a tree has {tree.size} nodes, more than the {self.node_steps[-1]} that were foreseen"
        if self._needed(active, _at_least(self.node_steps, tree.size)) > self.cache.capacity:
            return "the last slots of the cache have no room for the padding of a tree"
        if self.cache.storage is None:
            # It would be part of the record, and blank again at every replay.
            return "nothing was read before, so that the cache has no memory yet"
        return ""

    def shape(self, active: int, tree: TokenTree) -> Shape:
        """The smallest shape with room for a pass over the first rows."""
        nodes = _at_least(self.node_steps, tree.size)
        return Shape(_at_least(self.row_steps, active), nodes, _at_least(self.slot_steps, self._needed(active, nodes)))

    def _needed(self, active: int, nodes: int) -> int:
        return max(self.cache.host_lengths[:active]) + nodes

    def run(self, active: int, tree: TokenTree, embedded_BND: Tensor) -> PassOutput:
        """The pass of the first `active` rows: the tensors of its output are overwritten by the next one.

        Raises:
            RuntimeError: if a pass of this shape cannot be recorded.
        """
        shape = self.shape(active, tree)
        if (made := self.passes.get(shape)) is None:
            made = _Pass(self.target, self.cache, self.taps, shape, embedded_BND)
            made.fill(tree, embedded_BND)
            made.replay = self.record(made.compute)
            self.passes[shape] = made
        else:
            made.fill(tree, embedded_BND)
        made.replay()
        # The commit that follows moves what the real rows and nodes have written.
        self.cache.open(slice(0, active), tree.size)
        return made.output(active, tree.size)


class _Pass:
    """One shape of a pass: its buffers, and what it computes from them."""

    logits_BNV: Tensor
    final_BND: Tensor
    taps: dict[int, Tensor]
    replay: Body

    def __init__(
        self, target: "Target", cache: RowCache, taps: tuple[int, ...], shape: Shape, like_BND: Tensor
    ) -> None:
        self.target, self.cache, self.layers, self.shape = target, cache, taps, shape
        rows, nodes, _ = shape
        # Rows and nodes that no tree fills hold zeros, or what an earlier pass left: any finite states will do.
        self.embedded_BND = like_BND.new_zeros(rows, nodes, like_BND.shape[2])
        self.depths_BN = torch.zeros(rows, nodes, dtype=torch.long, device=like_BND.device)
        self.itself_NN = torch.eye(nodes, dtype=torch.bool, device=like_BND.device)
        self.ancestors_BNN = self.itself_NN.repeat(rows, 1, 1)

    def fill(self, tree: TokenTree, embedded_BND: Tensor) -> None:
        """Copy what the pass reads into its buffers; nodes beyond the tree see themselves alone."""
        rows, nodes = tree.tokens_BN.shape
        self.embedded_BND[:rows, :nodes] = embedded_BND
        self.depths_BN[:rows, :nodes] = tree.depths_BN
        if nodes < self.shape.nodes:
            self.ancestors_BNN.copy_(self.itself_NN.expand_as(self.ancestors_BNN))
        self.ancestors_BNN[:rows, :nodes, :nodes] = tree.ancestors_BNN

    def compute(self) -> None:
        """Read all rows and nodes of the shape; everything that depends on lengths is computed on the device."""
        window = self.cache.open_whole(*self.shape)
        layout = PassLayout.among(self.depths_BN, self.ancestors_BNN, window.slots_BN[:, :1], self.shape.slots,
                                  self.target.context_length)
        with self.target.tapping(self.layers) as states:
            self.final_BND = self.target.read_nodes(self.embedded_BND, layout, self.cache)
        self.taps = dict(states)
        self.logits_BNV = self.target.logits(self.final_BND)

    def output(self, rows: int, nodes: int) -> PassOutput:
        """The output at the real rows and nodes."""
        return PassOutput(logits_BMV=self.logits_BNV[:rows, :nodes], final_BND=self.final_BND[:rows, :nodes],
                          taps={layer: states[:rows, :nodes] for layer, states in self.taps.items()})


def _at_least(steps: Sequence[int], wanted: int) -> int:
    """The smallest step that is no smaller than wanted."""
    return next(step for step in steps if step >= wanted)
