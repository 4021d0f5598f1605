"""The walk along the target's choices: verification by equality, exact.

Verification by equality: the target chooses a token at every node, greedily or by sampling from its own distribution,
and the walk from the root goes down as long as a child holds the chosen token. For proposals that are point masses
this is the acceptance rule with probability p(x) and the residual with p(x) set to zero, in one step; the emitted
tokens have the target's distribution whatever was drafted.

The other rules are in `acceptance_rules.py`.

Shapes: B rows, N nodes, K nodes of the longest path.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..token_tree import TokenTree


@dataclass(frozen=True, kw_only=True)
class Accepted:
    """The accepted path of each row, from the root down, and the token the target adds to it."""

    path_BK: Tensor  # Ascending node indices; beyond `counts_B` a column holds its own index, and moves nothing
    counts_B: Tensor  # Nodes on the path, the root included: tokens that enter the cache
    bonus_B: Tensor  # The target's choice at the last accepted node: the next root


def follow(tree: TokenTree, choices_BN: Tensor) -> Accepted:
    """Walk from the root along the target's choices as far as the tree goes.

    A node is accepted when it and all its ancestors hold what the target chose at their parents. Computed for all
    nodes at once; of equal paths (duplicate siblings) any one is taken.
    """
    if tree.size == 1:
        # Plain decoding: there is nothing to walk.
        return Accepted(path_BK=torch.zeros_like(choices_BN), counts_B=torch.ones_like(choices_BN[:, 0]),
                        bonus_B=choices_BN[:, 0])
    columns_N = torch.arange(tree.size, device=choices_BN.device)
    wanted_BN = choices_BN.gather(1, tree.parents_BN.clamp(min=0))
    matched_BN = (tree.real_BN & (wanted_BN == tree.tokens_BN)) | (columns_N == 0)
    accepted_BN = ~(tree.ancestors_BNN & ~matched_BN[:, None, :]).any(-1)
    deepest_B = torch.where(accepted_BN, tree.depths_BN, -1).argmax(-1)
    return down_to(tree, deepest_B, choices_BN.gather(1, deepest_B[:, None])[:, 0])


def down_to(tree: TokenTree, deepest_B: Tensor, bonus_B: Tensor) -> Accepted:
    """The path from the root to one node a row."""
    columns_N = torch.arange(tree.size, device=deepest_B.device)
    on_path_BN = tree.ancestors_BNN.gather(1, deepest_B[:, None, None].expand(-1, 1, tree.size))[:, 0]
    # Nodes on the path come first, in their order: all others are sorted after them.
    ordered_BN = torch.where(on_path_BN, columns_N, columns_N + tree.size).sort(-1).values
    width = min(tree.max_depth + 1, tree.size)
    counts_B = on_path_BN.sum(-1)
    path_BK = torch.where(columns_N[:width] < counts_B[:, None], ordered_BN[:, :width], columns_N[:width])
    return Accepted(path_BK=path_BK, counts_B=counts_B, bonus_B=bonus_B)
