"""Attention of a tree pass over long rows in two parts, joined to what one softmax gives.

Every node sees all committed tokens of its row: the flash kernel reads them without a mask, split over their length.
The nodes see each other by a small mask. The log-sum-exp of the first part is the score of one key whose value is its
output, so that a softmax over it and the scores of the nodes joins both.

Shapes: B rows, H query heads, G key-value heads, N queries, C nodes of a tree, W slots, E width of a head."""

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ...token_tree import TokenTree, Topology
from .segment_attention import AttentionForm, additive

FEWEST_SLOTS, MOST_HEADS = 8_192, 16
"""Fewest slots of a row, and most key heads of all rows, for which it is used: an estimate that has not been measured.
A block of threads reads one key head under a mask at 60 to 100 GB/s, that many slots of 128 numbers in 42 to 70 µs. A
whole H100 reads 8 heads in 13 µs, but two parts are some 16 more operations of 2 µs; 31 heads are as fast unsplit."""
DEVICES, FORMATS = ("cuda",), (torch.float16, torch.bfloat16)  # Those of the flash kernel


@dataclass(frozen=True, kw_only=True)
class TreeParts:
    """The places and lengths that attention in two parts reads in every layer of a pass."""

    slots_BC: Tensor  # Slot of each node of the tree
    hidden_BNC: Tensor  # Minus infinity where a query does not see a node, else 0
    lengths_B: Tensor  # Committed tokens of each row, int32
    rows_B: Tensor  # Numbers of the rows and one more, int32
    mask: Tensor | None = None  # The mask of the pass: a layer that is given another one sees something else

    @classmethod
    def of(cls, tree: TokenTree, lengths_B1: Tensor) -> "TreeParts":
        """The places and lengths of a pass whose nodes come after the committed tokens of their rows."""
        return cls(slots_BC=lengths_B1 + torch.arange(tree.size, device=lengths_B1.device),
                   hidden_BNC=additive(tree.ancestors_BNN, torch.float32), lengths_B=lengths_B1[:, 0].int(),
                   rows_B=torch.arange(len(lengths_B1) + 1, dtype=torch.int32, device=lengths_B1.device))


def takes_parts(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, form: AttentionForm,
                parts: TreeParts) -> bool:
    """True for a layer whose attention is no other than that of its pass, few key heads, and what the kernel can be
    called with and has been right about. Prompts, trees with virtual nodes and short rows have no parts."""
    row, _, slot, number = key.stride()
    return (mask is parts.mask and all(one is None for one in (form.window, form.chunk, form.softcap, form.sinks_H))
            and len(key) * key.shape[1] <= MOST_HEADS and query.device.type in DEVICES and query.dtype in FORMATS
            and query.dtype == key.dtype == value.dtype and key.shape == value.shape and key.stride() == value.stride()
            and number == 1 and row % slot == 0 and key.shape[3] % 8 == 0 and key.shape[3] <= 256
            and not refusal(query, key))


def attend_in_parts(query_BHNE: Tensor, key_BGWE: Tensor, value_BGWE: Tensor, scaling: float | None,
                    parts: TreeParts) -> Tensor:
    """Attention output [B, N, H, E]; zero for a query that sees nothing."""
    (rows, heads, queries, width), groups = query_BHNE.shape, key_BGWE.shape[1]
    scale, exact = width**-0.5 if scaling is None else scaling, torch.promote_types(query_BHNE.dtype, torch.float32)
    out_BHNE, sums_BHN = committed(query_BHNE, key_BGWE, value_BGWE, scale, parts)
    # A row without a committed token has an output of zero there. Its score is the lowest number: minus infinity would
    # be a NaN for a query that sees no node.
    sums_BHN = sums_BHN.to(exact).masked_fill(parts.lengths_B[:, None, None] == 0, torch.finfo(exact).min)
    places = parts.slots_BC[:, None, :, None].expand(-1, groups, -1, width)
    nodes_BGCE, values_BGCE = (states.gather(2, places).to(exact) for states in (key_BGWE, value_BGWE))
    # The heads of a group are further queries of its key, which is not copied.
    folded = query_BHNE.to(exact).mul(scale).reshape(rows, groups, -1, width) @ nodes_BGCE.mT
    scores_BHNC = folded.view(rows, heads, queries, -1) + parts.hidden_BNC[:, None]
    weights = torch.cat([sums_BHN[..., None], scores_BHNC], -1).softmax(-1)
    of_nodes = weights[..., 1:].reshape(folded.shape) @ values_BGCE
    joined = torch.addcmul(of_nodes.view(query_BHNE.shape), weights[..., :1], out_BHNE.to(exact))
    return joined.to(query_BHNE.dtype).transpose(1, 2).contiguous()


def committed(query_BHNE: Tensor, key_BGWE: Tensor, value_BGWE: Tensor, scale: float,
              parts: TreeParts) -> tuple[Tensor, Tensor]:
    """Attention output [B, H, N, E] over the committed tokens alone, zero without any, and the log-sum-exp [B, H, N] of
    their scores."""
    rows, heads, queries, width = query_BHNE.shape
    # As torch's flash_api.cpp (mha_varlen_fwd) and flash_fwd_kernel.h of FlashAttention 2 have it:
    # * A row has as many keys as `seqused_k` says, on the device. `cum_seq_k` then only says at which slot after the
    #   first key it starts, so the cache is not copied.
    # * One query of more heads than there are key heads is read as more queries of each key head, and then alone are
    #   the keys split over their length. So the nodes are further heads of one query.
    # * The log-sum-exp is [heads, rows], float32, natural; without a key it is plus infinity, and the output zero.
    starts_B = parts.rows_B if rows == 1 else parts.rows_B * (key_BGWE.stride(0) // key_BGWE.stride(2))
    out, sums, *_ = torch.ops.aten._flash_attention_forward(
        query_BHNE.reshape(rows, heads * queries, width), key_BGWE[0].transpose(0, 1), value_BGWE[0].transpose(0, 1),
        parts.rows_B, starts_B, 1, key_BGWE.shape[2], 0.0, False, False, scale=scale, seqused_k=parts.lengths_B)
    return out.view(query_BHNE.shape), sums.view(heads, queries, rows).permute(2, 0, 1)


_REFUSALS: dict[tuple[torch.device, torch.dtype, int, int, int], str] = {}


def refusal(query: Tensor, key: Tensor) -> str:
    """The reason against the two parts for tensors of a kind, empty for none: with random numbers they fail, or differ
    from one softmax by more than rounding. It is found out once, with a warning, and not while a graph is captured."""
    kind = device, dtype, heads, groups, width = query.device, query.dtype, query.shape[1], key.shape[1], key.shape[3]
    if kind in _REFUSALS or torch.cuda.is_current_stream_capturing():
        return _REFUSALS.get(kind, "has not been tried")
    draws, said = torch.Generator(device).manual_seed(0), ""
    try:
        # Short rows show the nodes; the keys of the last one are split.
        lengths_B1 = torch.tensor([[0], [1], [40], [500]], device=device)
        query, key, value = (torch.randn((4, *shape, width), generator=draws, device=device, dtype=dtype)[:, :, :512]
                             for shape in ((heads, 5), (groups, 515), (groups, 515)))
        tree = Topology((-1, 0, 0, 1, 2), (0, 0, 1, 0, 0)).plant(torch.zeros_like(lengths_B1).expand(-1, 5))
        parts = TreeParts.of(tree, lengths_B1)
        seen_BNW = (torch.arange(512, device=device) < lengths_B1)[:, None].expand(-1, 5, -1).scatter(
            2, parts.slots_BC[:, None].expand_as(tree.ancestors_BNN), tree.ancestors_BNN)
        expected = scaled_dot_product_attention(query.double(), key.double(), value.double(), enable_gqa=True,
                                                attn_mask=seen_BNW[:, None]).transpose(1, 2)
        error_B = (attend_in_parts(query, key, value, None, parts) - expected).abs().amax((1, 2, 3))
        if not bool((error_B <= 4 * torch.finfo(dtype).eps * expected.abs().amax((1, 2, 3))).all()):
            said = f"differs from one softmax by {float(error_B.max()):.2g}"
    except (RuntimeError, TypeError) as error:
        said = f"fails ({str(error).splitlines()[0][:200]})"
    if said:
        warnings.warn(f"long rows are read by one softmax, exact and slower: the flash kernel {said} on {device} for "
                      f"{heads} heads, {groups} key heads, width {width} and {dtype}", stacklevel=2)
    _REFUSALS[kind] = said
    return said
