"""Timing on a machine that other programs use too."""

from pathlib import Path

import pytest
import torch
from draftsmith.export import EvaluateConfig, Question, busy_warning, evaluate, use_free_processors
from draftsmith.export.evaluation.contention import ContentionProbe, rotated
from draftsmith.modules import Target

SETS = {"own": [Question.single((1, 5, 40))]}


def test_the_probe_marks_a_busy_machine(tiny_target: Target) -> None:
    probe = ContentionProbe(tiny_target)
    assert not probe.contended
    probe.samples = {1: [0.050, 0.055], 8: [0.060, 0.068]}
    assert not probe.contended
    probe.samples = {1: [0.050, 0.055], 8: [0.060, 0.070]}
    assert probe.contended
    assert probe.excess[8] == pytest.approx(1 / 6)


def test_the_probe_measures_both_sizes_and_leaves_no_trace(tiny_target: Target) -> None:
    probe = ContentionProbe(tiny_target)
    before = list(probe.rows.cache.host_lengths)
    probe.sample()
    probe.sample()
    assert {size: len(seconds) for size, seconds in probe.samples.items()} == {1: 2, 8: 2}
    assert all(second > 0 for seconds in probe.samples.values() for second in seconds)
    assert probe.rows.cache.host_lengths == before


@pytest.mark.parametrize(("speed_prompts", "reported"), [(1, True), (0, False)])
def test_an_evaluation_that_times_says_so_on_stderr(tiny_target: Target, monkeypatch: pytest.MonkeyPatch,
                                                    capsys: pytest.CaptureFixture[str], speed_prompts: int,
                                                    reported: bool) -> None:
    monkeypatch.setattr("draftsmith.export.evaluation.evaluate.busy_warning", lambda: "the machine is busy")
    config = EvaluateConfig(max_new_tokens=4, speed_prompts=speed_prompts, baselines=("prompt_lookup",))
    evaluate(tiny_target, [], SETS, config, progress=False)
    shown = capsys.readouterr().err
    assert ("warning: the machine is busy\n" in shown) == reported


@pytest.mark.parametrize(("idle", "threads", "warning"), [
    ((100, 100), 2, None), ((90, 85), 2, None), ((100, 0), 1, None), ((60, 50), 2, "take 45% of the processor time"),
    ((0, 100), 2, "take 50% of the processor time"), ((0, 0), 1, "take 100% of the processor time"),
])
def test_processors_that_others_use_are_reported_without_a_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                                  idle: tuple[int, int], threads: int,
                                                                  warning: str | None) -> None:
    """Instead of sleeping, the test writes the processor times after the second."""
    times = tmp_path / "stat"

    def write(idle_ticks: tuple[int, int], busy_ticks: tuple[int, int]) -> None:
        rows = [f"cpu{place} {1000 + busy} 20 30 {5000 + free} 40 0 1 2 0 0"
                for place, (free, busy) in enumerate(zip(idle_ticks, busy_ticks, strict=True))]
        times.write_text("\n".join(["cpu 1 2 3 4 5 6 7 8 9 10", *rows, "cpu7 1 1 1 1 1 1 1 1 1 1", "intr 5 0 0", ""]))

    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr("os.sched_getaffinity", lambda _process: {0, 1})
    write((0, 0), (0, 0))
    busy = (100 - idle[0], 100 - idle[1])
    found = busy_warning(seconds=1.0, times=times, sleep=lambda _seconds: write(idle, busy))
    assert (found is None) == (warning is None)
    assert warning is None or (found is not None and warning in found)


@pytest.mark.parametrize(("looks", "threads", "used"), [
    ([[1.0, 1.0]], 2, 2), ([[0.0, 0.1], [0.0, 0.2]], 2, 1), ([[0.0, 0.1], [0.9, 0.9]], 2, 2), ([[0.0, 0.0]], 1, 1),
    ([[1.0, 0.4, 0.8, 0.0], [1.0, 0.2, 0.7, 0.1]], 4, 2), ([[1.0] * 8], 2, 2), ([[]], 2, 2),
])
def test_no_more_threads_than_free_processors_are_used(looks: list[list[float]], threads: int, used: int,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that only the first look sees takes none."""
    found, shares = [threads], iter(looks)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(torch, "set_num_threads", found.append)
    monkeypatch.setattr("draftsmith.export.evaluation.contention._idle_shares", lambda **_: next(shares))
    use_free_processors()
    assert found[-1] == used


def test_without_processor_times_nothing_is_reported(tmp_path: Path) -> None:
    assert busy_warning(times=tmp_path / "none", sleep=lambda _seconds: pytest.fail("it waited for nothing")) is None


def test_every_name_gets_to_go_first() -> None:
    assert [rotated("abc", turn)[0] for turn in range(4)] == ["a", "b", "c", "a"]
    assert sorted(rotated("abc", 2)) == ["a", "b", "c"]
