"""Mask tokens, with which a language model is trained to predict several tokens at once (PARD, arXiv:2504.18583).

After a text that ends at its token p, K - 1 mask tokens take the positions p + 1, p + 2, ...: the k-th of them predicts
the token at p + k + 1. In training every position p of a text is such an end, an *anchor*. All texts and all their mask
tokens share one pass: mask token k of anchor p sees the text up to p and the anchor's own mask tokens up to itself, and
no text token sees a mask token. All of them would make a pass K times as long, so only a falling share of the anchors
keeps its k-th mask token (conditional drop, section 3.3): share r ** k, at least r_min.

Shapes: B rows, L positions, K depths, S mask tokens of a row.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..features import Features

KEEP_RATE, KEEP_LEAST = 0.7, 0.2  # r and r_min of a draft language model in training


@dataclass(frozen=True, kw_only=True)
class Slots:
    """The mask tokens of a pass, left-aligned; rows with fewer of them are padded."""

    anchors_BS: Tensor  # Position of the text's last token in its row
    depths_BS: Tensor  # Number of the mask token after it, from 1
    real_BS: Tensor  # False at padding


def useful(features: Features, depths: int) -> Tensor:
    """True for depths with a label at a position, bool [B, L, K]: all labels up to that depth exist.

    While decoding a text never ends at a position without a label, and a guess needs the guesses before it.
    """
    valid_BLK = torch.stack([features.labels(depth + 1)[1] for depth in range(depths)], dim=-1)
    return valid_BLK.long().cumprod(-1).bool()


def conditional_drop(useful_BLK: Tensor, rate: float, least: float) -> Tensor:
    """A random choice of the mask tokens that are kept, bool [B, L, K]; depth 0 (the token itself) is unchanged.

    Anchors are ranked once at random, so that an anchor that keeps mask token k also keeps those before it, which mask
    token k sees.
    """
    anchors_BL = useful_BLK[..., 0]
    chance_BL = torch.rand(anchors_BL.shape, device=anchors_BL.device).masked_fill(~anchors_BL, 2.0)
    ranks_BL = chance_BL.argsort(-1).argsort(-1)
    shares = [1.0, *(max(rate**depth, least) for depth in range(1, useful_BLK.shape[-1]))]
    counts_BK = torch.stack([anchors_BL.sum(-1) * share for share in shares], dim=-1).floor()
    return useful_BLK & (ranks_BL[..., None] < counts_BK[:, None])


def pack(kept_BLK: Tensor) -> Slots:
    """The kept mask tokens of each row in the order of their anchors."""
    masks = kept_BLK.shape[-1] - 1
    flat_BM = kept_BLK[..., 1:].flatten(1)
    width = int(flat_BM.sum(-1).max())
    order_BS = flat_BM.byte().argsort(dim=-1, descending=True, stable=True)[:, :width]
    return Slots(anchors_BS=order_BS // masks, depths_BS=order_BS % masks + 1, real_BS=flat_BM.gather(1, order_BS))


def visible(features: Features, slots: Slots) -> Tensor:
    """Attention mask of the tokens of a row followed by its mask tokens, bool [B, L + S, L + S]."""
    text_BLL = features.visible()
    anchors_BS, depths_BS = slots.anchors_BS, slots.depths_BS
    length = text_BLL.shape[1]
    own_BSL = text_BLL.gather(1, anchors_BS[..., None].expand(-1, -1, length))
    chain_BSS = (
        (anchors_BS[:, :, None] == anchors_BS[:, None])
        & (depths_BS[:, :, None] >= depths_BS[:, None])
        & slots.real_BS[:, None]
    )
    unseen_BLS = text_BLL.new_zeros(text_BLL.shape[0], length, anchors_BS.shape[1])
    return torch.cat([torch.cat([text_BLL, unseen_BLS], dim=2), torch.cat([own_BSL, chain_BSS], dim=2)], dim=1)


def by_depth(states_BMD: Tensor, slots: Slots, length: int, depths: int) -> Tensor:
    """States of tokens and mask tokens as [B, L, K, D]: depth k of position p; zero for dropped mask tokens."""
    batch, _, width = states_BMD.shape
    # What is no mask token goes to a place after the last, so that the host need not know how many there are.
    places_BS = torch.where(slots.real_BS, slots.anchors_BS * depths + slots.depths_BS, length * depths)
    found = states_BMD.new_zeros(batch, length * depths + 1, width)
    found = found.scatter(1, places_BS[..., None].expand(-1, -1, width), states_BMD[:, length:])
    ahead_BLKD = found[:, :-1].view(batch, length, depths, width)[:, :, 1:]
    return torch.cat([states_BMD[:, :length, None], ahead_BLKD], dim=2)
