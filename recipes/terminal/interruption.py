"""Signals that end a command: Ctrl-C, a kill, a closed terminal, a job's end. Only the standard library is imported."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

ENDING = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "a request to end (SIGTERM)",
          signal.SIGHUP: "the end of its terminal (SIGHUP)",
          signal.SIGUSR1: "the announced end of its job (SIGUSR1)"}
"""The signals, in words."""
RESUMED = frozenset({"run", "distill", "train", "families"})  # Commands that go on where they were stopped
AGAIN_SECONDS = 0.05  # Seconds after which a signal is repeated that reached the process where no exception can leave


class Stopped(BaseException):
    """A signal asked the process to end. No `KeyboardInterrupt`: libraries catch that one and exit."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = signal.Signals(number)
        self.code = 128 + number  # The exit code by the convention of shells: 130, 143, 129 or 138

    def sentence(self, command: str) -> str:
        """The signal that ended the command, and the remedy."""
        what = "the same command goes on from here" if command in RESUMED else "the same command starts again"
        return f"stopped by {ENDING[self.number]}; nothing is half-written, and {what}"


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Context in which signals raise `Stopped`. Ignored ones stay ignored, as under nohup."""
    # Python lets the main thread alone set handlers.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers, arrived = {number: signal.getsignal(number) for number in ENDING}, list[int]()
    former_hook, repeated = sys.unraisablehook, list[threading.Timer]()

    def stop(number: int, _frame: FrameType | None) -> NoReturn:
        arrived.append(number)
        raise Stopped(number)

    def repeat(unraisable: "sys.UnraisableHookArgs") -> None:
        # What is raised in a finaliser Python prints and drops, a signal that came there too.
        if not isinstance(unraisable.exc_value, Stopped):
            former_hook(unraisable)
            return
        # By another thread: raised here, it would be dropped as well.
        repeated.append(threading.Timer(AGAIN_SECONDS, os.kill, (os.getpid(), unraisable.exc_value.number)))
        repeated[-1].start()

    try:
        sys.unraisablehook = repeat
        for number, handler in handlers.items():
            # None: a handler that C code has set, which Python could not put back.
            if handler not in (signal.SIG_IGN, None):
                signal.signal(number, stop)
        yield
    except Exception as error:
        # Of any kind: which one a library, such as C code, makes of `Stopped` is its own choice.
        if arrived:
            raise Stopped(arrived[-1]) from error
        raise
    finally:
        for number, handler in handlers.items():
            if handler is not None:
                signal.signal(number, handler)
        sys.unraisablehook = former_hook
        # A late one would end the caller, who has left the block.
        for timer in repeated:
            timer.cancel()


def call(words: Sequence[str]) -> int:
    """Exit code of a program of ours, which gets the signals that end this process and is waited for."""
    # A group of its own: else Ctrl-C in the terminal would reach it twice, and a second signal acts at once.
    with subprocess.Popen(words, process_group=0) as process:
        try:
            return process.wait()
        except Stopped as stop:
            process.send_signal(stop.number)
            process.wait()
            raise
