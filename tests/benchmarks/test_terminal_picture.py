"""The picture of a terminal shows what a terminal would."""

import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest
from benchmarks.terminal_picture import picture, record, screen


@pytest.mark.parametrize(("output", "lines"), [
    ("one\r\ntwo\r\n", ["one", "two", ""]), ("a" * 25, ["a" * 20, "a" * 5]), ("10 %\r100 %\r\ndone", ["100 %", "done"]),
    ("a long line\rshort\x1b[K\nx", ["short", "x"])])
def test_lines_end_and_continue_as_on_a_terminal(output: str, lines: list[str]) -> None:
    assert [line.plain for line in screen(output, 20)] == lines


def test_the_picture_holds_the_text_and_nothing_foreign() -> None:
    drawn = picture(["/usr/bin/tool", "--say", "a <b>"], "x <i> & \x1b[32mgreen\x1b[0m \x1b[2;9mgone\x1b[0m\nlast",
                    columns=60, lines=10)
    root = ElementTree.fromstring(drawn)
    texts = [one.text or "" for one in root.iter("{http://www.w3.org/2000/svg}text")]
    assert " ".join(texts).split() == ["$", "tool", "--say", "'a", "<b>'", "x", "<i>", "&", "green", "gone", "last"]
    green, = re.findall(r'class="(\S+)"[^>]*>green<', drawn)
    plain, = re.findall(r'class="(\S+)"[^>]*>last<', drawn)
    struck, = re.findall(r'class="(\S+)"[^>]*>gone<', drawn)
    assert len({green, plain, struck}) == 3
    assert re.search(rf"\.{struck} {{[^}}]*text-decoration: line-through", drawn)
    assert not re.search(r"<script|<image|href|url\((?!#)", drawn)


def test_only_the_end_is_shown() -> None:
    output = "\n".join(f"line {number}" for number in range(100))
    assert re.findall(r"line&#160;(\d+)<", picture(["tool"], output, columns=40, lines=5)) == ["96", "97", "98", "99"]
    assert "line&#160;98<" not in picture(["tool"], output, columns=40, lines=5, without="8$")


def test_a_command_sees_a_terminal() -> None:
    code = "import os, sys; print(sys.stdout.isatty(), os.get_terminal_size().columns, '\\x1b[32mok\\x1b[0m')"
    assert screen(record([sys.executable, "-c", code], 77), 77)[0].plain == "True 77 ok"
    with pytest.raises(subprocess.CalledProcessError, match="exit status 3"):
        record([sys.executable, "-c", "raise SystemExit(3)"], 40)
