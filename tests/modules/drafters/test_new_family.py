"""A new family, added to a copy of the package by steps 1, 2, 4 and 7 of modules/README.md, passes the tests of all
families and is listed in the table of methods."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "tests" / "support" / "new_family"
OWN_FILES = {
    "drafter.py": "draftsmith/modules/drafters/bigram.py",
    "module.py": "draftsmith/trainers/bigram.py",
    "cases.py": "tests/support/families/bigram.py",
}
"""The family's own files that decide how it decodes and trains; recipes, own tests and a layout come on top."""
LINES = ("from .baselines.ngram import NgramConfig, Ngrams\n", "DRAFTERS: tuple[type[Drafter], ...] = (")
"""The places in `modules/__init__.py` for the import and for the entry in DRAFTERS."""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package and its tests with the family in it."""
    copy = tmp_path_factory.mktemp("copy")
    for room in ("data", "export", "modules", "recipes", "trainers"):
        shutil.copytree(ROOT / room, copy / "draftsmith" / room, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "tests", copy / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("README.md", "pyproject.toml"):
        shutil.copy(ROOT / file, copy)
    for source, destination in OWN_FILES.items():
        shutil.copy(EXAMPLE / source, copy / destination)
    listing = copy / "draftsmith" / "modules" / "__init__.py"
    text = listing.read_text()
    assert all(line in text for line in LINES)
    text = text.replace(LINES[0], f"{LINES[0]}from .drafters.bigram import Bigram\n")
    listing.write_text(text.replace(LINES[1], f"{LINES[1]}Bigram, "))
    return copy


def run(copy: Path, *words: str) -> str:
    """Output of a Python command in the copy."""
    answer = subprocess.run([sys.executable, *words], cwd=copy, env={**os.environ, "PYTHONPATH": str(copy)},
                            capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stdout[-4000:] + answer.stderr[-4000:]
    return answer.stdout


@pytest.mark.slow
def test_a_new_family_trains_ships_and_decodes_without_changing_a_word(copy: Path) -> None:
    where = run(copy, "-c", "import draftsmith.modules as m; print(m.__file__, [f.family for f in m.DRAFTERS])")
    assert str(copy) in where
    assert "bigram" in where
    passed = run(copy, "-m", "pytest", "-v", "-k", "bigram or every_family_has",
                 "tests/modules/drafters/test_contract.py")
    for needed in ("learns", "generate", "artifact", "train_equals_decode"):
        assert any(needed in line and "PASSED" in line for line in passed.splitlines()), needed


def test_a_new_family_is_listed_in_the_table(copy: Path) -> None:
    assert "| bigram |" not in (copy / "README.md").read_text()
    run(copy, "-m", "draftsmith.recipes.method_table", "README.md")
    assert "| bigram | the last token alone predicts the next one |" in (copy / "README.md").read_text()
