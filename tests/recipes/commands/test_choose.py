"""The command choose: its advice follows from the seconds and lengths that were measured, and can be none."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from draftsmith.export import Artifact
from draftsmith.export.layouts.parts.export_format import Engine
from draftsmith.export.layouts.registry import EXPORT_FORMATS
from draftsmith.modules import Target, Topology
from draftsmith.recipes.__main__ import main
from draftsmith.recipes.commands.choose import grown, overlap, predicted
from support.artifacts import trial, tuning
from support.data.named_sets import cache_sets
from support.families import CASES
from support.target_folders import SERVED

ROOT = Path(__file__).resolve().parents[3]


def changed(tiny_run: Path, folder: Path, draft_seconds: float) -> Path:
    """The tiny artifact with stated seconds: a pass takes 10 ms whatever its nodes, a draft as many as given."""
    shutil.copytree(tiny_run / "artifact", folder)
    content = json.loads((folder / "tuning.json").read_text())
    for curve in content["cost"]["curves"]:
        count = len(curve["sizes"])
        curve |= {"pass_seconds": [0.01] * count, "draft_seconds": [0.0] + [draft_seconds] * (count - 1)}
    content["cost"] |= {"copy_seconds": 1.0, "excess": 0.0}
    (folder / "tuning.json").write_text(json.dumps(content | {"used_nodes": None}))
    return folder


def chosen(tmp_path: Path, *artifacts: Path, words: tuple[str, ...] = ()) -> dict[str, Any]:
    listed = f"[{','.join(map(str, artifacts))}]"
    assert main(["choose", "--artifacts", listed, "--out", str(tmp_path / "out"), *words]) == 0
    found: dict[str, Any] = json.loads((tmp_path / "out" / "choose.json").read_text())
    return found


def test_the_draft_that_pays_is_recommended_and_none_where_none_does(
    tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cheap, dear = (changed(tiny_run, tmp_path / name, seconds) for name, seconds in (("cheap", 1e-6), ("dear", 0.01)))
    words = ("--batch_sizes", "[1,8]", "--temperatures", "[0,1]")
    found = chosen(tmp_path, dear, cheap, words=words)
    assert found["recommendation"] == str(cheap)
    first, second = found["candidates"]
    assert (first["name"], second["name"]) == (str(cheap), str(dear))
    assert set(first["predictions"]) == {f"batch {rows}, temperature {degree}" for rows in (1, 8) for degree in (0, 1)}
    greedy = first["predictions"]["batch 1, temperature 0"]
    tuned = json.loads((cheap / "tuning.json").read_text())
    # Passes of any size take as long, so that the speed-up is the tokens of a pass.
    assert greedy["accepted_length"] in [one["reported"]["accepted_length"] for one in tuned["greedy"]]
    assert greedy["speedup"] == pytest.approx(greedy["accepted_length"], rel=1e-3)
    assert greedy["speedup_interval"][0] < greedy["speedup"] < greedy["speedup_interval"][1]
    assert first["parameters"] == json.loads((tiny_run / "train" / "result.json").read_text())["parameters"]
    assert "Text Generation Inference" in first["engines"]
    assert f"start: {first['start']}" in " ".join(capsys.readouterr().out.split())
    found = chosen(tmp_path, dear, words=words)
    assert found["recommendation"] is None
    assert found["advice"] == "none: plain decoding is faster here"


def test_a_draft_that_the_engine_does_not_load_is_left_out(tiny_run: Path, tmp_path: Path) -> None:
    cheap = changed(tiny_run, tmp_path / "cheap", 1e-6)
    found = chosen(tmp_path, cheap, words=("--engine", "llama.cpp"))
    assert found["recommendation"] is None
    assert found["notes"] == [f"{cheap} is left out: llama.cpp does not load it"]
    assert chosen(tmp_path, cheap, words=("--engine", "text generation inference"))["recommendation"] == str(cheap)


def test_a_draft_that_reads_text_alone_says_what_a_second_device_would_gain(tiny_target: Target) -> None:
    measured = {"chain": True, "group": "all", "temperature": 0.0, "unconditional": [0.8, 0.64]}
    known = Artifact(drafter=CASES["draft-lm"].make(tiny_target), target=tiny_target, topology=Topology.chain(2),
                     identity=tiny_target.identity, provenance={}, acceptance={"measurements": [measured]})
    found = tuning(trial("static-4", 1.6))
    ahead, gain = found.cost.overlapped(0.8)
    assert overlap(known, found).startswith(f"drafting {ahead} tokens on a second device while the target verifies "
                                            f"(PEARL) is predicted to be {gain:.2f} times as fast")
    assert "at 80% acceptance" in overlap(known, found)
    assert overlap(replace(known, acceptance={}), found) == ""
    assert overlap(replace(known, drafter=CASES["eagle"].make(tiny_target)), found) == ""


@pytest.mark.parametrize(("words", "sentence"), [
    (("--minutes", "1"), "minutes 1 is shorter than calibrating 5 rows, which takes 1.25 at least; give more, fewer"),
    (("--minutes", "-1"), "minutes must be above 0, got -1"),
    *((("--engine", name), f"engine must be one of vLLM, SGLang, llama.cpp, OpenVINO GenAI, TensorRT-LLM, Text "
       f"Generation Inference, transformers, got {name}; or leave it out") for name in ("m", "official code")),
    (("--batch_sizes", "[0]"), "batch_sizes[0] must be at least 1, got 0"),
    (("--temperatures", "[-1]"), "temperatures[0] must be 0 (greedy) or from 0.001"),
    (("--target.device", "cuda:7"), "'cuda:7' was asked for, but no CUDA device is available; use cpu or auto"),
    (("--artifacts", "[{artifact}]", "--target.name", "{other}"), "made for the target tiny-random with"),
])
def test_bad_input_gets_one_sentence(
    tiny_run: Path, tmp_path: Path, words: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    other = SERVED["gated delta rule and experts"](tmp_path / "other") if "{other}" in words else ""
    given = [word.format(artifact=tiny_run / "artifact", other=other) for word in words]
    assert main(["choose", "--config", "tiny", "--out", str(tmp_path / "out"), *given]) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert not (tmp_path / "out" / "choose.json").exists()


def test_every_engine_loads_some_layout() -> None:
    assert [name for name in get_args(Engine) if not any(name in one.readers for one in EXPORT_FORMATS)] == []


def test_growth_falls_with_the_steps_taken_and_its_half_is_uncertain() -> None:
    factor, error = grown(100, 60.0, 4.0)
    assert factor == pytest.approx(math.exp(0.5))
    assert error == pytest.approx(0.5 * 0.5 / 1.645)
    assert grown(100, 60.0, 0.5) == (1.0, 0.0), "less training is not extrapolated"
    assert 1 < grown(1000, 60.0, 4.0)[0] < grown(1000, 60.0, 400.0)[0] < factor
    assert grown(1, 60.0, 4.0)[0] == pytest.approx(math.exp(1.2)), "the first steps say nothing of the limit"
    known = tuning(trial("static-4", 1.6))
    now, later = (predicted(known, 1, 0.0, growth, 3.0) for growth in ((1.0, 0.0), (2.0, 0.1)))
    assert now is not None
    assert later is not None
    assert later.accepted_length - 1 == pytest.approx(2 * (now.accepted_length - 1))
    assert predicted(known, 1, 1.0, (1.0, 0.0), 3.0) is None, "nothing was measured for sampled rows"


@pytest.mark.long
@pytest.mark.slow
def test_families_are_calibrated_on_a_hybrid_target_with_another_template(tmp_path: Path) -> None:
    place = SERVED["gated delta rule and experts"](tmp_path / "target")
    template = ("{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}"
                "{% if add_generation_prompt %}[bot]{% endif %}")
    (place / "chat_template.jinja").write_text(template)
    tiny = yaml.safe_load((ROOT / "recipes" / "tiny.yaml").read_text())
    for name, family, drafter in (("heads", "medusa", {"num_heads": 3}), ("features", "eagle", {})):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(tiny | {"family": family, "drafter": drafter}))
    words = ["choose", "--config", "tiny", "--out", str(tmp_path / "out"), "--target.name", str(place), "--rows",
             f"[{tmp_path / 'heads.yaml'},{tmp_path / 'features.yaml'}]", "--minutes", "0.7", "--train_minutes", "5",
             "--distill.validation_prompts", "8", "--distill.test_prompts", "2", "--distill.budget_tokens", "400"]
    assert main([*words, "--memory_gib", "0.001"]) == 0
    none = json.loads((tmp_path / "out" / "choose.json").read_text())
    assert none["recommendation"] is None
    assert [note.split(" is left out")[0] for note in none["notes"]] == [str(tmp_path / "heads.yaml"),
                                                                         str(tmp_path / "features.yaml")]
    assert main(words) == 0
    found = json.loads((tmp_path / "out" / "choose.json").read_text())
    assert {one["name"] for one in found["candidates"]} == {"heads", "features"}
    for one in found["candidates"]:
        assert one["training"] == "5 min"
        assert one["memory"].endswith("GiB") or one["memory"].endswith("MiB")
        assert one["predictions"]["batch 1, temperature 0"]["accepted_length"] >= 1


def test_drafts_are_predicted_by_what_they_accept_on_a_set(
    tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache_sets(tmp_path / "hub", monkeypatch)
    cheap = changed(tiny_run, tmp_path / "cheap", 1e-6)
    found = chosen(tmp_path, cheap, words=("--evaluate.prompts", "mt_bench", "--evaluate.max_new_tokens", "8"))
    [held_out] = chosen(tmp_path, cheap)["candidates"]
    [measured] = found["candidates"]
    [one], [other] = (each["predictions"].values() for each in (measured, held_out))
    assert one["accepted_length"] != other["accepted_length"]
    # Passes of any size take as long, so that the speed-up is the tokens of a pass.
    assert one["speedup"] == pytest.approx(one["accepted_length"], rel=1e-3)
