"""The command doctor, killed at once (SIGKILL) while it writes: no file is half-written."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

KILLED = """
import os, signal, sys
from draftsmith.recipes.__main__ import main
rename, left = os.replace, int(sys.argv.pop(1))
def replace(old, new, **named):
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
    rename(old, new, **named)
os.replace = replace
sys.exit(main(sys.argv[1:]))
"""
"""A command that is killed just before the N-th rename."""


@pytest.mark.long
@pytest.mark.parametrize("renames", [1, 2])
def test_a_killed_doctor_leaves_the_old_page_or_the_new_one(renames: int, tiny_run: Path, tmp_path: Path) -> None:
    words = ["doctor", "--artifact", str(tiny_run), "--out", str(tmp_path)]
    names = ("doctor.json", "doctor.html")
    for name in names:
        (tmp_path / name).write_text("old")
    killed = subprocess.run([sys.executable, "-c", KILLED, str(renames), *words], check=False, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    found = [(tmp_path / name).read_text() for name in names]
    # Of the files before the last one nothing old is left.
    assert [text == "old" for text in found] == [place + 1 >= renames for place in range(len(names))]
    again = subprocess.run([sys.executable, "-c", KILLED, "9", *words], check=False, capture_output=True)
    assert again.returncode == 0, again.stderr
    # A killed process cannot remove the hidden file that it was writing.
    assert sorted(path.name for path in tmp_path.glob("[!.]*")) == sorted(names)
    assert (tmp_path / "doctor.html").read_text().rstrip().endswith("</html>")
    if renames == 2:
        assert json.loads(found[0])["findings"]
