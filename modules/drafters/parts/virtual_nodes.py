"""The places of virtual nodes: in a token tree while decoding, after many positions of a row in training.

A drafter has K steps with C copies each: slot k * C + c is copy c of step k, one position further on than step k - 1.
A virtual node sees what its anchor sees and the same copy of the earlier steps (arXiv:2405.18628, section 3.1).

Shapes: B rows, N nodes, L positions, G anchors of a row, S = K C slots, M virtual nodes.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...token_tree import Injection, TokenTree, VirtualNodes


@dataclass(frozen=True, kw_only=True)
class Slots:
    """The virtual nodes that a node may have: `steps` one after another, in `copies` that do not see each other."""

    steps: int
    copies: int = 1

    @property
    def count(self) -> int:
        """Number of virtual nodes after one node."""
        return self.steps * self.copies

    def step(self, slots: Tensor) -> Tensor:
        """The step of each slot."""
        return slots // self.copies

    def sees(self, slots: Tensor, others: Tensor) -> Tensor:
        """True where the other slot of the same anchor is the same copy of this step or an earlier one."""
        return (slots % self.copies == others % self.copies) & (others // self.copies <= slots // self.copies)


def extended(tree: TokenTree, slots: Slots, embedded_SD: Tensor, injection: Injection | None = None) -> TokenTree:
    """The tree with virtual nodes after its real nodes, as many as `tree.lookahead` wants, else all.

    Args:
        tree: without virtual nodes.
        slots: those of one node.
        embedded_SD: the embedding of each.
        injection: states that they get at a later layer.

    Raises:
        ValueError: if the tree has virtual nodes of another drafter.
    """
    if tree.virtual is not None:
        raise ValueError("the tree has the virtual nodes of another drafter; only one drafter may add any")
    anchors_BM, slots_BM = _placed(tree, slots)
    used_BM, above_BM = anchors_BM >= 0, anchors_BM.clamp(min=0)
    size, count = tree.size, anchors_BM.shape[1]
    same_BMM = (anchors_BM[:, :, None] == anchors_BM[:, None]) & used_BM[:, :, None]
    same_BMM &= slots.sees(slots_BM[:, :, None], slots_BM[:, None])
    same_BMM |= torch.eye(count, dtype=torch.bool, device=same_BMM.device)
    path_BMN = tree.ancestors_BNN.gather(1, above_BM[..., None].expand(-1, -1, size)) & used_BM[..., None]
    depths_BM = torch.where(used_BM, tree.depths_BN.gather(1, above_BM) + slots.step(slots_BM) + 1, 0)
    virtual = VirtualNodes(embedded_BMD=embedded_SD[slots_BM], anchors_BM=anchors_BM, slots_BM=slots_BM,
                           slots=slots.count, injection=injection)
    return replace(
        tree,
        # Any token of the row will do.
        tokens_BN=torch.cat([tree.tokens_BN, tree.tokens_BN[:, :1].expand(-1, count)], dim=1),
        parents_BN=torch.cat([tree.parents_BN, above_BM], dim=1),
        depths_BN=torch.cat([tree.depths_BN, depths_BM], dim=1),
        ancestors_BNN=torch.cat([pad(tree.ancestors_BNN, (0, count)), torch.cat([path_BMN, same_BMM], dim=2)], dim=1),
        real_BN=pad(tree.real_BN, (0, count)),
        drawn=None, virtual=virtual, lookahead=None,
    )


def _placed(tree: TokenTree, slots: Slots) -> tuple[Tensor, Tensor]:
    """(anchor of each virtual node or -1, its slot), [B, M] each, by anchor and slot."""
    wanted, order_S = tree.lookahead, torch.arange(slots.count, device=tree.tokens_BN.device)
    limit_BN = torch.full_like(tree.tokens_BN, slots.steps) if wanted is None else wanted.counts_BN
    here_BNS = (slots.step(order_S) < limit_BN[..., None]) & tree.real_BN[..., None]
    here_BX = here_BNS.flatten(1)
    most = here_BX.shape[1]
    if wanted is not None:
        # One padding node where no row wants any.
        most = max(1, min(wanted.most * slots.copies, wanted.nodes * slots.count, most))
    chosen_BM = torch.sort((~here_BX).byte(), dim=1, stable=True).indices[:, :most]
    anchors_BM = torch.where(here_BX.gather(1, chosen_BM), chosen_BM // slots.count, -1)
    return anchors_BM, chosen_BM % slots.count


def sees_group(slots: Slots, anchors: int, device: torch.device) -> Tensor:
    """Mask [M, M] of the virtual nodes of several anchors, by anchor and slot: each sees those of its own alone."""
    order_M = torch.arange(anchors * slots.count, device=device)
    group_M, slot_M = order_M // slots.count, order_M % slots.count
    return (group_M[:, None] == group_M) & slots.sees(slot_M[:, None], slot_M)
