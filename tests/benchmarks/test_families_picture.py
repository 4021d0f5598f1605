"""The plot of the families' table reads the figures of the guide next to it."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

PATH = Path(__file__).with_name("families_picture.py")


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location(PATH.stem, PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_rows_of_the_guide_are_read() -> None:
    found = script().lengths(PATH.with_name("README.md").read_text(encoding="utf-8"))
    assert len(found) >= 9
    assert all(length >= 1 for length, _ in found.values())


def test_a_row_gives_its_best_tree_and_its_speed_up_or_the_tree_in_use() -> None:
    head = ("| row | best tree, hand-written | used tree, hand-written, T=0 / T=1 | speed-up, T=0 / T=1 |\n"
            "|---|---|---|---|\n")
    rows = "| lookup | - | 1.25 / 1.08 | 1.13 / 1.01 |\n| Hydra | 1.97 | 1.52 / 1.33 | 1.57 / 1.07 |\n\n| other |\n"
    assert script().lengths(head + rows) == {"lookup": (1.25, 1.13), "Hydra": (1.97, 1.57)}


def test_a_text_without_the_table_is_refused() -> None:
    with pytest.raises(ValueError, match="holds no table with the columns 'row' and 'best tree, hand-written'"):
        script().lengths("| row | steps |\n|---|---|\n| Hydra | 3 |\n")
