"""Tokens whose embedding is not finite: as rejected guesses they must not change the answer of their row.

Shapes: B rows, N nodes, V vocabulary, D hidden size.
"""

import torch
from torch import Tensor

from ..token_tree import TokenTree


def tokens_without_embedding(embedding_VD: Tensor) -> Tensor | None:
    """True at tokens whose embedding holds NaN or infinity, [V]; None when there is none."""
    least_V, largest_V = embedding_VD.detach().aminmax(dim=-1)
    broken_V = ~(least_V.isfinite() & largest_V.isfinite())
    return broken_V if bool(broken_V.any()) else None


def readable_tokens(broken_V: Tensor | None, vocab_size: int, count: int, device: torch.device) -> Tensor:
    """The first `count` token ids with a finite embedding, [count], repeated where there are fewer."""
    ids = torch.arange(vocab_size, device=device) if broken_V is None else (~broken_V).nonzero()[:, 0]
    return ids[torch.arange(count, device=device) % len(ids)]


def blank_broken(tree: TokenTree, embedded_BND: Tensor, broken_V: Tensor) -> Tensor:
    """Zero the embeddings of broken tokens in place; returns the nodes that have one on their path, [B, N].

    Through a mask, a NaN would reach every other node of its row, though most guesses are rejected. The logits of the
    returned nodes mean nothing: a row that accepts one of these tokens ends there, as without a draft.
    """
    broken_BN = broken_V[tree.tokens_BN]
    embedded_BND.masked_fill_(broken_BN[..., None], 0.0)
    return (tree.ancestors_BNN & (broken_BN & tree.real_BN)[:, None, :]).any(-1)
