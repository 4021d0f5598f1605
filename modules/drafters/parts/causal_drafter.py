"""Decoding with a causal draft model that reads the text itself, into its own cache, and grows trees there.

Shapes: B rows, R rows that change, F nodes of a draft pass, W cache slots in use, N tokens, H depths scored at once,
Q draft vocabulary, D hidden size.
"""

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from ...interfaces.proposer import DraftState, Frontier, Observation, Proposer, Scores
from ...target.kv_cache import RowCache
from .block_cache import BlockRows
from .decoder_block import AttentionContext
from .row_text import Text

WAITING = 16
"""Most accepted tokens that are read together with the root; a longer text, such as a prompt, is read at once."""
SLOT = -1
"""Placeholder id of a mask token, which has a learned embedding and no id."""


class CausalState(Text):
    """The texts, the draft model's cache of them and the drafted tree."""

    def __init__(self, rows: int, capacity: int, read: BlockRows) -> None:
        super().__init__(rows, capacity, 0, read.cache.lengths_B.device)
        self.read = read
        self.host_lengths = [0] * rows
        """Tokens of each text without the root."""
        self.rooted = False
        """Whether the tree holds the roots."""
        self.most = WAITING
        """Most tokens of a row that an observation may leave unread."""
        self.at_once = False
        """Whether every pass of one shape may accept more, so that its observation reads them."""

    @property
    def caches(self) -> tuple[RowCache, ...]:
        """The draft model's."""
        return (self.read.cache,)

    def drop_tree(self) -> None:
        """Discard the roots and the nodes of their trees."""
        self.rooted = False
        self.read.drop_tree()

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


class CausalDraft(Proposer):
    """A draft model with a causal cache: its states equal those of one pass over the text and the drafted path.

    This class holds text, cache and trees; a subclass defines the layers that run and the output layer.
    """

    @property
    @abstractmethod
    def kept(self) -> Sequence[int]:
        """Layers that run, ascending."""

    @property
    @abstractmethod
    def num_layers(self) -> int:
        """Number of layers of the whole model."""

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

    @property
    def slots(self) -> int:
        """Mask tokens after the root, one for each depth beyond the first; 0 when depths are drafted one by one."""
        return 0

    def start(self, rows: int, capacity: int) -> CausalState:
        """An empty state."""
        # Rows are padded to the row with the most unread tokens.
        read = BlockRows(len(self.kept), rows, capacity + WAITING + 1 + self.slots, self.device)
        # The storage holds the layers that run alone; the model numbers all of them, but the others never write.
        places = {layer: place for place, layer in enumerate(self.kept)}
        read.cache.layers = [read.cache.layers[places.get(layer, 0)] for layer in range(self.num_layers)]
        return CausalState(rows, capacity, read)

    def observe(self, state: DraftState, rows_R: Tensor, observation: Observation) -> None:
        """Store the new tokens. A few are read together with the root, many are read at once."""
        held = _causal_state(state)
        held.drop_tree()
        held.append(rows_R, observation)
        rows, counts = observation.on_host(rows_R)
        for row, count in zip(rows, counts, strict=True):
            held.host_lengths[row] += count
        if held.read.cache.bound is not None:
            if held.at_once:
                self._read(held, rows, observation.tokens_BN.shape[1], roots=0)
        elif (most := max(held.unread(rows))) > held.most:
            self._read(held, rows, most, roots=0)

    @torch.no_grad()
    def expand(self, state: DraftState, frontier: Frontier) -> Scores:
        """Log-probabilities of the children of the frontier nodes; with mask tokens of every depth below the root.

        Raises:
            ValueError: if a drafter with mask tokens gets a node other than the root.
        """
        held = _causal_state(state)
        if not held.rooted:
            return self.read_out(self._root(held, len(frontier.nodes_BF))[:, None])
        if self.slots:
            raise ValueError(f"this {self.family} drafter scores every depth from the root at once; pass only the root")
        attention = held.read.add_nodes(frontier)
        return self.read_out(self.run(frontier.tokens_BF, attention, held.read.key_positions())[:, :, None])

    def _root(self, held: CausalState, batch: int) -> Tensor:
        """Read the unread tokens, the root and the mask tokens; returns states of the root's depths, [B, H, D]."""
        rows = list(range(batch))
        unread = max(held.unread(rows)) if held.read.cache.bound is None else held.most
        final_BND, counts_B = self._read(held, rows, unread + 1, roots=1)
        held.rooted = True
        held.read.hold_root()
        wanted_BH = counts_B[:, None] - 1 + torch.arange(1 + self.slots, device=counts_B.device)
        return final_BND.gather(1, wanted_BH[..., None].expand(-1, -1, final_BND.shape[-1]))

    @torch.no_grad()
    def _read(self, held: CausalState, rows: list[int], width: int, *, roots: int) -> tuple[Tensor, Tensor]:
        """Run the tokens of these rows that are not in the cache, with their roots if `roots` is 1, and commit all but
        the roots.

        Mask tokens come after each root; later mask tokens see them, and they are not committed.

        Args:
            width: most tokens of a row, the root included; rows with fewer are padded.

        Returns:
            The final states [R, N, D], left-aligned, and the counts [R] without mask tokens.
        """
        counts = held.unread(rows)
        rows_R = held.read.cache.row_numbers(rows)
        counts_R = held.roots_S[rows_R] + roots - held.read.cache.lengths_B[rows_R]
        attention = held.read.read(rows, width + roots * self.slots)
        places_RN = attention.positions_BN.clamp(max=held.tokens_SL.shape[1] - 1)
        tokens_RN = held.tokens_SL[rows_R[:, None], places_RN].clamp(min=0)
        if self.slots and roots:
            order_N = torch.arange(tokens_RN.shape[1], device=tokens_RN.device)
            tokens_RN = torch.where(order_N < counts_R[:, None], tokens_RN, SLOT)
        final_RND = self.run(tokens_RN, attention, held.read.key_positions())
        held.read.commit(counts_R - roots, counts)
        return final_RND, counts_R

    def clear(self, state: DraftState, rows_R: Tensor) -> None:
        """Reset the rows, texts and cache."""
        held, rows = _causal_state(state), rows_R.tolist()
        held.drop_tree()
        held.clear(rows_R)
        held.read.clear(rows)
        for row in rows:
            held.host_lengths[row] = 0

    def keep(self, state: DraftState, rows_R: Tensor) -> None:
        """Keep the rows `rows_R`, in that order."""
        held, order = _causal_state(state), rows_R.tolist()
        held.drop_tree()
        held.keep(rows_R)
        held.read.keep(order)
        left = len(held.host_lengths) - len(order)
        held.host_lengths = [*(held.host_lengths[row] for row in order), *[0] * left]


def _causal_state(state: DraftState) -> CausalState:
    if not isinstance(state, CausalState):
        raise TypeError(f"a draft model needs the state that its own start() made, got {type(state).__name__}")
    return state
