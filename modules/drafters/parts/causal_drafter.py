"""Decoding with a causal draft model that reads the text by itself, into a cache of its own, and grows trees there.

Shapes: B rows, R rows that change, F nodes of a draft pass, W cache slots in use, N tokens, H depths answered at once,
Q draft vocabulary, D hidden size.
"""

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from ...interfaces.proposer import DraftState, Frontier, Observation, Proposer, Scores
from .block_cache import BlockRows
from .decoder_block import Sight
from .row_text import Text

WAITING = 16
"""Accepted tokens that wait for the root's pass; a longer text, such as a prompt, is read at once."""
SLOT = -1
"""Stands for a mask token: it has a learned embedding and no id."""


class CausalState(Text):
    """The texts, and what the draft model has read of them, with the tree drafted behind it."""

    def __init__(self, rows: int, capacity: int, read: BlockRows) -> None:
        super().__init__(rows, capacity, 0, read.cache.lengths_B.device)
        self.read = read
        self.host_lengths = [0] * rows
        """Tokens of each text, the root not counted."""
        self.rooted = False
        """Whether the roots have been read: they count as read for the tree behind them alone."""

    def uproot(self) -> None:
        """Forget the roots and the nodes behind them."""
        if self.rooted:
            self.read.cache.rewind(len(self.host_lengths), 1)
            self.rooted = False
        self.read.uproot()


class CausalDraft(Proposer):
    """A draft model with a causal cache: its states are those of one fresh pass over the text and the path drafted.

    Whoever inherits says which layers run and what reads their states; text, cache and trees are kept here.
    """

    @property
    @abstractmethod
    def kept(self) -> Sequence[int]:
        """Layers that run, ascending."""

    @property
    @abstractmethod
    def num_layers(self) -> int:
        """Layers that the model numbers."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where its weights are."""

    @abstractmethod
    def run(self, tokens_BF: Tensor, sight: Sight, key_positions_BW: Tensor) -> Tensor:
        """Final states [B, F, D] of new tokens, `SLOT` for a mask token, written into the cache of `sight`."""

    @abstractmethod
    def read_out(self, final: Tensor) -> Scores:
        """Scores of states [B, F, H, D]: depth h of node f is read from `final[:, f, h]`."""

    @property
    def slots(self) -> int:
        """Mask tokens read behind the root, one for each depth beyond the first; none where depths come one by one."""
        return 0

    def start(self, rows: int, capacity: int) -> CausalState:
        """An empty state."""
        # Beside a row with tokens waiting, the others are padded.
        read = BlockRows(len(self.kept), rows, capacity + WAITING + 1 + self.slots, self.device)
        # The model numbers all its layers, the storage holds the kept ones; the others never write.
        places = {layer: place for place, layer in enumerate(self.kept)}
        read.cache.layers = [read.cache.layers[places.get(layer, 0)] for layer in range(self.num_layers)]
        return CausalState(rows, capacity, read)

    def observe(self, state: DraftState, rows_R: Tensor, observation: Observation) -> None:
        """Note the new tokens. A few wait for the root's pass; many are read at once."""
        held = _causal(state)
        held.uproot()
        held.append(rows_R, observation)
        rows = rows_R.tolist()
        for row, count in zip(rows, observation.counts_B.tolist(), strict=True):
            held.host_lengths[row] += count
        if max(held.host_lengths[row] - held.read.cache.host_lengths[row] for row in rows) > WAITING:
            self._read(held, rows, roots=0)

    @torch.no_grad()
    def expand(self, state: DraftState, frontier: Frontier) -> Scores:
        """Log-probabilities of the children of the frontier nodes; with mask tokens of every depth below the root.

        Raises:
            ValueError: if a drafter with mask tokens is asked about another node.
        """
        held = _causal(state)
        if not held.rooted:
            return self.read_out(self._root(held)[:, None])
        if self.slots:
            raise ValueError(f"this {self.family} drafter answers every depth from the root at once; ask for the root")
        sight = held.read.sprout(frontier)
        return self.read_out(self.run(frontier.tokens_BF, sight, held.read.key_positions())[:, :, None])

    def _root(self, held: CausalState) -> Tensor:
        """Read what is waiting, the root and the mask tokens behind it; states of the root's depths, [B, H, D]."""
        final_BND, counts_B = self._read(held, list(range(len(held.host_lengths))), roots=1)
        held.rooted = True
        wanted_BH = counts_B[:, None] - 1 + torch.arange(1 + self.slots, device=counts_B.device)
        return final_BND.gather(1, wanted_BH[..., None].expand(-1, -1, final_BND.shape[-1]))

    @torch.no_grad()
    def _read(self, held: CausalState, rows: list[int], *, roots: int) -> tuple[Tensor, Tensor]:
        """Run the tokens of these rows that are not in the cache, with their roots if `roots` is 1, and keep them.

        Mask tokens stand behind each root; they are seen by their successors and not kept.

        Returns:
            The final states [R, N, D], left-aligned, and the counts [R], mask tokens not counted.
        """
        device = held.roots_S.device
        counts = [held.host_lengths[row] + roots - held.read.cache.host_lengths[row] for row in rows]
        rows_R, counts_R = torch.tensor(rows, device=device), torch.tensor(counts, device=device)
        sight = held.read.read(rows, max(counts) + roots * self.slots)
        places_RN = sight.positions_BN.clamp(max=held.tokens_SL.shape[1] - 1)
        tokens_RN = held.tokens_SL[rows_R[:, None], places_RN].clamp(min=0)
        if self.slots and roots:
            order_N = torch.arange(tokens_RN.shape[1], device=device)
            tokens_RN = torch.where(order_N < counts_R[:, None], tokens_RN, SLOT)
        final_RND = self.run(tokens_RN, sight, held.read.key_positions())
        held.read.commit(counts_R, counts)
        return final_RND, counts_R

    def clear(self, state: DraftState, rows_R: Tensor) -> None:
        """Forget the rows' texts and what was read of them."""
        held, rows = _causal(state), rows_R.tolist()
        held.uproot()
        held.clear(rows_R)
        held.read.clear(rows)
        for row in rows:
            held.host_lengths[row] = 0

    def keep(self, state: DraftState, rows_R: Tensor) -> None:
        """Let row r be the former row rows_R[r]."""
        held, order = _causal(state), rows_R.tolist()
        held.uproot()
        held.keep(rows_R)
        held.read.keep(order)
        held.host_lengths = [held.host_lengths[row] for row in order]


def _causal(state: DraftState) -> CausalState:
    if not isinstance(state, CausalState):
        raise TypeError(f"a draft model needs the state that its own start() made, got {type(state).__name__}")
    return state
