"""Packing moves every piece whole, keeps segments apart and loses nothing."""

import pytest
import torch
from draftsmith.data.store.collate import OPEN_BINS, Piece, packed, pad, plan_bins
from draftsmith.data.store.feature_shards import StateSlice
from draftsmith.modules import Target, UserError
from hypothesis import given
from hypothesis import strategies as st


def piece(length: int, seed: int = 0, first: int = 0, states: bool = False) -> Piece:
    generator = torch.Generator().manual_seed(1000 * length + seed)
    final_ND = torch.randn(length, 3, generator=generator)
    return Piece(tokens_N=torch.randint(4, 90, (length,), generator=generator, dtype=torch.int32),
                 supervised_N=torch.rand(length, generator=generator) < 0.5, first=first,
                 final=StateSlice(final_ND) if states else None, taps={2: StateSlice(final_ND * 2)} if states else {})


@given(lengths=st.lists(st.integers(1, 40), max_size=60), row_length=st.integers(40, 90))
def test_every_piece_stands_in_one_row_that_holds_it(lengths: list[int], row_length: int) -> None:
    rows = plan_bins(lengths, row_length)
    assert sorted(place for row in rows for place in row) == list(range(len(lengths)))
    assert all(sum(lengths[place] for place in row) <= row_length for row in rows)
    # The rows that were closed for want of room were the fullest: at most the open ones may be half empty.
    assert sum(2 * sum(lengths[place] for place in row) <= row_length for row in rows) <= OPEN_BINS


def test_rows_are_well_filled() -> None:
    lengths = torch.randint(40, 240, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    assert sum(lengths) / (512 * len(plan_bins(lengths, 512))) > 0.9


def test_a_packed_row_written_out() -> None:
    first = Piece(tokens_N=torch.tensor([5, 6]), supervised_N=torch.tensor([False, True]))
    second = Piece(tokens_N=torch.tensor([7, 8, 9]), supervised_N=torch.tensor([True, True, False]), first=4)
    batch = packed([[first, second], [second]], 6).to("cpu")
    assert batch.tokens_BL.tolist() == [[5, 6, 7, 8, 9, 0], [7, 8, 9, 0, 0, 0]]
    assert batch.segments_BL.tolist() == [[0, 0, 1, 1, 1, -1], [0, 0, 0, -1, -1, -1]]
    assert batch.positions_BL.tolist() == [[0, 1, 4, 5, 6, 0], [4, 5, 6, 0, 0, 0]]
    assert batch.supervised_BL.long().tolist() == [[0, 1, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0]]
    labels, valid = batch.labels(1)
    assert valid.long().tolist() == [[1, 0, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0]], "no label across segments"
    assert labels[0, 0] == 6


def test_states_follow_their_tokens() -> None:
    pieces = [piece(3, states=True), piece(4, seed=1, states=True)]
    batch = packed([[pieces[0], pieces[1]], [pieces[1]]], 9).to("cpu")
    assert torch.equal(batch.final()[0, 3:7], batch.final()[1, :4])
    assert torch.equal(batch.taps[2], batch.final() * 2)
    assert not batch.final()[1, 4:].any()


def test_states_of_only_some_pieces_are_refused() -> None:
    with pytest.raises(ValueError, match="1 of 3 pieces of a batch bring states"):
        packed([[piece(3, states=True), piece(2)], [piece(4)]], 6).to("cpu")
    with pytest.raises(ValueError, match="hold no target states; encode them"):
        packed([[piece(2)]]).to("cpu").final()


def test_oversized_pieces_are_refused() -> None:
    with pytest.raises(UserError, match="row_length 4 is shorter than a row of 5 tokens"):
        packed([[piece(5)]], 4).to("cpu")
    with pytest.raises(UserError, match="row_length 4 is shorter than a piece of 5 tokens"):
        plan_bins([1, 5], 4)


def test_packing_changes_no_state_of_the_target(tiny_target_f64: Target) -> None:
    pieces = [piece(7), piece(5, seed=1), piece(9, seed=2)]
    alone = tiny_target_f64.encode(pad(pieces), (1,))
    together = tiny_target_f64.encode(packed([pieces[:2], pieces[2:]], 20).to("cpu"), (1,))
    for (row, start), (number, length) in zip([(0, 0), (0, 7), (1, 0)], [(0, 7), (1, 5), (2, 9)], strict=True):
        for here, single in ((together.final(), alone.final()), (together.taps[1], alone.taps[1])):
            torch.testing.assert_close(here[row, start : start + length], single[number, :length], rtol=0, atol=1e-10)
