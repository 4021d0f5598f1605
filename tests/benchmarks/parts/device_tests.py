"""A plugin of pytest that runs first what failed before, then what never ran, and writes every outcome at once, so that
a session that is stopped has lost nothing. `DEVICE_TESTS` names the folder of its files, with an id in each line."""

import os
from collections.abc import Generator
from pathlib import Path

import pytest

FOLDER = "DEVICE_TESTS"  # Environment variable
WORKER = os.environ.get("PYTEST_XDIST_WORKER")  # Name of this process among those of pytest-xdist; None for the first
OUTCOMES, COLLECTED = "outcomes.txt", "collected.txt"
LISTS = ("failed.txt", "passed.txt")  # By earlier sessions; the first may be written by hand


def ids(name: str) -> dict[str, None]:
    """The lines of a file of the folder."""
    file = Path(os.environ[FOLDER], name)
    return dict.fromkeys(file.read_text(encoding="utf-8").splitlines() if file.is_file() else ())


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None]:
    yield
    failed, passed = map(ids, LISTS)
    items.sort(key=lambda item: (item.nodeid not in failed, item.nodeid in passed))
    if WORKER in (None, "gw0"):
        Path(os.environ[FOLDER], COLLECTED).write_text("".join(f"{item.nodeid}\n" for item in items), encoding="utf-8")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if WORKER is None and (report.when == "call" or report.outcome != "passed"):
        with Path(os.environ[FOLDER], OUTCOMES).open("a", encoding="utf-8") as file:
            file.write(f"{report.outcome} {report.nodeid}\n")


def settled() -> tuple[dict[str, str], list[str]]:
    """(outcome by id of the sessions since the last call, tests that never ran in any), and the lists anew."""
    found = {nodeid: outcome for line in ids(OUTCOMES) for outcome, nodeid in [line.split(" ", 1)]}
    failed, passed = map(ids, LISTS)
    for nodeid, outcome in found.items():
        for name, group in (("failed", failed), ("passed", passed)):
            group.pop(nodeid, None)
            if outcome == name or (name == "passed" and outcome == "skipped"):
                group[nodeid] = None
    for name, group in zip(LISTS, (failed, passed), strict=True):
        Path(os.environ[FOLDER], name).write_text("".join(f"{nodeid}\n" for nodeid in group), encoding="utf-8")
    Path(os.environ[FOLDER], OUTCOMES).unlink(missing_ok=True)
    return found, [nodeid for nodeid in ids(COLLECTED) if nodeid not in failed and nodeid not in passed]
