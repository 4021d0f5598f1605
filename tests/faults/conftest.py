"""The folder of each case."""

from pathlib import Path

import pytest
from support.faults import Place


@pytest.fixture
def place(tmp_path: Path, tiny_run: Path) -> Place:
    """An empty folder, in which a copy of the finished tiny run is at hand."""
    folder = tmp_path / "here"
    folder.mkdir()
    return Place(folder, tiny_run)
