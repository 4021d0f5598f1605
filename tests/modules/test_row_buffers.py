"""A buffer of rows is written in place: one address and one shape, whatever joins and leaves."""

import torch
from draftsmith.modules.row_buffers import RowBuffer


def numbered(rows: int) -> RowBuffer:
    """Row r holds r + 1, twice; a blank row holds -1."""
    buffer = RowBuffer(rows, 2, blank=-1, device=torch.device("cpu"), dtype=torch.long)
    assert buffer.values.tolist() == [[-1, -1]] * rows
    rows_R = torch.arange(rows)
    buffer.store(rows_R, (rows_R + 1)[:, None].expand(-1, 2), rows_R >= 0)
    return buffer


def firsts(buffer: RowBuffer) -> list[int]:
    assert torch.equal(buffer.values[:, 0], buffer.values[:, 1])
    return buffer.values[:, 0].tolist()


def test_rows_are_stored_where_they_are_new() -> None:
    buffer = numbered(4)
    place = buffer.values.data_ptr()
    buffer.store(torch.tensor([2, 0]), torch.tensor([[7.0, 7.0], [8.0, 8.0]]), torch.tensor([True, False]))
    assert firsts(buffer) == [1, 2, 7, 4]
    assert (buffer.values.data_ptr(), buffer.values.dtype) == (place, torch.long)


def test_rows_that_leave_make_nothing_smaller() -> None:
    buffer = numbered(4)
    place = buffer.values.data_ptr()
    buffer.keep(torch.tensor([0, 3]))
    assert firsts(buffer) == [1, 4, -1, -1]
    buffer.clear(torch.tensor([0]))
    assert firsts(buffer) == [-1, 4, -1, -1]
    assert buffer.values.data_ptr() == place


def test_a_buffer_that_was_made_in_inference_mode_can_be_written_outside_it() -> None:
    with torch.inference_mode():
        buffer = numbered(2)
    buffer.store(torch.tensor([1]), torch.tensor([[5, 5]]), torch.tensor([True]))
    assert firsts(buffer) == [1, 5]
