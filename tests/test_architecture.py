"""The architecture of the package: the order of imports, the content of the wheel, strict types, style."""

import ast
import graphlib
import io
import os
import re
import subprocess
import sys
import tarfile
import tokenize
import tomllib
import zipfile
from collections import Counter
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
SHIPPED = (".py", ".yaml", ".jsonl", ".typed", "keys.md", ".jinja", ".css")


FLOORS: dict[str, tuple[tuple[str, ...], ...]] = {
    "modules": (
        ("errors",), ("files",), ("",), ("target.*", "verification"), ("interfaces",),
        ("parts", "policies"), ("families.*",), ("baselines", "decoding"), ("tuning",),
    ),
    "data": (("prompts",), ("store",), ("answers",), ("datamodule", "state_engines")),
    "trainers": (
        ("objectives", "optimizers"), ("checkpoints", "chunked_losses", "loggers", "train_config"), ("zero_drafter",),
        ("acceptance_head", "base"), ("medusa2",), ("families", "fitting"),
    ),
    "export": (("",), ("layouts.parts",), ("layouts",), ("evaluation",), ("report",)),
    "recipes": (
        ("chat_settings", "terminal"), ("reading",), ("recipe",), ("counted_work", "stages"), ("doctor",),
        ("commands",), ("__main__",),
    ),
}
"""The boxes of each room from the ground up; a file imports its own box and lower floors. A box is a folder, "" the
room itself, "target.*" a folder with those inside it, or a single file of the room."""
MOST_LINES, MOST_FUNCTIONS, LEAST_COMMENTS = 41_901, 2_525, 0.02
"""Lines of source and functions in all rooms, and the share of comments."""
MOST_FILES = 15  # Python files of a folder, `__init__` apart


def imports(path: Path, source: str) -> list[tuple[str, tuple[str, ...]]]:
    """Every import of a file as (written form, dotted path it reaches); inside the package that path starts at a room.

    A name imported from a package counts as reaching the module of that name where there is one.
    """
    found: list[tuple[str, tuple[str, ...]]] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(f"import {alias.name}", absolute(alias.name)) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            written = f"from {'.' * node.level}{node.module or ''} import"
            reached = reaches(path, node)
            names = [alias.name for alias in node.names if not reached or is_module((*reached, alias.name))]
            found += [(f"{written} {name}", (*reached, name)) for name in names]
            if len(names) < len(node.names):
                found.append((written, reached))
    return found


def reaches(path: Path, node: ast.ImportFrom) -> tuple[str, ...]:
    """Module between `from` and `import`, as a dotted path from the package's root; ("beyond",) outside it."""
    if node.level == 0:
        return absolute(node.module or "")
    here = path.relative_to(ROOT).parts[:-1]
    if node.level > len(here) + 1:
        return ("beyond",)
    return (*here[: len(here) + 1 - node.level], *(node.module.split(".") if node.module else ()))


def absolute(module: str) -> tuple[str, ...]:
    """The dotted path from the package's root for draftsmith.<room>..., else that of the top-level module."""
    parts = tuple(module.split("."))
    return parts[1:] if parts[0] == "draftsmith" and len(parts) > 1 else parts


def is_module(dotted: tuple[str, ...]) -> bool:
    """True if a dotted path is a file or folder of the package."""
    place = ROOT.joinpath(*dotted)
    return dotted[0] in ROOMS and (place.is_dir() or place.with_suffix(".py").is_file())


def violations(path: Path, source: str) -> list[str]:
    """Imports of a file that break the star of rooms or the order of floors."""
    room = path.relative_to(ROOT).parts[0]
    allowed = ALLOWED[room] | {room}
    found = [written for written, reached in imports(path, source)
             if (reached[0] in ROOMS and reached[0] not in allowed) or reached[0] in ("beyond", "tests")]
    if path == ROOT / room / "__init__.py":
        return found
    lower = below(room, box(room, path.relative_to(ROOT).with_suffix("").parts))
    return found + [written for written, reached in imports(path, source)
                    if reached[0] == room and box(room, reached) not in lower]


def box(room: str, dotted: tuple[str, ...]) -> str:
    """The box of FLOORS that holds a module; "through __init__" for the room's own package or one of its boxes."""
    if not ROOT.joinpath(*dotted).with_suffix(".py").is_file():
        return "through __init__"
    name, folder = ".".join(dotted[1:]), ".".join(dotted[1:-1])
    known = [entry for boxes in FLOORS[room] for entry in boxes]
    whole = (entry for entry in known if entry.endswith(".*") and f"{folder}.".startswith(entry[:-1]))
    return name if name in known else next(whole, folder)


def below(room: str, own: str) -> set[str]:
    """The boxes that a file of the box `own` may import."""
    floors = FLOORS[room]
    rank = next(number for number, boxes in enumerate(floors) if own in boxes)
    return {own, *(name for boxes in floors[:rank] for name in boxes)}


def room_files(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py"))


@pytest.mark.parametrize("room", ROOMS)
def test_imports_follow_the_star_and_the_floors(room: str) -> None:
    found = {str(path.relative_to(ROOT)): bad for path in room_files(room)
             if (bad := violations(path, path.read_text()))}
    assert not found


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_each_other_relatively(room: str) -> None:
    stray = [f"{path.name}: {written}" for path in room_files(room)
             for written, reached in imports(path, path.read_text())
             if reached[0] in ROOMS and not written.startswith("from .")]
    assert not stray


@pytest.mark.parametrize("room", ROOMS)
def test_every_file_stands_on_a_floor(room: str) -> None:
    known = {entry for boxes in FLOORS[room] for entry in boxes}
    used = {box(room, path.relative_to(ROOT).with_suffix("").parts) for path in room_files(room)
            if path != ROOT / room / "__init__.py"}
    assert used == known


def test_no_file_imports_itself_through_others() -> None:
    # Imports inside functions and of types alone make no circle when modules are loaded.
    files = {path.relative_to(ROOT).with_suffix("").parts: path for room in ROOMS for path in room_files(room)}
    below = {place: {reached for node in ast.parse(path.read_text()).body if isinstance(node, ast.ImportFrom)
                     for _, reached in imports(path, ast.unparse(node)) if reached in files}
             for place, path in files.items()}
    assert not list(graphlib.TopologicalSorter(below).static_order())[len(files):]


@pytest.mark.parametrize("room", [*ROOMS, "tests/support"])
def test_no_folder_is_crowded(room: str) -> None:
    files = Counter(path.parent for path in room_files(room) if path.name != "__init__.py")
    assert not {str(folder.relative_to(ROOT)): count for folder, count in files.items() if count > MOST_FILES}


@pytest.mark.parametrize(("file", "source"), [
    ("modules/features.py", "from ..data import chat"),
    ("modules/features.py", "from .. import trainers"),
    ("data/prompts/chat.py", "from ...export.artifact import save_artifact"),
    ("data/prompts/chat.py", "from ..store.held_out import read_held_out"),
    ("trainers/base.py", "from .fitting import fit"),
    ("recipes/stages/workspace.py", "from ..commands.pipeline import run"),
    ("trainers/base.py", "def f():\n    from ..data import token_store"),
    ("export/artifact.py", "import draftsmith.recipes.commands.artifact_commands"),
    ("data/prompts/chat.py", "import trainers"),
    ("modules/target/model.py", "from ...export import artifact"),
    ("modules/target/model.py", "from ....other import anything"),
    ("modules/features.py", "from .target.model import Target"),
    ("modules/target/model.py", "from ..interfaces.drafter import Drafter"),
    ("modules/policies/base.py", "from ..parts.heads import HeadDrafter"),
    ("modules/parts/heads.py", "from ..families.medusa.drafter import Medusa"),
    ("modules/decoding/loop.py", "from .. import Target"),
    ("modules/decoding/loop.py", "from ..target import Target"),
    ("export/layouts/eagle.py", "from ..report.evaluation_page import write_report"),
])
def test_the_import_test_can_fail(file: str, source: str) -> None:
    assert violations(ROOT / file, source)


@pytest.mark.parametrize(("file", "source"), [
    ("modules/decoding/loop.py", "from ..target import model"),
    ("modules/families/medusa/drafter.py", "from ...parts.heads import HeadDrafter"),
    ("export/layouts/eagle.py", "from ...modules import Eagle\nfrom ..artifact import Artifact"),
    ("recipes/commands/pipeline.py", "from ...export.report.evaluation_page import write_report"),
])
def test_the_import_test_can_pass(file: str, source: str) -> None:
    assert not violations(ROOT / file, source)


HOOKS = {
    "configure_gradient_clipping", "lightning_module_state_dict", "on_before_optimizer_step", "on_exception",
    "on_load_checkpoint", "on_save_checkpoint", "on_train_batch_end", "on_train_batch_start", "train_dataloader",
    "training_step",
    "block_backward_sync", "load_optimizer_state_dict", "optimizer_state", "_format_config",
    "_setup_model_and_optimizer", "get_mask_sizes", "get_seq_length",
    "lazy_initialization", "reset_parameters", "_shaped", "get_conv_state", "get_recurrent_state",
}
"""Functions that Lightning, transformers or torch call."""


def test_every_name_is_reached() -> None:
    """Each function and class is named in the rooms outside its definition; tests keep no code alive."""
    files = [path for room in ROOMS for path in room_files(room) if path.name != "__init__.py"]
    written = Counter(word for path in files for word in re.findall(r"[A-Za-z_]\w*", path.read_text()))
    defined = Counter(node.name for path in files for node in ast.walk(ast.parse(path.read_text()))
                      if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("__"))
    alone = {name for name, count in defined.items() if written[name] <= count}
    assert alone == HOOKS


def test_the_house_is_small() -> None:
    """A commit of its own raises the ceilings, and says what for."""
    sources = [path.read_text() for room in ROOMS for path in room_files(room)]
    lines = sum(source.count("\n") for source in sources)
    functions = sum(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                    for source in sources for node in ast.walk(ast.parse(source)))
    comments = sum(token.type == tokenize.COMMENT for source in sources
                   for token in tokenize.generate_tokens(io.StringIO(source).readline))
    assert lines <= MOST_LINES
    assert functions <= MOST_FUNCTIONS
    assert comments >= LEAST_COMMENTS * lines


def test_modules_need_no_extra() -> None:
    """But for one placement and for adapters, whose files import DeepSpeed and peft inside their functions."""
    apart = ("processes.py", "peft_adapter.py")
    needed = {reached[0] for path in room_files("modules") if path.name not in apart
              for _, reached in imports(path, path.read_text())}
    assert not needed & EXTRAS


def test_packages_are_the_folders_that_hold_source() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {path.parent.relative_to(ROOT) for room in ROOMS for path in room_files(room)}
    assert settings["packages"] == sorted(".".join(("draftsmith", *folder.parts)) for folder in folders)
    assert all((ROOT / folder / "__init__.py").is_file() for folder in folders)
    assert settings["package-dir"] == {f"draftsmith.{room}": room for room in ROOMS}
    assert not (ROOT / "__init__.py").exists(), "draftsmith is a namespace package"


def test_constraints_pin_torch_first_and_name_no_host() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert lines[0] == "torch==2.13.0"
    assert all("==" in line and not {"/", "@", "+"} & set(line) for line in lines)


def tracked_sources() -> set[str]:
    """The files of the rooms that git tracks and the wheel should hold, as draftsmith/<room>/<file>."""
    return {f"draftsmith/{name}" for name in listed(*ROOMS) if name.endswith(SHIPPED)}


def listed(*folders: str) -> list[str]:
    """The files that git tracks in folders, or in all."""
    return subprocess.run(["git", "ls-files", *folders], cwd=ROOT, check=True, capture_output=True,
                          text=True).stdout.split()


@pytest.mark.slow
def test_the_packages_hold_exactly_the_tracked_source(tmp_path: Path) -> None:
    """The wheel, which is made from the source distribution, holds the rooms, and that all that git tracks."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: there is nothing to compare the packages with")
    source = tmp_path / "source"
    subprocess.run(["git", "checkout-index", "--all", f"--prefix={source}/"], cwd=ROOT, check=True)
    subprocess.run([sys.executable, "-m", "build", *(["--no-isolation"] if has_setuptools() else []),
                    "--outdir", str(tmp_path / "dist"), str(source)], check=True, capture_output=True)
    (wheel,), (sources,) = ((tmp_path / "dist").glob(pattern) for pattern in ("*.whl", "*.tar.gz"))
    names = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("draftsmith/")}
    assert names == tracked_sources()
    with tarfile.open(sources) as packed:
        assert set(listed()) <= {name.partition("/")[2] for name in packed.getnames()}
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", str(wheel), str(sources)], check=True)
    about = zipfile.ZipFile(wheel).read(f"{wheel.name.removesuffix('-py3-none-any.whl')}.dist-info/METADATA").decode()
    page = about.partition("\n\n")[2]
    assert page.startswith("# Draftsmith\n")
    assert not re.findall(r"\]\((?!https:)[^)]*\)", page), "an index has no files that links could lead to"


def has_setuptools() -> bool:
    """True if a setuptools new enough for pyproject.toml is installed, so that the build needs no download."""
    answer = subprocess.run([sys.executable, "-c", "import setuptools; print(setuptools.__version__.split('.')[0])"],
                            capture_output=True, text=True, check=False)
    return answer.returncode == 0 and int(answer.stdout) >= 77


@pytest.mark.slow
def test_ruff_is_clean() -> None:
    answer = subprocess.run([sys.executable, "-m", "ruff", "check", "."], cwd=ROOT, capture_output=True, text=True,
                            check=False)
    assert answer.returncode == 0, answer.stdout


@pytest.mark.long
@pytest.mark.slow
def test_mypy_strict_is_clean() -> None:
    # Type checkers do not follow the import hook of the editable namespace package: they find it through a link. The
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


def test_commands_print_through_one_function() -> None:
    # The overview and the errors, and texts with colours, are made printable where they are printed.
    allowed = {"terminal.py", "__main__.py", "answer_commands.py", "doctor.py"}
    stray = [f"{path.name}:{node.lineno}" for room in ROOMS for path in room_files(room) if path.name not in allowed
             for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)
             and isinstance(node.func, ast.Name) and node.func.id == "print"]
    assert not stray, "print with terminal.say"
