"""A new family, added to a copy of the repository by the steps of the guide, passes the tests that all pass."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "tests" / "support" / "new_family"
OWN_FILES = {
    "package.py": "modules/families/bigram/__init__.py",
    "drafter.py": "modules/families/bigram/drafter.py",
    "recipe.yaml": "recipes/bigram.yaml",
    "cases.py": "tests/families/bigram/cases.py",
    "own_tests.py": "tests/families/bigram/test_bigram.py",
    "reference.py": "tests/families/bigram/reference.py",
}
"""The family's own files; it has no layout, since no serving engine has a format for it."""
EDITS = {
    "pyproject.toml": (('"draftsmith.modules.families",\n', '    "draftsmith.modules.families.bigram",\n'),),
    "modules/families/registry.py": (('FAMILIES = ("medusa", ', '"bigram", '),),
    "recipes/families.yaml": (("rows: [prompt_lookup, ", "bigram, "),),
    "recipes/targets/eight_billion.yaml": (
        ("by_family:\n", "  bigram:\n    drafter: {width: 1024, vocabulary_size: null}\n    train: {lr: 1.0e-3}\n"),),
}
"""The edits of the guide: in each file, what is inserted after which place."""
COMMANDS = (("draftsmith.recipes.commands.written_pages", "README.md"),)
"""The commands of the guide."""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository with the family in it."""
    copy = tmp_path_factory.mktemp("copy")
    for room in ("data", "export", "modules", "recipes", "tests", "trainers"):
        # With the compiled files: their sources keep their times and sizes, and compiling all of them takes long.
        shutil.copytree(ROOT / room, copy / room)
    for file in ("README.md", "pyproject.toml", "Makefile"):
        shutil.copy(ROOT / file, copy)
    (copy / "draftsmith").symlink_to(".", target_is_directory=True)
    for source, destination in OWN_FILES.items():
        (copy / destination).parent.mkdir(exist_ok=True)
        shutil.copy(EXAMPLE / source, copy / destination)
    for file, edits in EDITS.items():
        text = (copy / file).read_text(encoding="utf-8")
        for place, added in edits:
            assert text.count(place) == 1, f"{file} has no single {place!r}"
            text = text.replace(place, place + added)
        (copy / file).write_text(text, encoding="utf-8")
    for command in COMMANDS:
        run(copy, "-m", *command)
    return copy


def run(copy: Path, *words: str) -> str:
    """Output of a Python command in the copy."""
    answer = subprocess.run([sys.executable, *words], cwd=copy, env={**os.environ, "PYTHONPATH": str(copy)},
                            capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stdout[-4000:] + answer.stderr[-4000:]
    return answer.stdout


def passed(output: str, *needed: str) -> None:
    """Check that tests of these names ran and passed."""
    lines = [line for line in output.splitlines() if "PASSED" in line]
    assert all(any(name in line for line in lines) for name in needed), output[-4000:]


def test_the_steps_are_those_of_the_guide() -> None:
    guide = (ROOT / "recipes/guides/add-a-method.md").read_text(encoding="utf-8")
    for file in (*OWN_FILES.values(), *EDITS):
        place = file.replace("bigram", "<family>") if file in OWN_FILES.values() else file
        assert f"`{place}`" in guide, f"no step names {place}"
    for command in COMMANDS:
        assert f"`python -m {' '.join(command)}`" in guide


@pytest.mark.long
@pytest.mark.slow
def test_a_new_family_passes_the_tests_that_all_pass(copy: Path) -> None:
    where = run(copy, "-c", "import draftsmith.modules as m; print(m.__file__, [f.family for f in m.DRAFTERS])")
    assert str(copy) in where
    assert "bigram" in where
    output = run(copy, "-m", "pytest", "-v", "-k",
                 "bigram or every_family_has or keys_of_the_code or readme or map or import",
                 "tests/families/test_contract.py", "tests/families/bigram/test_bigram.py",
                 "tests/recipes/commands/test_memory_plan.py", "tests/trainers/test_families.py",
                 "tests/recipes/commands/test_written_pages.py",
                 "tests/modules/test_readme.py", "tests/test_architecture.py")
    # Its objective is the target's distribution, and one case has an output layer of its own: neither is named there.
    passed(output, "learns_a_deterministic_text[bigram]", "never_loaded_are_nan[bigram-own]", "generate", "artifact",
           "train_equals_decode", "plain_twin", "stages[bigram eight_billion]",
           "module_and_its_settings[bigram]", "table_of_the_families", "keys_of_the_code", "test_readme.py",
           "star_and_the_floors[modules]")


@pytest.mark.full
def test_a_new_family_is_in_the_guides_and_in_the_comparison(copy: Path) -> None:
    table = "| bigram | the last token alone predicts the next one |"
    assert table not in (ROOT / "README.md").read_text(encoding="utf-8")
    assert table in (copy / "README.md").read_text(encoding="utf-8")
    assert "## `family: bigram`" in (copy / "recipes" / "keys.md").read_text(encoding="utf-8")
    plan = run(copy, "-m", "draftsmith.recipes", "families", "--config", "families", "--print_config")
    assert "bigram" in plan
    run(copy, "-m", "draftsmith.recipes", "run", "--config", "tiny", "--family", "bigram", "--evaluate.limit", "1")
    assert (copy / "runs" / "tiny" / "report.html").is_file()
