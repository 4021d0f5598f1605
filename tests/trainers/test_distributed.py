"""Two processes on gloo train the same weights as one."""

import re
from pathlib import Path

import pytest
import torch
from support.processes import python, torchrun

SCRIPT = Path(__file__).resolve().parents[1] / "references" / "distributed_fit.py"


def run(out: Path, accumulate: int, processes: int, *more: str) -> list[str]:
    """Output of each process."""
    command = [str(SCRIPT), str(out), str(accumulate), *more]
    answer = torchrun(processes, *command) if processes > 1 else python(*command)
    assert answer.returncode == 0, answer.stderr[-3000:]
    assert answer.stdout.count("joined at the end: False.") == processes, "Python may abort with them joined"
    # Two processes write to one pipe: their lines may be joined.
    return re.findall(r"step \d+, accepted length \d+\.\d{6}, \d+ steps", answer.stdout)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.long
def test_two_processes_equal_one_that_accumulates(tmp_path: Path) -> None:
    """The micro-batches are the same, two at a time here and one after another there; their label counts differ."""
    alone = run(tmp_path / "one", 4, 1)
    together = run(tmp_path / "two", 2, 2)
    stored = [torch.load(tmp_path / name / "last.ckpt", weights_only=True) for name in ("one", "two")]
    assert stored[0]["global_step"] == stored[1]["global_step"] == 6
    for name, tensor in stored[0]["state_dict"].items():
        torch.testing.assert_close(stored[1]["state_dict"][name], tensor, atol=2e-5, rtol=1e-4)
    assert (len(alone), len(together)) == (1, 2)
    assert len({*alone, *together}) == 1, f"every process knows the same best step: {alone} {together}"


@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.slow
def test_two_processes_end_by_time_at_the_same_step(tmp_path: Path) -> None:
    """Their clocks differ by days; if each used its own, one would wait for the other forever."""
    told = run(tmp_path, 1, 2, "0.02")
    steps = torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"]
    assert len(told) == 2
    assert len(set(told)) == 1
    assert told[0].endswith(f" {steps} steps")
    assert steps > 2


@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.slow
def test_a_signal_to_one_process_ends_all_after_the_same_step(tmp_path: Path) -> None:
    """The others would wait for it forever, or end without a checkpoint."""
    assert not run(tmp_path, 1, 2, "1", "signalled"), "a process told a result although it was stopped"
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 3
