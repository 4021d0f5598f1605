"""The benchmark of waiting for data trains on states of every format, with batches ahead and without."""

import pytest
from benchmarks import data_wait


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_every_format_is_trained_on_and_the_wait_is_a_share(capsys: pytest.CaptureFixture[str]) -> None:
    data_wait.main(["--shape", "tiny", "--formats", "float32", "int8", "--steps", "2", "--conversations", "8",
                    "--row-length", "128", "--rows", "2"])
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()
            if line.startswith(("| computed", "| float32", "| int8"))]
    assert [(row[0], row[4]) for row in rows] == [(form, ahead) for form in ("computed", "float32", "int8")
                                                  for ahead in ("0", "2")]
    for form, size, made, _decoded, _ahead, rate, share in rows:
        # One kind of states of 256 tokens, 64 wide.
        assert float(size) == pytest.approx({"computed": 0, "float32": 256 * 64 * 4, "int8": 256 * 68}[form] / 2**20,
                                            abs=0.051)
        # Packing so few tokens may take less than what is printed.
        assert float(made) >= 0
        assert float(rate) > 0
        assert 0 <= float(share) < 100


def test_a_mistake_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        data_wait.main(["--steps", "0"])
    assert "must be at least 1 and --row-length at least 32, got 0, 192, 4 and 512" in capsys.readouterr().err
