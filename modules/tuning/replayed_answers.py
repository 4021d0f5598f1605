"""Replay of stored answers: the exact accepted length of a drafter without a pass of the target.

Decoding emits the target's own answer whatever point masses are drafted, greedy or drawn under the same random numbers,
so on a stored answer every accepted path, and every state that a drafter observes, is already known. `Replay` answers
the loop's passes from there: its rows are decoded greedily, and the target's choice is the token that is stored.

A drafter whose guesses the target makes at virtual nodes would need its passes; its states after every position of the
text are computed at once instead.

Shapes: B rows, N nodes, M selected nodes, L positions, K draft steps, D hidden size, V vocabulary."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from ..decoding.requests import Request
from ..features import Features
from ..interfaces.drafter import Drafter
from ..target.loading.generation_defaults import TokenBiases
from ..target.model import Target
from ..target.target_rows import PassOutput
from ..token_tree import TokenTree


@dataclass(frozen=True)
class StoredRow:
    """One encoded conversation."""

    tokens_L: Tensor
    final_LD: Tensor
    taps: dict[int, Tensor]
    ahead_LKD: Tensor | None  # States of virtual nodes after each position, one a step; None for a drafter without any


class Replay:
    """Target whose passes are read from answers that it wrote, encoded batches of one conversation a row (no packing).
    Of the drafter that will draft its virtual nodes are read."""

    def __init__(self, target: Target, features: Sequence[Features], drafter: Drafter | None = None) -> None:
        self.target = target
        self.vocab_size, self.context_length = target.vocab_size, target.context_length
        self.tokenizer, self.compiler = target.tokenizer, target.compiler
        # No end tokens: an answer ends where the stored one does.
        self.eos_ids: tuple[int, ...] = ()
        self.biases = TokenBiases()
        self.ahead_of = drafter if drafter is not None and drafter.virtual_nodes else None
        self.rows: dict[int, StoredRow] = {}
        self.requests: list[Request] = []
        for batch in features:
            with torch.no_grad():
                ahead_BLKD = None if self.ahead_of is None else self.ahead_of(batch).hidden_BLKD
            for row in range(batch.tokens_BL.shape[0]):
                length = int((batch.segments_BL[row] >= 0).sum())
                stored = StoredRow(batch.tokens_BL[row, :length], batch.final()[row, :length],
                                   {layer: states[row, :length] for layer, states in batch.taps.items()},
                                   None if ahead_BLKD is None else ahead_BLKD[row, :length])
                # A conversation of several turns is a request for each of its answers.
                asked = answer_requests(batch, row, len(self.rows))
                self.rows |= {request.index: stored for request in asked}
                self.requests += asked
        self.device = next(iter(self.rows.values())).final_LD.device if self.rows else target.device

    def compiled(self) -> AbstractContextManager[None]:
        return nullcontext()

    def start(self, rows: int, capacity: int, taps: Sequence[int] = (), prefix: Sequence[int] = ()) -> "ReplayRows":
        """An empty batch of rows; a shared prefix has no use here."""
        return ReplayRows(self, rows, tuple(taps))


def answer_requests(batch: Features, row: int, first: int) -> list[Request]:
    """The requests of a stored conversation, numbered from `first` on: the text before each of its answers, which is at
    least two tokens long."""
    length = int((batch.segments_BL[row] >= 0).sum())
    tokens = batch.tokens_BL[row, :length].tolist()
    # An answer is a run of supervised tokens: it starts and stops where the mark changes.
    marks = [False, *batch.supervised_BL[row, :length].tolist(), False]
    edges = [place for place in range(length + 1) if marks[place] != marks[place + 1]]
    answers = [(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True)
               if start > 0 and stop - start > 1]
    return [Request(tuple(tokens[:start]), number, stop - start) for number, (start, stop) in enumerate(answers, first)]


class ReplayRows:
    """A batch of stored conversations, each read up to its last committed token."""

    def __init__(self, replay: Replay, rows: int, taps: tuple[int, ...]) -> None:
        self.replay, self.taps = replay, taps
        self.shared: PassOutput | None = None
        self.stored: list[StoredRow | None] = [None] * rows
        self.lengths = [0] * rows
        self.reads_virtual = replay.ahead_of is not None
        self._running: list[int] = []

    def run(self, tree: TokenTree, rows: list[int] | None = None, select_BM: Tensor | None = None) -> PassOutput:
        """Stored output at each node's position: right for accepted nodes, irrelevant for the others."""
        self._running = list(range(len(self.stored))) if rows is None else rows
        vocab_size = self.replay.target.vocab_size
        finals: list[Tensor] = []
        choices: list[Tensor] = []
        taps: dict[int, list[Tensor]] = {layer: [] for layer in self.taps}
        for place, row in enumerate(self._running):
            stored = self.stored[row]
            if stored is None:
                raise ValueError(f"row {row} was read before it was opened")
            last = stored.tokens_L.shape[0] - 1
            here_N = (self.lengths[row] + tree.depths_BN[place]).clamp(max=last)
            finals.append(stored.final_LD[here_N])
            choices.append(stored.tokens_L[(here_N + 1).clamp(max=last)])
            for layer in self.taps:
                taps[layer].append(stored.taps[layer][here_N])
            if tree.virtual is not None:
                # The states of virtual nodes are those after their anchor, and the last ones of a pass.
                if stored.ahead_LKD is None:
                    raise ValueError("this replay was made without the drafter whose virtual nodes it is asked about")
                anchors_M, slots_M = tree.virtual.anchors_BM[place], tree.virtual.slots_BM[place]
                depths_M = tree.depths_BN[place][anchors_M.clamp(min=0)]
                after_M = (self.lengths[row] + depths_M).clamp(max=last)
                copies = tree.virtual.slots // stored.ahead_LKD.shape[1]
                ahead_MD = stored.ahead_LKD[after_M, slots_M // copies].to(finals[-1].dtype)
                finals[-1] = torch.cat([finals[-1][: -len(anchors_M)], ahead_MD])
        choices_BM = torch.stack(choices)
        if select_BM is not None:
            choices_BM = choices_BM.gather(1, select_BM)
        # Greedy rows read only where the largest logit is.
        logits_BMV = torch.zeros(*choices_BM.shape, vocab_size, device=choices_BM.device)
        return PassOutput(logits_BMV=logits_BMV.scatter_(2, choices_BM[..., None], 1.0),
                          final_BND=torch.stack(finals).float(),
                          taps={layer: torch.stack(states).float() for layer, states in taps.items()})

    def early(self, num_layers: int) -> None:
        """No layer runs: a drafter of the first layers runs them itself."""

    def commit(self, path_BK: Tensor, counts_B: Tensor, host_counts: list[int], *, moved: bool = True) -> None:
        for row, count in zip(self._running, host_counts, strict=True):
            self.lengths[row] += count

    def open(self, row: int, index: int) -> int:
        # The prompt is read again like any text: its states are stored too.
        self.stored[row], self.lengths[row] = self.replay.rows[index], 0
        return 0

    def wipe(self, row: int) -> None:
        """Nothing to do: a row keeps only its position."""

    def keep(self, order: list[int]) -> None:
        self.stored = [self.stored[row] for row in order]
        self.lengths = [self.lengths[row] for row in order]
