"""A run whose training several processes do, with a target and a drafter that they share."""

from pathlib import Path

import pytest
from draftsmith.recipes.__main__ import main
from support.torchrun import torchrun

TINY = str(Path(__file__).resolve().parents[2] / "recipes" / "tiny.yaml")


@pytest.mark.distributed
@pytest.mark.slow
def test_one_process_distils_two_train_and_one_evaluates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--config", TINY, "--out", str(tmp_path / "out"), "--train.devices", "2", "--train.accelerator", "cpu",
             "--batch.states", "computed", "--train.max_steps", "4", "--train.validate_every", "2"]
    assert main(["distill", *words]) == 0
    answer = torchrun(2, "-m", "draftsmith.recipes", "run", *words, "--target.placement", "tensor_parallel",
                      "--train.strategy", "fsdp2")
    assert answer.returncode == 0, answer.stderr[-3000:]
    assert answer.stdout.count("the drafter is trained") == 1, "the first process speaks for all"
    assert "trained; for the stages artifact and evaluate start draftsmith run" in answer.stdout
    assert (tmp_path / "out" / "train" / "result.json").is_file()
    assert not (tmp_path / "out" / "artifact").exists()
    capsys.readouterr()
    assert main(["run", *words]) == 0
    printed = capsys.readouterr().out
    assert printed.count("already complete, skipped") == 3, "wherever target and drafter are, they are complete"
    assert (tmp_path / "out" / "report.html").is_file()
