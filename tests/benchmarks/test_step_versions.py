"""The benchmark of optimizer steps on a tiny recipe: shares of operations add up, and products are known by name."""

import pytest
from benchmarks import step_versions
from benchmarks.step_versions import PRODUCTS, WAYS, Steps


def test_the_shares_of_operations_add_up_and_matrix_products_are_among_them() -> None:
    shares = Steps.of("tiny", 32).operations()
    assert sum(shares.values()) == pytest.approx(1.0)
    assert list(shares.values()) == sorted(shares.values(), reverse=True)
    assert 0 < sum(shares.get(name, 0.0) for name in PRODUCTS) < 1


def test_a_row_of_operations_names_as_many_as_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    step_versions.print_operations(["tiny"], 32, 3)
    _, _, row, *rest = capsys.readouterr().out.splitlines()
    name, products, largest = (cell.strip() for cell in row.strip("|").split("|"))
    assert (name, largest.count("%"), rest) == ("tiny", 3, [])
    assert 0 < int(products.removesuffix("%")) < 100


def test_a_step_is_timed_in_both_precisions() -> None:
    found = next(Steps.of("tiny", 32).taken())
    assert set(found) == set(WAYS)
    assert min(found.values()) > 0
