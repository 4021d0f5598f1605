"""The folder of each case."""

from pathlib import Path

import pytest
from support.faults import Place


@pytest.fixture
def place(tmp_path: Path, tiny_run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Place:
    """An empty folder, in which the test works and a copy of the finished tiny run is at hand."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return Place(folder, tiny_run, capfd)


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test in which no target may be loaded."""
    for name in ("commands.artifact_commands.artifact_target", "stages.workspace.load_target"):
        monkeypatch.setattr(f"draftsmith.recipes.{name}", lambda *_: pytest.fail("the target was loaded first"))
