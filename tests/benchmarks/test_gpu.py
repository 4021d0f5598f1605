"""The measurement of a whole machine: parts run in their order, finished ones are skipped, and what a part has is kept
however it ends."""

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks import gpu
from benchmarks.parts import device_parts, device_tests

WORDS = ["--device", "cpu", "--small"]
SETTINGS = {"device": "cpu", "small": True, "artifacts": None, "brief": True}
TESTS = """

def test_right(): pass
def test_wrong(): assert False
def test_stopped(): raise KeyboardInterrupt
def test_late(): pass
"""


def test_a_part_runs_and_is_skipped_the_next_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                  capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpu, "PARTS", {"passes": gpu.PARTS["passes"]})
    monkeypatch.setattr(gpu, "run_apart", lambda name, words, _minutes: gpu.main([*words, "--here", name]) or "")
    words = [*WORDS, "--out", str(tmp_path)]
    assert gpu.main(words) == 0
    printed = capsys.readouterr().out
    assert printed.index("all are here") < printed.index("== passes") < printed.index("### Milliseconds of a pass")
    written = json.loads((tmp_path / "passes.json").read_text())
    assert written["figures"]["sizes"] == [1, 4, 16]
    assert all(value > 0 for row in written["figures"]["seconds"]["tiny"].values() for value in row)
    text = (tmp_path / "gpu.md").read_text()
    assert "make gpu ARGS='--part passes'" in text
    assert written["device"] in text
    assert gpu.main(words) == 0
    assert "== passes" not in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"was made with .*; choose another --out folder"):
        gpu.main(["--device", "cpu", "--out", str(tmp_path)])


def test_a_part_that_fails_is_named_and_the_others_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                       capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpu, "run_apart", lambda name, _words, _minutes: "ended with 1" if name == "passes" else "")
    assert gpu.main([*WORDS, "--out", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert [line for line in printed.out.splitlines() if line.startswith("== ")] == [
        f"== {name}, at most {10 if name == 'main-job' else 1.5:g} minutes" for name in gpu.PARTS]
    assert [*gpu.PARTS][:6] == ["decode-8b", "tests", "main-job", "training", "recurrent", "context-8k"]
    assert "the part passes ended with 1; call the same command again to repeat it" in printed.err


def test_a_part_is_stopped_after_its_minutes(tmp_path: Path) -> None:
    assert gpu.run_apart("passes", [*WORDS, "--out", str(tmp_path)], 0.001) == "was stopped after 0.001 minutes"
    assert not list(tmp_path.glob("*.json"))


def test_a_part_that_fails_keeps_what_it_has_and_runs_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def part(_settings: object) -> Iterator[gpu.Measured]:
        yield gpu.Measured([1], {"A title": ["| first |"]})
        raise RuntimeError("no memory")

    def apart(name: str, words: list[str], _minutes: float) -> str:
        with pytest.raises(RuntimeError):
            gpu.main([*words, "--here", name])
        runs.append(name)
        return "ended with 1"

    runs: list[str] = []
    monkeypatch.setattr(gpu, "PARTS", {"passes": part})
    monkeypatch.setattr(gpu, "run_apart", apart)
    assert [gpu.main([*WORDS, "--out", str(tmp_path)]) for _ in range(2)] == [1, 1]
    assert runs == ["passes", "passes"]
    text = (tmp_path / "gpu.md").read_text()
    assert "| first |" in text
    assert "s, not finished; " in text


def test_tests_that_are_stopped_keep_their_outcomes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next session begins with what failed, and goes on with what never ran."""
    monkeypatch.setenv(device_tests.FOLDER, str(tmp_path))
    # The session is no worker of this one.
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    (tmp_path / "test_here.py").write_text(TESTS)
    settings = device_parts.Settings(**SETTINGS, deadline=time.monotonic() + 300, out=tmp_path)
    words = ["-m", "pytest", "-q", "-p", "benchmarks.parts.device_tests", str(tmp_path / "test_here.py")]
    environment = {"PYTHONPATH": str(device_parts.ROOT / "tests"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    for expected in (["right", "wrong", "stopped", "late"], ["wrong", "stopped", "late", "right"]):
        ended = device_parts.until(words, tmp_path / "log", settings, environment)
        found, never = device_tests.settled()
        order = [nodeid.rpartition("test_")[2] for nodeid in device_tests.ids(device_tests.COLLECTED)]
        assert (order, ended) == (expected, "ended with 2, see log")
        assert [(nodeid.rpartition("_")[2], outcome) for nodeid, outcome in found.items()] == [
            (name, {"right": "passed", "wrong": "failed"}[name]) for name in expected[: expected.index("stopped")]]
        assert [nodeid.rpartition("_")[2] for nodeid in never] == ["stopped", "late"]


def test_a_command_is_stopped_at_the_deadline(tmp_path: Path) -> None:
    settings = device_parts.Settings(**SETTINGS, deadline=0.0, out=tmp_path)
    words = ["-c", "import time; time.sleep(600)"]
    assert device_parts.until(words, tmp_path / "log", settings, {}) == "stopped, no time was left"


def test_the_main_job_tells_of_its_stages_and_its_report(tmp_path: Path, tiny_run: Path,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    def until(words: list[str], log: Path, *_: object) -> str:
        assert words[:4] == ["-m", "draftsmith.recipes", "run", "--config"]
        shutil.copytree(tiny_run, tmp_path / "main-job")
        log.write_text("[1/5] the target answers prompts\n     loading\n     done in 9 s\n")
        return ""

    monkeypatch.setattr(device_parts, "until", until)
    found, = device_parts.main_job(device_parts.Settings(**SETTINGS, deadline=0.0, out=tmp_path))
    stages, speeds = found.tables.values()
    assert "| the target answers prompts | 9 s |" in stages
    assert "| steps | 30 |" in stages
    assert [line.split(" | ")[0] for line in speeds] == ["| ", "| ---", "| all prompts", "| own", "| handwritten"]


@pytest.mark.long
def test_every_part_runs_to_its_end(tmp_path: Path) -> None:
    """As `make gpu ARGS='--device cpu --small'` does it."""
    assert gpu.main([*WORDS, "--out", str(tmp_path)]) == 0
    assert all(json.loads((tmp_path / f"{name}.json").read_text())["complete"] for name in gpu.PARTS)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_requirements", lambda: ["torch>=2", "no-such-package"])
    line = gpu.needed(None)[1]
    assert "MISSING no-such-package (elsewhere: pip download --dest wheels no-such-package" in line


@pytest.mark.parametrize(("words", "message"), [
    (["--device", "cuda"], "torch finds no CUDA device here; add --device cpu --small"),
    ([*WORDS, "--artifacts", "nowhere"], "--artifacts nowhere is no folder; give the one that holds the artifacts"),
])
def test_a_mistake_is_one_sentence(words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                   capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        gpu.main([*words, "--out", str(tmp_path)])
    assert message in capsys.readouterr().err
