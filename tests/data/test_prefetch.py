"""Batches that are made ahead: the same in the same order, with errors where they are due, and no thread left."""

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.data import Manifest, datamodule
from draftsmith.data.datamodule import THREAD, BatchConfig, DraftDataModule, Prefetched
from draftsmith.data.store.feature_shards import FINAL, state_file
from draftsmith.modules import Features, Medusa, MedusaConfig, Target, UserError, progress
from draftsmith.recipes.__main__ import main
from draftsmith.trainers import DraftModule, draft_module, fit, train_config
from support.cases import interrupted
from support.data.data_folders import conversations, encode

pytestmark = pytest.mark.filterwarnings("ignore")
CONFIG = BatchConfig(row_length=96, rows_per_batch=2)
TRAIN = train_config(Medusa)(drafter=MedusaConfig(num_heads=1), max_steps=5, warmup_steps=1, checkpoint_every=2,
                          validate_every=5, accumulate=2, accelerator="cpu", precision="32-true")


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(THREAD)]


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    """Every test leaves as many threads that read ahead as it found."""
    assert threads() == []
    yield
    assert threads() == []


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_batches_come_in_order_and_no_more_are_made_than_asked_for(ahead: int) -> None:
    made: list[tuple[int, str]] = []

    def make(number: int) -> int:
        made.append((number, threading.current_thread().name))
        return number * 10

    batches = Prefetched(make, 4, ahead)
    assert list(islice(iter(batches), 5)) == [40, 50, 60, 70, 80]
    batches.close()
    assert [number for number, _ in made] == list(range(4, 9 + max(0, ahead)))[: len(made)]
    assert 5 <= len(made) <= 5 + ahead
    assert all(name.startswith(THREAD) == bool(ahead) for _, name in made)


def test_the_wait_is_that_for_batches_that_are_not_ready() -> None:
    made: list[int] = []

    def make(number: int) -> None:
        time.sleep(0.05)
        made.append(number)

    at_once, ahead = Prefetched(make, 0, 0), Prefetched(make, 0, 2)
    for batches in (at_once, ahead):
        made.clear()
        for number, _ in enumerate(islice(iter(batches), 10)):
            while batches is ahead and number + 1 not in made:
                time.sleep(0.01)
        batches.close()
    assert at_once.waited >= 0.5
    assert ahead.waited < at_once.waited, "the first batch alone is waited for"


def test_an_error_comes_where_its_batch_is_due() -> None:
    def make(number: int) -> int:
        if number == 2:
            raise UserError("batch 2 cannot be read")
        return number

    batches = iter(Prefetched(make, 0, 4))
    assert [next(batches), next(batches)] == [0, 1]
    with pytest.raises(UserError, match="batch 2 cannot be read"):
        next(batches)


class Asked(BaseException):
    """Raised by a request to end."""


@contextmanager
def asked_to_end(told: Callable[[], object] = bool) -> Iterator[None]:
    """A block that a signal ends; first it calls this."""
    def stop(_number: int, _frame: object) -> None:
        told()
        raise Asked

    former = signal.signal(signal.SIGTERM, stop)
    try:
        with pytest.raises(Asked):
            yield
    finally:
        signal.signal(signal.SIGTERM, former)


def test_a_signal_ends_the_wait_for_a_batch() -> None:
    ended = threading.Event()

    def make(number: int) -> None:
        if number:
            ended.wait()

    batches = iter(Prefetched(make, 0, 2))
    next(batches)
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM))
    # The thread is waited for on the way out.
    with asked_to_end(ended.set):
        timer.start()
        next(batches)
    timer.join()


@pytest.fixture
def three_threads() -> Iterator[None]:
    """Three threads of torch, more than one whatever the tests run with."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("three_threads")
def test_the_threads_of_torch_stay_those_of_the_training() -> None:
    """The thread that reads has one, also after the training's number was set again."""
    found: list[int] = []
    batches = Prefetched(lambda _number: found.append(torch.get_num_threads()), 0, 1)
    coming = iter(batches)
    next(coming)
    next(coming)
    batches.close()
    assert set(found) == {1}
    later = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    later.start()
    later.join()
    assert torch.get_num_threads() == 3 == found[-1]


# Training -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory, tiny_target: Target) -> Path:
    """Three validation and twelve train conversations with final states in int8."""
    out = conversations(tmp_path_factory.mktemp("data"), tiny_target)
    encode(tiny_target, out, form="int8")
    return out


@pytest.fixture
def folder(stored: Path, tmp_path: Path) -> Path:
    """The same, to be damaged."""
    return Path(shutil.copytree(stored, tmp_path / "data"))


def data(folder: Path, **changes: Any) -> DraftDataModule:
    return DraftDataModule(folder, replace(CONFIG, **changes))


PLAIN = draft_module(Medusa)


class Terminated(DraftModule):
    """A module whose training is asked to end in its second step."""

    drafter_class = Medusa

    def on_train_batch_start(self, batch: Features, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        if batch_idx == 2:
            assert len(threads()) == 1
            signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("states", ["stored", "computed"])
def test_a_run_ends_in_the_same_bits_with_prefetching_without_and_resumed(
    states: Any, stored: Path, tmp_path: Path, tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained(ahead: int, out: Path) -> bytes:
        monkeypatch.setattr(datamodule, "AHEAD", ahead)
        fit(PLAIN(tiny_target, TRAIN), data(stored, states=states), out, progress=False)
        return (out / "best.safetensors").read_bytes()

    plain = trained(0, tmp_path / "plain")
    assert trained(3, tmp_path / "ahead") == plain
    # Amid an epoch and amid an optimizer step.
    with interrupted(PLAIN, 7):
        trained(2, tmp_path / "parts")
    assert threads() == []
    assert trained(3, tmp_path / "parts") == plain


def test_a_request_to_end_leaves_no_thread_and_the_run_goes_on(stored: Path, tmp_path: Path, tiny_target: Target,
                                                               capfd: pytest.CaptureFixture[str],
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    # A short training has no line in a log.
    monkeypatch.setattr(progress, "LOG_SECONDS", 0.0)
    whole = fit(PLAIN(tiny_target, TRAIN), data(stored), tmp_path / "whole", progress=True)
    assert ", data wait % " in capfd.readouterr().err
    assert 0 < whole.data_wait < 1
    with asked_to_end():
        fit(Terminated(tiny_target, TRAIN), data(stored), tmp_path / "parts", progress=False)
    assert threads() == []
    fit(PLAIN(tiny_target, TRAIN), data(stored), tmp_path / "parts", progress=False)
    assert (tmp_path / "parts/best.safetensors").read_bytes() == (tmp_path / "whole/best.safetensors").read_bytes()


@pytest.mark.parametrize("ahead", [0, 2])
def test_states_that_are_altered_while_they_are_read_end_the_training(
    ahead: int, folder: Path, tmp_path: Path, tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datamodule, "AHEAD", ahead)
    batches = data(folder)
    files = [folder / state_file(record, FINAL) for record in Manifest.load(folder).split("train")]
    for file in files:
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    with pytest.raises(UserError, match=r"final-train-\S+ was altered while training reads it; run draftsmith distill"):
        fit(PLAIN(tiny_target, TRAIN), batches, tmp_path / "out", progress=False)
    for file in files:
        file.unlink()
    with pytest.raises(UserError, match=r"final-train-\S+ is gone while training reads it \(No such file"):
        batches.packed_batch(0).to("cpu")


def test_a_command_names_altered_states_in_one_sentence(copied_run: Path, tmp_path: Path, capsys: Any,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    start = DraftDataModule.train_dataloader

    def altered(self: DraftDataModule) -> Any:
        file = self.folder / state_file(self.manifest.split("train")[0], FINAL)
        content = file.read_bytes()
        file.write_bytes(content[: len(content) // 2])
        return start(self)

    monkeypatch.setattr(DraftDataModule, "train_dataloader", altered)
    words = ["--config", "tiny", "--out", str(tmp_path / "out"), "--data", str(copied_run / "data")]
    assert main(["train", *words]) == 2
    error = capsys.readouterr().err
    assert "was altered while training reads it; run draftsmith distill with the same recipe" in error
    assert "Traceback" not in error
