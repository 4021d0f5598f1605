"""The report: what a person reads agrees with what was measured, and the page needs nothing but itself."""

import builtins
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from draftsmith.export import (
    Artifact,
    EvaluateConfig,
    Evaluation,
    EvaluationRun,
    Lossless,
    Measures,
    plots,
    terminal_table,
    write_report,
)
from draftsmith.export.wording import lossless_verdict
from draftsmith.modules import CostCurve, TargetIdentity, Topology, UserError
from test_artifact import TREE, tuning


def measures(**changes: Any) -> Measures:
    fields: dict[str, Any] = {
        "prompts": 10, "new_tokens": 1234, "target_passes": 600, "accepted_length": 1.94, "tokens_per_second": 28.5,
        "acceptance_by_position": (0.57, 0.25, 0.12), "plain_tokens_per_second": 19.9, "draft_time_share": 0.09,
        "generate_tokens_per_second": 15.8, "speedup": 1.43, "repetition_rate": 0.12, "truncation_rate": 0.4,
        "lossless": Lossless(prompts=10, identical=10, near_tie_divergences=0, max_logit_gap_at_divergence=None),
    }
    return Measures(**(fields | changes))


def a_run(*, contended: bool = False, names: tuple[str, ...] = ("medusa",), **changes: Any) -> EvaluationRun:
    overall = measures(**changes)
    evaluations = tuple(Evaluation(
        name=name, family="medusa", target="a <small> target", batch_size=1, temperature=0.0, contended=contended,
        target_calls=600, overall=overall,
        accepted_length_by_tree_size={"own": {"16": 1.9, "64": 2.15}},
        by_prompt_set={"own": overall, "handwritten": measures(accepted_length=1.71)},
        by_category={"math": measures(accepted_length=2.05), "writing": measures(accepted_length=1.52)},
    ) for name in names)
    header = {
        "machine": {"processor": "A Processor", "device": "cpu", "system": "Linux"}, "dtype": "float32", "threads": 2,
        "versions": {"torch": "2.13.0"}, "settings": {"max_new_tokens": 128, "seed": 0}, "timed_prompts": 4,
        "prompt_sets": {"own": 5, "handwritten": 5},
        "contention": {"bound": 0.15, "worst_excess": {"1": 0.04, "8": 0.31}, "samples": 5},
    }
    return EvaluationRun(header=header, evaluations=evaluations)


def an_artifact(tree: Topology = TREE) -> Artifact:
    identity = TargetIdentity(name="t", architecture="A", vocab_size=9, hidden_size=8, num_layers=1,
                              weights_hash="cafe01")
    return Artifact(drafter=None, topology=tree, identity=identity,  # type: ignore[arg-type]  # only drawn, never used
                    provenance={"data_manifest": "0a1b2c"}, tuning=tuning())


def test_three_files_hold_the_same_figures(tmp_path: Path) -> None:
    paths = write_report(tmp_path / "out", a_run(), an_artifact())
    assert {path.name for path in paths.values()} == {"evaluation.json", "report.md", "report.html"}
    assert json.loads(paths["json"].read_text()) == json.loads(json.dumps(a_run().to_dict()))
    page, text = paths["html"].read_text(), paths["markdown"].read_text()
    for figure in ("1.94", "1.71", "2.05", "28.5", "19.9", "15.8", "1.43×", "10/10"):
        assert figure in page
        assert figure in text


def test_the_page_is_whole_and_fetches_nothing(tmp_path: Path) -> None:
    page = write_report(tmp_path, a_run(), an_artifact())["html"].read_text()
    assert page.count("<svg") == 5  # positions, speed, categories, cost, tree
    assert not re.search(r"<script|<link|<img|@import|\bsrc=|url\((?!#)", page)
    linked = set(re.findall(r"""(?:href)="([^#"][^"]*)\"""", page))
    assert not linked
    assert "a &lt;small&gt; target" in page
    assert "<small>" not in page


def test_every_plot_is_well_formed_with_ids_of_its_own(tmp_path: Path) -> None:
    page = write_report(tmp_path, a_run(), an_artifact())["html"].read_text()
    drawings = re.findall(r"<svg.*?</svg>", page, re.S)
    ids = [set(re.findall(r'<clipPath id="([^"]+)"', drawing)) for drawing in drawings]
    assert all(ElementTree.fromstring(drawing).tag.endswith("svg") for drawing in drawings)
    assert sum(map(len, ids)) == len(set().union(*ids))


def test_equal_runs_give_equal_pages(tmp_path: Path) -> None:
    first, second = (write_report(tmp_path / name, a_run(), an_artifact())["html"] for name in "ab")
    assert first.read_bytes() == second.read_bytes()


def test_a_page_without_timing_or_artifact(tmp_path: Path) -> None:
    untimed = dict.fromkeys(("tokens_per_second", "plain_tokens_per_second", "generate_tokens_per_second", "speedup",
                             "draft_time_share"))
    run = a_run(**untimed)
    run.evaluations[0].by_prompt_set.update({name: measures(**untimed) for name in ("own", "handwritten")})
    page = write_report(tmp_path, run)["html"].read_text()
    assert page.count("<svg") == 2
    assert "None" not in page
    assert "–" in terminal_table(run)


def test_a_busy_machine_is_announced_everywhere(tmp_path: Path) -> None:
    for contended in (False, True):
        run = a_run(contended=contended)
        paths = write_report(tmp_path, run)
        for text in (terminal_table(run), paths["markdown"].read_text(), paths["html"].read_text()):
            assert ("The machine was busy with something else" in text) == contended


def test_methods_stand_side_by_side(tmp_path: Path) -> None:
    page = write_report(tmp_path, a_run(names=("medusa", "chain")))["html"].read_text()
    assert "The methods side by side" in page
    assert "<td>chain</td>" in page
    assert "The methods side by side" not in write_report(tmp_path, a_run())["html"].read_text()


def test_the_terminal_table_is_narrow_and_aligned() -> None:
    lines = terminal_table(a_run(contended=True)).splitlines()
    assert max(map(len, lines)) <= 100
    table = lines[2:6]
    assert len({len(line) for line in table}) == 1
    assert "all prompts" in table[1]
    assert "1.94" in table[1]


@pytest.mark.parametrize(("identical", "near", "gap", "words"), [
    (10, 0, None, "All 10 answers (1,234 tokens) are identical"),
    (9, 1, 3e-5, "1 first differs where the target itself is undecided within the rounding of float32 (largest logit "
                 "gap there: 3e-05)."),
    (8, 2, 3e-5, "more often than once in 10,000 tokens"),
    (9, 0, 0.7, "1 first differs where it is not (largest logit gap there: 0.7): this is a fault"),
])
def test_the_verdict_hides_nothing(identical: int, near: int, gap: float | None, words: str) -> None:
    run = a_run(lossless=Lossless(prompts=10, identical=identical, near_tie_divergences=near,
                                  max_logit_gap_at_divergence=gap))
    assert words in lossless_verdict(run, run.evaluations[0])


def test_a_changed_word_is_shown_as_a_fault(tmp_path: Path) -> None:
    lost = Lossless(prompts=10, identical=9, near_tie_divergences=0, max_logit_gap_at_divergence=0.7)
    assert "Drafting changed words." in write_report(tmp_path, a_run(lossless=lost))["html"].read_text()
    assert "Not a word changed." in write_report(tmp_path, a_run())["html"].read_text()


def test_without_matplotlib_the_figures_are_kept_and_the_remedy_is_named(tmp_path: Path,
                                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(UserError, match=r"pip install 'draftsmith\[report\]'"):
        write_report(tmp_path, a_run())
    assert {path.name for path in tmp_path.iterdir()} == {"evaluation.json", "report.md"}


@pytest.mark.parametrize("tree", [Topology.chain(0), Topology.chain(3), TREE])
def test_any_tree_can_be_drawn(tree: Topology) -> None:
    assert plots.tree(tree, 1).startswith("<svg")


def test_nodes_of_one_depth_stand_apart() -> None:
    heights = plots._leaf_heights(TREE)
    places = list(zip(TREE.depths, heights, strict=True))
    assert len(set(places)) == TREE.size
    below = {node: parent for node, parent in enumerate(TREE.parents) if TREE.ranks[node] == 0 and node}
    assert all(heights[node] == heights[parent] for node, parent in below.items())


def test_a_cost_curve_without_estimates_can_be_drawn() -> None:
    cost = CostCurve(sizes=(1,), pass_seconds=(0.1,), draft_seconds=(0.0,), context=8)
    assert "expected speed-up" not in plots.cost_curve(cost, 1, ())
    assert EvaluateConfig().speed_prompts == 8
