"""Processes forked from the test's own that work on one folder, and can be killed."""

import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path

import torch


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
