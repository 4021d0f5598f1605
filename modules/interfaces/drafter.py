"""The contract of every drafter family: the drafter holds weights, the state of a sequence is passed in.

A `Proposer` proposes tokens while decoding; a `Drafter` is a proposer with trained weights that an artifact ships. Its
`FamilyCard` is a row in the table of methods, for choosing one.

Shapes: B rows, L positions, K draft steps of one call, D hidden size, F frontier nodes, H depths scored,
Q entries of the draft vocabulary or candidates of a node, R ranks used, M nodes of a pass, V target vocabulary."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from ..config_checks import CheckedSettings, Size
from ..features import Features
from ..target.devices.compiled_layers import Adapt, CompiledLayers, Compiler
from ..target.linear_forms import DecodingLinears
from ..target.loading.model_parts import TargetIdentity
from ..target.model import Target
from .proposer import Proposer, State


@dataclass(frozen=True, kw_only=True)
class FamilyCard:
    """One method in plain words; each family states its own."""

    name: str  # Name in papers, such as EAGLE-3
    guesses: str  # The way it guesses, in one line
    cost: str  # Cost of training or drafting, in one phrase
    papers: tuple[str, ...] = ()  # arXiv numbers, the method's own first
    needs_export: bool = True  # Whether there is an artifact to export; not for policies and drafting without training


@dataclass(frozen=True, kw_only=True)
class Training:
    """The training of a family: defaults of settings that a recipe may have otherwise, None for those of all families,
    and what no recipe changes."""

    objective: str | None = None
    lr: float | None = None
    warmup_steps: int | None = None
    weight_decay: float | None = None
    feature_weight: float | None = None
    decay: float = 0.8  # Weight of draft step k in the loss is decay ** k (arXiv:2401.10774, section 2.2.1)
    offsets: bool = False  # Whether a recipe may offset the position ids that the drafter reads
    through_target: bool = False
    """Whether training reads the target's layers other than by `Target.encode`: with gradients, or as copies. They must
    then be whole on one device of each process."""


@dataclass(frozen=True, kw_only=True)
class DrafterConfig(CheckedSettings):
    """Settings that the shape of every drafter has; each family adds its own."""

    # Settings that change neither weights nor the function that they compute: a continued draft may have others.
    training_only: ClassVar[frozenset[str]] = frozenset()
    vocabulary_size: Size | None = None
    """Entries of a reduced draft vocabulary, the most frequent tokens of the training data; None keeps them all."""

    def inherits(self, name: str, start: Any) -> bool:
        """True if a setting that the recipe leaves at its default is that of the start, whose settings are `start`."""
        return True

    def carries(self, name: str, start: Any) -> bool:
        """True if a drafter of these settings takes over weights of one of the settings `start`, which differ here."""
        return name == "vocabulary_size"

    def check_training(self, train: Any) -> None:
        """Refuse settings of training (`TrainConfig`) that do not go with these. Raises UserError."""

    def weighed(self, weights: tuple[float, ...], progress: float) -> tuple[float, ...]:
        """Weight of each draft step in the loss at this progress of the training, from 0 to 1; `weights` has the powers
        of the decay."""
        return weights


@dataclass(frozen=True, kw_only=True)
class Drafts:
    """Output of a drafter's training forward: one hidden state for each draft step at each position. The k-th state at
    position p predicts the token at p + offsets[k]; the loss applies the output layer, in chunks."""

    hidden_BLKD: Tensor  # Draft hidden states, ready for the output layer
    offsets: tuple[int, ...]  # Tokens from a position to the one that each of its K states predicts; they may be equal
    valid_BLK: Tensor | None = None
    """False where a draft step has no state at a position, such as one dropped in training: it adds nothing to the loss
    there, and its hidden state is any finite one. None when none is missing, as always in evaluation mode."""
    estimates: tuple[int, ...] | None = None
    """Distance in tokens from a position to the target's final state that each of its K states estimates, from which
    the target's output layer predicts the token at `offsets`. None for families that estimate no target states."""
    estimated_BLKD: Tensor | None = None  # The estimated target states where they are not `hidden_BLKD`
    choices: int = 0
    """Number of the first steps that choose among a few candidates. They learn the label by cross entropy where it is a
    candidate, and nothing elsewhere, whatever the objective; their mean counts as the weight of the first of them next
    to that of the other steps."""
    candidates: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None
    """(these tokens, their logits), [..., C] each, for such a step's states [..., D]."""
    indices_BL: Tensor | None = None  # Index in its row of each of the L positions, where drafts start at sampled ones

    def __post_init__(self) -> None:
        shape = self.hidden_BLKD.shape
        # Shapes that differ would broadcast in the losses, which then have a plausible and wrong value.
        for name, given, dims in (("valid_BLK", self.valid_BLK, 3), ("indices_BL", self.indices_BL, 2)):
            if given is not None and given.shape != shape[:dims]:
                raise ValueError(f"{name} must have the shape {tuple(shape[:dims])} of the draft states, got "
                                 f"{tuple(given.shape)}")
        if self.estimated_BLKD is not None and (self.estimates is None or self.estimated_BLKD.shape[:3] != shape[:3]):
            raise ValueError(f"estimated_BLKD needs estimates and the shape {tuple(shape[:3])} of the draft states, "
                             f"got {self.estimates} and {tuple(self.estimated_BLKD.shape)}")
        for name, ahead in (("offsets", self.offsets), ("estimates", self.estimates)):
            if ahead is not None and len(ahead) != shape[2]:
                raise ValueError(f"{name} must have one entry for each of the {shape[2]} draft steps, got {ahead}")
        for offset, estimate in zip(self.offsets, self.estimates or (), strict=bool(self.estimates)):
            # The target's state `estimate` ahead predicts the token after it, which is at most the one to be guessed.
            if not 0 <= estimate < offset:
                raise ValueError(f"a state that predicts {offset} tokens ahead cannot estimate the target's state "
                                 f"{estimate} ahead, which has seen that token or comes before the position")


class Drafter(nn.Module, Proposer[State]):
    """A small trained model that proposes the target's next tokens. It holds weights only, and the ids of a reduced
    draft vocabulary of `vocabulary_size` entries, `token_ids` [Q]. Borrowed parts of the target (embedding, output
    layer) are attached by `bind`; this module never saves, trains or moves them."""

    card: ClassVar[FamilyCard]  # The family's row in the table of methods
    config_class: ClassVar[type[DrafterConfig]]  # The family's own settings
    trained_as: ClassVar[Training] = Training()
    export_refusal: ClassVar[str | None] = None  # Why no export format can hold the family, as a sentence; or None
    reads_states: bool = True  # True if `forward` reads the target's states; False for most draft language models
    compiled_kinds: tuple[type[nn.Module], ...] = ()  # Classes of its layers that run compiled while it drafts
    compiled_form: Adapt  # Gives such a layer its compiled form
    unrolls: int | None = None
    """The training step that an autoregressive drafter applies repeatedly while decoding; None for a drafter whose K
    training steps are its K draft steps."""
    trained_steps: int = 1  # Draft steps trained at each position; training rows must be longer than these steps reach
    imitated: Callable[[Tensor], Tensor] | None = None
    """Logits [..., Q] of hidden states [..., D] whose distribution `project` learns; None where it learns the
    target's."""
    state_size: int
    """Width of the output of `forward` at one position and step: the state that the output layer reads, plus the
    estimate of the target's state where that is a separate one."""
    token_ids: Tensor | None
    config: DrafterConfig  # Its settings

    def __init__(self, vocabulary_size: int | None = None) -> None:
        super().__init__()
        ids = None if vocabulary_size is None else torch.zeros(vocabulary_size, dtype=torch.long)
        self.register_buffer("token_ids", ids)
        self.packing = DecodingLinears()  # The linear layers as they run while decoding
        self._forms: CompiledLayers | None = None

    @classmethod
    def fitted(cls, config: Any, target: Target) -> tuple[Any, Any]:
        """(settings for this target, shape of the decoder layers). Raises UserError when they do not fit it."""
        return config, None

    @classmethod
    def sources(cls, config: Any) -> dict[str, str]:
        """Hashes by name of files that decide the first weights: a training goes on with equal ones alone."""
        return {}

    @classmethod
    def serves_all(cls, description: Mapping[str, Any]) -> bool:
        """True if the drafter that `describe` gave reads and borrows nothing of its target: it then drafts for every
        target of its tokenizer and vocabulary."""
        return False

    @classmethod
    @abstractmethod
    def create(cls, config: Any, target: Target, token_ids_Q: Tensor | None = None, start: Self | None = None) -> Self:
        """Make a new, initialised drafter for `target` and bind it, with the ids of a reduced draft vocabulary where
        `config`, the family's own settings, asks for one. UserError if settings, target, ids and start do not agree.
        `start` is a drafter of this family, not bound, of which it takes over the shape of the layers and all weights;
        what it has besides changes nothing of what they compute."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """The JSON-ready configuration from which `rebuild` makes an equal, uninitialised drafter."""

    @classmethod
    @abstractmethod
    def rebuild(cls, description: dict[str, Any], identity: TargetIdentity) -> Self:
        """Make a drafter from the result of `describe()`; its weights are still to be loaded, the target to be bound.
        UserError if the description does not fit the family."""

    @abstractmethod
    def bind(self, target: Target) -> None:
        """Borrow the parts of `target` that the family reads. Raises UserError when the target does not fit."""

    @abstractmethod
    def forward(self, features: Features) -> Drafts:
        """Draft hidden states of all positions at once, for training."""

    @abstractmethod
    def project(self, hidden: Tensor, step: int) -> Tensor:
        """Draft logits [..., Q] of hidden states [..., D] by the output layer of draft step `step`."""

    def output_parameters(self, step: int) -> tuple[nn.Parameter, ...]:
        """The trained weights that `project` reads for draft step `step`; empty when it borrows them."""
        return ()

    @property
    def token_ids_Q(self) -> Tensor | None:
        """Target id of each entry of a reduced draft vocabulary; None for the whole vocabulary."""
        return self.token_ids

    def recompute_layers(self) -> bool:
        """Let training compute the states inside of its layers again in the backward pass, in place of keeping them;
        False for a drafter without layers of which this would save any."""
        return False

    def train(self, mode: bool = True) -> Self:
        """Switch the mode; training runs the plain layers and frees the memory of those packed for decoding."""
        if mode:
            self.packing.release()
        return super().train(mode)

    def compiled(self, compiler: Compiler) -> AbstractContextManager[None]:
        if compiler.refusal or not self.compiled_kinds:
            return nullcontext()
        # Forms belong to the compiler that made them: another one counts its own graphs and refusals.
        if self._forms is None or self._forms.compiler is not compiler:
            layers = [part for part in self.modules() if isinstance(part, self.compiled_kinds)]
            self._forms = CompiledLayers(layers, compiler, self.compiled_form)
        return self._forms.installed()
