"""Parts of the contract that only some proposers have; the code that uses one asks whether a proposer has it.

They are classes to inherit from and not structural types: asking then reads no attribute, some of which make the host
wait for the device.

Shapes: P places of held-out text, K draft steps.
"""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from ..compiler import Compiler
from ..config_checks import CheckedSettings
from ..errors import UserError
from ..target.early_layers import EarlyLayers
from ..token_tree import TokenTree
from .proposer import DraftState, Proposer


class VerifiedRows(Protocol):
    """Rows that a target verifies, as a drafter sees that has the target run something for it."""

    reads_virtual: bool  # True if the virtual nodes of a pass have states

    def early(self, num_layers: int) -> EarlyLayers | None:
        """The first layers in the cache of these rows, or None where no layer runs; verification takes over what they
        computed."""
        ...


class SharesTargetRows(ABC):
    """A proposer for which the target runs something in the rows that are verified: its first layers, virtual nodes."""

    @abstractmethod
    def start(self, rows: int, capacity: int, verified: VerifiedRows | None = None) -> DraftState:
        """`Proposer.start` for sequences that are the rows of `verified`; None where these are not to be had."""


class GuessesInPasses(ABC):
    """A proposer whose guesses the target makes at virtual nodes of the verifying pass (arXiv:2405.18628)."""

    virtual_nodes: int  # Most virtual nodes that `extended` adds after a node

    @property
    @abstractmethod
    def rank_chances(self) -> tuple[tuple[float, ...], ...] | None:
        """Chance that its guess of each rank at each depth is right, as counted on held-out text; None where nobody
        counted."""

    @abstractmethod
    def extended(self, state: Any, tree: TokenTree) -> TokenTree:
        """The tree, to be verified or read as a prompt, with the virtual nodes whose states the next observation holds;
        `tree.lookahead` may limit their number."""

    def count_ranks(self, table_PK: Tensor) -> None:  # noqa: B027 -- a union of drafters counts nothing
        """Keep the rank of the right token at P held-out places for each of K draft steps."""


@dataclass(frozen=True, kw_only=True)
class ChainLimits(CheckedSettings):
    """Ends of a chain of drafted tokens (Kangaroo, arXiv:2404.18911, section 3.2); UserError if a limit is out of
    range."""

    gamma: int = 6  # Most tokens
    eta: float = 0.6  # A token whose distribution peaks below this probability is the chain's last

    def __post_init__(self) -> None:
        super().__post_init__()
        # At 0 no chain ever ends early, at 1 every chain does: either bound would switch the rule off without a word.
        if not 0 < self.eta < 1:
            raise UserError(f"eta must be above 0 and below 1, got {self.eta}")


class LimitsChains:
    """A proposer with its own limits for the policy `early-exit`; all others have the paper's."""

    chain_limits: ChainLimits  # Ends of a chain that stops at its first unsure token


class JudgesGuesses(ABC):
    """A drafter that estimates the chance of what it guesses next before the guess is chosen (arXiv:2607.05147)."""

    judges: bool  # True if this drafter of the family does
    judge_temperatures_K: Tensor  # Temperature of its judgement at each draft step; 1 before they are calibrated

    @abstractmethod
    def judge(self, states: Tensor, step: int) -> Tensor:
        """Logit [...] of the acceptance of a guess made from states [..., D] that `project` reads at a step."""


class Remembers(ABC):
    """A proposer that stores more than its weights from one sequence to the next."""

    @abstractmethod
    def forget(self) -> None:
        """Drop what was stored from earlier sequences."""


class RunsCompiled(ABC):
    """A proposer with layers of its own that torch.compile can take."""

    @abstractmethod
    def compiled(self, compiler: Compiler) -> AbstractContextManager[None]:
        """A block in which its layers run compiled."""


def virtual_nodes(drafter: Proposer | None) -> int:
    """Most virtual nodes after a node of a pass; 0 for most proposers."""
    return drafter.virtual_nodes if isinstance(drafter, GuessesInPasses) else 0


def started(drafter: Proposer, rows: VerifiedRows | None, count: int, capacity: int) -> DraftState:
    """An empty state for `count` sequences that `rows` verifies, which it shares if it can; None for no such rows."""
    if isinstance(drafter, SharesTargetRows):
        return drafter.start(count, capacity, rows)
    state: DraftState = drafter.start(count, capacity)
    return state


def extended(drafter: Proposer | None, state: DraftState | None, tree: TokenTree) -> TokenTree:
    """The tree with the drafter's virtual nodes; as it is for most proposers."""
    if state is None or not isinstance(drafter, GuessesInPasses):
        return tree
    return drafter.extended(state, tree)


def compiled(drafter: Proposer, compiler: Compiler) -> AbstractContextManager[None]:
    """A block in which the drafter's layers run compiled; one without effect where it has none."""
    return drafter.compiled(compiler) if isinstance(drafter, RunsCompiled) else nullcontext()
