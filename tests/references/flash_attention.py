"""The flash kernel in plain operations, for the arguments that attention in two parts gives it.

Written after torch's flash_api.cpp (`mha_varlen_fwd`) and FlashAttention 2's block_info.h and flash_fwd_kernel.h: keys
are read at their addresses, from `cum_seq_k` on, as many as `seqused_k` says. It stands for the kernel on devices that
have none, where `forced` lets every tree pass attend in two parts."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from draftsmith.modules.target import partial_passes
from draftsmith.modules.target.attention import tree_attention, two_parts
from torch import Tensor

Answer = tuple[Tensor, Tensor, None, None, None]


def flash(query_THE: Tensor, key_SGE: Tensor, value_SGE: Tensor, cum_seq_q: Tensor, cum_seq_k: Tensor, max_q: int,
          max_k: int, dropout_p: float, is_causal: bool, return_debug_mask: bool, *, scale: float,
          seqused_k: Tensor) -> Answer:
    """Output [T, H, E] and log-sum-exp [H, T] of rows of one query; zero and plus infinity for a row without a key."""
    assert (max_q, dropout_p, is_causal, return_debug_mask) == (1, 0.0, False, False)
    assert cum_seq_q.dtype is cum_seq_k.dtype is seqused_k.dtype is torch.int32
    (_, heads, width), groups = query_THE.shape, key_SGE.shape[1]
    order_W, used_B1 = torch.arange(max_k, device=query_THE.device), seqused_k[:, None]
    slots_BW = cum_seq_k[:-1, None] + torch.minimum(order_W, (used_B1 - 1).clamp(min=0))

    def read(states: Tensor) -> Tensor:
        held = getattr(states, "held", states)
        size = held.untyped_storage().nbytes() // held.itemsize - held.storage_offset()
        numbers = states.as_strided((size,), (1,), held.storage_offset())
        groups_G11, order_E = (torch.arange(count, device=slots_BW.device) for count in (groups, width))
        places = slots_BW[:, None, :, None] * states.stride(0) + groups_G11[:, None, None] * states.stride(1) + order_E
        return numbers[places].to(exact).repeat_interleave(heads // groups, 1)

    exact = torch.promote_types(query_THE.dtype, torch.float32)
    query_BH1E = query_THE[cum_seq_q[:-1].long()].to(exact)[:, :, None]
    scores_BHW = (query_BH1E @ read(key_SGE).mT)[:, :, 0] * scale
    hidden_B1W = (order_W >= used_B1)[:, None]
    sums_BH1 = scores_BHW.masked_fill(hidden_B1W, -torch.inf).logsumexp(-1, keepdim=True)
    sums_BH1 = sums_BH1.masked_fill(hidden_B1W.all(-1, keepdim=True), torch.inf)
    weights_BHW = (scores_BHW - sums_BH1).exp().masked_fill(hidden_B1W, 0.0)
    out_BHE = (weights_BHW[:, :, None] @ read(value_SGE))[:, :, 0]
    return out_BHE.to(query_THE.dtype), sums_BH1[..., 0].T.contiguous(), None, None, None


@contextmanager
def kernel(function: Callable[..., Any] = flash) -> Iterator[None]:
    """A block in which a function is torch's flash kernel, and nothing is known of it yet."""
    with (patch.object(torch.ops.aten, "_flash_attention_forward", function), patch.object(two_parts, "_REFUSALS", {}),
          patch.object(torch.cuda, "is_current_stream_capturing", lambda: False)):
        yield


@contextmanager
def forced() -> Iterator[Counter[str]]:
    """A block in which tree passes of any length attend in two parts on any device and in any number format. It counts
    the layers of such passes that were "asked", and those that "took" them."""
    counts: Counter[str] = Counter()
    takes, attend = two_parts.takes_parts, two_parts.attend_in_parts

    def asked(*args: Any) -> bool:
        counts["asked"] += 1
        return takes(*args)

    def took(*args: Any) -> Tensor:
        counts["took"] += 1
        return attend(*args)

    formats = torch.float16, torch.bfloat16, torch.float32, torch.float64
    with (kernel(), patch.object(partial_passes, "FEWEST_SLOTS", 1),
          patch.multiple(two_parts, DEVICES=("cpu", "privateuseone"), FORMATS=formats, MOST_HEADS=1_000,
                         refusal=lambda *_: ""),
          patch.multiple(tree_attention, takes_parts=asked, attend_in_parts=took)):
        yield counts
