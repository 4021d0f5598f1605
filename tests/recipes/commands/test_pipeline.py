"""The tiny recipe from end to end, as a user runs it."""

import gzip
import html
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import yaml
from draftsmith.data import Manifest, TokenShard
from draftsmith.data.datamodule import BatchConfig, HeldOutRows
from draftsmith.data.store.token_store import answers
from draftsmith.export import Artifact, Trial, Tuning, export_artifact, load_artifact
from draftsmith.export.evaluation.engine_trial import BatchTrial
from draftsmith.export.measured_files import save_tuning
from draftsmith.modules import (
    JOINED,
    STATIC,
    DecodeSettings,
    DraftLM,
    DraftLMConfig,
    Request,
    Target,
    TargetConfig,
    Topology,
    UserError,
    decode,
    load_target,
    stream,
)
from draftsmith.modules.target.devices import compiled_layers
from draftsmith.modules.target.linear_forms import can_pack
from draftsmith.recipes.__main__ import main
from draftsmith.recipes.commands import artifact_commands, compare_families, pipeline
from draftsmith.recipes.stages import finished_draft
from draftsmith.recipes.stages.workspace import Workspace
from draftsmith.trainers import loggers
from safetensors.torch import load_file
from support.artifacts import costs, trial, tuning
from support.processes import kill, working
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).resolve().parents[3]
STAGES = 5  # Stages of a run
KEYS = {"family", "target", "prompts", "batch_size", "temperature", "new_tokens", "target_passes", "accepted_length",
        "acceptance_by_position", "tokens_per_second", "plain_tokens_per_second", "generate_tokens_per_second",
        "speedup", "contended", "draft_time_share", "lossless"}


def run(out: Path, *words: str, command: str = "run") -> None:
    """A command on the tiny recipe that must succeed."""
    assert main([command, "--config", "tiny", "--out", str(out), *words]) == 0


def test_the_sentence_names_what_is_drafted_with() -> None:
    """Answers that chose it and the others differ: the sentence counts the others."""
    found = tuning(trial("static-4", 1.6, reported=1.9), trial("static-2+lookup-7", 2.9, 4.0, reported=1.1))
    said = " ".join(finished_draft.sizes_in_words(found, Topology.chain(7)))
    assert found.fastest() == JOINED
    both, alone = found.prediction(JOINED), found.prediction(STATIC)
    assert both is not None
    assert alone is not None
    assert (f"greedy static-2+lookup-7, 1.10 tokens per pass and {both.speedup:.2f} times the speed without drafts "
            f"predicted (next: static-4, 1.90 tokens per pass and {alone.speedup:.2f} times") in said
    assert "by held-out answers that did not choose it:" in said
    few = " ".join(finished_draft.sizes_in_words(tuning(trial("static-4", 1.6)), Topology.chain(7)))
    assert "by held-out answers of which too few did not choose it:" in few
    assert "at temperature 1 none, drafting does not pay" in said
    assert "the machine was busy" not in said
    busy = replace(found, cost=replace(found.cost, excess=0.5))
    assert "nothing is switched off by it" in " ".join(finished_draft.sizes_in_words(busy, Topology.chain(7)))


def test_a_run_leaves_an_artifact_and_a_report(tiny_run: Path) -> None:
    assert {file.name for file in (tiny_run / "artifact").iterdir()} == {
        ".draftsmith.json", "config.json", "model.safetensors", "README.md", "tuning.json",
        "acceptance.json"}
    assert "<svg" in (tiny_run / "report.html").read_text()
    assert (tiny_run / "data" / "manifest.json").is_file()


@pytest.mark.parametrize(("minutes", "looks"), [("null", 2), ("9", 3)])
def test_measured_stages_take_free_processors_and_so_does_a_training_with_minutes(
        minutes: str, looks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tuning and evaluation always; a training without minutes can be repeated to the byte, with the same threads."""
    found = list[int]()
    monkeypatch.setattr(pipeline, "use_free_processors", lambda: found.append(1))
    run(tmp_path / "run", "--train.max_minutes", minutes)
    assert len(found) == looks


def test_the_evaluation_has_the_promised_keys_and_is_lossless(tiny_run: Path) -> None:
    content = json.loads((tiny_run / "evaluation.json").read_text())
    assert set(content) >= KEYS
    lossless = content["lossless"]
    assert lossless["prompts"] == content["prompts"] == 8
    assert lossless["identical"] + lossless["near_tie_divergences"] == lossless["prompts"]
    assert content["accepted_length"] >= 1


def shown(value: float | None, form: str, interval: list[float] | None = None) -> tuple[str, str]:
    """A figure and its interval as a report shows them."""
    ends = "" if interval is None else "–".join(format(end, form.rstrip("×")) for end in interval)
    return "–" if value is None else format(value, form.rstrip("×")) + "×" * form.endswith("×"), ends


def row_of(found: dict[str, Any]) -> list[tuple[str, str]]:
    """The cells of a group of prompts in a table of a report."""
    return [shown(found["prompts"], "d"), shown(found["accepted_length"], ".2f", found["accepted_length_interval"]),
            shown(found["tokens_per_second"], ".1f", found["tokens_per_second_interval"]),
            shown(found["plain_tokens_per_second"], ".1f"), shown(found["generate_tokens_per_second"], ".1f"),
            shown(found["speedup"], ".2f×", found["speedup_interval"]),
            (f"{found['lossless']['identical']}/{found['lossless']['prompts']}", "")]


def test_a_figure_that_stands_in_several_places_is_the_same(tiny_run: Path) -> None:
    """Page, Markdown, card and evaluation.json: each says of what its figure is, and figures of one thing agree."""
    found = json.loads((tiny_run / "evaluation.json").read_text())
    config = json.loads((tiny_run / "artifact" / "config.json").read_text())
    trained = json.loads((tiny_run / "train" / "result.json").read_text())
    tuned = json.loads((tiny_run / "artifact" / "tuning.json").read_text())
    raw, text = html.unescape((tiny_run / "report.html").read_text()), (tiny_run / "report.md").read_text()
    page = " ".join(re.sub("<[^>]+>", " ", raw).split())
    # Tables: every cell of every group.
    cell = r'<td>([^<]*)(?:<i class="range">([^<]*)</i>)?</td>'
    rows = {row[0][0]: row[1:] for line in re.findall(r"<tr>(<td>.*?)</tr>", raw) if (row := re.findall(cell, line))}
    measured = {"all prompts": found, **found["by_prompt_set"],
                **{name: one for name, one in found["by_category"].items() if name != "own"}}
    assert {name: rows[name] for name in rows if name in measured} == {
        name: row_of(one) for name, one in measured.items()}
    assert {"all prompts", "own", "handwritten", "writing"} <= set(rows)
    for name, prompts, length in re.findall(r"^\| ([a-z ]+) \| (\d+) \| ([\d.]+) ", text, re.M):
        assert [prompts, length] == [figure for figure, _ in row_of(measured[name])[:2]], name
    # Cards and sentences.
    cards = re.findall(r'<div class="card[^"]*"><b>([^<]*)(?:<i class="range">([^<]*)</i>)?</b>', raw)
    assert cards == [*(row_of(found)[column] for column in (1, 5, 6)), shown(found["draft_time_share"], ".0%")]
    own = found["by_prompt_set"]["own"]
    header, faster = found["header"], max(found["plain_tokens_per_second"], found["generate_tokens_per_second"])
    for sentence in (
        f"{sum(header['prompt_sets'].values())} prompts, answers of at most {header['settings']['max_new_tokens']} ",
        f"timed prompts: {header['timed_prompts']}",
        f"speed-up: {found['tokens_per_second']:.1f} tokens/s with drafts, {faster:.1f} without",
        f"All {found['lossless']['prompts']} answers ({found['new_tokens']:,} tokens) are identical",
        f"Drafting took {found['draft_time_share']:.0%} of the time. {found['repetition_rate']:.0%} of the answers "
        "repeat",
        f"before), {found['truncation_rate']:.0%} reached the length limit",
        f"tokens per pass {found['predicted_accepted_length']:.2f} (90 %: "
        f"{' to '.join(format(end, '.2f') for end in found['predicted_accepted_length_interval'])}), measured: "
        f"{own['accepted_length']:.2f}; speed-up over this loop without drafts {found['predicted_speedup']:.2f}× "
        "(90 %: "
        f"{' to '.join(format(end, '.2f') for end in found['predicted_speedup_interval'])}), measured: "
        f"{own['tokens_per_second'] / own['plain_tokens_per_second']:.2f}×",
        " and ".join(f"{count} {name}" for name, count in header["prompt_sets"].items()),
        *(f"{one['rank'].capitalize()}: {one['accepted_length']:.2f} tokens per pass, "
          f"{sum(token['guessed'] for token in one['tokens'])} of {len(one['tokens'])} tokens guessed"
          for one in found["sample_answers"]),
        *found["left_out"], found["training"]["time"], found["training"]["outcome"],
        f"With the tree alone each pass of the target checks {tuned['used_nodes']} tokens at once",
        f"The artifact holds {len(config['tree']['parents'])} nodes",
    ):
        assert sentence in page
    assert set(re.findall(r"at most (\d+) nodes", page)) == {str(found["nodes"])}
    assert found["nodes"] == found["tree_nodes"] == tuned["used_nodes"]
    worst = max(header["contention"]["worst_excess"].values())
    assert f"{worst:.0%}" in page[page.index("steadiness") :]
    # Labels in the plots: speeds of each prompt set, lengths of each category, the best step of training.
    drawn = [re.findall(r"<text[^>]*>([^<]*)</text>", one) for one in re.findall(r"<svg.*?</svg>", raw, re.S)]
    speeds, lengths, training = (next(one for one in drawn if label in one) for label in (
        "tokens per second, median", "tokens per target pass", "held-out text, decoded"))
    for one in found["by_prompt_set"].values():
        assert {f"{one[f'{name}tokens_per_second']:.1f}" for name in ("", "plain_", "generate_")} <= set(speeds)
    assert {f"{one['accepted_length']:.2f}" for one in found["by_category"].values()} <= set(lengths)
    assert f"all {found['accepted_length']:.2f}" in map(str.strip, lengths)
    curve = {one["step"]: one for one in found["training"]["curve"]}
    best = found["training"]["best_step"]
    assert f"best: {curve[best]['accepted_length']:.2f} at step {best}" in training
    assert curve[best]["accepted_length"] == max(curve[step]["accepted_length"] for step in curve if step)
    assert (best, found["training"]["curve"]) == (trained["step"], trained["curve"])
    assert trained["accepted_length"] == curve[best]["accepted_length"]
    card = (tiny_run / "artifact" / "README.md").read_text()
    assert f"| accepted length in validation | {trained['accepted_length']:.2f} tokens per target pass" in card
    assert "held-out answers with a tree of at most 8 nodes, without copies |" in card
    assert (f"| expected accepted length | {config['provenance']['expected_accepted_length'][-1]:.2f} tokens per "
            f"target pass with a tree of {len(config['tree']['parents'])} nodes, without copies") in card


def test_acceptance_json_agrees_with_the_evaluation(tiny_run: Path, tmp_path: Path) -> None:
    found = json.loads((tiny_run / "artifact" / "acceptance.json").read_text())
    evaluated = json.loads((tiny_run / "evaluation.json").read_text())
    decoded = {(one["group"], one["value"]): one for one in found["measurements"] if one["source"] == "decoded answers"}
    whole = decoded["all", "all"]
    assert (whole["accepted_length"], whole["drafts"], whole["temperature"], whole["nodes"]) == (
        evaluated["accepted_length"], evaluated["target_passes"], 0.0, evaluated["nodes"])
    shares = evaluated["acceptance_by_position"]
    assert whole["unconditional"] == shares + [0.0] * (whole["draft_tokens"] - len(shares))
    kinds = {value: one["accepted_length"] for (group, value), one in decoded.items() if group == "kind"}
    assert kinds == {name: one["accepted_length"] for name, one in evaluated["by_category"].items()}
    assert sum(one["drafts"] for (group, _), one in decoded.items() if group == "context_tokens") == whole["drafts"]
    assert "note" not in found
    card = (tiny_run / "artifact" / "README.md").read_text()
    assert "## Acceptance" in card
    assert f"chain-3 at temperature 0: {sum(found['vllm'][2]['synthetic_acceptance_rates']) + 1:.2f} tokens" in card
    out = tmp_path / "export"
    assert main(["export", "--artifact", str(tiny_run / "artifact"), "--format", "medusa", "--out", str(out)]) == 0
    assert (out / "acceptance.json").read_bytes() == (tiny_run / "artifact" / "acceptance.json").read_bytes()
    assert f"{whole['accepted_length']:.2f} tokens per target pass over {whole['drafts']:,} drafts" in (
        out / "README.md").read_text()


@pytest.mark.parametrize(("node", "given", "said"), [
    (0.2, None, "the seconds of abacus; for another machine give your engine's with --engine_costs. By requests at "
                "once: none for 1 to 16. Serve the target alone where it says none"),
    (0.0, None, "By requests at once: {heads} for 1, none for 2 to 16. For one request the speed is predicted at "
                "{length:.2f} of that"),
    (0.2, 0.1, "the seconds of your engine. By requests at once: {heads} for 1 to 8. For one request the speed is"),
    (None, None, "The numbers of tokens to draft are defaults: no seconds were measured, give your engine's with"),
])
def test_an_export_says_how_many_tokens_pay(copied_run: Path, node: float | None, given: float | None, said: str,
                                            capsys: pytest.CaptureFixture[str]) -> None:
    """By the acceptance of held-out answers, and the seconds measured or given; in the folder too."""
    artifact, words = copied_run / "artifact", list[str]()
    heads = json.loads((artifact / "config.json").read_text())["drafter"]["num_heads"]
    length = 1 + sum(json.loads((artifact / "acceptance.json").read_text())["vllm"][-1]["synthetic_acceptance_rates"])
    (artifact / "tuning.json").unlink()
    if node is not None:
        found = Tuning.of(load_target(TargetConfig(name="tiny-random")), costs(node=node, draft=0.0))
        save_tuning(artifact, replace(found, device="abacus"))
    if given is not None:
        curve = {"sizes": [1, 9], "pass_seconds": [given] * 2, "draft_seconds": [0.0] * 2, "batch": 8}
        (copied_run / "costs.json").write_text(json.dumps({"curves": [curve]}))
        words = ["--engine_costs", str(copied_run / "costs.json")]
    assert main(["export", "--artifact", str(artifact), "--format", "medusa-vllm", "--out",
                 str(copied_run / "export"), *words]) == 0
    out = capsys.readouterr().out
    assert f'"num_speculative_tokens": {heads}' in out
    for text in (out, (copied_run / "export" / "README.md").read_text()):
        assert said.format(heads=heads, length=length) in " ".join(text.split())


@pytest.mark.parametrize(("count", "answered"), [(0, 10), (3, 9), (70, 24)])
def test_an_export_is_tried_with_the_prompts_that_are_given(
    copied_run: Path, count: int, answered: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []

    def tried(artifact: Artifact, layout: str, folder: Path, python: Path, prompts: Any, settings: Any) -> Trial:
        asked.append((prompts, settings.draft_tokens))
        rows = [BatchTrial(dtype="bfloat16", tokens=tokens, batch_size=1, speed=1.0 + tokens, first_token=0.1, equal=9,
                           accepted_length=2.0) for tokens in (0, *settings.draft_tokens)]
        return Trial(engine="vLLM 0", answers=9, own_length=2.0, tokens=3, varies=False, batches=tuple(rows))

    for name, found in (("require_engine", lambda *_: None), ("busy_warning", lambda: "the machine is busy"),
                        ("try_export", tried)):
        monkeypatch.setattr(artifact_commands, name, found)
    file, words = copied_run / "prompts.jsonl", list[str]()
    if count:
        file.write_text("".join(json.dumps({"prompt": f"Say {number}."}) + "\n" for number in range(count)))
        words = ["--prompts", str(file)]
    assert main(["export", "--artifact", str(copied_run / "artifact"), "--format", "medusa-vllm", "--out",
                 str(copied_run / "export"), "--try_with", sys.executable, *words]) == 0
    [(prompts, numbers)] = asked
    assert (len(prompts), numbers) == (answered, (3, 1))
    out = capsys.readouterr().out
    assert "the machine is busy" in out
    assert "| bfloat16 | 3 | 1 | 4.0 | 0.100 | 9 of 9 | 2.00 | 2.00 |" in out
    assert 'by requests at once: 3 for 1; set "num_speculative_tokens": 3 in --speculative-config' in out


@pytest.mark.parametrize(("content", "said"), [
    ("{}", "costs.json is damaged: .*curves"), ("[1", "costs.json cannot be read as JSON"),
    (None, "cannot read .*costs"),
    ('{"curves": [{"batch": 4, "sizes": [1], "pass_seconds": [0.1], "draft_seconds": [0]}]}',
     "has the seconds of a pass of 1 token alone for 4 requests at once; add those of more tokens: write it as"),
    (json.dumps({"curves": [{"batch": batch, "sizes": [1, 4], "pass_seconds": [0.1, 0.2], "draft_seconds": [0, 0]}
                            for batch in (8, 1)]}),
     r"has curves for \[8, 1\] requests at once, which must ascend; write it"),
    ('{"curves": [{"batch": 4, "sizes": [1, 4], "pass_seconds": [0.1, -2], "draft_seconds": [0, 0]}]}',
     "pass_seconds of a cost curve must lie between 0 and 86400 s, got -2; write it as recipes/guides/serve-vllm.md"),
])
def test_seconds_that_are_none_are_refused_before_anything_is_written(
    tmp_path: Path, content: str | None, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "costs.json").write_text(content)
    words = ["export", "--artifact", str(tmp_path / "none"), "--format", "medusa", "--out", str(tmp_path / "out")]
    assert main([*words, "--engine_costs", str(tmp_path / "costs.json")]) == 2
    assert re.search(said, capsys.readouterr().err)
    assert main([*words, "--prompts", str(tmp_path / "costs.json")]) == 2
    assert "are for try_with and measure; give one of both, or leave them out" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_answers_that_predict_chose_no_checkpoint(tiny_run: Path) -> None:
    """Validation measures every second row, and the tree of the artifact stage is searched on all."""
    rows = HeldOutRows(tiny_run / "data", BatchConfig(row_length=128, states="computed"))
    texts = [row.tokens_BL[0].tolist() for row in rows.up_to_repetitions()]
    unread = [row.tokens_BL[0].tolist() for row in rows.unread()]
    assert len(texts) == 24
    assert unread == texts[0::2]
    assert not [text for text in texts[1::2] if text in unread]
    tuned = json.loads((tiny_run / "artifact" / "tuning.json").read_text())
    for found in (tuned["greedy"], tuned["sampled"]):
        chosen, reported = ([one[name]["accepted_length"] for one in found] for name in ("chosen", "reported"))
        assert chosen != reported
        assert min(chosen) >= 1


def test_the_logger_has_the_recipe_hashes_final_figures_and_plots(tiny_run: Path) -> None:
    found = EventAccumulator(str(tiny_run / "train" / "tensorboard")).Reload()
    measured = json.loads((tiny_run / "evaluation.json").read_text())
    [final] = found.Scalars("evaluation/medusa/accepted_length")
    assert final.step == json.loads((tiny_run / "train" / "result.json").read_text())["step"]
    assert final.value == pytest.approx(measured["accepted_length"])
    assert found.Tags()["images"] == [f"report/{name}" for name in (
        "acceptance", "speeds", "length", "cost", "training", "losses", "tree")]
    assert found.Images("report/tree")[0].width > 100
    facts = yaml.safe_load((tiny_run / "train" / "tensorboard" / "hparams.yaml").read_text())
    assert facts["hashes"]["data"] == Manifest.load(tiny_run / "data").hash
    assert facts["hashes"]["target"] == json.loads((tiny_run / "artifact" / "config.json").read_text())["target"][
        "weights_hash"]
    assert facts["recipe"]["distill"]["budget_tokens"] == 1200


@pytest.mark.parametrize("command", ["run", "plan"])
def test_a_logger_that_is_not_there_is_refused_before_anything_is_done(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loggers, "find_spec", lambda name: None)
    words = [command, "--config", "tiny", "--out", str(tmp_path), "--train.logger"]
    for logger, sentence in (("wandb", "not installed: pip install wandb"), ("wandbb", "must be one of tensorboard, ")):
        assert main([*words, logger]) == 2
        assert sentence in capsys.readouterr().err
    assert not [file for file in tmp_path.rglob("*") if "lock" not in file.name]


def test_a_second_call_skips_every_stage(copied_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {file: file.stat().st_mtime_ns for file in copied_run.rglob("*") if file.is_file()}
    # What logs a training decides nothing.
    for words in ((), ("--train.logger", "csv")):
        run(copied_run, *words)
        assert capsys.readouterr().out.count("already complete, skipped") == STAGES
    assert {file: file.stat().st_mtime_ns for file in copied_run.rglob("*") if file.is_file()} == before


@pytest.mark.long
@pytest.mark.parametrize("kind", ["UltraChat", "ShareGPT", "agents"])
def test_files_as_people_have_them_are_trained_on_without_an_edit(kind: str, tmp_path: Path) -> None:
    turns = [(f"Question {number}?", f"Answer {number}.") for number in range(60)]
    call = {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": '{"word": "sea"}'}}
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
    files: dict[str, tuple[str, list[dict[str, object]]]] = {
        "UltraChat": ("u.jsonl.gz", [{"prompt": asked, "prompt_id": str(number), "messages": [
            {"role": "user", "content": asked}, {"role": "assistant", "content": said},
            {"role": "user", "content": "And then?"}, {"role": "assistant", "content": "Nothing."}]}
            for number, (asked, said) in enumerate(turns)]),
        "ShareGPT": ("s.json", [{"id": f"x_{number}", "conversations": [
            *([{"from": "gpt", "value": "cut off"}] * (number % 3 == 0)), {"from": "human", "value": asked},
            {"from": "gpt", "value": said}]} for number, (asked, said) in enumerate(turns)]),
        "agents": ("a.jsonl", [{"tools": [tool], "messages": [
            {"role": "system", "content": "Look words up."}, {"role": "user", "content": asked},
            {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "I look it up."},
            {"role": "tool", "tool_call_id": "c1", "content": "water"}, {"role": "assistant", "content": said}]}
            for asked, said in turns])}
    name, rows = files[kind]
    picture = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}
    content = [rows[0], *rows[:40], picture, *rows[40:]]
    text = json.dumps(content) if name == "s.json" else "".join(json.dumps(row) + "\n" for row in content)
    (tmp_path / name).write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
    assert main(["run", "--config", "tiny", "--out", str(tmp_path / "out"), "--prompts.origin", "file",
                 "--prompts.path", str(tmp_path / name), "--evaluate.limit", "2", "--train.max_steps", "4"]) == 0
    [line] = (tmp_path / "out" / "data" / "skipped.jsonl").read_text().splitlines()
    assert json.loads(line)["row"] == (f"{name}:1 (row 42)" if name == "s.json" else f"{name}:42")
    report = (tmp_path / "out" / "report.html").read_text()
    assert "rows were skipped, which data/skipped.jsonl lists: 1 × only text is read of a message" in report
    assert re.search(r"prompts: 1 of \d+ repeat others and were left out", report) is not None


@pytest.mark.long
def test_an_artifacts_draft_writes_rows_for_the_next_one(tiny_run: Path, tmp_path: Path,
                                                         capsys: pytest.CaptureFixture[str]) -> None:
    mixed = ["--distill.answered_by", '{"target": 0.5, "draft": 0.5}', "--distill.draft",
             str(tiny_run / "artifact"), "--distill.budget_tokens", "600"]
    words = ["--config", "tiny", "--out", str(tmp_path), *mixed]
    assert main(["distill", *words]) == 2
    assert "objective is hard and the text is learnt as it stands; choose another objective" in capsys.readouterr().err
    assert not (tmp_path / "data").exists(), "message before anything is written"
    assert main(["distill", *words, "--train.objective", "soft"]) == 0
    manifest = Manifest.load(tmp_path / "data")
    assert manifest.total("train", "by_draft") > 0 < manifest.total("train", "by_target")
    assert main(["train", *words]) == 2
    assert "objective is hard and the text is learnt as it stands; choose another objective" in capsys.readouterr().err


@pytest.mark.long
def test_a_draft_vocabulary_is_chosen_once_and_its_coverage_reported(
    tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = Path(shutil.copytree(tiny_run / "data", tmp_path / "data"))
    words = ["--config", "tiny", "--data", str(data), "--drafter.vocabulary_size", "40", "--train.max_steps", "2"]
    assert main(["run", *words, "--out", str(tmp_path / "one"), "--evaluate.limit", "1"]) == 0
    said = re.search(r"draft vocabulary of 40 tokens: ([\d.]+)% of the tokens of held-out answers",
                     capsys.readouterr().out)
    assert said is not None
    facts = json.loads((tmp_path / "one" / "artifact" / "config.json").read_text())["provenance"]["draft_vocabulary"]
    assert facts["tokens"] == 40
    assert f"{facts['held_out_coverage']:.1%}" == f"{said[1]}%"
    assert f"| draft vocabulary | 40 tokens, {said[1]}% of those in held-out answers |" in (
        tmp_path / "one" / "artifact" / "README.md").read_text()
    assert "draft vocabulary" in (tmp_path / "one" / "report.html").read_text()
    assert main(["train", *words, "--out", str(tmp_path / "two")]) == 0
    one, two = (load_file(tmp_path / name / "artifact" / "model.safetensors") for name in ("one", "two"))
    assert torch.equal(one["token_ids"], two["token_ids"])


@pytest.mark.long
def test_loops_are_left_out_by_default_and_reported(tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the last five tokens of every longer answer repeated those before them."""
    def last_five(shard: TokenShard) -> Iterator[tuple[int, int, int]]:
        return ((row, stop - 5, stop) for row, start, stop in answers(shard) if stop - start > 40)

    for module in ("data.store.token_store", "data.datamodule", "recipes.stages.training_folder"):
        monkeypatch.setattr(f"draftsmith.{module}.repetitions", last_five)
    learned: list[int] = []
    original = finished_draft.ranked_text
    monkeypatch.setattr(finished_draft, "ranked_text", lambda drafter, rows: (
        learned.append(sum(int(row.supervised_BL.sum()) for row in rows)), original(drafter, rows))[1])
    words = ["--config", "tiny", "--data", str(tiny_run / "data"), "--out", str(tmp_path), "--train.max_steps", "2"]
    assert main(["run", *words, "--evaluate.limit", "1"]) == 0
    assert re.search(r"\d+ held-out answers end in a loop: [\d.]+ tokens per pass there", capsys.readouterr().out)
    manifest = Manifest.load(tiny_run / "data")
    shards = [TokenShard.read(tiny_run / "data" / record.file) for record in manifest.split("train")]
    found = sum(1 for shard in shards for _ in last_five(shard))
    assert json.loads((tmp_path / "evaluation.json").read_text())["left_out"] == [
        f"training text: {found} of {manifest.total('train', 'answers')} answers end in a loop, whose {5 * found} "
        f"repeated tokens of {manifest.total('train', 'supervised'):,} in all are not learned"]
    loops = json.loads((tmp_path / "artifact" / "config.json").read_text())["provenance"]["loops"]
    assert loops["answers"] > 0
    assert loops["accepted_length"] >= 1
    [held_out] = [TokenShard.read(tiny_run / "data" / record.file) for record in manifest.split("validation")]
    greedy = sum(int(held_out.supervised_T[slice(*held_out.span(row))].sum()) for row in held_out.answered_at(0.0))
    assert sum(learned[:2]) == greedy - 5 * loops["answers"], "trees and copies are sized by text without loops"


@pytest.mark.long
def test_a_lost_report_is_made_again_without_training(copied_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (copied_run / "report.html").unlink()
    run(copied_run)
    assert capsys.readouterr().out.count("already complete, skipped") == STAGES - 1
    assert (copied_run / "report.html").is_file()


def workspace(out: Path, *words: str) -> Workspace:
    return Workspace(pipeline.COMMANDS["run"].parse(["--config", "tiny", "--out", str(out), *words]))


@pytest.mark.long
def test_data_that_a_training_was_made_on_do_not_grow(copied_run: Path, tmp_path: Path,
                                                      capsys: pytest.CaptureFixture[str]) -> None:
    before = {file: file.read_bytes() for file in copied_run.rglob("*") if file.is_file()}
    for command in ("run", "distill"):
        assert main([command, "--config", "tiny", "--out", str(copied_run), "--distill.budget_tokens", "1600"]) == 2
        assert re.search(r"train was trained on the answers in .*/data, which would grow: distill.budget_tokens was "
                         r"1200 and is now 1600; go back to the former setting, or copy .*/data into the folder of "
                         r"another --out and let it grow there", capsys.readouterr().err)
    assert {file: file.read_bytes() for file in copied_run.rglob("*") if file.is_file()} == before
    few = Manifest.load(shutil.copytree(copied_run / "data", tmp_path / "more" / "data"))
    run(tmp_path / "more", "--distill.budget_tokens", "1600", command="distill")
    more = Manifest.load(tmp_path / "more" / "data")
    assert more.total("train", "supervised") >= 1600
    assert more.shards[: len(few.shards)] == few.shards


def test_rows_of_a_comparison_keep_the_data_that_they_were_trained_on(
    copied_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare_families, "performed", lambda *_: pytest.fail("prompts were answered"))
    shutil.copytree(copied_run / "train", copied_run / "tiny" / "train")
    words = ["families", "--config", "tiny", "--rows", '[tiny, "prompt_lookup"]', "--only", "prompt_lookup"]
    assert main([*words, "--out", str(copied_run), "--distill.budget_tokens", "1600"]) == 2
    assert "tiny/train was trained on the answers in" in capsys.readouterr().err


def test_an_artifact_names_the_data_that_it_was_trained_on(copied_run: Path) -> None:
    found = Manifest.load(copied_run / "data")
    grown = {**found.recipe, "distill": {**found.recipe["distill"], "budget_tokens": 1600}}
    replace(found, recipe=grown, complete=False).save(copied_run / "data")
    result = pipeline.training_folder.read_result(copied_run / "train")
    assert pipeline.provenance(workspace(copied_run), result, (1.0,))["data_manifest"] == found.hash
    file = copied_run / "train" / "settings.json"
    file.write_text("{}")
    with pytest.raises(UserError, match=r"the key data of .*settings.json is damaged: .*; delete .* to train anew"):
        pipeline.provenance(workspace(copied_run), result, (1.0,))


def test_the_room_for_states_is_that_of_the_tokens_still_missing(copied_run: Path) -> None:
    held = Manifest.load(copied_run / "data").total("train", "supervised")
    higher = "--distill.budget_tokens", "1600"
    assert pipeline.missing_tokens(workspace(copied_run)) == 0
    assert pipeline.missing_tokens(workspace(copied_run, *higher)) == 1600 - held > 0
    assert pipeline.missing_tokens(workspace(copied_run, "--distill.budget_tokens", "null")) == 0
    assert pipeline.missing_tokens(workspace(copied_run / "new", *higher)) == 1600
    (copied_run / "data" / "queue").mkdir()
    assert pipeline.missing_tokens(workspace(copied_run, *higher)) == 0, "an interrupted one was counted before"


def test_lost_states_are_made_again_and_a_damaged_shard_is_named(
    copied_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shard, weights = min((copied_run / "data").glob("train-*.safetensors")), copied_run / "artifact/model.safetensors"
    states = shard.with_name(f"final-{shard.name}")
    # A copy: what is loaded is the mapped file, which is changed below.
    before, trained = load_file(states)["states"].clone(), weights.read_bytes()
    content = states.read_bytes()
    states.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    run(copied_run)
    # They were kept while the answers were decoded; a second pass rounds differently.
    torch.testing.assert_close(load_file(states)["states"], before, rtol=0, atol=1e-4)
    message = capsys.readouterr().out
    assert "[1/5] the target answers prompts: already complete, skipped" in message
    assert "nothing to compute" not in message
    assert weights.read_bytes() == trained, "a finished training takes no further step"
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    assert main(["run", "--config", "tiny", "--out", str(copied_run)]) == 2
    assert f"{shard.name} is corrupted" in capsys.readouterr().err
    shard.unlink()
    assert main(["run", "--config", "tiny", "--out", str(copied_run)]) == 2
    assert "delete the folder" in capsys.readouterr().err


def test_the_artifact_decodes_to_the_targets_own_words(tiny_run: Path) -> None:
    target = load_target(TargetConfig(name="tiny-random"))
    artifact = load_artifact(tiny_run / "artifact", target)
    requests = [Request(tuple(target.tokenizer(text).input_ids), index, 40) for index, text in enumerate(("a", "bc d"))]
    drafted = decode(target, requests, DecodeSettings(), drafter=artifact.drafter, policy=artifact.policy("static-8"))
    plain = decode(target, requests, DecodeSettings())
    assert [one.tokens for one in drafted.generations] == [one.tokens for one in plain.generations]


@pytest.mark.long
def test_distill_then_train_is_the_same_as_run(tiny_run: Path, tmp_path: Path,
                                               capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path / "run", command="distill")
    assert "nothing to compute: all of them were stored before" in capsys.readouterr().out
    assert not (tmp_path / "run" / "train").exists()
    run(tmp_path / "run", command="train")
    for name in ("config.json", "model.safetensors", "README.md"):
        assert (tmp_path / "run" / "artifact" / name).read_bytes() == (tiny_run / "artifact" / name).read_bytes()


def test_generate_streams_the_plain_answer(tiny_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    artifact = str(tiny_run / "artifact")
    assert main(["generate", "--artifact", artifact, "--prompt", "hello", "--max-new-tokens", "30"]) == 0
    message = capsys.readouterr()
    target = load_target(TargetConfig(name="tiny-random"))
    tokens = target.tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], add_generation_prompt=True,
                                                  tokenize=True, return_dict=False)
    plain, = decode(target, [Request(tuple(tokens), 0, 30)], DecodeSettings()).generations
    assert message.out.rstrip("\n") == target.tokenizer.decode(plain.tokens, skip_special_tokens=True).rstrip("\n")
    assert "tokens per pass" in message.err


def test_generate_says_why_graphs_were_not_replayed_and_compiles_where_it_can(
    tiny_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With unpacked layers, whose compiler is watched; packed ones are named."""
    answers = []
    for asked in ([], ["--graphs"], ["--compile"], ["--compile", "--target.pack", "0"]):
        with patch.object(compiled_layers, "BACKEND", "eager"):
            assert main(["generate", "--artifact", str(tiny_run / "artifact"), "--prompt", "hello", "--max-new-tokens",
                         "9", *asked]) == 0
        answers.append(capsys.readouterr())
    assert len({one.out for one in answers}) == 1
    assert "CUDA graphs" not in answers[0].err
    assert "compil" not in answers[0].err
    assert "not replayed as CUDA graphs: there is no CUDA device\n" in answers[1].err
    if can_pack(load_target(TargetConfig(name="tiny-random")).model):
        assert "not compiled: the linear layers are packed for oneDNN, which no graph can hold" in answers[2].err
    assert answers[3].err.count("compiling the layers: minutes at the first use on a machine\n") == 1
    assert re.search(r"layers compiled in \d+\.\d s\n", answers[3].err)


@pytest.fixture
def policies(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The policies of the answers that commands stream."""
    found = list[Any]()

    def watched(*given: Any, policy: Any, **more: Any) -> Any:
        found.append(policy)
        return stream(*given, policy=policy, **more)

    monkeypatch.setattr("draftsmith.recipes.commands.answer_commands.stream", watched)
    return found


def test_generate_copies_beside_the_tree_in_the_sizes_tuned_here(
    copied_run: Path, policies: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    file = copied_run / "artifact" / "tuning.json"
    tuning = json.loads(file.read_text())
    names = [f"static-{tuning['used_nodes']}{copied}" for copied in ("", "+lookup-7")]
    assert [one["policy"] for one in tuning["greedy"]] == [one["policy"] for one in tuning["sampled"]] == names
    counted = {"accepted_length": 900.0, "nodes": 4.0}
    file.write_text(json.dumps(tuning | {"used_nodes": None, "greedy": [
        {"policy": name, "chosen": counted} for name in ("static-4", "static-2+lookup-5")]}))
    answers = []
    for policy in ("static", "static+lookup"):
        assert main(["generate", "--artifact", str(copied_run / "artifact"), "--prompt", "la la la la la la",
                     "--max-new-tokens", "20", "--policy", policy]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1]
    assert [one.max_size for one in policies] == [4, 2 + 5]
    assert policies[1].policies[0].max_size == 1 + 5


def test_a_sampled_answer_is_drafted_by_the_tree_for_it(copied_run: Path, policies: list[Any],
                                                        capsys: pytest.CaptureFixture[str]) -> None:
    file = copied_run / "artifact" / "tuning.json"
    # Nothing is accepted of a sampling target: it is not drafted for at all.
    tuning = json.loads(file.read_text())
    nothing, much = ([{"policy": "static-4", "chosen": {"accepted_length": length, "nodes": 4.0}}]
                     for length in (1.0, 900.0))
    file.write_text(json.dumps(tuning | {"used_nodes": None, "greedy": much, "sampled": nothing}))
    for degree in ("0", "0.8"):
        assert main(["generate", "--artifact", str(copied_run / "artifact"), "--prompt", "hello", "--max-new-tokens",
                     "5", "--temperature", degree]) == 0
    assert [one.max_size for one in policies] == [4, 1]
    said = capsys.readouterr().err
    assert said.count("nothing was drafted") == 1
    assert "because on this machine no tree makes decoding faster at temperature 0.8; --policy static-16" in said


@pytest.mark.long
@pytest.mark.parametrize("words", [["generate", "--prompt", "hello", "--max-new-tokens", "8"],
                                   ["export", "--format", "medusa", "--out", "{out}"]])
def test_an_artifact_is_used_without_the_extras(words: list[str], tiny_run: Path, tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "for name in 'lightning pytorch_lightning datasets peft tensorboard matplotlib deepspeed'.split():\n"
        "    sys.modules[name] = None\n"
        "from draftsmith.recipes.__main__ import main\n"
        "sys.exit(main(sys.argv[1:]))\n")
    given = [word.format(out=tmp_path / "out") for word in words]
    subprocess.run([sys.executable, "-c", program, *given, "--artifact", str(tiny_run / "artifact")], check=True)


def test_of_two_evaluations_into_one_folder_one_is_refused(tiny_run: Path, tmp_path: Path,
                                                           capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report"
    words = ["evaluate", "--artifact", str(tiny_run / "artifact"), "--out", str(out), "--limit", "1",
             "--max-new-tokens", "4", "--speed-prompts", "0"]
    process = working(out)
    assert main(words) == 2
    kill(process)
    assert re.search(r"another command works in \S+; start again when it has ended, or choose another",
                     capsys.readouterr().err)
    assert not (out / "evaluation.json").exists()
    assert main(words) == 0
    assert sorted(path.name for path in out.iterdir()) == [
        "acceptance.json", "evaluation.json", "report.html", "report.md"]


def test_evaluate_a_file_of_two_turns_with_a_baseline_batches_and_temperatures(tiny_run: Path, tmp_path: Path) -> None:
    """Two artifacts and a baseline, as a person would compare them."""
    again = shutil.copytree(tiny_run / "artifact", tmp_path / "again" / "artifact")
    lines = [{"question_id": n, "category": ("math", "writing")[n % 2], "turns": [f"say {n} things", "and more"]}
             for n in range(4)]
    (tmp_path / "spec.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["evaluate", "--artifact", f"[{tiny_run / 'artifact'},{again}]", "--prompts",
                 str(tmp_path / "spec.jsonl"), "--out", str(tmp_path / "report"), "--batch-sizes", "[1,2]",
                 "--temperatures", "[0,0.9]", "--max-new-tokens", "8", "--speed-prompts", "2",
                 "--baselines", "[prompt_lookup]"]) == 0
    content = json.loads((tmp_path / "report" / "evaluation.json").read_text())
    measured = content["measurements"]
    assert {(one["temperature"], one["batch_size"]) for one in measured} == {(t, b) for t in (0, 0.9) for b in (1, 2)}
    assert len({one["method"] for one in measured}) == 3
    assert "prompt_lookup" in {one["method"] for one in measured}
    assert content["prompts"] == 8  # four questions, two turns each
    assert {one["turn"] for one in measured} == {None, "1", "2"}
    assert all(one["lossless"]["identical"] + one["lossless"]["near_tie_divergences"] == one["prompts"]
               for one in measured)
    assert measured[0]["accepted_length"] == content["accepted_length"]
    page = (tmp_path / "report" / "report.html").read_text()
    assert "rows of the batch" in page
    assert "temperature" in page


def test_baselines_are_evaluated_without_an_artifact(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"prompt": "hello", "reference": "some text", "draft_prompt": "bye"}
    (tmp_path / "mine.jsonl").write_text(json.dumps(row) + "\n")
    baselines = "[recycling,prompt_lookup,reference,whole_target]"
    assert main(["evaluate", "--target.name", "tiny-random", "--baselines", baselines, "--out",
                 str(tmp_path), "--prompts", str(tmp_path / "mine.jsonl"), "--max-new-tokens", "8"]) == 0
    content = json.loads((tmp_path / "evaluation.json").read_text())
    assert (content["method"], content["lossless"]["identical"]) == ("recycling", 1)
    (tmp_path / "mine.jsonl").write_text(json.dumps({**row, "reference": "word " * 600}) + "\n")
    assert main(["evaluate", "--target.name", "tiny-random", "--baselines", baselines, "--out", str(tmp_path / "long"),
                 "--prompts", str(tmp_path / "mine.jsonl"), "--max-new-tokens", "8"]) == 2
    assert "tokens and a draft_prompt of" in capsys.readouterr().err


def test_the_example_of_the_readme_runs(tiny_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example = (ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0]
    assert len(example.splitlines()) <= 12
    program = example.replace("smollm2-135m-instruct", "tiny-random").replace("runs/quickstart", str(tiny_run))
    exec(compile(program, "README.md", "exec"), {})
    assert len(capsys.readouterr().out) > 20


@pytest.mark.long
@pytest.mark.slow
def test_a_kill_changes_no_byte(tmp_path: Path) -> None:
    campaign = subprocess.run([sys.executable, str(ROOT / "tests" / "benchmarks" / "fault_campaign.py"), "--state",
                               str(tmp_path / "state"), "--only", "kill at a random moment", "--subject", "medusa",
                               "--kills", "1", "--processes", "1"], capture_output=True, text=True, check=False)
    assert "| run, medusa | 1 of 1 |" in campaign.stdout, campaign.stderr
    assert campaign.returncode == 0


@pytest.mark.long
def test_another_run_trains_on_the_same_data(tiny_run: Path, tmp_path: Path,
                                             capsys: pytest.CaptureFixture[str]) -> None:
    out, data = tmp_path / "second", tiny_run / "data"
    before = {file: file.stat().st_mtime_ns for file in data.iterdir()}
    run(out, "--data", str(data), "--drafter.num_heads", "2")
    message = capsys.readouterr().out
    assert "[1/4] the target's states are stored" in message
    assert not (out / "data").exists()
    assert {file: file.stat().st_mtime_ns for file in data.iterdir()} == before
    run(out, "--data", str(data), "--drafter.num_heads", "2")
    assert capsys.readouterr().out.count("already complete, skipped") == STAGES - 1


@pytest.mark.parametrize(("words", "message"), [
    (("train", "--data", "DATA", "--template.system", "Be brief."), "was rendered with another chat template or other"),
    (("run", "--data", "none"), "none, which is no folder; give the data folder of a finished run"),
    (("distill", "--data", "DATA"), "distill makes new data, and data names"),
])
def test_data_of_another_run_must_be_there_and_fit(words: tuple[str, ...], message: str, tiny_run: Path, tmp_path: Path,
                                                   capsys: pytest.CaptureFixture[str]) -> None:
    given = [word.replace("DATA", str(tiny_run / "data")) for word in words]
    assert main([*given, "--config", "tiny", "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err


def beginning_with(folder: Path, target: Target, layers: tuple[int, ...], out: Path) -> list[str]:
    """Put these layers of the target into a folder as a model, and train on from there: words of `train`."""
    drafter = DraftLM.create(DraftLMConfig(layers=layers), target)
    export_artifact(Artifact(drafter=drafter, target=target, topology=Topology.chain(2), identity=target.identity,
                             provenance={}), target, "huggingface", folder)
    content = yaml.safe_load((ROOT / "recipes" / "tiny.yaml").read_text())
    content |= {"family": "draft_lm", "drafter": {"folder": str(folder)},
                "train": {"max_steps": 2, "warmup_steps": 1, "checkpoint_every": 1}}
    out.mkdir(exist_ok=True)
    (out / "recipe.yaml").write_text(yaml.safe_dump(content))
    return ["--config", str(out / "recipe.yaml"), "--out", str(out)]


@pytest.mark.long
def test_another_model_in_the_same_folder_is_noticed(tiny_run: Path, tmp_path: Path,
                                                     capsys: pytest.CaptureFixture[str]) -> None:
    target, data = load_target(TargetConfig(name="tiny-random")), ["--data", str(tiny_run / "data")]
    words = beginning_with(tmp_path / "draft", target, (0,), tmp_path / "out") + data
    assert main(["train", *words]) == 0
    weights = (tmp_path / "out" / "artifact" / "model.safetensors").read_bytes()
    capsys.readouterr()
    assert main(["train", *words]) == 0
    assert capsys.readouterr().out.count("already complete, skipped") == 3
    beginning_with(tmp_path / "draft", target, (1,), tmp_path / "out")
    assert main(["train", *words]) == 2
    assert "was started with drafter.model_in_folder '" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "out" / "train")
    assert main(["train", *words]) == 0
    assert (tmp_path / "out" / "artifact" / "model.safetensors").read_bytes() != weights
