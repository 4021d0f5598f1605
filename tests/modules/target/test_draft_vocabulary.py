"""The reduced draft vocabulary: which tokens, how much of the text, and back again."""

import gc
import weakref

import pytest
import torch
from draftsmith.modules import Target, UserError
from draftsmith.modules.target.draft_vocabulary import OutputRows, choose, draft_index, require_ids
from hypothesis import given, settings
from hypothesis import strategies as st

COUNTS = torch.tensor([5, 0, 9, 5, 1, 7])


def test_the_most_frequent_tokens_and_required_ones_in_ascending_order() -> None:
    """Equal counts go to the lower id."""
    assert choose(COUNTS, 3).tolist() == [0, 2, 5]
    assert choose(torch.tensor([1, 3, 3, 3]), 2).tolist() == [1, 2]
    assert choose(COUNTS, 2, always=(1,)).tolist() == [1, 2]


@pytest.mark.parametrize(("size", "always"), [(0, ()), (7, ()), (1, (1, 4))])
def test_impossible_sizes_are_refused(size: int, always: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match=rf"between .* and 6 entries .* got {size}"):
        choose(COUNTS, size, always=always)


@settings(max_examples=50)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=40), st.data())
def test_the_index_is_the_inverse_of_the_ids(counts: list[int], data: st.DataObject) -> None:
    size = data.draw(st.integers(1, len(counts)))
    ids = choose(torch.tensor(counts), size)
    index = draft_index(ids, len(counts))
    assert torch.equal(index[ids], torch.arange(size))
    assert int((index == -1).sum()) == len(counts) - size
    left_out = [counts[token] for token in range(len(counts)) if token not in ids.tolist()]
    assert min(counts[token] for token in ids.tolist()) >= max(left_out, default=0)


def test_ids_that_occur_twice_are_refused() -> None:
    require_ids(3, torch.tensor([5, 2, 9]))
    require_ids(None, None)
    with pytest.raises(UserError, match="token 7 occurs 2 times in the draft vocabulary; give every id once"):
        require_ids(4, torch.tensor([5, 7, 9, 7]))
    with pytest.raises(UserError, match="vocabulary_size is 4 but 3 token ids were given"):
        require_ids(4, torch.tensor([5, 7, 9]))


def test_selected_rows_are_given_back_at_once(tiny_target: Target) -> None:
    gc.collect()
    gc.disable()
    try:
        rows = OutputRows(tiny_target, torch.arange(7))
        selected = weakref.ref(rows.weight_QD)
        assert rows(torch.zeros(tiny_target.hidden_size)).shape == (7,)
        del rows
        assert selected() is None
    finally:
        gc.enable()


def test_autocast_s_logits_come_from_rows_that_are_cast_once(tiny_target: Target) -> None:
    rows = OutputRows(tiny_target, torch.arange(7))
    states = torch.randn(3, tiny_target.hidden_size, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        wanted = torch.nn.functional.linear(states, rows.weight_QD)
        # A first call without gradients, as in validation, must not keep the next from having one.
        with torch.inference_mode():
            rows.unpacked(states)
        cast, found = rows._cast, rows(states)
        rows(states)
    assert rows._cast is cast
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert torch.autograd.grad(found.float().sum(), states)[0].any()
    assert rows(states).dtype == torch.float32
