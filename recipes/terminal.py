"""Text on the terminal, and the signals that end a command. Only the standard library is imported.

All that the commands print passes here, since names of models, files and prompts come from others: control characters,
which could move the cursor or hide words, are written as their codes."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn, TextIO

LONGEST = 200  # Characters of a word that a sentence shows; of a longer one, its ends
LONGEST_SENTENCE = 500  # Characters of a sentence; of a longer one the middle is left out, since its end is a remedy
# The signals, in words.
ENDING = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "a request to end (SIGTERM)",
          signal.SIGHUP: "the end of its terminal (SIGHUP)",
          signal.SIGUSR1: "the announced end of its job (SIGUSR1)"}
RESUMED = frozenset({"run", "distill", "train", "families"})  # Commands that go on where they were stopped
AGAIN_SECONDS = 0.05  # Seconds after which a signal is repeated that reached the process where no exception can leave
HELPS = "DRAFTSMITH_HELPS"  # Variable of the environment of a process that was started to help


def printable(text: str, keep: str = "") -> str:
    """The text with each character that is not printable as its code: \\x1b, \\u202e, \\ud800; those of `keep`, such as
    line breaks, stay."""
    if text.isprintable():
        return text
    # Codes as in Python's own strings.
    return "".join(letter if letter.isprintable() or letter in keep else letter.encode("unicode_escape").decode()
                   for letter in text)


def one_sentence(text: str) -> str:
    """The text as one printable line; of words that no terminal could show, such as 5,000 digits, only the ends."""
    line = printable(" ".join(text.split()))
    line = re.sub(rf"\S{{{LONGEST + 1},}}", lambda word: (
        f"{word[0][: LONGEST // 2]}...({len(word[0]):,} characters)...{word[0][-LONGEST // 4:]}"), line)
    half = (LONGEST_SENTENCE - len(" [...] ")) // 2
    return line if len(line) <= LONGEST_SENTENCE else f"{line[:half]} [...] {line[-half:]}"


def stage_line(text: str, file: TextIO | None = None) -> None:
    """Print a sentence under the title of a run's stage."""
    say(f"     {text}", file=file)


def say(text: str, *, end: str = "\n", file: TextIO | None = None) -> None:
    """Print at once; line breaks and tabs stay, other control characters are written as their codes. Of the processes
    that torchrun or Lightning has started the first one speaks for all; each reports its own errors. One that was
    started to help tells of its own answers."""
    rank = os.environ.get("RANK" if "TORCHELASTIC_RUN_ID" in os.environ else "LOCAL_RANK", "0")
    if file is None and rank != "0" and HELPS not in os.environ:
        return
    print(printable(text, keep="\n\t"), end=end, file=sys.stdout if file is None else file, flush=True)


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
