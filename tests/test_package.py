"""The container, the release and the citation: the files next to the rooms that others meet first."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from dockerfile_parse import DockerfileParser

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
KNOWN = {"ARG", "FROM", "RUN", "COPY", "ENV", "WORKDIR", "USER", "VOLUME", "ENTRYPOINT", "CMD"}
SYSTEM = ("apt-get", "useradd", "chown")  # Programs that change the system: a test only notes how they are called


class Step(NamedTuple):
    """An instruction of the Dockerfile and its words."""

    instruction: str
    value: str


def steps(device: str = "cpu") -> Iterator[Step]:
    """The instructions of the image for a device, those of the other device's stage left out."""
    stage = device
    for entry in DockerfileParser(path=str(ROOT / "Dockerfile")).structure:
        step = Step(entry["instruction"], entry["value"])
        if step.instruction == "FROM":
            stage = step.value.partition(" AS ")[2] or device
        if stage == device and step.instruction != "COMMENT":
            yield step


def assigned(value: str) -> Iterator[tuple[str, str]]:
    """The names and values of an ENV or ARG instruction."""
    for word in shlex.split(value):
        name, given, default = word.partition("=")
        if given:
            yield name, default


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_container_is_built_of_what_is_here(device: str) -> None:
    let_in = (ROOT / ".dockerignore").read_text().split("\n")
    arguments: dict[str, str] = {}
    for instruction, value in steps(device):
        assert instruction in KNOWN
        if instruction == "ARG":
            arguments |= assigned(value)
        elif instruction == "FROM" and value[0] != "$":
            python = re.match(r"python:(3\.\d+)-slim AS (cpu|cuda)$", value)
            assert python is not None
            assert PROJECT["requires-python"] == f">={python[1]}", "constraints.txt is tested with this Python"
        elif instruction == "COPY":
            for source in value.split()[:-1]:
                assert (ROOT / source).exists()
                assert f"!{source}" in let_in
        elif instruction == "RUN" and "pip install" in value and value != "pip install --no-deps .":
            assert "--constraint constraints.txt" in value
            assert "==" not in value.replace("grep '^torch=='", ""), "constraints.txt names the versions"
        elif instruction == "USER":
            assert int(value.replace("${UID}", arguments["UID"])) >= 1000
    assert set(arguments["EXTRAS"].split(",")) <= set(PROJECT["optional-dependencies"])
    assert [step.instruction for step in steps(device)][-3:] == ["VOLUME", "ENTRYPOINT", "CMD"]
    assert "//" not in re.sub(r"#.*", "", (ROOT / "Dockerfile").read_text()), "an index is the user's to name"


@pytest.mark.slow
@pytest.mark.long
def test_the_steps_of_the_container_work_in_a_fresh_environment(tmp_path: Path) -> None:
    """Every step of the image for processors, its paths below a folder, and then what users call."""
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "python").symlink_to(Path(sys.base_prefix) / "bin" / "python3")
    for name in SYSTEM:
        (programs / name).write_text(f'#!/bin/sh\necho {name} "$@" >> {tmp_path}/system\n')
        (programs / name).chmod(0o755)

    def below(text: str) -> str:
        return re.sub(r"(?<![\w.])/(?=opt|draftsmith)", f"{tmp_path}/", text)

    environment = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    environment |= {"PATH": f"{programs}:/usr/bin:/bin", "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    folder, words = tmp_path, []
    for instruction, value in steps():
        if instruction in ("ARG", "ENV"):
            environment |= {name: below(given).replace("$PATH", environment["PATH"]) for name, given in assigned(value)}
        elif instruction == "WORKDIR":
            folder = Path(below(value))
            folder.mkdir(parents=True, exist_ok=True)
        elif instruction == "COPY":
            *sources, target = value.split()
            for source in sources:
                to = folder / target / (source if target == "./" else "")
                shutil.copytree(ROOT / source, to) if (ROOT / source).is_dir() else shutil.copy(ROOT / source, to)
        elif instruction == "RUN":
            run(["sh", "-c", below(value)], folder, environment)
        elif instruction == "ENTRYPOINT":
            words = json.loads(value)
    called = (tmp_path / "system").read_text()
    assert f"useradd --create-home --uid {environment['UID']} draftsmith\n" in called
    assert f"chown -R draftsmith {folder}\n" in called
    assert "usage: draftsmith COMMAND" in run([*words, "--help"], folder, environment)
    run([*words, "run", "--config", "tiny"], folder, environment)
    assert run([*words, "generate", "--artifact", "runs/tiny/artifact", "--prompt", "hello"], folder, environment)
    assert sorted(path.name for path in folder.iterdir()) == ["huggingface", "runs"]
    found = run([str(tmp_path / "opt/venv/bin/python"), "-c", "import draftsmith.modules as m; print(m.__file__)"],
                folder, environment)
    assert found.startswith(f"{tmp_path}/opt/venv/"), "the source tree is in use, not the installed package"


def run(words: list[str], folder: Path, environment: dict[str, str]) -> str:
    """The output of a program, which must end well."""
    answer = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, f"{words}: {answer.stdout[-2000:]}{answer.stderr[-2000:]}"
    return answer.stdout


def test_the_citation_says_what_it_must() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["cff-version"] == "1.2.0"
    assert cited["type"] == "software"
    assert cited["message"]
    assert cited["title"] == "Draftsmith"
    assert cited["license"] == PROJECT["license"]
    assert str(cited["version"]) == PROJECT["version"]
    assert [author["name"] for author in cited["authors"]] == [author["name"] for author in PROJECT["authors"]]


def git(folder: Path, *words: str) -> None:
    """A command of git by somebody."""
    subprocess.run(["git", "-c", "user.name=A", "-c", "user.email=a@b", *words], cwd=folder, check=True,
                   capture_output=True)


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository that can be released, whose Python only says with what it is called."""
    folder = tmp_path_factory.mktemp("released")
    for name in ("Makefile", "pyproject.toml", "CITATION.cff", "constraints.txt", ".gitignore"):
        shutil.copy(ROOT / name, folder)
    text = (ROOT / "CHANGELOG.md").read_text()
    (folder / "CHANGELOG.md").write_text(text.replace("unreleased", "2026-12-01"))
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message", "all")
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / ".venv" / "bin" / "python").write_text('#!/bin/sh\necho python "$@"\n')
    (folder / ".venv" / "bin" / "python").chmod(0o755)
    (folder / ".venv" / ".installed").touch()
    return folder


def release(folder: Path) -> tuple[int, str, str]:
    """(exit code, output, errors) of `make release`."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "GIT_"))}
    answer = subprocess.run(["make", "release"], cwd=folder, env=environment, capture_output=True, text=True,
                            check=False)
    return answer.returncode, answer.stdout, answer.stderr


@pytest.mark.parametrize("tagged", [False, True])
def test_a_release_is_built_and_the_commands_are_only_printed(released: Path, tmp_path: Path, tagged: bool) -> None:
    folder = Path(shutil.copytree(released, tmp_path / "clone"))
    version = PROJECT["version"]
    if tagged:
        git(folder, "tag", f"v{version}")
    code, printed, errors = release(folder)
    assert (code, errors) == (0, "")
    built, checked, _, *commands = printed.splitlines()
    assert built == "python -m build --outdir dist ."
    assert checked.startswith("python -m twine check --strict dist/draftsmith-")
    assert commands == [*([] if tagged else [f"git tag --annotate v{version} --message 'Draftsmith {version}'"]),
                        f"git push origin v{version}", f".venv/bin/python -m twine upload dist/draftsmith-{version}*"]
    tags = subprocess.run(["git", "tag"], cwd=folder, capture_output=True, text=True, check=True).stdout
    assert bool(tags) == tagged


@pytest.mark.parametrize(("file", "old", "new", "said"), [
    ("pyproject.toml", 'version = "0.1.0"', 'version = "0.2.0"',
     r"'## \[0.1.0\] - 2026-12-01', and pyproject.toml has version 0.2.0; make it '## \[0.2.0\] - \d{4}-\d\d-\d\d'"),
    ("CHANGELOG.md", "2026-12-01", "unreleased", r"'## \[0.1.0\] - unreleased', and .* make it '## \[0.1.0\] - \d"),
    ("CHANGELOG.md", "2026-12-01", "2026-12-32", "2026-12-32' in CHANGELOG.md has no day of the calendar"),
    ("CHANGELOG.md", "## [0.1.0]", "## [Unreleased]\n\n## [0.1.0]", r"'## \[Unreleased\]', and .* make it"),
    ("CITATION.cff", "version: 0.1.0", "version: 0.0.9", "version 0.0.9, and pyproject.toml 0.1.0; make them equal"),
    ("Makefile", "# make setup", "# make the setup", "'Makefile' is not committed; commit, remove or ignore it"),
    (".git", "", "", "this folder is no git repository; release from a clone"),
    ("tag", "", "", r"the tag v0.1.0 is on [0-9a-f]{12}, not on this commit; raise the version"),
])
def test_what_is_not_ready_is_not_released(released: Path, tmp_path: Path, file: str, old: str, new: str,
                                           said: str) -> None:
    folder = Path(shutil.copytree(released, tmp_path / "clone"))
    if file == "tag":
        git(folder, "tag", f"v{PROJECT['version']}")
        git(folder, "commit", "--quiet", "--allow-empty", "--message", "more")
    elif file == ".git":
        shutil.rmtree(folder / ".git")
    else:
        text = (folder / file).read_text()
        assert old in text
        (folder / file).write_text(text.replace(old, new, 1))
    code, printed, errors = release(folder)
    assert (code, printed) == (2, "")
    assert re.search(said, errors.splitlines()[-2]), errors
