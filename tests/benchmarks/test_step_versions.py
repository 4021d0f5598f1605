"""The benchmark of optimizer steps on a tiny recipe: shares of operations add up, and products are known by name."""

from pathlib import Path

import pytest
from benchmarks import step_versions
from benchmarks.step_versions import WAYS, Steps


@pytest.fixture
def muon(tmp_path: Path) -> str:
    """A recipe whose optimizer has two parts."""
    file = tmp_path / "muon.yaml"
    file.write_text("extends: tiny\ntrain: {optimizer: muon, lr: 4.0e-4}\n")
    return str(file)


def test_the_shares_of_operations_add_up_and_matrix_products_are_among_them() -> None:
    found = Steps.of("tiny", 32).shares()
    shares = list(found.operations.values())
    assert sum(shares) == pytest.approx(1.0)
    assert shares == sorted(shares, reverse=True)
    assert 0 < found.products < 1
    assert 0 < found.optimizer < 1


def test_an_optimizer_of_two_parts_counts_once_and_orthogonalising_takes_more_of_the_step(muon: str) -> None:
    orthogonalised, plain = (Steps.of(name, 32).shares().optimizer for name in (muon, "tiny"))
    assert plain < orthogonalised < 1


def test_a_row_of_operations_names_as_many_as_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    step_versions.print_operations(["tiny"], 32, 3)
    _, _, row, *rest = capsys.readouterr().out.splitlines()
    name, products, optimizer, largest = (cell.strip() for cell in row.strip("|").split("|"))
    assert (name, largest.count("%"), rest) == ("tiny", 3, [])
    assert 0 < int(products.removesuffix("%")) < 100
    assert 0 <= int(optimizer.removesuffix("%")) < 100


def test_a_step_is_timed_in_both_precisions() -> None:
    found = next(Steps.of("tiny", 32).taken())
    assert set(found) == set(WAYS)
    assert min(found.values()) > 0
