"""Picture of a terminal: runs a command in a pseudo-terminal and draws its output, colours included, as an SVG.

    python tests/benchmarks/terminal_picture.py --out tests/benchmarks/figures/terminal.svg -- \\
        draftsmith generate --artifact runs/quickstart/artifact --prompt "Why is the sky blue?" --show-drafts

The picture shows the command and the end of its real output, as `--lines` of `--columns` characters hold it.
"""

import argparse
import fcntl
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path

CELL_WIDTH, LINE_HEIGHT, MARGIN, BAR = 8.4, 20.0, 18.0, 34.0
"""Pixels of a character, a line, the margin inside the window, and the window's title bar."""
GROUND, FRAME, INK, PROMPT = "#161b22", "#2b333d", "#dfe5ec", "#7d8896"
COLOURS = ("#484f58", "#f47067", "#4cc38a", "#daaa3f", "#6cb6ff", "#dcbdfb", "#56d4dd", "#dfe5ec")
"""The eight colours of a terminal, from black to white."""
BUTTONS = ("#f4605a", "#f5bd4f", "#58c455")
SEQUENCE = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[()][A-Z0-9]")
"""Escape sequences: of the cursor and colours, titles, and character sets."""
NO_BREAK = "\N{NO-BREAK SPACE}"
"""Space that viewers of SVG neither collapse nor drop at the start of a text."""


@dataclass(frozen=True)
class Style:
    """Appearance of a character."""

    colour: str = INK
    bold: bool = False
    dim: bool = False
    struck: bool = False

    def changed(self, codes: str) -> "Style":
        """The style after the parameters of an SGR sequence; unknown ones change nothing."""
        style = self
        for code in (int(text or 0) for text in codes.split(";")):
            if code == 0:
                style = Style()
            elif code in (1, 2, 9):
                style = replace(style, **{{1: "bold", 2: "dim", 9: "struck"}[code]: True})
            elif code in (22, 29):
                style = replace(style, struck=False) if code == 29 else replace(style, bold=False, dim=False)
            elif 30 <= code <= 37 or 90 <= code <= 97:
                style = replace(style, colour=COLOURS[code % 10])
            elif code == 39:
                style = replace(style, colour=INK)
        return style


Cell = tuple[str, Style]


def screen(output: str, columns: int) -> list[list[Cell]]:
    """Lines of styled characters that the output leaves on a terminal of so many columns.

    Carriage returns write over a line, long lines continue on the next one; of the cursor sequences only erasing to the
    end of the line is known, which is all that progress bars use.
    """
    lines: list[list[Cell]] = [[]]
    column, style = 0, Style()
    for text, sequence in _parts(output):
        if sequence is not None:
            codes, kind = sequence
            style = style.changed(codes) if kind == "m" else style
            if kind == "K":
                del lines[-1][column:]
        elif text == "\n":
            lines.append([])
            column = 0
        elif text == "\r":
            column = 0
        elif text == "\t":
            column = _put(lines, column, " " * (8 - column % 8), style, columns)
        elif text >= " " and text != "\x7f":
            column = _put(lines, column, text, style, columns)
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _parts(output: str) -> Iterator[tuple[str, tuple[str, str] | None]]:
    """Single characters, and (parameters, letter) of each escape sequence."""
    place = 0
    for match in SEQUENCE.finditer(output):
        yield from ((letter, None) for letter in output[place : match.start()])
        yield "", (match[1] or "", match[2] or "")
        place = match.end()
    yield from ((letter, None) for letter in output[place:])


def _put(lines: list[list[Cell]], column: int, text: str, style: Style, columns: int) -> int:
    """Write characters at a column of the last line; returns the next column."""
    for letter in text:
        if unicodedata.combining(letter):
            continue
        width = 2 if unicodedata.east_asian_width(letter) in "WF" else 1
        if column + width > columns:
            lines.append([])
            column = 0
        line = lines[-1]
        line += [(" ", Style())] * (column - len(line))
        line[column : column + width] = [(letter, style), ("", style)][:width]
        column += width
    return column


def drawing(lines: Sequence[Sequence[Cell]], columns: int, title: str) -> str:
    """The SVG of a terminal window that holds the lines."""
    width = 2 * MARGIN + columns * CELL_WIDTH
    height = BAR + MARGIN + len(lines) * LINE_HEIGHT
    buttons = "".join(f'<circle cx="{MARGIN + 20 * place:g}" cy="{BAR / 2:g}" r="6" fill="{colour}"/>'
                      for place, colour in enumerate(BUTTONS))
    rows = "".join(_row(line, BAR + MARGIN / 2 + (place + 0.7) * LINE_HEIGHT) for place, line in enumerate(lines))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" role="img">\n<title>{escape(title)}</title>\n'
        f'<rect width="{width:g}" height="{height:g}" rx="10" fill="{GROUND}"/>'
        f'<path d="M0 {BAR:g}V10A10 10 0 0 1 10 0H{width - 10:g}A10 10 0 0 1 {width:g} 10V{BAR:g}Z" fill="{FRAME}"/>'
        f'{buttons}\n<g font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, \'DejaVu Sans Mono\', monospace" '
        f'font-size="14" fill="{INK}">\n{rows}</g>\n</svg>\n'
    )


def _row(line: Sequence[Cell], y: float) -> str:
    """One line: a text element for each run of characters of one style, stretched to its cells."""
    found, start = "", 0
    while start < len(line):
        end = start + 1
        while end < len(line) and line[end][1] == line[start][1]:
            end += 1
        text = "".join(letter for letter, _ in line[start:end])
        if text.strip() or line[start][1].struck:
            found += (f'<text x="{MARGIN + start * CELL_WIDTH:.4g}" y="{y:g}" textLength="'
                      f'{(end - start) * CELL_WIDTH:.4g}" lengthAdjust="spacingAndGlyphs"{_attributes(line[start][1])}>'
                      f"{escape(text.replace(' ', NO_BREAK))}</text>")
        start = end
    return found + "\n" if found else ""


def _attributes(style: Style) -> str:
    return "".join([
        f' fill="{style.colour}"' if style.colour != INK else "", ' font-weight="bold"' if style.bold else "",
        ' opacity="0.55"' if style.dim else "", ' text-decoration="line-through"' if style.struck else ""])


def record(command: Sequence[str], columns: int) -> str:
    """The output of a command that runs in a pseudo-terminal of so many columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    environment = {name: text for name, text in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs,
                               env=environment | {"TERM": "xterm-256color", "COLUMNS": str(columns)})
    os.close(theirs)
    output = b"".join(_read(ours))
    os.close(ours)
    if process.wait():
        raise subprocess.CalledProcessError(process.returncode, command, output)
    return output.decode(errors="replace")


def _read(descriptor: int) -> Iterator[bytes]:
    """Pieces of the output until the other end is closed, which Linux reports as an error."""
    while True:
        try:
            piece = os.read(descriptor, 65536)
        except OSError:
            return
        if not piece:
            return
        yield piece


def picture(command: Sequence[str], output: str, *, columns: int, lines: int, without: str | None = None) -> str:
    """The SVG of a command and the last lines of its output."""
    name = Path(command[0]).name
    typed = [(letter, Style(PROMPT)) for letter in "$ "], shlex.join([name, *command[1:]])
    first = screen(f"  {typed[1]}", columns)
    first[0][:2] = typed[0]
    shown = screen(output, columns)
    if without is not None:
        shown = [line for line in shown if not re.search(without, "".join(letter for letter, _ in line))]
    kept = shown[-max(1, lines - len(first)):]
    return drawing([*first, *kept], columns, typed[1])


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
