"""The time of drafting is that of its work, not of its launches."""

from typing import Any

import pytest
import torch
from draftsmith.modules import Chain, DecodeSettings, LayerDraft, Request, Target, decode
from draftsmith.modules.decoding import recorders
from draftsmith.modules.decoding.recorders import DeviceTimer


class Device:
    """A device that works off what was launched when somebody waits for it; a launch takes it no time."""

    def __init__(self) -> None:
        self.now, self.launched, self.waits = 0.0, [], 0

    def launch(self, work: Any) -> None:
        self.launched.append(work)

    def finish(self) -> None:
        for work in self.launched:
            self.now += work if isinstance(work, float) else work.reached(self.now)
        self.launched.clear()


def test_events_are_read_behind_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: Any) -> None:
            assert stream is device
            device.launch(self)

        def reached(self, now: float) -> float:
            self.at = now
            return 0.0

        def synchronize(self) -> None:
            device.waits += 1
            device.finish()

        def elapsed_time(self, later: "Event") -> float:
            return 1000 * (later.at - self.at)

    monkeypatch.setattr(recorders.torch.cuda, "Event", Event)
    monkeypatch.setattr(recorders.torch.cuda, "current_stream", lambda _device: device)
    monkeypatch.setattr(recorders.torch.cuda, "is_current_stream_capturing", lambda: False)
    timer = DeviceTimer(torch.device("cuda"))
    for seconds in (2.0, 3.0):
        device.launch(0.5)
        with timer.running():
            device.launch(seconds)
        device.launch(7.0)
    assert (device.now, device.waits) == (0.0, 0)  # nobody has waited so far
    assert timer.read() == 5.0
    assert timer.read() == 0.0


def test_drafting_is_a_part_of_decoding(tiny_target: Target) -> None:
    stats = decode(tiny_target, [Request((5, 9), 0, 12)], DecodeSettings(), drafter=LayerDraft(tiny_target, range(1)),
                   policy=Chain(3)).stats
    assert 0 < stats.draft_seconds < stats.seconds - stats.target_seconds


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_device_it_is_the_time_of_the_work() -> None:
    device = torch.device("cuda")
    square = torch.randn(4096, 4096, device=device)
    square @ square
    whole, timer = DeviceTimer(torch.device("cpu")), DeviceTimer(device)
    torch.cuda.synchronize()
    with whole.running():
        with timer.running():
            for _ in range(50):
                square @ square
        torch.cuda.synchronize()
    assert timer.read() == pytest.approx(whole.read(), rel=0.2)
