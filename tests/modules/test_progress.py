"""The line of a stage: when it is written, what it says of the time left."""

import sys

import pytest
from draftsmith.data.answers.data_folder import Progress
from draftsmith.modules import progress
from draftsmith.modules.progress import ProgressLine, clock
from draftsmith.modules.target.loading.hf_folder import without_bars
from huggingface_hub.utils.tqdm import are_progress_bars_disabled
from transformers import modeling_gguf_pytorch_utils as gguf
from transformers.utils import logging


class Ticking:
    """A clock that a test moves."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Ticking:
    ticking = Ticking()
    monkeypatch.setattr(progress, "time", ticking)
    return ticking


def become_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if stderr were a terminal of 60 columns."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")


def test_minutes_end_a_stage_whatever_its_rate_says(time: Ticking) -> None:
    """Three tokens in a minute are 500 hours for 90,000 of them; the minutes leave one and a half."""
    line = ProgressLine("answers", 90_000, "tok", seconds_left=lambda: 90.0, shown=False)
    time.now += 60
    line.advance(3)
    assert str(line) == "answers: 3 of 90,000 tok in 1:00, 1:30 left, 20.0 s/tok"
    line.advance(59_997)
    assert str(line) == "answers: 60,000 of 90,000 tok in 1:00, 0:30 left, 1,000.0 tok/s"


def test_a_rate_says_nothing_before_some_work_is_done_and_knows_an_earlier_run(time: Ticking) -> None:
    line = ProgressLine("train", 400, "step", done=200, shown=False)
    time.now += 30
    line.advance(3)
    assert str(line) == "train: 203 of 400 step in 0:30, 10.0 s/step"
    line.figures = "loss 2.00"
    line.advance(17)
    assert str(line) == "train: 220 of 400 step in 0:30, 4:30 left, 1.5 s/step, loss 2.00"
    assert str(ProgressLine("trial", None, "tok", shown=False)) == "trial: 0 tok in 0:00"
    assert clock(7325) == "2:02:05"


def test_a_log_gets_one_line_in_ten_seconds_and_none_of_a_short_stage(time: Ticking,
                                                                      capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressLine("answers", 1000, "tok") as line:
        for _ in range(100):
            time.now += 0.25
            line.advance(10)
            line.entitle("answers")
    shown = capsys.readouterr().err
    assert [one.split(" in ")[0] for one in shown.splitlines()] == [
        "answers: 400 of 1,000 tok", "answers: 800 of 1,000 tok"]
    assert "\r" not in shown
    with ProgressLine("held-out prompts", 10, "prompt") as line:
        time.now += 9.0
        line.advance(10)
    assert capsys.readouterr().err == ""


def test_a_terminal_shows_one_line_that_fits(time: Ticking, monkeypatch: pytest.MonkeyPatch,
                                             capfd: pytest.CaptureFixture[str]) -> None:
    become_terminal(monkeypatch)
    with ProgressLine("answers", 1000, "tok") as line:
        line.figures = "12% of slots idle, " * 9
        for _ in range(10):
            time.now += 1.0
            line.advance(100)
        line.figures = ""
        line.entitle("end")
    shown = capfd.readouterr().err
    assert shown.index("\n") == len(shown) - 1
    lines = shown.rstrip("\n").split("\r")
    # What is shorter than the line before covers it.
    assert {len(one) for one in lines[2:-1]} == {59}
    assert lines[-1].rstrip() == "end: 1,000 of 1,000 tok in 0:10, 0:00 left, 100.0 tok/s"


def test_a_stage_of_answers_ends_with_the_number_that_the_data_have(time: Ticking, monkeypatch: pytest.MonkeyPatch,
                                                                    capfd: pytest.CaptureFixture[str]) -> None:
    become_terminal(monkeypatch)
    bar = Progress(shown=True, seconds_left=lambda: 60.0)
    with bar.stage("answers", 1000, "tok", done=100):
        time.now += 10.0
        bar.advance("tok", 900)
        bar.advance("prompt", 8)
        bar.settle("prompt", 3)
        bar.settle("tok", 940)
    last = capfd.readouterr().err.rstrip("\n").split("\r")[-1]
    assert last.startswith("answers: 940 of 1,000 tok in 0:10, 0:01 left")


def test_a_model_is_read_without_bars_of_another_library(capsys: pytest.CaptureFixture[str]) -> None:
    with without_bars():
        assert are_progress_bars_disabled(), "a log gets no bars of downloads either"
        assert list(gguf.tqdm(range(3), desc="of a GGUF file")) == list(logging.tqdm(range(3))) == [0, 1, 2]
    assert capsys.readouterr().err == ""
    list(gguf.tqdm(range(3), desc="of a GGUF file"))
    assert "of a GGUF file" in capsys.readouterr().err
