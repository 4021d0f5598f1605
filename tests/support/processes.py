"""Work in other processes: scripts under torchrun, work that is killed, and disturbed commands."""

import ctypes
import importlib
import itertools
import json
import os
import pkgutil
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import pytest
import torch
from draftsmith.modules.files.folders import FolderLocks, sole_writer

ROOT = Path(__file__).resolve().parents[2]
HANGING = 3600.0  # Seconds after which a process hangs: those of the longest test on a busy machine, twenty times


def torchrun(processes: int, *command: str) -> subprocess.CompletedProcess[str]:
    """Output of a script, or of a module (`-m`, its name), with its arguments when torchrun has started it."""
    return python(*launcher(processes), *command)


def launcher(processes: int) -> list[str]:
    """Arguments of Python that start what follows them in so many processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return ["-m", "torch.distributed.run", f"--nproc-per-node={processes}", f"--master-port={port}"]


def python(*command: str) -> subprocess.CompletedProcess[str]:
    """Output of Python with these arguments, on one thread and without a network."""
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False, timeout=HANGING,
                          cwd=ROOT, env=environment())


def environment() -> dict[str, str]:
    """Variables of a started process: one thread, no network."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@contextmanager
def before_write(number: int | None, act: Callable[[], object]) -> Iterator[None]:
    """A block in which something happens before this write of a file, counted from 0."""
    count, replacing = itertools.count(), Path.replace

    def replaced(self: Path, to: Path) -> Path:
        if next(count) == number:
            act()
        return replacing(self, to)

    with patch.object(Path, "replace", replaced):
        yield


def start(work: Callable[[], object], *, killed_at: int = 0) -> int:
    """Start a process that does some work, killed before this write of a file, counted from 1; returns its id."""
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        # The threads of the parent are not here.
        torch.set_num_threads(1)
        with before_write(killed_at - 1, lambda: os.kill(os.getpid(), signal.SIGKILL)):
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


def die(*_given: Any, **_more: Any) -> Any:
    raise Killed


def killed_after(writes: int | None) -> AbstractContextManager[None]:
    """A block that ends before this write of a file, counted from 0; None lets it finish."""
    return before_write(writes, die)


@contextmanager
def killed_in(owner: Any, name: str) -> Iterator[None]:
    """A block that ends where this function of a class or module is called first."""
    with patch.object(owner, name, die), pytest.raises(Killed):
        yield


ROOMS = ("modules", "data", "export", "trainers", "recipes")
PARENT_DEATH = 1  # PR_SET_PDEATHSIG of Linux's prctl: the signal that a process gets when its parent ends


def import_everything() -> None:
    """Import every module of the project and the parts of libraries that they import late."""
    for room in ROOMS:
        package = importlib.import_module(f"draftsmith.{room}")
        for info in pkgutil.walk_packages(package.__path__, f"draftsmith.{room}."):
            if not info.name.endswith(".__main__"):
                importlib.import_module(info.name)
    importlib.import_module("transformers.models.llama.modeling_llama")


@dataclass(frozen=True)
class Ended:
    """End of a command."""

    code: int  # exit code; negative: ended by that signal
    said: str
    seconds: float
    renamed: tuple[str, ...]  # new paths of all that it renamed, in order; empty for a killed one

    @property
    def last(self) -> str:
        """The end of its output, or a traceback with the lines before it."""
        return self.said[max(0, self.said.find("Traceback") - 200) :][:1500] if "Traceback" in self.said else (
            self.said[-300:])

    def clean(self, sentences: int = 1) -> bool:
        """True for an end without a traceback, with so many sentences where the code is that of a user's mistake."""
        told = sum("draftsmith: error: " in line for line in self.said.replace("\r", "\n").splitlines())
        return "Traceback" not in self.said and (self.code != 2 or told == sentences)


@dataclass(frozen=True)
class Disturbance:
    """An interference with a running command."""

    after: float | None = None  # seconds until it is killed
    rename: int = 0  # it kills itself just before this rename, counted from 1
    most_kib: int = 0  # largest size of a file that it may write: a disk that is full
    sent: signal.Signals | None = None  # signal that it gets, `delay` seconds after a line that begins with `stage`
    stage: str = ""
    delay: float = 0.0


def call(words: Sequence[str], folder: Path, disturbance: Disturbance | None = None) -> Ended:
    """Run a command in a forked process to its end, with something done to it."""
    done = disturbance or Disturbance()
    output, output_end = os.pipe()
    names, names_end = os.pipe()
    started = time.monotonic()
    process = os.fork()
    if process == 0:
        _become_command(words, folder, done, output_end, names_end)
    os.close(output_end)
    os.close(names_end)
    killer = threading.Timer(done.after, os.kill, (process, signal.SIGKILL)) if done.after is not None else None
    if killer is not None:
        killer.start()
    said: list[str] = []
    with os.fdopen(output, errors="replace") as lines:
        waiting = done.sent is not None
        for line in lines:
            said.append(line)
            if waiting and done.sent is not None and line.startswith(done.stage):
                waiting = False
                time.sleep(done.delay)
                os.kill(process, done.sent)
    if killer is not None:
        # Before the process is waited for: until then no other process can have its number.
        killer.cancel()
        killer.join()
    _, status = os.waitpid(process, 0)
    with os.fdopen(names) as stream:
        renamed = tuple(json.loads(stream.read() or "[]"))
    return Ended(os.waitstatus_to_exitcode(status), "".join(said), time.monotonic() - started, renamed)


def _become_command(words: Sequence[str], folder: Path, done: Disturbance, output: int, names: int) -> NoReturn:
    """Everything that the forked process does."""
    ctypes.CDLL(None).prctl(PARENT_DEATH, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(folder)
    for stream in (1, 2):
        os.dup2(output, stream)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    if done.most_kib:
        # Without this the first byte too many would end the process instead of the write.
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (done.most_kib * 1024,) * 2)
    renamed: list[str] = []
    os.replace, os.rename = (_noted(function, renamed, done.rename) for function in (os.replace, os.rename))
    code = 70
    try:
        from draftsmith.recipes.__main__ import main

        code = main(words)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 the end of a process: whatever it is belongs into what it said
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        with os.fdopen(names, "w") as stream:
            json.dump(renamed, stream)
        os._exit(code)


def _noted(function: Callable[..., None], renamed: list[str], last: int) -> Callable[..., None]:
    """A rename that is noted; the process kills itself just before the last one."""

    def rename(old: str | Path, new: str | Path, **named: object) -> None:
        renamed.append(os.fspath(new))
        if len(renamed) == last:
            os.kill(os.getpid(), signal.SIGKILL)
        function(old, new, **named)

    return rename
