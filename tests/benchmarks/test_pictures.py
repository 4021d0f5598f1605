"""The picture of a terminal shows what a terminal would, and the plot of the families' table its figures."""

import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest
from benchmarks.families_picture import TABLE, lengths
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


def test_the_rows_of_the_guide_are_read() -> None:
    found = lengths(TABLE.read_text(encoding="utf-8"))
    assert len(found) >= 9
    assert all(length >= 1 for length, _ in found.values())


def test_a_row_gives_its_best_tree_and_its_speed_up_or_the_tree_in_use() -> None:
    head = ("| row | best tree, hand-written | used tree, hand-written, T=0 / T=1 | speed-up, T=0 / T=1 |\n"
            "|---|---|---|---|\n")
    rows = "| lookup | - | 1.25 / 1.08 | 1.13 / 1.01 |\n| Hydra | 1.97 | 1.52 / 1.33 | 1.57 / 1.07 |\n\n| other |\n"
    assert lengths(head + rows) == {"lookup": (1.25, 1.13), "Hydra": (1.97, 1.57)}


def test_a_text_without_the_table_is_refused() -> None:
    with pytest.raises(ValueError, match="holds no table with the columns 'row' and 'best tree, hand-written'"):
        lengths("| row | steps |\n|---|---|\n| Hydra | 3 |\n")
