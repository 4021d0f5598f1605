"""Picture of a terminal: runs a command in a pseudo-terminal and draws its output, colours included, as an SVG.

    python tests/benchmarks/terminal_picture.py --out tests/benchmarks/figures/terminal.svg -- \\
        draftsmith generate --artifact runs/quickstart/artifact --prompt "Why is the sky blue?" --show-drafts

The picture shows the command and the end of its real output, as `--lines` of `--columns` characters hold it.
"""

import argparse
import contextlib
import fcntl
import io
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)  # Fonts that a viewer would fetch from elsewhere


def record(command: Sequence[str], columns: int) -> str:
    """The output of a command that runs in a pseudo-terminal of so many columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    environment = {name: text for name, text in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs,
                               env=environment | {"TERM": "xterm-256color", "COLUMNS": str(columns)})
    os.close(theirs)
    output = b""
    # Linux reports as an error that the other end is closed.
    with contextlib.suppress(OSError):
        while piece := os.read(ours, 65536):
            output += piece
    os.close(ours)
    if process.wait():
        raise subprocess.CalledProcessError(process.returncode, command, output)
    return output.decode(errors="replace")


def screen(output: str, columns: int) -> list[Text]:
    """Lines that the output leaves on a terminal of so many columns; of a progress bar that is its last state."""
    lines = Text.from_ansi(output.replace("\r\n", "\n")).split("\n", allow_blank=True)
    return [piece for line in lines for piece in line.divide(range(columns, len(line), columns))]


def picture(command: Sequence[str], output: str, *, columns: int, lines: int, without: str | None = None) -> str:
    """The SVG of a command and the last lines of its output, without those that match a pattern."""
    typed = shlex.join([Path(command[0]).name, *command[1:]])
    first = screen(f"\x1b[2m$\x1b[0m {typed}", columns)
    shown = [line for line in screen(output.rstrip(), columns) if without is None or not re.search(without, line.plain)]
    console = Console(record=True, width=columns, file=io.StringIO(), highlight=False)
    for line in [*first, *shown[-max(1, lines - len(first)):]]:
        console.print(line, no_wrap=True)
    return FONTS.sub("", console.export_svg(title=""))


def main() -> int:
    """Record and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="file of the picture")
    parser.add_argument("--columns", type=int, default=96, help="width of the terminal")
    parser.add_argument("--lines", type=int, default=40, help="most lines of the picture")
    parser.add_argument("--without", help="pattern of lines to leave out, such as 'it/s\\]' for progress bars")
    parser.add_argument("command", nargs="+", help="the command and its arguments, after --")
    given = parser.parse_args()
    output = record(given.command, given.columns)
    drawn = picture(given.command, output, columns=given.columns, lines=given.lines, without=given.without)
    given.out.write_text(drawn, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
