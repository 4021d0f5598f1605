"""The contract every drafter family fulfils: weights here, sequence state outside.

What proposes tokens while decoding is a `Proposer`; one whose weights are trained and shipped is a `Drafter`.

Shapes: B rows, L positions, K draft steps answered by one call, D hidden size, F frontier nodes, H depths answered,
Q entries of the draft vocabulary or candidates of a node, R ranks used, M nodes of a pass, V target vocabulary.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from .features import Features
from .identity import TargetIdentity
from .packing import DecodingLinears
from .target import Target
from .vocabulary import OutputRows


@dataclass(frozen=True, kw_only=True)
class Drafts:
    """What a drafter's training forward gives: one hidden state for each draft step at each index.

    The k-th state at index p predicts the token at p + offsets[k]; the vocabulary projection is left to the loss, which
    takes it in chunks.
    """

    hidden_BLKD: Tensor
    """Draft hidden states, ready for the output layer."""
    offsets: tuple[int, ...]
    """How far ahead of its index each of the K states predicts, in tokens; several may predict the same."""
    valid_BLK: Tensor | None = None
    """False where a draft step has no state at an index, such as one dropped in training: there it neither learns nor
    counts, and its hidden state is any finite one. None, as always in evaluation mode, when no state is missing."""
    estimates: tuple[int, ...] | None = None
    """How far ahead of its index the target's final state lies that each of the K states resembles, when the family
    says so; the output layer of the target then predicts from it the token at `offsets`."""
    estimated_BLKD: Tensor | None = None
    """The states that resemble the target's, where a family keeps them apart from those that the output layer reads;
    None when they are `hidden_BLKD`."""

    def __post_init__(self) -> None:
        shape = self.hidden_BLKD.shape
        if self.valid_BLK is not None and self.valid_BLK.shape != shape[:3]:
            raise ValueError(f"valid_BLK must have the shape {tuple(shape[:3])} of the draft states, got "
                             f"{tuple(self.valid_BLK.shape)}")
        if self.estimated_BLKD is not None and (self.estimates is None or self.estimated_BLKD.shape[:3] != shape[:3]):
            raise ValueError(f"estimated_BLKD needs estimates and the shape {tuple(shape[:3])} of the draft states, "
                             f"got {self.estimates} and {tuple(self.estimated_BLKD.shape)}")
        for name, ahead in (("offsets", self.offsets), ("estimates", self.estimates)):
            if ahead is not None and len(ahead) != shape[2]:
                raise ValueError(f"{name} must have one entry for each of the {shape[2]} draft steps, got {ahead}")
        for offset, estimate in zip(self.offsets, self.estimates or (), strict=bool(self.estimates)):
            if not 0 <= estimate < offset:
                raise ValueError(f"a state that predicts {offset} tokens ahead cannot resemble the target's state "
                                 f"{estimate} ahead, which has seen that token or lies behind")


@dataclass(frozen=True, kw_only=True)
class Frontier:
    """Nodes of a growing tree whose children are asked for."""

    nodes_BF: Tensor
    """Index of each node in the tree, int64; 0 is the root."""
    parents_BF: Tensor
    """Index of each node's parent in the tree; -1 for the root."""
    tokens_BF: Tensor
    """Token of each node, int64."""


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Log-probabilities of the children of a frontier.

    A one-shot family answers H > 1 depths at once: level h scores every descendant h + 1 levels below the frontier
    node, whatever the path between. A recurrent family answers H = 1.
    """

    log_probs_BFHQ: Tensor
    """Draft log-probabilities, float32; minus infinity stands for "no guess"."""
    token_ids_Q: Tensor | None = None
    """Target-vocabulary id of each entry of a reduced draft vocabulary; None when Q is the whole vocabulary."""
    candidates_BFHQ: Tensor | None = None
    """Instead of `token_ids_Q`: the ids of a few candidates, other ones at every node. Only a drafter that answers
    this way may have fewer guesses than asked for."""

    def best(self, width: int) -> "Proposals":
        """The `width` likeliest children of each node, best first.

        Raises:
            ValueError: if the draft vocabulary is smaller than `width`.
        """
        entries = self.log_probs_BFHQ.shape[-1]
        if self.candidates_BFHQ is not None:
            top = self.log_probs_BFHQ.topk(min(width, entries), dim=-1)
            missing = (0, width - top.indices.shape[-1])
            tokens = nn.functional.pad(self.candidates_BFHQ.gather(-1, top.indices), missing)
            log_probs = nn.functional.pad(top.values, missing, value=-torch.inf)
            return Proposals(tokens, log_probs > -torch.inf, log_probs)
        if width > entries:
            raise ValueError(f"the tree uses the {width} best proposals of a node, the draft vocabulary has {entries}")
        top = self.log_probs_BFHQ.topk(width, dim=-1)
        tokens = top.indices if self.token_ids_Q is None else self.token_ids_Q[top.indices]
        return Proposals(tokens, None, top.values)


@dataclass(frozen=True)
class Proposals:
    """Children by rank, best first."""

    tokens_BFHR: Tensor
    """Target-vocabulary ids; any id where there is no guess."""
    guessed_BFHR: Tensor | None
    """Where the drafter has a guess at all; None when it has one everywhere."""
    log_probs_BFHR: Tensor
    """Their draft log-probabilities."""


@dataclass(frozen=True, kw_only=True)
class Verified:
    """What the target said at the nodes of a pass, the rejected ones included."""

    tokens_BM: Tensor
    """Token of each node, int64."""
    real_BM: Tensor
    """False at padding nodes, where the logits mean nothing."""
    logits_BMV: Tensor
    """The target's next-token logits behind each node."""
    places_BM: Tensor
    """Column of the node in the observation's `tokens_BN`; -1 for nodes that were rejected."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """Everything a drafter may look at after a pass: what was newly accepted, and what the target thought there.

    Row b has `counts_B[b]` new positions, left-aligned and padded on the right. Their tokens have been through the
    target (the last root and the accepted nodes); `roots_B` is the token the target decided next, which has not.
    """

    tokens_BN: Tensor
    """Tokens that went through the target, int64."""
    counts_B: Tensor
    """How many of them are real, per row."""
    final_BND: Tensor
    """The target's final states (after its last norm) at those tokens."""
    taps: dict[int, Tensor]
    """Outputs of the tapped layers at those tokens, each [B, N, D]."""
    roots_B: Tensor
    """The next token of each row: the root of its next tree."""
    verified: Verified | None = None
    """The target's logits, for drafters with `reads_logits`: at all nodes of a pass, at the last token of a prompt
    chunk."""

    @property
    def real_BN(self) -> Tensor:
        """Where a token is real and no padding."""
        return torch.arange(self.tokens_BN.shape[1], device=self.counts_B.device) < self.counts_B[:, None]

    @property
    def behind_BN(self) -> Tensor:
        """The token behind each one, int64; behind the last real one it is the root. Behind padding it is any."""
        shifted_BN = torch.cat([self.tokens_BN[:, 1:], self.roots_B[:, None]], dim=1)
        last_B1 = self.counts_B[:, None] - 1
        here_N = torch.arange(self.tokens_BN.shape[1], device=self.counts_B.device)
        return torch.where(here_N == last_B1, self.roots_B[:, None], shifted_BN)


class DraftState:
    """Sequence state of a batch of rows; each family keeps its own kind."""


class Proposer(ABC):
    """Guesses what the target says next; sequence state stays outside, so that rows can come, go and share it."""

    family: ClassVar[str]
    """Name of the family in artifacts, recipes and reports."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose outputs this drafter reads; none by default."""
        return ()

    @property
    def reach(self) -> int | None:
        """How deep below the root it can score: a one-shot family's depths; None for as deep as anyone likes."""
        return None

    @property
    def reads_logits(self) -> bool:
        """Whether observations must carry the target's logits; they need not by default."""
        return False

    @abstractmethod
    def start(self, rows: int, capacity: int) -> DraftState:
        """An empty state for a batch of `rows` sequences of at most `capacity` tokens, the largest tree included."""

    @abstractmethod
    def observe(self, state: DraftState, rows_R: Tensor, observation: Observation) -> None:
        """Take in what the last pass taught about the rows `rows_R` of the state; N counts new positions."""

    @abstractmethod
    def expand(self, state: DraftState, frontier: Frontier) -> Scores:
        """One draft step: scores of the children of the frontier nodes.

        The first call after an observation gets the root; a node is asked for once, after its parent.
        """

    @abstractmethod
    def clear(self, state: DraftState, rows_R: Tensor) -> None:
        """Forget everything about the rows `rows_R`: other sequences take their places."""

    def forget(self) -> None:  # noqa: B027 -- doing nothing is right for most
        """Drop what was learnt from earlier sequences; most families keep nothing beyond their weights."""

    @abstractmethod
    def keep(self, state: DraftState, rows_R: Tensor) -> None:
        """Let the state's row r be the former row rows_R[r], the others leave; later rows are pulled forward only."""

    def expand_bytes(self) -> int:
        """Bytes of weights that one `expand` reads, own and borrowed ones; lookups in a table count nothing."""
        return 0

    def observe_bytes(self) -> int:
        """Bytes of weights that one `observe` reads; most families only note what they will read later."""
        return 0


class Drafter(nn.Module, Proposer):
    """A small trained model that guesses what its target says next. It holds weights only.

    Borrowed parts of the target (embedding, output layer, first layers) are attached by `bind` and never saved,
    trained or moved by this module.
    """

    def __init__(self) -> None:
        super().__init__()
        self._packing = DecodingLinears()

    def train(self, mode: bool = True) -> Self:
        """Training runs the plain layers: it gives back the memory of those packed for decoding."""
        if mode:
            self._packing.release()
        return super().train(mode)

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """The JSON-ready configuration from which `rebuild` makes an equal, uninitialised drafter."""

    @classmethod
    @abstractmethod
    def rebuild(cls, description: dict[str, Any], identity: TargetIdentity) -> "Drafter":
        """Make a drafter from `describe()`'s answer, its own weights to be loaded, its borrowed parts unbound.

        Raises:
            UserError: if the description does not fit the family.
        """

    @abstractmethod
    def bind(self, target: Target) -> None:
        """Borrow what the family needs from `target`. Raises UserError when the target does not fit."""

    @property
    def reads_states(self) -> bool:
        """Whether `forward` reads the target's states, final or tapped; a draft language model does not."""
        return True

    @property
    def unrolls(self) -> int | None:
        """The training step whose answers at the following indices are those of the following draft steps, for a family
        that drafts by asking itself again; None when its K training steps are its K draft steps."""
        return None

    @property
    @abstractmethod
    def state_size(self) -> int:
        """Components of what `forward` gives at one index and step: the state that the output layer reads, and beside
        it the estimate of the target's where that is another."""

    @property
    def trained_steps(self) -> int:
        """Draft steps that training forms at every index: rows must be longer than they reach."""
        return self.reach or 1

    @abstractmethod
    def forward(self, features: Features) -> Drafts:
        """Training: the draft hidden states at all positions at once."""

    @abstractmethod
    def project(self, hidden: Tensor, step: int) -> Tensor:
        """Draft logits [..., Q] of draft step `step` for hidden states [..., D]: the output layer of that step."""

    def output_parameters(self, step: int) -> tuple[nn.Parameter, ...]:
        """The trained weights that `project` reads for draft step `step`; none where it borrows them."""
        return ()

    @property
    def token_ids_Q(self) -> Tensor | None:
        """Target id of each entry of a reduced draft vocabulary; None for the whole vocabulary."""
        return None

    def expand_bytes(self) -> int:
        """The own weights and the borrowed rows of the output layer; a family that reads others says so."""
        borrowed = sum(part.weight_QD.nbytes for part in vars(self).values() if isinstance(part, OutputRows))
        return borrowed + sum(parameter.nbytes for parameter in self.parameters())
