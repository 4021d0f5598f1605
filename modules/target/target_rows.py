"""A batch of sequences inside the target: their cache, the passes that extend it, and the output of a pass.

Shapes: B rows, N nodes of a tree, M selected nodes, those with logits, K nodes of a path, D hidden size, V vocabulary.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..token_tree import TokenTree
from .kv_cache import RowCache
from .partial_passes import EarlyLayers, PassLayout, injected, later_layers

if TYPE_CHECKING:
    from .model import Target


@dataclass(frozen=True, kw_only=True)
class PassOutput:
    """Logits and hidden states of one pass of the target."""

    logits_BMV: Tensor  # Next-token logits at the selected nodes (all of them unless the caller chose)
    final_BND: Tensor  # Final hidden states, after the last norm, at every node
    taps: dict[int, Tensor] = field(default_factory=dict)  # Outputs of the tapped layers at every node, each [B, N, D]


class TargetRows:
    """A batch of sequences inside the target: their cache, and the passes that extend it. Rows `[0, active)` are in
    use. A pass writes its nodes after each row; `commit` keeps a path of them."""

    reads_virtual: bool = True  # True: virtual nodes are nodes of the pass

    def __init__(self, target: "Target", rows: int, capacity: int, taps: tuple[int, ...],
                 prefix: Sequence[int] = ()) -> None:
        self.target, self.taps, self.active = target, taps, rows
        self.cache = RowCache(target.num_layers, rows + bool(prefix), capacity, target.device, target.layer_devices,
                              target.cache_groups, target.recurrent)
        self.calls = 0
        self.drafted: EarlyLayers | None = None
        self.shared: PassOutput | None = None
        if prefix:
            self.share(prefix)

    def share(self, prefix: Sequence[int]) -> None:
        """Read the tokens with which all rows start, once, into a spare row after the others, from which each copies
        it; there is one if the rows were made with a prefix. Tokens without a finite embedding are left to the rows."""
        target, spare = self.target, self.cache.rows - 1
        if target.broken_V is not None:
            broken = [place for place, token in enumerate(prefix) if bool(target.broken_V[token])]
            prefix = prefix[: min(broken, default=len(prefix))]
        self.shared, count = None, len(prefix)
        self.cache.forget(spare)
        if prefix:
            counts_B = torch.tensor([count], device=target.device)
            tree = TokenTree.prompts(torch.tensor([list(prefix)], device=target.device), counts_B)
            self.shared = self.run(tree, [spare], counts_B[:, None] - 1)
            self.commit(torch.arange(count, device=target.device)[None], counts_B, [count], moved=False)

    @torch.no_grad()
    def run(self, tree: TokenTree, rows: list[int] | None = None, select_BM: Tensor | None = None) -> PassOutput:
        """Send a tree a row through the target after the committed tokens of each of the `rows`, by default the active
        ones, for the logits of the nodes `select_BM`, by default all. ValueError inside a block of `Target.native`."""
        target = self.target
        if target.is_native:
            raise ValueError("a tree was sent through the target inside its native() block, in which it knows none; "
                             "leave the block first")
        embedded, tokens_BN = target.embed(tree.tokens_BN), tree.tokens_BN
        lost_BN: Tensor | None = None
        if target.broken_V is not None:
            # Through a mask, a NaN would reach every other node of its row, though most guesses are rejected. A row
            # that accepts a token without a finite embedding ends there, as without a draft: its logits become NaN.
            broken_BN = target.broken_V[tree.tokens_BN]
            embedded.masked_fill_(broken_BN[..., None], 0.0)
            lost_BN = (tree.ancestors_BNN & (broken_BN & tree.real_BN)[:, None, :]).any(-1)
        if tree.virtual is not None and tree.virtual_BN is not None:
            tokens_BN = tokens_BN.masked_fill(tree.virtual_BN, -1)
            embedded[:, -tree.virtual.embedded_BMD.shape[1] :] = tree.virtual.embedded_BMD
        early: Tensor | None = None
        first = 0
        if self.drafted is not None and self.drafted.tree is not None and rows is None:
            # The first layers ran over these nodes while the tree was drafted.
            early, first = self.drafted.hand_over(tree, embedded), self.drafted.num_layers
        window = self.cache.open(slice(0, len(tree.tokens_BN)) if rows is None else rows, tree.size,
                                 virtual_BN=tree.virtual_BN)
        layout = PassLayout.of(tree, window.slots_BN[:, :1], window.width, target.context_length)
        later = later_layers(target.layers, first, early)
        recurrent = nullcontext() if self.cache.states is None else self.cache.states.reading(tree, window.rows)
        with target.tapping(self.taps) as states, later, injected(target.layers, tree.virtual), recurrent:
            final_BND = target.read_nodes(embedded, tokens_BN, layout, self.cache)
        self.calls += 1
        wanted_BMD = final_BND
        if select_BM is not None:
            wanted_BMD = final_BND.gather(1, select_BM[..., None].expand(-1, -1, final_BND.shape[-1]))
        logits_BMV = target.logits(wanted_BMD)
        if lost_BN is not None:
            # A token without a finite embedding says nothing, and its row ends with an error.
            lost_BM = lost_BN if select_BM is None else lost_BN.gather(1, select_BM)
            logits_BMV = logits_BMV.masked_fill(lost_BM[..., None], torch.nan)
        return PassOutput(logits_BMV=logits_BMV, final_BND=final_BND, taps=dict(states))

    def early(self, num_layers: int) -> EarlyLayers:
        """The first layers for a drafter that runs them on the active rows; the next pass of these takes them over.
        ValueError if a layer is tapped whose output they do not keep."""
        if any(layer < num_layers - 1 for layer in self.taps):
            raise ValueError(f"of the first {num_layers} layers only the last one's output is kept, got the taps "
                             f"{self.taps}")
        self.drafted = EarlyLayers(self.target, self.cache, num_layers)
        return self.drafted

    @torch.no_grad()
    def commit(self, path_BK: Tensor, counts_B: Tensor, host_counts: list[int], *, moved: bool = True) -> None:
        """Keep a path of the last pass in each of its rows; see `RowCache.commit`."""
        self.cache.commit(path_BK, counts_B, host_counts, moved=moved)

    @torch.no_grad()
    def open(self, row: int, index: int) -> int:
        """Empty a row for the request numbered `index`; it starts with the shared prefix, whose length is returned."""
        self.cache.forget(row)
        if self.shared is None:
            return 0
        spare = self.cache.rows - 1
        length = self.cache.host_lengths[spare]
        self.cache.copy(spare, row, length)
        return length

    def wipe(self, row: int) -> None:
        """Zero what a row that went wrong left in the cache."""
        self.cache.wipe(row)

    def keep(self, order: list[int]) -> None:
        """Make row order[r] the row r and drop the rest; an order may only pull later rows forward."""
        with torch.no_grad():
            for destination, source in enumerate(order):
                if source != destination:
                    self.cache.move(source, destination)
            self.cache.drop_after(len(order), self.active)
        self.active = len(order)
