"""The plot of the families' table reads the figures of the guide next to it."""

import pytest
from benchmarks.families_picture import TABLE, lengths


def test_the_rows_of_the_guide_are_read() -> None:
    found = lengths(TABLE.read_text(encoding="utf-8"))
    assert len(found) >= 9
    assert all(length >= 1 for length, _ in found.values())


def test_a_row_gives_its_best_tree_and_its_speed_up_or_the_tree_in_use() -> None:
    head = ("| row | best tree, hand-written | used tree, hand-written, T=0 / T=1 | speed-up, T=0 / T=1 |\n"
            "|---|---|---|---|\n")
    rows = "| lookup | - | 1.25 / 1.08 | 1.13 / 1.01 |\n| Hydra | 1.97 | 1.52 / 1.33 | 1.57 / 1.07 |\n\n| other |\n"
    assert lengths(head + rows) == {"lookup": (1.25, 1.13), "Hydra": (1.97, 1.57)}


def test_a_text_without_the_table_is_refused() -> None:
    with pytest.raises(ValueError, match="holds no table with the columns 'row' and 'best tree, hand-written'"):
        lengths("| row | steps |\n|---|---|\n| Hydra | 3 |\n")
