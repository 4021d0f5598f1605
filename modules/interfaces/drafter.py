"""The contract every drafter family fulfils: weights here, sequence state outside.

What proposes tokens while decoding is a `Proposer`; one whose weights are trained and shipped is a `Drafter`.

Shapes: B rows, L positions, K draft steps answered by one call, D hidden size, F frontier nodes, H depths answered,
Q entries of the draft vocabulary or candidates of a node, R ranks used, M nodes of a pass, V target vocabulary.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor, nn

from ..features import Features
from ..target.draft_vocabulary import OutputRows
from ..target.identity import TargetIdentity
from ..target.model import Target
from ..target.packed_linear import DecodingLinears
from .proposer import Proposer


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