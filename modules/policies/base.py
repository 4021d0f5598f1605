"""The interface of policies: how a token tree grows from a drafter's scores, written once for every family; and queries
of a drafter by tree level: scores looked up, tempered and sampled from.

Shapes: B rows, N nodes, F nodes of a level, K children of one node, O nodes the drafter was asked about, H depths
answered at once, Q entries of the draft vocabulary or candidates of a node, D width of the drafter's states."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..errors import UserError
from ..interfaces.proposer import DraftState, Frontier, Proposer, spread
from ..token_tree import TokenTree
from ..verification.sampling import Draws, SamplingSetting


class Policy(ABC):
    """Decides which guesses of a drafter are verified."""

    max_size: int  # Most nodes of a tree, the root included: cache slots a pass may need
    samples: bool = False
    """True if tokens are drawn from the draft: sampled answers then have the target's distribution, but are not those
    of plain decoding under the same random numbers."""

    @abstractmethod
    def grow(self, drafter: Proposer, state: DraftState, roots_B: Tensor, draws: Draws | None = None) -> TokenTree:
        """Build one tree a row below its root, the last token. It may look at nothing but what the drafter's state
        knows so far; `draws` are random numbers for policies that sample, None when every row is greedy."""

    def check(self, drafter: Proposer) -> None:  # noqa: B027
        """Raise UserError when the policy makes no sense with a family; most serve all, recurrent or one-shot."""

    def check_sampling(self, setting: SamplingSetting) -> None:  # noqa: B027
        """Raise UserError when the policy was made for another sampling of the answers; most serve all."""

    # A policy that chooses a size before each pass follows the batch: rows have the numbers that they have there.

    size: int = 0
    """Nodes of the next trees where `plan` chooses them, 1 for none: the drafter may then observe the pass later."""

    def plan(self, rows: int) -> None:  # noqa: B027
        """Choose the size of the next pass, over the first rows; most policies have one for all."""

    def learn(self, size: int, counts: Sequence[int], seconds: float) -> None:  # noqa: B027
        """Take in the nodes that each row accepted of a pass of this size, the root included, and its seconds."""

    def opened(self, row: int) -> None:  # noqa: B027
        """Forget a row, in which another sequence starts."""

    def kept(self, order: Sequence[int]) -> None:  # noqa: B027
        """Let row r be the former row order[r]; the others have left. Without any a batch starts."""

    def unwatched(self) -> "Policy":
        """This policy, made to ask the device nothing while a tree grows, as recorded rounds must; most never ask."""
        return self


def trimmed(tree: TokenTree) -> TokenTree:
    """The tree without the padding that no row needs; down to the root where nobody has a guess. On a CPU the time of a
    pass grows with its nodes and its size is known at once. On an accelerator a small pass costs what one token does,
    while asking for the size would wait for the device and another shape need another graph: the padding stays."""
    if tree.real_BN.device.type != "cpu":
        return tree
    size = int(tree.real_BN.sum(-1).max())
    return tree if size == tree.size else tree.packed(size)


class LevelQueries:
    """Scores of one tree level after another; what a one-shot family has answered already is looked up. A one-shot
    family scores a depth whatever the path, so the nodes of a level share the scores of the node that it was asked
    about. A node must have `least` entries; a drafter that names its candidates may have fewer, the rest is padding."""

    def __init__(self, drafter: Proposer, state: DraftState, least: int = 1) -> None:
        self.drafter, self.state, self.least = drafter, state, least
        self.token_ids_Q: Tensor | None = None
        self._answered: Tensor | None = None
        self.candidates_BOQ: Tensor | None = None  # Of the entries answered last, where they differ from node to node
        self.states_BOD: Tensor | None = None  # The drafter's, of the entries answered last; None where it has none
        self._candidates: Tensor | None = None
        self._states: Tensor | None = None
        self._origin_BF = torch.zeros(0)
        self._used = 0

    def ask(self, frontier: Frontier, above_BF: Tensor | None) -> tuple[Tensor, Tensor]:
        """(log-probabilities [B, O, Q], float32 or wider; for each frontier node its own, [B, F]) of the nodes of one
        level; `above_BF` is the column of each node's parent in the previous level's frontier, None for the root."""
        if self._answered is None or above_BF is None or self._used == self._answered.shape[2]:
            scores = self.drafter.expand(self.state, frontier)
            self.token_ids_Q, self._candidates, self._used = scores.token_ids_Q, scores.candidates_BFHQ, 0
            self._answered, self._states = scores.log_probs_BFHQ, scores.states_BFHD
            if (missing := self.least - self._answered.shape[-1]) > 0:
                if self._candidates is None:
                    raise UserError(f"the tree uses the {self.least} best guesses after a token, but the draft "
                                    f"vocabulary has {self.least - missing} tokens; choose a narrower tree, such as "
                                    "chain")
                self._candidates = pad(self._candidates, (0, missing))
                self._answered = pad(self._answered, (0, missing), value=-torch.inf)
            columns = torch.arange(frontier.nodes_BF.shape[1], device=frontier.nodes_BF.device)
            self._origin_BF = columns.expand_as(frontier.nodes_BF)
        else:
            self._origin_BF = self._origin_BF.gather(1, above_BF)
        depth, self._used = self._used, self._used + 1
        self.candidates_BOQ = None if self._candidates is None else self._candidates[:, :, depth]
        self.states_BOD = None if self._states is None else self._states[:, :, depth]
        log_probs_BOQ = self._answered[:, :, depth]
        log_probs_BOQ = log_probs_BOQ.to(torch.promote_types(log_probs_BOQ.dtype, torch.float32))
        # A drafter may have read a token without a finite embedding: NaN and +inf are no guess, and sorted among other
        # scores they would stand above the root.
        return torch.where(log_probs_BOQ < torch.inf, log_probs_BOQ, -torch.inf), self._origin_BF

    def tokens(self, entries_BFK: Tensor) -> Tensor:
        """Target-vocabulary ids of entries that were answered last, [B, F, K]."""
        if self.candidates_BOQ is not None:
            return spread(self.candidates_BOQ, self._origin_BF).gather(2, entries_BFK)
        return entries_BFK if self.token_ids_Q is None else self.token_ids_Q[entries_BFK]


def tempered(log_probs_BOQ: Tensor, temperature: float | None, draws: Draws) -> Tensor:
    """log q as it is drawn from, [B, O, Q]: at `temperature`, or each row's own; greedy rows as they are."""
    own_B = draws.temperature_B if temperature is None else torch.full_like(draws.temperature_B, temperature)
    divisor_B = torch.where(draws.sampling_B, own_B, 1.0)
    log_q_BOQ = (log_probs_BOQ / divisor_B[:, None, None]).log_softmax(-1)
    # A node without any guess has no q; the softmax of nothing would be NaN.
    nothing_BO1 = log_probs_BOQ.amax(-1, keepdim=True) == -torch.inf
    return log_q_BOQ.masked_fill(nothing_BO1, -torch.inf)


def sample(log_q_BFQ: Tensor, nodes_BF: Tensor, width: int, draws: Draws) -> Tensor:
    """Entries of `width` children of each node in the order drawn, [B, F, width]. Gumbel-top-k draws without
    replacement (arXiv:1903.06059); greedy rows take the likeliest instead. The sum is taken in float64: far below the
    favourite, where later siblings come from, float32 would round the noise away."""
    noise_BFQ = draws.gumbels(nodes_BF, log_q_BFQ.shape[-1]) * draws.sampling_B[:, None, None]
    return (log_q_BFQ.double() + noise_BFQ).topk(width, dim=-1).indices


def check_temperature(temperature: float | None) -> None:
    """Raise ValueError for a draft temperature that is not above 0."""
    if temperature is not None and not temperature > 0:
        raise ValueError(f"temperature must be above 0, got {temperature}")
