"""A machine that refuses or kills: rights, open files, memory, a full disk, a clock that moved, SIGKILL."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from draftsmith.recipes.__main__ import main, out_of_memory, system_error
from support.faults import ERROR, Fault, Place, check, ids
from support.processes import Disturbance, call
from support.tiers import some_long

TINY = str(Path(__file__).resolve().parents[2] / "recipes" / "tiny.yaml")
SENTENCES = [(MemoryError(), "needs more memory"), (RuntimeError("CUDA out of memory. Tried"), "needs more memory"),
             (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "needs more memory"),
             (RuntimeError("can't start new thread"), "more memory or threads")]


@pytest.mark.parametrize(("error", "says"), SENTENCES, ids=range(len(SENTENCES)))
def test_missing_memory_is_one_sentence(error: MemoryError | RuntimeError, says: str) -> None:
    assert says in out_of_memory(error)


def test_any_other_error_of_torch_stays_an_error() -> None:
    with pytest.raises(RuntimeError, match="size mismatch"):
        out_of_memory(RuntimeError("size mismatch"))


@pytest.mark.parametrize("number", range(1, 134))
def test_every_error_of_the_system_is_one_sentence_with_a_remedy(number: int) -> None:
    assert system_error(OSError(number, os.strerror(number), "here/file")).startswith("here/file: ")
    assert any(word in system_error(OSError(number, os.strerror(number)))
               for word in ("check", "choose", "change", "free", "give", "raise", "remove", "close", "name"))


@contextmanager
def limited(kind: int, most: int) -> Iterator[None]:
    """A lower limit of the system for the block."""
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))


@pytest.mark.parametrize("kib", some_long([64, 16], 9))
def test_a_full_disk_is_one_sentence_and_leaves_nothing_half_written(place: Place, kib: int) -> None:
    words = ["distill", "--config", TINY, "--out", "o", "--distill.budget_tokens", "100"]
    with limited(resource.RLIMIT_FSIZE, kib * 1024):
        assert main(words) == 2
    said = place.capfd.readouterr().err
    lines = [line for line in said.splitlines() if line.startswith(ERROR)]
    assert len(lines) == 1, said[-2000:]
    assert re.search("cannot write o/.*make room or choose another folder", lines[0])
    assert not [path for path in place.folder.rglob("*") if ".partial" in path.name]


def test_too_few_open_files_are_one_sentence(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = Fault("open files", "generate --artifact {artifact} --prompt hi", "Too many open files.*(raise|copy)")
    find = Place.fingerprints
    # What the command imports is imported before.
    main(["generate", "--artifact", str(place.run / "gone"), "--prompt", "hi"])
    place.capfd.readouterr()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)

    def fingerprints(here: Place) -> dict[str, str]:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        found = find(here)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limit[1]))
        return found

    monkeypatch.setattr(Place, "fingerprints", fingerprints)
    try:
        check(fault, place)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)


@pytest.mark.long
@pytest.mark.parametrize("most", [5, 6])
def test_a_process_that_may_hardly_open_a_file_says_so(most: int) -> None:
    # Fewer are too few for Python itself.
    words = [sys.executable, "-m", "draftsmith.recipes", "generate", "--artifact", "gone", "--prompt", "hi"]
    found = subprocess.run(words, capture_output=True, text=True, check=False, close_fds=False,
                           preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (most, most)))
    assert found.returncode == 2, found.stderr[-2000:]
    assert found.stderr.count("\n") == 1
    assert re.search("Too many open files: raise the limit|gone holds no artifact", found.stderr)


RIGHTS = pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may read and write everything")
LOCKED = [
    Fault("an out folder that may not be written", "run --config {tiny} --out locked/o", "cannot write .*choose",
          lambda place: (place.folder / "locked").mkdir(mode=0o500)),
    Fault("a prompt file that may not be read", "evaluate --artifact {artifact} --out o --prompts p.jsonl",
          "cannot read the prompts .*check", lambda place: place.write("p.jsonl", "{}").chmod(0)),
    Fault("an artifact that may not be read", "generate --artifact {artifact} --prompt hi", "cannot read .*config.json",
          lambda place: (place.artifact / "config.json").chmod(0)),
]
IN_THE_WAY = [
    Fault("an out folder below a file", "run --config {tiny} --out f/o", "cannot write .*(choose|make)|check the path",
          lambda place: place.write("f", "mine")),
    Fault("an out that is a file", "run --config {tiny} --out f", "cannot write .*choose|check|choose",
          lambda place: place.write("f", "mine")),
    Fault("an out that is a link to itself", "run --config {tiny} --out f", "cannot write|remove the link|choose",
          lambda place: (place.folder / "f").symlink_to("f")),
    Fault("an out on a disk of the system", "run --config {tiny} --out /proc/o", "cannot write .*choose|check"),
    Fault("an export below a file", "export --artifact {artifact} --format medusa --out f/o", "cannot write .*choose",
          lambda place: place.write("f", "mine")),
    Fault("a config.json that is a folder", "generate --artifact a --prompt hi", "holds no artifact .*give the folder",
          lambda place: place.write("a/config.json/x", "")),
    Fault("a tuning.json that is a folder", "evaluate --artifact a --out f/o", "holds no artifact .*give",
          lambda place: place.write("a/tuning.json/x", "")),
]


@pytest.mark.parametrize("fault", [*IN_THE_WAY, *(pytest.param(fault, marks=RIGHTS) for fault in LOCKED)],
                         ids=ids([*IN_THE_WAY, *LOCKED]))
def test_what_stands_in_the_way_is_named(fault: Fault, place: Place) -> None:
    check(fault, place)


@pytest.mark.parametrize("seconds", [-10**9, 10**9])
def test_a_clock_that_moved_changes_no_byte(place: Place, monkeypatch: pytest.MonkeyPatch, seconds: int) -> None:
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + seconds)
    manifest = (place.run / "data" / "manifest.json").read_bytes()
    os.utime(place.run / "data" / "manifest.json", (max(0.0, now() + seconds),) * 2)
    assert main(["distill", "--config", TINY, "--out", str(place.run)]) == 0
    assert (place.run / "data" / "manifest.json").read_bytes() == manifest


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
