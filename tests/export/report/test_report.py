"""The report: its figures agree with the measurement, and the page needs nothing but itself."""

import builtins
import html
import json
import re
from dataclasses import asdict, replace
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
    TrainingRecord,
    terminal_table,
    write_report,
)
from draftsmith.export.evaluation.results import Distribution, SampleAnswer, SampleToken
from draftsmith.export.measured_files import Prediction
from draftsmith.export.page import Heading, as_html
from draftsmith.export.report import plots
from draftsmith.export.report.evaluation_page import boxes
from draftsmith.export.report.phrases import headline, lossless_verdict, verdicts
from draftsmith.modules import CostCurve, CostTable, MeasuredStep, TargetIdentity, Topology, UserError
from support.artifacts import TREE, tuning


def lossless(prompts: int, identical: int | None = None, near: int = 0, gap: float | None = None) -> Lossless:
    return Lossless(prompts=prompts, identical=prompts if identical is None else identical, near_tie_divergences=near,
                    max_logit_gap=gap, rounding=1e-4 if near else None)


def measures(**changes: Any) -> Measures:
    fields: dict[str, Any] = {
        "prompts": 10, "new_tokens": 1234, "target_passes": 600, "accepted_length": 1.94, "tokens_per_second": 28.5,
        "acceptance_by_position": (0.57, 0.25, 0.12), "plain_tokens_per_second": 19.9, "draft_time_share": 0.09,
        "generate_tokens_per_second": 15.8, "speedup": 1.43, "repetition_rate": 0.12, "truncation_rate": 0.4,
        "lossless": lossless(10),
        "accepted_length_interval": (1.81, 2.07), "tokens_per_second_interval": (26.1, 30.9),
        "speedup_interval": (1.32, 1.55), "block_efficiency": 1.9,
        "distribution": None,
    }
    return Measures(**(fields | changes))


def an_evaluation(name: str, **changes: Any) -> Evaluation:
    fields: dict[str, Any] = {
        "name": name, "family": "medusa", "target": "a <small> target", "batch_size": 1, "temperature": 0.0, "nodes": 6,
        "tree_nodes": 6, "partners": (),
        "contended": False, "target_calls": 600, "prediction": None, "overall": measures(),
        "by_prompt_set": {"own": measures(), "handwritten": measures(accepted_length=1.71)},
        "by_category": {"math": measures(accepted_length=2.05), "writing": measures(accepted_length=1.52)},
        "by_turn": {},
        "by_mode": {},
    }
    return Evaluation(**(fields | changes))


SAMPLES = tuple(
    SampleAnswer(rank=rank, prompt_set="own", prompt="Write <b>bold</b>", accepted_length=1.5, tokens=(
        SampleToken(text="A", guessed=False), SampleToken(text=" <i>", guessed=True),
        SampleToken(text="\x1b[0m", guessed=False, rejected=("\n\"x\"", "</span>", "c", "d", "e")),
        SampleToken(text="", guessed=True)))
    for rank in ("best", "median", "worst"))


def a_run(*, contended: bool = False, names: tuple[str, ...] = ("medusa",), batch_sizes: tuple[int, ...] = (1,),
          temperatures: tuple[float, ...] = (0.0,), of: dict[str, Any] | None = None, **changes: Any) -> EvaluationRun:
    """A run; `of` changes its evaluations, other keywords the measures of all prompts."""
    overall = measures(**changes)
    sets = {"own": overall, "handwritten": measures(accepted_length=1.71)}
    evaluations = tuple(
        an_evaluation(name, **{"contended": contended, "batch_size": size, "temperature": temperature,
                               "overall": overall, "by_prompt_set": sets, **(of or {})})
        for temperature in temperatures for size in batch_sizes for name in names)
    header = {
        "machine": {"processor": "A Processor", "device": "cpu", "system": "Linux"}, "dtype": "float32", "threads": 2,
        "linear_layers": {"forms": "linear layers plain", "packed_from": 0, "times": None},
        "versions": {"torch": "2.13.0"}, "graphs": False, "settings": asdict(EvaluateConfig()), "timed_prompts": 4,
        "artifacts": dict.fromkeys(names, "cafe02"),
        "prompt_sets": {"own": 5, "handwritten": 5}, "categories": {"math": 5, "writing": 5},
        "planned": {"prompt_sets": {"own": 5, "handwritten": 5}, "categories": {"math": 5, "writing": 5},
                    "timed_prompts": 4},
        "minutes": {"predicted": 3.0, "taken": 3.2, "budget": None},
        "contention": {"bound": 0.15, "worst_excess": {"1": 0.04, "8": 0.31}, "samples": 5},
    }
    return EvaluationRun(header=header, evaluations=evaluations, samples=SAMPLES)


def an_artifact(tree: Topology = TREE) -> Artifact:
    identity = TargetIdentity(name="t", architecture="A", vocab_size=9, hidden_size=8, num_layers=1,
                              weights_hash="cafe01")
    return Artifact(drafter=None, target=None, topology=tree,  # type: ignore[arg-type]  # only drawn, never used
                    identity=identity, provenance={"data_manifest": "0a1b2c"}, tuning=tuning())


def test_a_fault_of_the_loop_without_drafts_is_not_called_one_of_the_draft() -> None:
    drawn = Distribution(tokens=900, distance=0.01, p_value=0.6, impossible=0, visible=0.05)
    run = a_run(temperatures=(0.7,), distribution=drawn, lossless=replace(lossless(0), wrong_references=2))
    assert headline(run).endswith(", but answers without drafts are not the target's, which is a fault of the loop "
                                  "itself.")
    assert "2 of 10 answers of this project's loop without drafts are not what the target" in " ".join(verdicts(run))
    assert "The loop without drafts is wrong." in terminal_table(run)


def test_a_lossy_result_cannot_be_mistaken() -> None:
    run = a_run(of={"lossy": "typical"}, temperatures=(0.7,), lossless=lossless(10, 7))
    said = "LOSSY (typical): 3 of 10 answers (30%) differ from those of exact verification"
    assert headline(run).endswith(f", but {said}.")
    assert f"medusa at temperature 0.7: {said} with the same drafts and random numbers" in " ".join(verdicts(run))
    assert "Answers are not the target's own." in terminal_table(run)
    assert not run.evaluations[0].faulty


@pytest.mark.parametrize(("nodes", "said"), [(1, "nothing was drafted"), (6, "no pass accepted a guess")])
def test_no_accepted_guess_is_told_from_no_guess(nodes: int, said: str) -> None:
    run = a_run(of={"nodes": nodes}, accepted_length=1.0, acceptance_by_position=())
    assert f"medusa: {said}\n" in terminal_table(run)
    assert ("no pass accepted a guess" in terminal_table(run)) == (nodes > 1)


def test_half_precision_says_what_identical_means() -> None:
    for dtype, said in (("float32", False), ("bfloat16", True), ("float16", True)):
        found = " ".join(verdicts(replace(a_run(), header={**a_run().header, "dtype": dtype})))
        assert (f"compared with its own in {dtype}, not with those in float32" in found) == said


def test_three_files_hold_the_same_figures(tmp_path: Path) -> None:
    paths = write_report(tmp_path / "out", a_run(), an_artifact())
    assert {path.name for path in paths.values()} == {"evaluation.json", "report.md", "report.html"}
    assert json.loads(paths["json"].read_text()) == json.loads(json.dumps(a_run().to_dict()))
    page, text = paths["html"].read_text(), paths["markdown"].read_text()
    for figure in ("1.94", "1.81–2.07", "1.71", "2.05", "28.5", "26.1–30.9", "19.9", "15.8", "1.43×", "1.32–1.55",
                   "10/10", "at most 6 nodes", "A Processor, 2 threads; linear layers plain", "float32",
                   "torch 2.13.0"):
        assert figure in page
        assert figure in text
    # Equal runs give equal pages.
    assert write_report(tmp_path / "again", a_run(), an_artifact())["html"].read_text() == page


JOINED = {"nodes": 15, "tree_nodes": 8, "partners": ("lookup",),
          "prediction": Prediction(speedup=1.87, accepted_length=2.2)}
"""An evaluation of static+lookup: what the tree alone accepts is another figure than that of its decoding."""


def test_a_figure_says_whether_it_is_of_the_tree_alone_or_with_copies(tmp_path: Path) -> None:
    run = a_run(names=("medusa, static+lookup",), of=JOINED)
    paths = write_report(tmp_path, run, an_artifact())
    page, text = paths["html"].read_text(), paths["markdown"].read_text()
    for shown in (page, text):
        assert ("at most 15 nodes: the last token and the guesses after it, from the draft's own tree of 8 nodes and "
                "from copies from the text.") in html.unescape(shown)
        assert "without drafts 1.87×, measured: 1.43×." in shown
    assert "in passes of at most 15 nodes with copies from the text; 1 without drafts" in page
    assert page.count("expected speed-up, tree alone") == 1
    kept = json.loads(paths["json"].read_text())
    assert (kept["nodes"], kept["tree_nodes"], kept["partners"]) == (15, 8, ["lookup"])
    both = a_run(names=("medusa, static+lookup", "chain"), of=JOINED)
    assert "| nodes per pass | of its own tree |" in write_report(tmp_path, both)["markdown"].read_text()


def test_conditions_are_sentences_with_units(tmp_path: Path) -> None:
    times = {"dtype": "float32", "tokens": [1, 16], "plain": [0.0104, 0.05], "packed": [0.0081, 0.0203]}
    run, made = a_run(), an_artifact()
    run = replace(run, header=run.header | {
        "linear_layers": {"forms": "linear layers packed for oneDNN", "packed_from": 1, "times": times}})
    origin = {"loops": {"answers": 3, "accepted_length": 2.314},
              "draft_vocabulary": {"tokens": 4096, "held_out_coverage": 0.834}}
    page = html.unescape(write_report(tmp_path, run, replace(made, provenance=origin))["html"].read_text())
    for said in ("A Processor, Linux, 2 threads; device cpu",
                 "linear layers packed for oneDNN: all of them in one pass, in float32: 1 token 10.4 ms plain, 8.1 ms "
                 "packed; 16 tokens 50 ms plain, 20.3 ms packed",
                 "drafted by the policy static; all prompts of each set; without a limit of time; without CUDA graphs, "
                 "layers not compiled",
                 "5 own and 5 handwritten", "4,096 tokens, 83.4% of those in held-out answers",
                 "3 held-out answers end in a loop, with 2.31 tokens per pass there"):
        assert f"<dd>{said}</dd>" in page, said
    shared = html.unescape(write_report(tmp_path, run, replace(made, shared=True))["html"].read_text())
    assert "<dd>t (cafe01), another target of the same tokenizer and vocabulary</dd>" in shared
    for name, drafted in (("medusa", "the policy static, next to prompt_lookup"), ("prompt_lookup", "prompt_lookup")):
        settings = asdict(EvaluateConfig(baselines=("prompt_lookup",)))
        header = run.header | {"artifacts": {name: ""}, "settings": settings}
        assert f"drafted by {drafted}; all" in write_report(tmp_path, replace(run, header=header))["html"].read_text()


def test_the_page_is_whole_and_fetches_nothing(tmp_path: Path) -> None:
    page = write_report(tmp_path, a_run(), an_artifact())["html"].read_text()
    assert page.count("<svg") == 5  # positions, speed, categories, cost, tree
    assert not re.search(r"<script|<link|<img|@import|\bsrc=|url\((?!#)", page)
    linked = set(re.findall(r"""(?:href)="([^#"][^"]*)\"""", page))
    assert not linked
    assert "a &lt;small&gt; target" in page
    assert not re.search(r"<small>|<i>|<b>bold|\x1b", page)


def test_plots_are_well_formed_with_ids_of_their_own_and_follow_the_colours_of_the_page(tmp_path: Path) -> None:
    run = replace(a_run(batch_sizes=(1, 4)), training=trained())
    page = write_report(tmp_path, run, an_artifact())["html"].read_text()
    drawings = re.findall(r"<svg.*?</svg>", page, re.S)
    ids = [set(re.findall(r'<clipPath id="([^"]+)"', drawing)) for drawing in drawings]
    assert all(ElementTree.fromstring(drawing).tag.endswith("svg") for drawing in drawings)
    assert sum(map(len, ids)) == len(set().union(*ids))
    style, drawn = page.split("</style>", 1)
    known = set(re.findall(r"(--[\w-]+):", style))
    assert set(re.findall(r"var\((--[\w-]+)", drawn)) <= known | {"--plot-ffffff"}
    assert not re.findall(r"[^ ]#[0-9a-f]{6}\b", drawn)
    assert set(re.findall(r"var\((--[\w-]+)\)", style)) <= known


def trained(expected: float | None = 1.2) -> TrainingRecord:
    return TrainingRecord(time="trained in 61 s", outcome="Short of data: 14,000 tokens.", best_step=200, curve=(
        MeasuredStep(step=0, accepted_length=1.0, labels=0),
        MeasuredStep(step=200, accepted_length=1.43, labels=900, loss=3.1, accuracy=0.25,
                     expected_accepted_length=expected),
        MeasuredStep(step=300, accepted_length=1.41, labels=1350, loss=2.9, accuracy=0.3,
                     expected_accepted_length=expected)))


@pytest.mark.parametrize("expected", [1.2, None])
def test_the_page_of_a_run_that_trained_shows_the_curve(tmp_path: Path, expected: float | None) -> None:
    run = replace(a_run(), training=trained(expected))
    paths = write_report(tmp_path, run, an_artifact())
    page = paths["html"].read_text()
    assert page.count("<svg") == 7  # those of an evaluation, tokens per pass, loss
    assert "<p>Short of data: 14,000 tokens.</p>" in page
    assert "best: 1.43 at step 200" in page
    assert ("training text, expected" in page) == ("expected of a chain" in page) == (expected is not None)
    text = paths["markdown"].read_text()
    assert "trained in 61 s" in text
    assert "Short of data: 14,000 tokens." in text
    assert json.loads(paths["json"].read_text())["training"]["curve"][1]["accuracy"] == 0.25


def test_a_page_without_timing_samples_or_artifact(tmp_path: Path) -> None:
    untimed = dict.fromkeys(("tokens_per_second", "plain_tokens_per_second", "generate_tokens_per_second", "speedup",
                             "draft_time_share", "tokens_per_second_interval", "speedup_interval"))
    for names in (("medusa",), ("medusa", "chain")):
        run = a_run(names=names, batch_sizes=(1, 8)[: len(names)], **untimed)
        for one in run.evaluations:
            one.by_prompt_set.update({name: measures(**untimed) for name in ("own", "handwritten")})
        page = write_report(tmp_path, replace(run, samples=()))["html"].read_text()
        assert page.count("<svg") == 2
        assert not re.search("None|Who wrote", page)
        assert "–" in terminal_table(run)


def test_a_busy_machine_is_reported_everywhere(tmp_path: Path) -> None:
    for contended in (False, True):
        run = a_run(contended=contended)
        paths = write_report(tmp_path, run)
        for text in (terminal_table(run), paths["markdown"].read_text(), paths["html"].read_text()):
            assert ("The machine was busy with something else" in text) == contended


def test_methods_batch_sizes_and_temperatures_get_plots_and_columns(tmp_path: Path) -> None:
    page = write_report(tmp_path, a_run(names=("medusa", "chain")))["html"].read_text()
    assert "The methods side by side" in page
    assert "<td>chain</td>" in page
    assert page.count("<svg") == 3  # positions, speed of each method, categories
    assert "The methods side by side" not in write_report(tmp_path, a_run())["html"].read_text()
    run = a_run(names=("medusa", "chain"), batch_sizes=(1, 4, 8), temperatures=(0.0, 0.7))
    paths = write_report(tmp_path, run, an_artifact())
    page, text = paths["html"].read_text(), paths["markdown"].read_text()
    assert page.count("<svg") == 6  # positions, batches, categories, temperatures, cost, tree
    assert "rows of the batch" in page
    assert "| chain | 0.7 | 8 | 6 | 1.94 (1.81–2.07) |" in text
    assert "chain, temperature 0.7, batch 8" in terminal_table(run)
    assert len(json.loads(paths["json"].read_text())["measurements"]) == 12 * 5
    assert "temperature |" not in write_report(tmp_path, a_run(names=("a", "b")))["markdown"].read_text()
    # The verdict is about every temperature and counts all methods.
    run = a_run(names=("medusa", "chain"), temperatures=(0.0, 0.7))
    text = write_report(tmp_path, run)["markdown"].read_text()
    assert "All 20 greedy answers (2,468 tokens) are identical, token by token, to those of transformers' own" in text
    assert "All 20 answers at temperature 0.7 (2,468 tokens) are identical, token by token, to" in text


def test_predicted_is_next_to_measured(tmp_path: Path) -> None:
    """With two intervals where the answers that predict chose nothing, and a warning where they chose the draft."""
    blind = Prediction(speedup=1.61, accepted_length=2.3)
    paths = write_report(tmp_path, a_run(of={"prediction": blind}))
    for file in (paths["html"], paths["markdown"]):
        assert "speed-up over this loop without drafts 1.61×, measured: 1.43×. Too few answers" in file.read_text()
    found = replace(blind, interval=(2.1, 2.5))
    text = write_report(tmp_path, a_run(of={"prediction": found}))["markdown"].read_text()
    assert "tokens per pass 2.30 (90 %: 2.10 to 2.50), measured: " in text
    assert f"1.61× (90 %: {1.61 * 2.1 / 2.3:.2f} to {1.61 * 2.5 / 2.3:.2f}), measured: " in text
    assert "Too few" not in text


def test_groups_have_rows_of_their_own_but_for_a_category_that_is_a_whole_set(tmp_path: Path) -> None:
    groups = {"by_turn": {"1": measures(), "2": measures()},
              "by_category": {"own": measures(), "math": measures(accepted_length=2.05)},
              "by_mode": {"thinking": measures(), "not thinking": measures(accepted_length=2.5)}}
    text = write_report(tmp_path, a_run(of=groups))["markdown"].read_text()
    for row in ("| turn 2 | 10 | 1.94 (1.81–2.07) |", "| thinking | 10 | 1.94 ", "| not thinking | 10 | 2.5"):
        assert row in text
    assert [line.split("|")[1].strip() for line in text.partition("## All figures")[2].partition("##")[0].splitlines()
            if line.startswith("| ")][2:8] == [
        "all prompts", "*prompt sets*", "own", "handwritten", "*categories*", "math"]


def test_the_terminal_table_is_narrow_and_aligned() -> None:
    lines = terminal_table(a_run(contended=True)).splitlines()
    assert max(map(len, lines)) <= 100
    table = lines[4:7]
    assert lines[2].startswith("1.4 times faster, not a word changed;")
    assert len({len(line) for line in table}) == 1
    assert "medusa" in table[1]
    assert "1.94" in table[1]


@pytest.mark.parametrize(("identical", "near", "gap", "words"), [
    (10, 0, None, "All 10 answers (1,234 tokens) are identical"),
    (9, 1, 3e-5, "1 differs only where the target itself is undecided: each later token was compared with what the "
                 "target says after the same text, and the rounding of float32, which moves two logits by up to "
                 "0.0001"),
    (8, 2, 3e-5, "more often than once in 10,000 tokens"),
    (9, 0, 0.7, "1 differs where rounding does not explain it (a token lies 0.7 below the target's best logit): this "
                "is a fault"),
])
def test_the_verdict_hides_nothing(identical: int, near: int, gap: float | None, words: str) -> None:
    run = a_run(lossless=lossless(10, identical, near, gap))
    assert words in lossless_verdict(run, run.evaluations)
    box = 'warn"><p><b>Drafting changed words.' if identical + near < 10 else 'good"><p><b>Not a word changed'
    assert f'<div class="box {box}' in as_html([Heading("", 1), *boxes(run)])


@pytest.mark.parametrize(("p", "end", "heading"), [
    (0.4, "as chance has it; 6.0% in this order would have been seen.", "Drafts were sampled."),
    (1e-5, "chance does not explain that: this is a fault, please report it.", "Drafting changed words."),
])
def test_the_check_of_sampled_drafts_is_reported(p: float, end: str, heading: str, tmp_path: Path) -> None:
    none = lossless(0)
    drawn = Distribution(tokens=1234, distance=0.021, p_value=p, visible=0.06 if p > 0.001 else 0.01, impossible=0)
    run = a_run(lossless=none, distribution=drawn, temperatures=(0.7,))
    verdict = lossless_verdict(run, run.evaluations)
    assert verdict == ("medusa: drafts were sampled, so answers at temperature 0.7 are other words from the same "
                       "distribution. How likely each of 1,234 tokens was to the target differs from what its "
                       f"probabilities say by at most 2.1% (p = {p:.2g}): {end}")
    files = write_report(tmp_path, run)
    assert heading in files["html"].read_text()
    assert f"sampled, p = {p:.2g}" in files["markdown"].read_text()
    assert json.loads(files["json"].read_text())["distribution"]["p_value"] == p


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


@pytest.mark.parametrize(("changes", "expected"), [
    ({}, "1.4 times faster, not a word changed."),
    ({"speedup": 1.06, "speedup_interval": (1.02, 1.1)}, "1.06 times faster, not a word changed."),
    ({"speedup": 1.06, "speedup_interval": (0.9, 1.2)}, "About as fast as without drafts, not a word changed."),
    ({"speedup": 0.8, "speedup_interval": None},
     "Drafting does not pay here, at 0.80 times the speed without drafts (decode with the policy none), not a word "
     "changed."),
    ({"of": {"nodes": 1}, "speedup": 0.8, "speedup_interval": (0.7, 0.9)},
     "Nothing was drafted, because on this machine no tree makes decoding faster; this loop ran at 0.80 times the "
     "speed of transformers' generate, not a word changed."),
    ({"speedup": None}, "1.9 tokens per target pass instead of 1, speed not measured, not a word changed."),
    ({"of": {"nodes": 1}},
     "Nothing was drafted, because on this machine no tree makes decoding faster, not a word changed."),
    ({"names": ("medusa, none",), "of": {"nodes": 1}}, "Nothing was drafted, as asked, not a word changed."),
    ({"contended": True},
     "1.4 times faster, not a word changed; but the machine was busy, so measure the speed again."),
    ({"contended": True, "speedup": None},
     "1.9 tokens per target pass instead of 1, speed not measured, not a word changed."),
    ({"lossless": (8, 2)}, "1.4 times faster, 2 of 10 answers changed, only where rounding decides between two words."),
    ({"lossless": (8, 1)}, "1.4 times faster, but drafting changed 1 of 10 answers, which is a fault."),
    ({"lossless": (0, 0, 0)},
     "1.4 times faster, with answers of the target's distribution."),
    ({"lossless": (0, 0, 0), "p_value": 1e-4},
     "1.4 times faster, but sampled drafts changed the distribution of answers, which is a fault."),
])
def test_the_headline_says_what_is_true(changes: dict[str, Any], expected: str) -> None:
    if "lossless" in changes:
        identical, near, *prompts = changes["lossless"]
        found = lossless((*prompts, 10)[0], identical, near)
        p = changes.get("p_value", 0.5)
        drawn = Distribution(tokens=900, distance=0.02, p_value=p, visible=0.06 if p > 0.001 else 0.01, impossible=0)
        changes = {"lossless": found, "distribution": None if found.prompts else drawn}
    assert headline(a_run(**changes)) == expected


def of_few(prompts: int, timed: int, **changes: Any) -> str:
    """The headline of an evaluation of so many decoded and timed prompts."""
    run = a_run(**changes)
    return headline(replace(run, header=run.header | {"prompt_sets": {"own": prompts}, "timed_prompts": timed,
                                                      "planned": run.header["planned"] | {"prompt_sets": {"own": 10}},
                                                      "minutes": {"taken": 0.5, "budget": 0.5}}))


def test_of_too_few_prompts_nothing_is_claimed_but_a_fault() -> None:
    said = of_few(2, 2)
    assert said.startswith("Too few prompts for a claim: 2 of 10 prompts were decoded: the rest did not fit into 0.5 "
                           "min, and it takes at least 10; give more prompts, or raise evaluate.limit")
    assert not re.search(r"faster|word|1\.4", said)
    assert of_few(9, 9, names=("medusa", "chain")).startswith("Too few prompts")
    assert of_few(10, 3) == ("Too few timed prompts for a claim about speed (3, it takes at least 4), not a word "
                             "changed.")
    assert of_few(10, 4) == "1.4 times faster, not a word changed."
    assert "speed not measured, not a word changed." in of_few(10, 0, speedup=None)
    lost = lossless(2, 1, gap=0.7)
    one = a_run()
    one = replace(one, header=one.header | {"prompt_sets": {"own": 1}, "planned": {"prompt_sets": {"own": 1}}})
    assert headline(one).startswith("Too few prompts for a claim: 1 prompt was decoded, and it takes at least 10")
    assert of_few(8, 8, lossless=lost).startswith("Too few prompts for a claim about speed (8, it takes at least 10), "
                                                  "but drafting changed 1 of 2 answers, which is a fault")
    assert "drafting changed 1 of 2 answers, which is a fault" in of_few(2, 2, lossless=lost)


def test_the_headline_names_the_fastest_method_and_an_adapted_target() -> None:
    run = a_run(names=("medusa", "chain"))
    fast = replace(run.evaluations[1], overall=measures(speedup=1.7, speedup_interval=None))
    run = replace(run, evaluations=(run.evaluations[0], fast), header=run.header | {"drift": {}})
    assert headline(run) == ("chain, the fastest of 2 methods: 1.7 times faster, not a word of the adapted target "
                             "changed.")


def test_tokens_are_marked_by_their_author(tmp_path: Path) -> None:
    page = write_report(tmp_path, a_run())["html"].read_text()
    assert page.count('<div class="answer"><h3>') == 3
    assert page.count("Best: 1.50 tokens per pass, 2 of 4 tokens guessed") == 1
    text = re.findall(r'<p class="text">(.*?)</p>', page, re.S)[1]
    assert re.sub("<[^>]+>", "", text) == "A &lt;i&gt;␛[0m"
    assert '<span class="guess" title="guessed by the draft and accepted"> &lt;i&gt;</span>' in text
    assert ('<span class="missed" title="written by the target; the draft guessed “↵&#34;x&#34;”, “&lt;/span&gt;”, '
            '“c”, “d”, …">␛[0m</span>') in text
    assert "Write &lt;b&gt;bold&lt;/b&gt;" in page


def test_any_tree_and_a_cost_curve_without_estimates_can_be_drawn_and_nodes_of_one_depth_stand_apart() -> None:
    assert all(plots.tree(tree, 1).startswith("<svg") for tree in (Topology.chain(0), Topology.chain(3), TREE))
    heights = plots._leaf_heights(TREE)
    places = list(zip(TREE.depths, heights, strict=True))
    assert len(set(places)) == TREE.size
    below = {node: parent for node, parent in enumerate(TREE.parents) if TREE.ranks[node] == 0 and node}
    assert all(heights[node] == heights[parent] for node, parent in below.items())
    curve = CostCurve(batch=1, sizes=(1,), pass_seconds=(0.1,), draft_seconds=(0.0,))
    assert "expected speed-up" not in plots.cost_curve(CostTable(curves=(curve,)), 1, {})


def test_a_part_is_never_reported_as_the_whole(tmp_path: Path) -> None:
    run = a_run(prompts=6)
    planned = run.header["planned"] | {"prompt_sets": {"own": 8, "handwritten": 5}, "timed_prompts": 5,
                                       "categories": {"math": 8, "writing": 5}}
    run = replace(run, header=run.header | {"planned": planned, "minutes": run.header["minutes"] | {"budget": 2.0}},
                  left_out=("evaluation: 10 of 13 prompts were decoded",))
    said = "10 of 13 prompts were decoded: the rest did not fit into 2 min"
    assert said in headline(run)
    assert any(said in sentence for sentence in verdicts(run))
    paths = write_report(tmp_path, run, None)
    for written in (paths["html"].read_text(), paths["markdown"].read_text(), terminal_table(run)):
        text = " ".join(written.split())
        assert "What was left out" in text
        assert "evaluation: 10 of 13 prompts were decoded" in text
        assert "own (5 of 8)" in text
        assert "handwritten (" not in text
        assert "timed prompts: 4 of 5" in text
    assert "math (5 of 8)" in paths["markdown"].read_text()
    assert "| 10 of 13 prompts |" in paths["markdown"].read_text()
    assert json.loads(paths["json"].read_text())["left_out"] == ["evaluation: 10 of 13 prompts were decoded"]
    whole = write_report(tmp_path / "whole", a_run(), None)
    assert "left out" not in whole["html"].read_text() + whole["markdown"].read_text() + terminal_table(a_run())
