"""The interface of policies: how a token tree grows from a drafter's scores, written once for every family.

Shapes: B rows, N nodes."""

from abc import ABC, abstractmethod

from torch import Tensor

from ..interfaces.proposer import DraftState, Proposer
from ..random_streams import Draws
from ..token_tree import TokenTree
from ..verification.sampling import SamplingSetting


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

    def unwatched(self) -> "Policy":
        """This policy, made to ask the device nothing while a tree grows, as recorded rounds must; most never ask."""
        return self


def trimmed(tree: TokenTree) -> TokenTree:
    """The tree without the padding that no row needs; down to the root where nobody has a guess.

    On a CPU the time of a pass grows with its nodes and its size is known at once. On an accelerator a small pass costs
    what a pass of one token does, while asking for the size would wait for the device and another shape would need
    another graph: there the padding stays."""
    if tree.real_BN.device.type != "cpu":
        return tree
    size = int(tree.real_BN.sum(-1).max())
    return tree if size == tree.size else tree.packed(size)
