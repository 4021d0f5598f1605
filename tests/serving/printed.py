"""Commands and Python that an exported README.md prints, read and started as they stand there."""

import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

_PATIENCE = 7200
"""Seconds after which a server hangs: vLLM first compiles the layers, for minutes on a quiet CPU and ten times as long
on a busy one."""
_SHOWN = 2000  # Last characters of a failed command that are shown


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of a language in Markdown."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def commands(text: str) -> list[list[str]]:
    """The words of each command in Markdown."""
    return [shlex.split(line) for block in blocks(text, "bash") for line in block.splitlines()]


def command(folder: Path, *start: str) -> list[str]:
    """The words of the one command in a folder's README.md that starts so."""
    found, = (words for words in commands((folder / "README.md").read_text()) if words[: len(start)] == [*start])
    return found


def environment(python: Path, settings: dict[str, str] | None = None) -> dict[str, str]:
    """The variables of a shell in which an engine's environment is active."""
    return {**os.environ, "PATH": f"{python.absolute().parent}{os.pathsep}{os.environ['PATH']}", **(settings or {})}


def ran(words: Sequence[str], folder: Path, python: Path) -> str:
    """The output of a command that was typed in a folder. Raises RuntimeError if it fails."""
    done = subprocess.run(words, cwd=folder, env=environment(python), text=True, errors="replace", check=False,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode != 0:
        raise RuntimeError(f"{shlex.join(words)} ended with {done.returncode}:\n{done.stdout[-_SHOWN:]}")
    return done.stdout


@contextmanager
def server(words: Sequence[str], folder: Path, variables: dict[str, str], health: str) -> Iterator[None]:
    """A server that was started in a folder, while the block runs."""
    log = folder / "server.log"
    with log.open("w") as file:
        process = subprocess.Popen(words, cwd=folder, env=variables, stdout=file, stderr=subprocess.STDOUT,
                                   start_new_session=True)
    try:
        until = time.monotonic() + _PATIENCE
        while not _answers(health):
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"{shlex.join(words)} does not answer:\n{log.read_text()[-_SHOWN:]}")
            time.sleep(1)
        yield
    finally:
        # The whole group: an engine is a process of its own.
        for sign in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(process.pid, sign)
                process.wait(timeout=30)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue
        process.wait()


def _answers(address: str) -> bool:
    try:
        with urlopen(address, timeout=5):
            return True
    except (URLError, OSError):
        return False
