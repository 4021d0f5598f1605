"""The picture of a terminal shows what a terminal would."""

import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest
from benchmarks.terminal_picture import COLOURS, INK, Style, picture, record, screen


def plain(output: str, columns: int = 20) -> list[str]:
    return ["".join(letter for letter, _ in line) for line in screen(output, columns)]


def test_lines_end_and_continue_as_on_a_terminal() -> None:
    assert plain("one\r\ntwo\r\n") == ["one", "two"]
    assert plain("a" * 25) == ["a" * 20, "a" * 5]
    assert plain("ab\tc") == ["ab      c"]
    assert plain("世界", 3) == ["世", "界"]


def test_progress_bars_leave_their_last_state() -> None:
    assert plain("10 %\r100 %\r\ndone") == ["100 %", "done"]
    assert plain("a long line\rshort\x1b[K\n") == ["short"]
    assert plain("\x1b]0;title\x07\x1b(Bx\x1b[2Ay") == ["xy"]


def test_colours_are_read() -> None:
    (green, plain_, struck), = screen("\x1b[32mg\x1b[0mp\x1b[2;9mr\x1b[0m", 20)
    assert green == ("g", Style(colour=COLOURS[2]))
    assert plain_ == ("p", Style(colour=INK))
    assert struck == ("r", Style(dim=True, struck=True))
    assert Style().changed("1;31").changed("22;39;29") == Style()


def test_the_picture_holds_the_text_and_nothing_foreign() -> None:
    drawn = picture(["/usr/bin/tool", "--say", "a <b>"], "x <i> & \x1b[32mgreen\x1b[0m \x1b[2;9mgone\x1b[0m\nlast",
                    columns=60, lines=10)
    root = ElementTree.fromstring(drawn)
    texts = [one.text or "" for one in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "".join(texts).split() == ["$", "tool", "--say", "'a", "<b>'x", "<i>", "&", "green", "gone", "last"]
    assert f'fill="{COLOURS[2]}">green<' in drawn
    assert 'opacity="0.55" text-decoration="line-through">gone<' in drawn
    assert not re.search(r"<script|<image|href|url\(", drawn)


def test_only_the_end_is_shown() -> None:
    drawn = picture(["tool"], "\n".join(f"line {number}" for number in range(100)), columns=40, lines=5)
    assert re.findall(r"line\xa0(\d+)<", drawn) == ["96", "97", "98", "99"]
    assert "tool</text>" in drawn
    assert "line\N{NO-BREAK SPACE}98<" not in picture(["tool"], "line 98\nline 99", columns=40, lines=5, without="8$")


def test_a_command_sees_a_terminal() -> None:
    code = "import os, sys; print(sys.stdout.isatty(), os.get_terminal_size().columns, '\\x1b[32mok\\x1b[0m')"
    output = record([sys.executable, "-c", code], 77)
    assert plain(output, 77) == ["True 77 ok"]
    with pytest.raises(subprocess.CalledProcessError, match="exit status 3"):
        record([sys.executable, "-c", "raise SystemExit(3)"], 40)
