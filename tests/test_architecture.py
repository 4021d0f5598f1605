"""The package's shape: who may import whom, what ships in the wheel, strict types, one style."""

import ast
import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("data", "export", "modules", "recipes", "trainers")
ALLOWED = {
    "modules": set(),
    "data": {"modules"},
    "trainers": {"modules"},
    "export": {"modules"},
    "recipes": {"data", "export", "modules", "trainers"},
}
EXTRAS = {"lightning", "datasets", "peft", "tensorboard", "deepspeed", "matplotlib", "pytorch_lightning"}
SHIPPED = (".py", ".yaml", ".jsonl", ".typed")


def imports(source: str) -> list[tuple[str, str]]:
    """Every import of a file as (written form, first room or top-level module it reaches)."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(f"import {alias.name}", absolute(alias.name)) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.append((f"from {node.module} import", absolute(node.module or "")))
        elif isinstance(node, ast.ImportFrom) and node.level == 2:
            names = [node.module.split(".")[0]] if node.module else [alias.name for alias in node.names]
            found += [(f"from ..{name} import", name) for name in names]
        elif isinstance(node, ast.ImportFrom) and node.level > 2:
            found.append(("from beyond the package", "beyond"))
    return found


def absolute(module: str) -> str:
    """The room of draftsmith.<room>..., else the top-level module."""
    parts = module.split(".")
    return parts[1] if parts[0] == "draftsmith" and len(parts) > 1 else parts[0]


def violations(room: str, source: str) -> list[str]:
    """What a file of `room` imports against the star."""
    return [written for written, reached in imports(source)
            if (reached in ROOMS and reached not in ALLOWED[room] | {room}) or reached in ("beyond", "tests")]


def room_files(room: str) -> list[Path]:
    return sorted((ROOT / room).glob("*.py"))


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_only_what_the_star_allows(room: str) -> None:
    found = {path.name: bad for path in room_files(room) if (bad := violations(room, path.read_text()))}
    assert not found


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_each_other_relatively(room: str) -> None:
    stray = [f"{path.name}: {written}" for path in room_files(room) for written, reached in imports(path.read_text())
             if reached in ROOMS and not written.startswith("from ..")]
    assert not stray


@pytest.mark.parametrize(("room", "source"), [
    ("modules", "from ..data import chat"),
    ("modules", "from .. import trainers"),
    ("data", "from ..export.artifact import save_artifact"),
    ("trainers", "def f():\n    from ..data import store"),
    ("export", "import draftsmith.recipes.artifact_commands"),
    ("data", "import trainers"),
])
def test_the_star_test_can_fail(room: str, source: str) -> None:
    assert violations(room, source)


def test_modules_need_no_extra() -> None:
    needed = {reached for path in room_files("modules") for _, reached in imports(path.read_text())}
    assert not needed & EXTRAS


def test_packages_are_the_folders() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert sorted(settings["packages"]) == [f"draftsmith.{room}" for room in ROOMS]
    assert settings["package-dir"] == {f"draftsmith.{room}": room for room in ROOMS}
    assert sorted(path.parent.name for path in ROOT.glob("*/__init__.py")) == sorted(ROOMS)
    assert not (ROOT / "__init__.py").exists(), "draftsmith is a namespace package"


def test_rooms_stay_flat() -> None:
    nested = [path for room in ROOMS for path in (ROOT / room).glob("*/**/*.py")]
    assert not nested


def test_constraints_pin_torch_first_and_name_no_host() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert lines[0] == "torch==2.13.0"
    assert all("==" in line and not {"/", "@", "+"} & set(line) for line in lines)


def tracked_sources() -> set[str]:
    """The files of the rooms that git tracks and the wheel should hold, as draftsmith/<room>/<file>."""
    listed = subprocess.run(["git", "ls-files", *ROOMS], cwd=ROOT, check=True, capture_output=True, text=True)
    return {f"draftsmith/{name}" for name in listed.stdout.split() if name.endswith(SHIPPED)}


@pytest.mark.slow
def test_the_wheel_holds_exactly_the_tracked_source(tmp_path: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: there is nothing to compare the wheel with")
    source = tmp_path / "source"
    subprocess.run(["git", "checkout-index", "--all", f"--prefix={source}/"], cwd=ROOT, check=True)
    subprocess.run([sys.executable, "-m", "build", "--wheel", *(["--no-isolation"] if has_setuptools() else []),
                    "--outdir", str(tmp_path / "dist"), str(source)], check=True, capture_output=True)
    wheel, = (tmp_path / "dist").glob("*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("draftsmith/")}
    assert names == tracked_sources()


def has_setuptools() -> bool:
    """Whether a setuptools new enough for pyproject.toml is here, so that the build needs no download."""
    answer = subprocess.run([sys.executable, "-c", "import setuptools; print(setuptools.__version__.split('.')[0])"],
                            capture_output=True, text=True, check=False)
    return answer.returncode == 0 and int(answer.stdout) >= 77


@pytest.mark.slow
def test_ruff_is_clean() -> None:
    answer = subprocess.run([sys.executable, "-m", "ruff", "check", "."], cwd=ROOT, capture_output=True, text=True,
                            check=False)
    assert answer.returncode == 0, answer.stdout


@pytest.mark.slow
def test_mypy_strict_is_clean() -> None:
    # The package is a namespace behind an import hook that type checkers do not follow: they get it by a link. The
    # folder stays, and with it mypy's cache.
    link = ROOT / "tmp" / "draftsmith"
    link.parent.mkdir(exist_ok=True)
    if not link.is_symlink():
        link.symlink_to("..")
    packages = [word for room in ROOMS for word in ("-p", f"draftsmith.{room}")]
    answer = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), *packages],
        cwd=link.parent, env={**os.environ, "MYPYPATH": str(link.parent)}, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stdout
