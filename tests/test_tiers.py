"""The three tiers: every case runs in exactly one, and none is judged by a clock."""

import ast
import re
from itertools import product
from pathlib import Path

from _pytest.mark.expression import Expression
from support.families import CASES
from support.tiers import TELLING, others_long, some_long

ROOT = Path(__file__).resolve().parents[1]
TIERS = re.findall(r"TIER *\??='?(.*?)'?$", (ROOT / "Makefile").read_text(), re.MULTILINE)


def later(cases: list[object]) -> list[object]:
    """First values of the cases that are marked as long."""
    return [case.values[0] for case in cases if getattr(case, "marks", ())]  # type: ignore[attr-defined]


def test_every_test_runs_in_one_tier() -> None:
    assert len(TIERS) == 3
    for marks in product((False, True), repeat=2):
        held = dict(zip(("long", "full"), marks, strict=True))
        assert sum(Expression.compile(tier).evaluate(held.__getitem__) for tier in TIERS) == 1, held


def test_the_most_telling_drafter_is_tried_first_and_none_is_lost() -> None:
    found = others_long(CASES)
    assert found[0] == TELLING[0]
    assert later(found)[: len(TELLING) - 1] == [*TELLING[1:]]
    assert {found[0], *later(found)} == {*CASES}
    pairs = others_long([(name, size) for name in ("medusa", "eagle3") for size in (1, 2)])
    assert [pair for pair in pairs if isinstance(pair, tuple) and not hasattr(pair, "marks")] == [
        ("eagle3", 1), ("eagle3", 2)]
    assert later(pairs) == ["medusa", "medusa"]
    assert later(some_long(range(7), 3)) == [1, 2, 4, 5]
    assert later(some_long(range(7), 3, 1)) == [1, 2, 3, 4, 5, 6]


def test_no_test_compares_a_clock_with_a_bound() -> None:
    clocks = {"time", "monotonic", "perf_counter", "process_time"}

    def reads(node: ast.AST) -> bool:
        return any(isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute) and one.func.attr in clocks
                   for one in ast.walk(node))

    found = [f"{path.relative_to(ROOT)}:{node.lineno}" for path in (ROOT / "tests").rglob("test_*.py")
             for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Assert) and reads(node)]
    assert not found, f"{found}: a busy machine takes longer; measure in tests/benchmarks"
