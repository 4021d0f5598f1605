"""Passes through some of a target's layers, or of nodes that come after text which it has read.

What makes a model run some of its layers only, or lets nodes enter at a later one, keeps the model's own forward pass:
embeddings, positions, masks and the last norm are the architecture's.

A node's states in the first layers depend on its path alone. So the verifying pass takes over those of every node whose
path was read while the tree grew, runs the first layers on the others only, and all later layers once over all nodes
(Kangaroo, arXiv:2404.18911).

Shapes: B rows, L positions, M nodes read so far, F new nodes, K nodes of a verified tree not read yet, N all its nodes,
C = M + K, W cache slots in use, D hidden size."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot, pad
from transformers.cache_utils import DynamicCache, DynamicLayer

from ..features import Features
from ..token_tree import TokenTree, VirtualNodes
from .attention.segment_attention import mask_arguments, visible_text
from .attention.tree_attention import place_arguments
from .attention.two_parts import FEWEST_SLOTS, TreeParts
from .kv_cache import RowCache

if TYPE_CHECKING:
    from .model import Target


@dataclass(frozen=True, kw_only=True)
class PassLayout:
    """The places of nodes after the committed tokens of their rows."""

    positions_BN: Tensor  # Position id of each node, int64: its row's length plus its depth
    visible_BNW: Tensor  # True where a node sees a slot: committed tokens, its ancestors and itself
    key_positions_BW: Tensor  # Position id of each slot, for sliding windows
    parts: TreeParts | None = None  # For attention in two parts; None for prompts, virtual nodes and short rows

    @classmethod
    def of(cls, tree: TokenTree, lengths_B1: Tensor, width: int, context_length: int) -> "PassLayout":
        """The layout of one tree a row, whose node n is in the slot lengths[b] + n of `width` in use. Positions beyond
        the target's context length become its last one."""
        depths_BN, size = tree.depths_BN, tree.size
        positions_BN = (lengths_B1 + depths_BN).clamp(max=context_length - 1)
        slots_W = torch.arange(width, device=lengths_B1.device)
        node_BW = slots_W - lengths_B1
        inside_BW = (node_BW >= 0) & (node_BW < size)
        node_BW = node_BW.clamp(0, size - 1)
        ancestor_BNW = tree.ancestors_BNN.gather(2, node_BW[:, None, :].expand(-1, size, -1))
        long = width >= FEWEST_SLOTS and not tree.prompt and tree.virtual is None
        return cls(positions_BN=positions_BN, parts=TreeParts.of(tree, lengths_B1) if long else None,
                   visible_BNW=(slots_W < lengths_B1)[:, None, :] | (inside_BW[:, None, :] & ancestor_BNW),
                   key_positions_BW=torch.where(inside_BW, positions_BN.gather(1, node_BW), slots_W))


Forward = Callable[..., Tensor]  # The forward of a layer


@contextmanager
def skipping(layers: nn.ModuleList, kept: Sequence[int]) -> Iterator[None]:
    """Let only the layers `kept` of a model do anything inside the block."""
    skipped = [layer for index, layer in enumerate(layers) if index not in set(kept)]
    with replaced((layer, _unchanged) for layer in skipped):
        yield


@contextmanager
def first_layers(layers: nn.ModuleList, count: int) -> Iterator[list[Tensor]]:
    """Let only the first `count` layers of a model run, fewer than it has; their outputs are added to the list."""
    # The model's own forward ends in its norm, which the drafter's states come before: they are kept on the way.
    outputs: list[Tensor] = []

    def end(hidden_states: Tensor, *_args: object, **_kwargs: object) -> Tensor:
        outputs.append(hidden_states)
        return hidden_states

    after = [(layer, _unchanged if place else end) for place, layer in enumerate(layers[count:])]
    with replaced(after):
        yield outputs


@contextmanager
def later_layers(layers: nn.ModuleList, first: int, states: Tensor | None) -> Iterator[None]:
    """Let a model start at its layer `first`, at least 1, from the given outputs of the layer before it; without states
    it runs as a whole."""
    if states is None:
        yield
        return

    before = [(layer, (lambda *_args, **_kwargs: states) if place + 1 == first else _unchanged)
              for place, layer in enumerate(layers[:first])]
    with replaced(before):
        yield


@contextmanager
def injected(layers: nn.ModuleList, virtual: VirtualNodes | None) -> Iterator[None]:
    """Give the virtual nodes of a pass, its last ones, their own states at a later layer inside the block."""
    injection = None if virtual is None else virtual.injection
    if virtual is None or injection is None:
        yield
        return
    anchors_BM1, count = virtual.anchors_BM.clamp(min=0)[..., None], virtual.anchors_BM.shape[1]

    def enter(_layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
        hidden_BND = args[0] if args else kwargs["hidden_states"]
        before_BMD = hidden_BND.gather(1, anchors_BM1.expand(-1, -1, hidden_BND.shape[-1]))
        states_BMD = injection.states(before_BMD, virtual.slots_BM).to(hidden_BND.dtype)
        changed_BND = torch.cat([hidden_BND[:, :-count], states_BMD], dim=1)
        return ((changed_BND, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": changed_BND})

    handle = layers[injection.layer].register_forward_pre_hook(enter, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def replaced(forwards: Iterable[tuple[nn.Module, Forward]]) -> Iterator[None]:
    """Run other forwards in place of those of some layers inside the block."""
    given = list(forwards)
    # Hooks that spread a model over devices replace `forward` on the layer too: what was there must come back.
    former = [layer.__dict__.get("forward") for layer, _ in given]
    for layer, forward in given:
        layer.__dict__["forward"] = forward
    try:
        yield
    finally:
        for (layer, _), own in zip(given, former, strict=True):
            if own is None:
                del layer.__dict__["forward"]
            else:
                layer.__dict__["forward"] = own


def _unchanged(hidden_states: Tensor, *_args: object, **_kwargs: object) -> Tensor:
    return hidden_states


class EarlyLayers:
    """The first layers of a target, run on nodes level by level; `cache` is of `target.start`'s rows, or of these
    layers alone. Nodes get the slots after the committed tokens of their rows in the order in which they come, and are
    never committed by this class: the verifying pass moves them to the places of its tree. In a cache that no target
    pass extends, `read` runs and commits the text itself."""

    states_BMD: Tensor  # Outputs of the last of these layers at the nodes read so far
    ids_BM: Tensor  # Numbers by which the nodes' children name them

    def __init__(self, target: "Target", cache: RowCache, num_layers: int) -> None:
        self.target, self.cache, self.num_layers = target, cache, num_layers
        self.tree: TokenTree | None = None

    @classmethod
    def alone(cls, target: "Target", rows: int, capacity: int, num_layers: int) -> "EarlyLayers":
        """The layers with a cache of their own, for sequences of `capacity` tokens that they read themselves."""
        cache = RowCache(num_layers, rows, capacity, target.device, target.layer_devices, target.cache_groups)
        return cls(target, cache, num_layers)

    # While drafting --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def run(self, nodes_BF: Tensor, parents_BF: Tensor, tokens_BF: Tensor) -> Tensor:
        """Outputs [B, F, D] of the last of these layers at new nodes; the first call gets the root. Later calls name
        nodes by their numbers as parents; the root's parent is -1."""
        if (former := self.tree) is None:
            # A root alone, written out: a captured graph must not ask a topology for what it computes but once.
            itself_B11 = torch.ones_like(tokens_BF, dtype=torch.bool)[..., None]
            tree = TokenTree(
                tokens_BN=tokens_BF, parents_BN=torch.full_like(tokens_BF, -1), depths_BN=torch.zeros_like(tokens_BF),
                ancestors_BNN=itself_B11, real_BN=itself_B11[..., 0], max_depth=0)
        else:
            above_BF = (parents_BF[:, :, None] == self.ids_BM[:, None]).long().argmax(-1)
            seen_BFM = former.ancestors_BNN.gather(1, above_BF[..., None].expand(-1, -1, former.size))
            itself_FF = torch.eye(tokens_BF.shape[1], dtype=torch.bool, device=tokens_BF.device)
            tree = _extended(former, tokens_BF, above_BF,
                             torch.cat([seen_BFM, itself_FF.expand(len(seen_BFM), -1, -1)], 2))
        new_BFD = self._outputs(list(range(len(tokens_BF))), tree, self.target.embed_guesses(tokens_BF))
        if former is None:
            self.states_BMD, self.ids_BM = new_BFD, nodes_BF
        else:
            self.states_BMD = torch.cat([self.states_BMD, new_BFD], dim=1)
            self.ids_BM = torch.cat([self.ids_BM, nodes_BF], dim=1)
        self.tree = tree
        return new_BFD

    def drop(self) -> None:
        """Discard the nodes; their slots are overwritten."""
        self.tree = None

    # In the verifying pass -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def hand_over(self, tree: TokenTree, embedded_BND: Tensor) -> Tensor:
        """Outputs of the last of these layers at all nodes of a verified tree below the same roots, [B, N, D], padding
        excepted. ValueError if no node has been read. Afterwards the cache holds these layers' keys and values of node
        n in the slot lengths[b] + n, and the nodes read so far are discarded."""
        if self.tree is None:
            raise ValueError("no node was read by the first layers, so there is nothing to hand over")
        read, self.tree = self.tree, None
        equal_BNM, virtual_BN = tree.equal_paths(read), tree.virtual_BN
        known_BN, order_N = equal_BNM.any(-1), torch.arange(tree.size, device=equal_BNM.device)
        missing_BN = (tree.real_BN if virtual_BN is None else tree.real_BN | virtual_BN) & ~known_BN
        # Padding gets the root's states: any finite ones will do.
        columns_BN = torch.where(known_BN, equal_BNM.long().argmax(-1), 0)
        columns_BN = torch.where(missing_BN, read.size + missing_BN.cumsum(-1) - 1, columns_BN)
        # The root has been read. An accelerator runs as many as may be missing: it would wait to learn how many are.
        count, moved = tree.size - 1, tree.size > 1
        if columns_BN.device.type == "cpu":
            count, moved = torch.stack([missing_BN.sum(-1).max(), (columns_BN != order_N).any()]).tolist()
        states_BCD = self.states_BMD
        if count:
            # The missing nodes come after those read, in the order of the tree; rows that lack fewer are padded with
            # nodes that see themselves alone.
            places_BK = (~missing_BN).byte().sort(dim=-1, stable=True).indices[:, :count]
            here_BK1, places_BK1 = missing_BN.gather(1, places_BK)[..., None], places_BK[..., None]
            there_BNC = one_hot(columns_BN, read.size + count).float()
            path_BKN = tree.ancestors_BNN.gather(1, places_BK1.expand(-1, -1, tree.size))
            itself_KC = pad(torch.eye(count, dtype=torch.bool, device=columns_BN.device), (read.size, 0))
            seen_BKC = torch.where(here_BK1, (path_BKN.float() @ there_BNC) > 0, itself_KC)
            # Which node is the parent does not matter here: masks and positions follow from the ancestors.
            extended = _extended(read, tree.tokens_BN.gather(1, places_BK), torch.zeros_like(places_BK), seen_BKC)
            embedded_BKD = embedded_BND.gather(1, places_BK1.expand(-1, -1, embedded_BND.shape[-1]))
            virtual_BK = None if virtual_BN is None else virtual_BN.gather(1, places_BK)
            new_BKD = self._outputs(list(range(len(places_BK))), extended, embedded_BKD, virtual_BK)
            states_BCD = torch.cat([states_BCD, new_BKD], 1)
        if moved:
            self.cache.arrange(self.num_layers, columns_BN)
        return states_BCD.gather(1, columns_BN[..., None].expand(-1, -1, states_BCD.shape[-1]))

    # Text that no target pass reads ----------------------------------------------------------------------------------

    @torch.no_grad()
    def read(self, rows: list[int], tokens_BN: Tensor, counts_B: Tensor, host_counts: list[int]) -> None:
        """Run the layers on the next tokens of these rows, counts_B[b] of them in each, and commit them."""
        self.drop()
        tree = TokenTree.prompts(tokens_BN, counts_B)
        self._outputs(rows, tree, self.target.embed(tokens_BN))
        self.cache.commit(counts_B[:, None], counts_B, host_counts, moved=False)

    def _outputs(self, rows: list[int], tree: TokenTree, embedded_BFD: Tensor,
                 virtual_BF: Tensor | None = None) -> Tensor:
        """Run the layers on the last F nodes of a tree, whose other nodes are in the cache; returns [B, F, D].
        `virtual_BF` is None where no node is virtual."""
        count = embedded_BFD.shape[1]
        self.cache.reserve(max(self.cache.host_lengths[row] for row in rows), tree.size)
        adjacent = rows == list(range(len(rows)))
        window = self.cache.open(slice(0, len(rows)) if adjacent else rows, count, gap=tree.size - count,
                                 virtual_BN=virtual_BF)
        lengths_B1 = self.cache.lengths_B[window.rows_B1]
        layout, first = PassLayout.of(tree, lengths_B1, window.width, self.target.context_length), tree.size - count
        # The last nodes alone run; the slots of the others, which they see, stay in use.
        parts = layout.parts if virtual_BF is None else None
        layout = replace(layout, positions_BN=layout.positions_BN[:, first:], visible_BNW=layout.visible_BNW[:, first:],
                         parts=parts and replace(parts, hidden_BNC=parts.hidden_BNC[:, first:]))
        with first_layers(self.target.layers, self.num_layers) as outputs:
            tokens_BF = tree.tokens_BN[:, first:]
            tokens_BF = tokens_BF if virtual_BF is None else tokens_BF.masked_fill(virtual_BF, -1)
            self.target.read_nodes(embedded_BFD, tokens_BF, layout, self.cache)
        return outputs[0].to(self.target.device)


def _extended(tree: TokenTree, tokens_BF: Tensor, parents_BF: Tensor, seen_BFC: Tensor) -> TokenTree:
    """The tree with F more nodes, each of which sees the given ones, itself included."""
    return replace(tree, tokens_BN=torch.cat([tree.tokens_BN, tokens_BF], dim=1),
                   parents_BN=torch.cat([tree.parents_BN, parents_BF], dim=1),
                   depths_BN=torch.cat([tree.depths_BN, seen_BFC.sum(-1) - 1], dim=1),
                   ancestors_BNN=torch.cat([pad(tree.ancestors_BNN, (0, tokens_BF.shape[1])), seen_BFC], dim=1),
                   real_BN=torch.cat([tree.real_BN, torch.ones_like(tokens_BF, dtype=torch.bool)], dim=1),
                   max_depth=tree.max_depth + 1, most_children=None)


class ReadText:
    """Rows of text with their keys and values in the target, which needs no stored states. Nodes see the text up to
    their anchor, in the anchor's segment, and each other by a mask. Nothing is trained in the target: the text is read
    without a graph, and gradients of the nodes reach their embeddings."""

    def __init__(self, target: "Target", features: Features) -> None:
        self.target, self.features = target, features.to(target.device)
        # Without a configuration: no layer of this cache drops what lies outside a window.
        self.cache = DynamicCache()
        text = self.features
        with torch.no_grad(), torch.autocast(target.device.type, enabled=False):
            embedded_BLD = target.embed_guesses(text.tokens_BL)
            self.final_BLD: Tensor = target.decoder(
                inputs_embeds=embedded_BLD, past_key_values=self.cache, use_cache=True,
                **target.looked_up(text.tokens_BL), **place_arguments(text.positions_BL, text.positions_BL),
                **mask_arguments(visible_text(text, target.decoder), target.decoder, embedded_BLD)).last_hidden_state
        self._layers = [layer for layer in self.cache.layers if isinstance(layer, DynamicLayer)]
        self._read = [(layer.keys, layer.values) for layer in self._layers]

    def read(self, embedded_BND: Tensor, anchors_BN: Tensor, ahead_BN: Tensor, sees_NN: Tensor, *,
             first: int = 0) -> Tensor:
        """Final states [B, N, D] of nodes after the text's tokens; the text stays as it was. Each comes after the
        position `anchors_BN` of its row, `ahead_BN` positions further on, and sees the nodes of `sees_NN`, itself among
        them. `embedded_BND` is what enters the layer `first`."""
        target, text = self.target, self.features
        order_L = torch.arange(text.tokens_BL.shape[1], device=anchors_BN.device)
        segments_BN = text.segments_BL.gather(1, anchors_BN)
        seen_BNL = (text.segments_BL[:, None] == segments_BN[..., None]) & (order_L <= anchors_BN[..., None])
        positions_BN = text.positions_BL.gather(1, anchors_BN) + ahead_BN
        positions_BN = positions_BN.clamp(max=target.context_length - 1)
        layout = PassLayout(positions_BN=positions_BN,
                            visible_BNW=torch.cat([seen_BNL, sees_NN.expand(len(seen_BNL), -1, -1)], dim=2),
                            key_positions_BW=torch.cat([text.positions_BL, positions_BN], dim=1))
        entering = embedded_BND.to(target.dtype)
        # Plain linear layers: packed ones have no gradient.
        with (torch.autocast(target.device.type, enabled=False), target.linears.plain(),
              later_layers(target.layers, first, entering if first else None)):
            final_BND = target.read_nodes(entering, torch.full_like(positions_BN, -1), layout, self.cache)
        for layer, (keys, values) in zip(self._layers, self._read, strict=True):
            layer.keys, layer.values = keys, values
        return final_BND
