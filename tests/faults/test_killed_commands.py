"""The command doctor, killed at once (SIGKILL) while it writes: no file is half-written."""

import json
import signal
from pathlib import Path

import pytest
from support.processes import Disturbance, call


@pytest.mark.long
@pytest.mark.parametrize("renames", [1, 2])
def test_a_killed_doctor_leaves_the_old_page_or_the_new_one(renames: int, tiny_run: Path, tmp_path: Path) -> None:
    words, names = ["doctor", "--artifact", str(tiny_run), "--out", str(tmp_path)], ("doctor.json", "doctor.html")
    for name in names:
        (tmp_path / name).write_text("old")
    killed = call(words, tmp_path, Disturbance(rename=renames))
    assert killed.code == -signal.SIGKILL, killed.last
    found = [(tmp_path / name).read_text() for name in names]
    # Of the files before the last one nothing old is left.
    assert [text == "old" for text in found] == [place + 1 >= renames for place in range(len(names))]
    again = call(words, tmp_path)
    assert again.code == 0, again.last
    # A killed process cannot remove the hidden file that it was writing.
    assert sorted(path.name for path in tmp_path.glob("[!.]*")) == sorted(names)
    assert (tmp_path / "doctor.html").read_text().rstrip().endswith("</html>")
    if renames == 2:
        assert json.loads(found[0])["findings"]
