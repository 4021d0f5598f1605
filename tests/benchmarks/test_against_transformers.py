"""The benchmark against transformers runs on the tiny target, and its ratio is that of the sums."""

import importlib
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    return importlib.import_module("benchmarks.against_transformers")


def test_the_table_has_a_row_for_each_pair(benchmark: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    benchmark.main(["--target", "tiny-random", "--prompts", "3", "--new-tokens", "8", "--minutes", "0"])
    printed = capsys.readouterr()
    rows = [line for line in printed.out.splitlines() if line.startswith("| ")][1:]
    assert [row.split(" | ")[0] for row in rows] == ["| plain", "| prompt lookup", "| first layers"]
    assert all(row.endswith("2 / 2 of 2 |") for row in rows)  # no third prompt was started after the time
    assert "prompt 2 of 3" in printed.err
    assert "times transformers" in printed.out


def test_a_mistake_is_one_sentence(benchmark: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        benchmark.main(["--prompts", "0"])
    assert "must be at least 1, got 0 and 96" in capsys.readouterr().err


def test_the_ratio_is_of_sums_and_paired(benchmark: ModuleType) -> None:
    def tally(*seconds: float) -> object:
        return benchmark.Tally([benchmark.Outcome([[1] * 10], 5, second) for second in seconds])

    value, ends = benchmark.ratio(tally(1.0, 9.0), tally(2.0, 18.0))
    assert value == pytest.approx(2.0)
    assert ends == pytest.approx((2.0, 2.0))
    value, ends = benchmark.ratio(tally(1.0, 1.0), tally(1.0, 3.0))
    assert value == pytest.approx(2.0)
    assert ends == pytest.approx((1.0, 3.0))
