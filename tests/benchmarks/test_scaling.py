"""The benchmark of cost against size: a case is measured, its tables are printed, batches are packed closely."""

from dataclasses import replace

import pytest
from benchmarks import scaling
from benchmarks.scaling import FAMILIES, TABLES, Case, batches, cases, conversations, measure
from draftsmith.trainers import chunked_losses

SMALL = Case(length=64, segment=32, vocabulary=128, steps=2, width=16)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_of_every_family_is_measured(family: str) -> None:
    found = measure(replace(SMALL, family=family))
    assert found["seconds"] > 0
    assert found["loss MiB"] > 0


def test_memory_of_the_loss_ends_with_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """More tokens than a chunk has come one chunk after the other; in one chunk four times as many take four times."""
    monkeypatch.setitem(chunked_losses.CHUNK_ELEMENTS, "cpu", 16 * SMALL.vocabulary)
    one, four = (measure(replace(SMALL, rows=rows, length=512)) for rows in (1, 4))
    assert four["loss MiB"] < 2 * one["loss MiB"]


@pytest.mark.long
def test_memory_of_blocks_grows_with_anchors_or_tokens_alone() -> None:
    """Four times as many blocks take four times as much; scores of all slots with all slots would take sixteen."""
    few, many = (measure(replace(SMALL, family="dspark", length=2048, segment=2048, anchors=anchors))["step MiB"]
                 for anchors in (128, 512))
    assert many < 4 * few
    short, long = (measure(replace(SMALL, family="dspark", length=length, segment=length))["step MiB"]
                   for length in (512, 2048))
    assert 3.5 < long / short < 4.5


def test_every_table_starts_at_the_base_and_varies_what_it_says(monkeypatch: pytest.MonkeyPatch,
                                                                capsys: pytest.CaptureFixture[str]) -> None:
    run: list[Case] = []

    def noted(case: Case) -> dict[str, float]:
        run.append(case)
        return {"seconds": case.rows * case.length / 1000, "MiB": 1.0, "step MiB": 1.0, "loss MiB": 1.0}

    monkeypatch.setattr(scaling, "run", noted)
    scaling.main(["--family", "medusa", "--longest", "4096"])
    printed = capsys.readouterr().out
    tables = cases(Case(family="medusa"), 4096)
    assert tuple(tables) == TABLES
    assert run == [case for several in tables.values() for case in several]
    for name, several in tables.items():
        assert printed.count(f"\n| {name} |") == len(several) == len(set(several))
        assert max(case.length for case in several) <= 4096


def test_packed_batches_waste_less_than_a_twentieth() -> None:
    for row_length, rows in ((2048, 4), (8192, 1)):
        waste, _ = batches(conversations(2000, row_length), row_length, rows)
        assert 0 <= waste < 0.05
