"""The measurement of a whole machine: a part runs, finished ones are skipped, and the report has them all."""

import json
from pathlib import Path

import pytest
from benchmarks import gpu

WORDS = ["--device", "cpu", "--small"]


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
    assert [line for line in printed.out.splitlines() if line.startswith("== ")] == [f"== {name}" for name in gpu.PARTS]
    assert "the part passes ended with 1; call the same command again to repeat it" in printed.err


def test_a_part_is_stopped_after_its_minutes(tmp_path: Path) -> None:
    assert gpu.run_apart("passes", [*WORDS, "--out", str(tmp_path)], 0.001) == "stopped after 0.001 minutes"
    assert not list(tmp_path.glob("*.json"))


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
