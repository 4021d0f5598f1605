"""Work that is killed: in processes forked from the test's own, which share a folder, and in a block of the test."""

import itertools
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from draftsmith.modules.files.folders import FolderLocks, sole_writer


def start(work: Callable[[], object], *, killed_at: int = 0) -> int:
    """Start a process that does some work; returns its id."""
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        # The threads of the parent are not here.
        torch.set_num_threads(1)
        if killed_at:
            _die_at(killed_at)
        work()
        code = 0
    except BaseException:  # noqa: BLE001 the end of a process: whatever it is belongs into what it said
        traceback.print_exc()
    finally:
        os._exit(code)


def ended(process: int) -> int:
    """Exit code of a process that is waited for; -9 after a kill."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def kill(process: int) -> None:
    """End a process as `kill -9` does, if it has not ended before."""
    os.kill(process, signal.SIGKILL)
    ended(process)


def _die_at(last: int) -> None:
    replacing, calls = Path.replace, []

    def replaced(self: Path, to: Path) -> Path:
        calls.append(to)
        if len(calls) == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return replacing(self, to)

    Path.replace = replaced  # type: ignore[method-assign,assignment]


def holding(locks: Path, number: int) -> int:
    """Start a process that holds a lock of a folder and does nothing else; returns its id once it has it."""
    return _kept(lambda: (held := FolderLocks(locks)).take(number) and held)


def working(folder: Path) -> int:
    """The same for the one command that works in a folder."""

    def begun() -> object:
        block = sole_writer(folder / "stages.json")
        block.__enter__()
        return block

    return _kept(begun)


def _kept(take: Callable[[], object]) -> int:
    taken, told = os.pipe()

    def keep() -> None:
        kept = take()
        assert kept
        os.write(told, b"!")
        time.sleep(600)

    process = start(keep)
    os.close(told)
    assert os.read(taken, 1), "the lock is held by another"
    os.close(taken)
    return process


class Killed(BaseException):
    """Stands for a process that ends here: nothing cleans up."""


@contextmanager
def killed_after(writes: int | None) -> Iterator[None]:
    """A block that ends before this write of a file, counted from 0; None lets it finish."""
    left, replacing = itertools.count(), Path.replace

    def stop(self: Path, to: Path) -> Path:
        if next(left) == writes:
            raise Killed
        return replacing(self, to)

    with patch.object(Path, "replace", stop):
        yield


def die(*_given: Any, **_more: Any) -> Any:
    raise Killed


@contextmanager
def killed_in(owner: Any, name: str) -> Iterator[None]:
    """A block that ends where this function of a class or module is called first."""
    with patch.object(owner, name, die), pytest.raises(Killed):
        yield
