"""Flex attention inside the segments of packed rows: the blocks of its mask, outputs and gradients, and no mask of all
positions.

torch computes no gradient of flex attention on a CPU and refuses to; the unfused computation that its graph stands for
has one, and is what these tests run.
"""

import re
from collections.abc import Iterator
from itertools import groupby

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex
from draftsmith.modules import Features
from draftsmith.modules.target.attention.flex_segments import FlexAttention, FlexSegments
from draftsmith.modules.target.attention.scored_attention import PLAIN, AttentionForm
from draftsmith.modules.target.attention.segment_attention import Segments, attend_inside, visible_text
from support.flex import unfused_flex
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask
from torch.utils._python_dispatch import TorchDispatchMode

SEGMENTS = [[0] * 5 + [1] * 30 + [2] * 6 + [-1] * 4, [3] * 40 + [1] * 5]


@pytest.fixture(autouse=True)
def _unfused() -> Iterator[None]:
    with unfused_flex():
        yield


def states(length: int = 45, heads: int = 4, groups: int = 2, wide: int = 16) -> list[Tensor]:
    return [torch.randn(2, count, length, size, dtype=torch.float64, requires_grad=True)
            for count, size in ((heads, 16), (groups, 16), (groups, wide))]


def rows(segments: list[list[int]]) -> Features:
    numbers = torch.tensor(segments)
    return Features(tokens_BL=torch.zeros_like(numbers), supervised_BL=numbers >= 0, segments_BL=numbers,
                    positions_BL=torch.zeros_like(numbers))


@pytest.mark.parametrize("block", [4, 16, 64])
@pytest.mark.parametrize(("window", "chunk"), [(None, None), (1, None), (7, None), (100, None), (None, 5), (None, 64)])
def test_blocks_are_those_that_torch_finds_in_a_whole_mask(block: int, window: int | None, chunk: int | None) -> None:
    """Block by block: which are skipped, which need no mask inside; and the mask itself."""
    numbers = torch.tensor(SEGMENTS)
    made = FlexSegments(FlexAttention(None), numbers, block).mask((window, chunk))
    order = torch.arange(numbers.shape[1])
    seen = (numbers[:, :, None] == numbers[:, None]) & (order[:, None] >= order)
    if window is not None:
        seen &= order[:, None] - order < window
    if chunk is not None:
        place = torch.tensor([[place for _, run in groupby(row) for place, _ in enumerate(run)] for row in SEGMENTS])
        seen &= place[:, :, None] // chunk == place[:, None] // chunk
    assert made.mask_mod is not None
    found = create_mask(made.mask_mod, 2, None, *seen.shape[1:], device="cpu")
    assert torch.equal(found[:, 0], seen)
    wanted = torch_flex.create_block_mask(
        lambda row, _head, query, key: seen[row, query, key], 2, None, *seen.shape[1:], device="cpu", BLOCK_SIZE=block)
    assert torch.equal(made.to_dense(), wanted.to_dense())
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        # A block at the end of a row that is whole but for what is beyond it may be called whole or not.
        assert getattr(made, name).shape == getattr(wanted, name).shape
    assert torch.equal(made.kv_num_blocks + made.full_kv_num_blocks, wanted.kv_num_blocks + wanted.full_kv_num_blocks)


@pytest.mark.parametrize(("form", "wide"), [
    (PLAIN, 16), (AttentionForm(window=7), 16), (AttentionForm(softcap=2.0, scaling=0.3), 16),
    (AttentionForm(chunk=5), 16), (AttentionForm(sinks_H=torch.tensor([0.5, -1.0, 2.0, 0.0]).double()), 16),
    (AttentionForm(window=7, softcap=2.0, sinks_H=torch.tensor([0.5, -1.0, 2.0, 0.0]).double()), 8), (PLAIN, 8),
], ids=["plain", "window", "softcap", "chunk", "sinks", "window, softcap, sinks, narrow values", "narrow values"])
def test_outputs_and_gradients_are_those_of_each_segment_alone(form: AttentionForm, wide: int) -> None:
    given, numbers = states(wide=wide), torch.tensor(SEGMENTS)
    real = (numbers >= 0)[:, None, :, None]
    outer = torch.randn(2, 4, 45, wide, dtype=torch.float64) * real
    found = FlexSegments(FlexAttention(None), numbers, 16).attend(*given, form)
    wanted = attend_inside(*given, Segments.of(rows(SEGMENTS)), form)
    torch.testing.assert_close(found * real, wanted)
    for one, other in zip(torch.autograd.grad((found * outer).sum(), given),
                          torch.autograd.grad((wanted * outer).sum(), given), strict=True):
        torch.testing.assert_close(one, other)


def test_the_log_sum_exp_has_a_gradient() -> None:
    given, numbers = states(), torch.tensor(SEGMENTS)
    _, sums = FlexSegments(FlexAttention(None), numbers, 16).attend_with_sums(*given)
    seen = rows(SEGMENTS).visible()[:, None]
    query, key, _ = given
    wanted = (query @ key.repeat_interleave(2, 1).mT / 4).masked_fill(~seen, -torch.inf).logsumexp(-1)
    torch.testing.assert_close(sums, wanted)
    for one, other in zip(torch.autograd.grad(sums.sin().sum(), given[:2]),
                          torch.autograd.grad(wanted.sin().sum(), given[:2]), strict=True):
        torch.testing.assert_close(one, other)


class LargestTensor(TorchDispatchMode):
    """Notes the most elements of a tensor that an operation makes."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        made = func(*args, **(kwargs or {}))
        for one in made if isinstance(made, (list, tuple)) else [made]:
            if isinstance(one, Tensor):
                self.most = max(self.most, one.numel())
        return made


def test_no_mask_of_all_positions_is_made() -> None:
    """Of a row of 32,768 tokens nothing larger than the blocks by blocks."""
    length = 1 << 15
    numbers = (torch.arange(length) // 5000)[None]
    with LargestTensor() as largest:
        FlexSegments(FlexAttention(None), numbers).mask((4096, None))
    assert largest.most <= max((length // 128 + 1) ** 2, length)


def test_rows_attend_by_it_inside_its_block_alone() -> None:
    flex = FlexAttention(None)
    with flex.used():
        assert isinstance(visible_text(rows(SEGMENTS)), FlexSegments)
    assert isinstance(visible_text(rows(SEGMENTS)), Tensor)


def test_heads_that_it_cannot_compute_leave_it_unused() -> None:
    """A CPU's, as torch is."""
    flex = FlexAttention(None)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch_flex, "_validate_device", REFUSING)
        flex.probe({(4, 2, 16, 16)}, torch.device("cpu"), torch.float32)
    assert flex.refusal == ("flex attention does not run here (FlexAttention does not support backward on CPU. Please "
                            "set the input requires_grad to False or use another device.)")
    with flex.used():
        assert isinstance(visible_text(rows(SEGMENTS)), Tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_tried_out_against_a_mask(dtype: torch.dtype) -> None:
    flex = FlexAttention(None)
    flex.probe({(4, 2, 16, 16), (3, 1, 8, 5)}, torch.device("cpu"), dtype)
    assert flex.refusal == ""
    attend = flex.run
    flex.run = lambda query, key, value, **others: attend(query, key, value * torch.nan, **others)
    flex.probe({(4, 2, 16, 16)}, torch.device("cpu"), dtype)
    assert flex.refusal == "flex attention differs here by nan% from attention with a mask"
    flex.run = lambda query, key, value, **others: attend(query, key, 1.1 * value, **others)
    flex.probe({(4, 2, 16, 16)}, torch.device("cpu"), dtype)
    assert re.fullmatch(r"flex attention differs here by 1\d\.\d% from attention with a mask", flex.refusal)


REFUSING = torch_flex._validate_device
