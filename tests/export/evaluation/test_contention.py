"""Timing on a machine that others use too."""

import pytest
from draftsmith.export.evaluation.contention import ContentionProbe, rotated
from draftsmith.modules import Target


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


def test_every_way_gets_to_go_first() -> None:
    assert [rotated("abc", turn)[0] for turn in range(4)] == ["a", "b", "c", "a"]
    assert sorted(rotated("abc", 2)) == ["a", "b", "c"]
