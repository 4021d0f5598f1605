"""Decoding with a causal draft model that reads the text itself, into its own cache, and grows trees there.

Shapes: B rows, R rows that change, F nodes of a draft pass, W cache slots in use, N tokens, H depths scored at once,
Q draft vocabulary, D hidden size.
"""

from abc import abstractmethod
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from ..interfaces.proposer import Frontier, Observation, Proposer, Scores
from .block_cache import BlockRows
from .decoder_block import AttentionContext
from .row_text import Text

WAITING = 16
"""Most accepted tokens that are read together with the root; a longer text, such as a prompt, is read at once."""
SLOT = -1  # Placeholder id of a mask token, which has a learned embedding and no id


class CausalState(Text):
    """The texts, the draft model's cache of them and the drafted tree.

    Args:
        rows: number of sequences.
        capacity: most tokens of one sequence.
        read: the cache.
    """

    def __init__(self, rows: int, capacity: int, read: BlockRows) -> None:
        super().__init__(rows, capacity, 0, read.cache.lengths_B.device)
        self.read = read
        self.held, self.caches = (*self.held, read.cache), (read.cache,)
        self.host_lengths = [0] * rows  # Tokens of each text without the root
        self.rooted = False  # Whether the tree holds the roots
        self.most = WAITING  # Most tokens of a row that an observation may leave unread
        self.at_once = False  # Whether every pass of one shape may accept more, so that its observation reads them

    def drop_tree(self) -> None:
        """Discard the roots and the nodes of their trees."""
        self.rooted = False
        self.read.drop_tree()

    def clear(self, rows_R: Tensor) -> None:
        """Reset the rows, texts and cache."""
        super().clear(rows_R)
        for row in rows_R.tolist():
            self.host_lengths[row] = 0

    def keep(self, rows_R: Tensor) -> None:
        """Keep the rows `rows_R`, in that order."""
        super().keep(rows_R)
        kept = [self.host_lengths[row] for row in rows_R.tolist()]
        self.host_lengths = [*kept, *[0] * (len(self.host_lengths) - len(kept))]

    def unread(self, rows: Sequence[int]) -> list[int]:
        """Tokens of these rows that are not in the cache, their roots not counted."""
        return [self.host_lengths[row] - self.read.cache.host_lengths[row] for row in rows]

    def expect(self, path: int) -> None:
        """Let each pass of one shape read as many tokens as one may leave unread."""
        self.most, self.at_once = min(WAITING, path), path > WAITING

    def advance(self, counts: Sequence[int]) -> None:
        """Count the accepted tokens, and those that the cache holds now: all that were unread before the pass."""
        read = self.unread(range(len(counts)))
        for row, count in enumerate(counts):
            self.host_lengths[row] += count
            read[row] += count if self.at_once else 0
        self.read.cache.advance(read)


class CausalDraft(Proposer[CausalState]):
    """A draft model with a causal cache: its states equal those of one pass over the text and the drafted path.

    This class holds text, cache and trees; a subclass defines the layers that run and the output layer.
    """

    kept: Sequence[int]  # Layers that run, ascending
    num_layers: int  # Number of layers of the whole model
    cache_groups: Sequence[Hashable]
    """A mark of each layer, equal where keys and values have equal shapes, see `RowCache`."""
    slots: int = 0
    """Mask tokens after the root, one for each depth beyond the first; 0 when depths are drafted one by one."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Device of the weights."""

    @abstractmethod
    def run(self, tokens_BF: Tensor, attention: AttentionContext, key_positions_BW: Tensor) -> Tensor:
        """Final states [B, F, D] of new tokens, `SLOT` for a mask token; keys go to the cache of `attention`."""

    @abstractmethod
    def read_out(self, final: Tensor) -> Scores:
        """Scores of states [B, F, H, D]: those of depth h of node f come from `final[:, f, h]`."""

    def start(self, rows: int, capacity: int) -> CausalState:
        """An empty state."""
        # Rows are padded to the row with the most unread tokens.
        read = BlockRows(len(self.kept), rows, capacity + WAITING + 1 + self.slots, self.device,
                         [self.cache_groups[layer] for layer in self.kept])
        # The storage holds the layers that run alone; the model numbers all of them, but the others never write.
        places = {layer: place for place, layer in enumerate(self.kept)}
        read.cache.layers = [read.cache.layers[places.get(layer, 0)] for layer in range(self.num_layers)]
        return CausalState(rows, capacity, read)

    def observe(self, state: CausalState, rows_R: Tensor, observation: Observation) -> None:
        """Store the new tokens. A few are read together with the root, many are read at once."""
        state.drop_tree()
        state.append(rows_R, observation)
        rows, counts = observation.on_host(rows_R)
        for row, count in zip(rows, counts, strict=True):
            state.host_lengths[row] += count
        if state.read.cache.bound is not None:
            if state.at_once:
                self._read(state, rows, observation.tokens_BN.shape[1], roots=0)
        elif (most := max(state.unread(rows))) > state.most:
            self._read(state, rows, most, roots=0)

    @torch.no_grad()
    def expand(self, state: CausalState, frontier: Frontier) -> Scores:
        """Log-probabilities of the children of the frontier nodes; with mask tokens of every depth below the root.

        Raises:
            ValueError: if a drafter with mask tokens gets a node other than the root.
        """
        if state.rooted:
            if self.slots:
                raise ValueError(f"this {self.family} drafter scores every depth from the root at once; pass only the "
                                 "root")
            attention = state.read.add_nodes(frontier)
            final_BFD = self.run(frontier.tokens_BF, attention, state.read.key_positions())
            return self.read_out(final_BFD[:, :, None])
        # First the unread tokens, the root and the mask tokens after it are read.
        rows = list(range(len(frontier.nodes_BF)))
        unread = max(state.unread(rows)) if state.read.cache.bound is None else state.most
        final_BND, counts_B = self._read(state, rows, unread + 1, roots=1)
        state.rooted = True
        # The tree starts with the root, which was read after the committed tokens.
        state.read.nodes_BM, state.read.above_BMM = state.read.root_B1, state.read.root_B11
        wanted_BH = counts_B[:, None] - 1 + torch.arange(1 + self.slots, device=counts_B.device)
        return self.read_out(final_BND.gather(1, wanted_BH[..., None].expand(-1, -1, final_BND.shape[-1]))[:, None])

    @torch.no_grad()
    def _read(self, state: CausalState, rows: list[int], width: int, *, roots: int) -> tuple[Tensor, Tensor]:
        """Run the tokens of these rows that are not in the cache, with their roots if `roots` is 1, and commit all but
        the roots.

        Mask tokens come after each root; later mask tokens see them, and they are not committed.

        Args:
            width: most tokens of a row, the root included; rows with fewer are padded.

        Returns:
            The final states [R, N, D], left-aligned, and the counts [R] without mask tokens.
        """
        counts = state.unread(rows)
        rows_R = state.read.cache.row_numbers(rows)
        counts_R = state.roots_S[rows_R] + roots - state.read.cache.lengths_B[rows_R]
        attention = state.read.read(rows, width + roots * self.slots)
        places_RN = attention.positions_BN.clamp(max=state.tokens_SL.shape[1] - 1)
        tokens_RN = state.tokens_SL[rows_R[:, None], places_RN].clamp(min=0)
        if self.slots and roots:
            order_N = torch.arange(tokens_RN.shape[1], device=tokens_RN.device)
            tokens_RN = torch.where(order_N < counts_R[:, None], tokens_RN, SLOT)
        final_RND = self.run(tokens_RN, attention, state.read.key_positions())
        state.read.commit(counts_R - roots, counts)
        return final_RND, counts_R
