"""Commands that an exported README.md, an export and the messages of the program print: each parses with our own
command line, or is one that the proof of an engine starts."""

import argparse
import ast
import json
import os
import re
import runpy
import shlex
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from draftsmith.export import Artifact, ExportSettings, export_artifact, save_artifact
from draftsmith.export.artifact import portable
from draftsmith.export.layouts import registry
from draftsmith.export.layouts.parts.export_format import VLLM, VLLM_ON_CPU, WRONG_SAMPLES
from draftsmith.export.layouts.registry import EXPORT_FORMATS
from draftsmith.modules import DraftLM, DraftLMConfig, Target, TargetConfig, Topology, UserError, load_target
from draftsmith.recipes.__main__ import COMMANDS, main
from draftsmith.recipes.reading.keys import command_keys
from serving.llama_cpp_cases import options
from serving.proof import blocks, commands
from serving.vllm_cases import LOADER, VLLM_CASES
from support.artifacts import TREE, heads
from support.documents import ROOT
from support.families import CASES
from support.target_folders import write_vocabulary
from support.targets import six_layers

from .test_engine_contracts import MADE, target_of, written

OTHERS = {
    "sglang.launch_server": ("--model-path", "--speculative-algorithm", "--speculative-draft-model-path",
                             "--speculative-num-draft-tokens"),
    "text-generation-launcher": ("--model-id", "--speculate"),
}
"""Options of engines that do not run here, by their sources."""
DEPTHS = ("--speculative-num-steps", "--speculative-eagle-topk")  # Further ones of SGLang for drafts of several passes


@pytest.fixture(scope="module")
def target() -> Target:
    return six_layers()


def run_in_the_proof() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(configuration of drafts, extra settings for loading) of each folder that vLLM's proof drafts with."""
    asked = [dict(case.asked) for case in VLLM_CASES if not case.wrong]
    return [({key: value for key, value in one.items() if key != LOADER}, one.get(LOADER, {})) for one in asked]


def served_by_vllm(words: list[str]) -> list[str]:
    """The model and the options of a command that starts vLLM; empty for another one."""
    for start in (VLLM, VLLM_ON_CPU):
        if tuple(words[: len(start)]) == start:
            return words[len(start):]
    return []


def check(words: list[str]) -> None:
    """Fail unless the command is our own, or one that a proof starts."""
    if words[0] == "draftsmith":
        module = import_module(f"draftsmith.recipes.commands.{COMMANDS[words[1]][0]}")
        module.COMMANDS[words[1]].parse(words[2:])
    elif model := served_by_vllm(words):
        parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
        parser.add_argument("model")
        parser.add_argument("--speculative-config", type=json.loads)
        parser.add_argument("--model-loader-extra-config", type=json.loads, default={})
        given = parser.parse_args(model)
        drafts = given.speculative_config
        if drafts is not None:
            assert drafts.pop("model") != given.model
            assert drafts.pop("num_speculative_tokens") >= 1
            # vLLM for CPUs has no DSpark.
            assert drafts == {"method": "dspark"} or (
                drafts, given.model_loader_extra_config) in run_in_the_proof()
    elif words[0] == "llama-server":
        options(words)
    elif words[0] == "optimum-cli":
        assert words[1:4] == ["export", "openvino", "-m"]
    else:
        program = words[2] if words[0] == "python" else words[0]
        wanted = {*OTHERS[program], *(DEPTHS if {"EAGLE", "EAGLE3"} & {*words} else ())}
        assert {word for word in words if word.startswith("--")} == wanted, words


WRITTEN = [(name, one.name) for name in MADE for one in EXPORT_FORMATS if one.name in (
    {"eagle3": ("eagle", "speculators", "gguf"), "eagle": ("eagle", "eagle-sglang"),
     "block": ("dflash", "speculators", "gguf"), "medusa": ("medusa", "medusa-vllm"),
     "draft_lm": ("huggingface", "gguf")}[re.split("[ ,]", name)[0]])]


@pytest.mark.parametrize(("name", "layout"), WRITTEN)
def test_every_command_of_a_readme_runs_as_it_stands(tmp_path: Path, target: Target, name: str, layout: str) -> None:
    drafter, settings, target = MADE[name](target), ExportSettings(), target_of(name, target)
    if layout == "gguf":
        settings = ExportSettings(target_gguf=write_vocabulary(tmp_path / "v.gguf", target.vocab_size))
    try:
        folder = written(drafter, target, layout, tmp_path / "out", settings)
    except UserError as refusal:
        # It names formats that hold the drafter, each of which does.
        for other in re.findall(r"choose --format (.*)", str(refusal))[0].split(", "):
            assert not next(one for one in EXPORT_FORMATS if one.name == other).refusal(drafter, target)
        return
    text = (folder / "README.md").read_text()
    assert commands(text)
    for words in commands(text):
        check(words)
    assert not re.search(r"\b(THIS_FOLDER|TARGET)\b", text)
    for example in blocks(text, "python"):
        ast.parse(example)
    # Recommended formats hold this very drafter.
    for other in re.findall(r"^\* `--format ([\w-]+)`", text, flags=re.MULTILINE):
        chosen = next(one for one in EXPORT_FORMATS if one.name == other)
        assert isinstance(drafter, chosen.families)
        assert not chosen.refusal(drafter, target)


def test_eagle_3_that_only_some_engines_run_is_sent_to_no_other(tmp_path: Path, target: Target) -> None:
    for name, others in (("eagle3 whole", {"speculators", "gguf", "openvino"}), ("eagle3 norms", {"speculators"}),
                         ("eagle3 layers", {"speculators"}), ("eagle3 one norm", {"speculators", "gguf"})):
        text = (written(MADE[name](target), target, "eagle", tmp_path / name) / "README.md").read_text()
        assert set(re.findall(r"--format ([\w-]+)`", text)) == others


def test_transformers_runs_the_printed_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                             capsys: pytest.CaptureFixture[str]) -> None:
    tiny = load_target(TargetConfig(name="tiny-random"))
    save_artifact(tmp_path / "artifact", DraftLM.create(DraftLMConfig(layers=(0,)), tiny), tiny.identity, {},
                  Topology.chain(2))
    monkeypatch.chdir(tmp_path)
    assert main(["export", "--artifact", "artifact", "--format", "huggingface", "--out", "draft"]) == 0
    printed = [shlex.split(line) for line in capsys.readouterr().out.splitlines()
               if line.startswith(("draftsmith ", VLLM[0], VLLM_ON_CPU[0]))]
    assert [words[0] for words in printed] == ["draftsmith", VLLM[0], VLLM_ON_CPU[0]]
    for words in printed:
        check(words)
    assert "target" in printed[1]
    assert '"model": "draft"' in printed[1][-1]
    monkeypatch.chdir("draft")
    for words in commands(Path("README.md").read_text()):
        # The command that writes the target; the server is started by the proof.
        if words[0] == "draftsmith":
            assert main(words[1:]) == 0
    capsys.readouterr()
    file = tmp_path / "example.py"
    file.write_text(blocks(Path("README.md").read_text(), "python")[0])
    runpy.run_path(os.fspath(file))
    assert "What is a draft horse?" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["models/my llama.gguf", "/data/models/llama", "./llama", "owner/llama"])
def test_a_target_is_named_as_it_can_be_found(tmp_path: Path, name: str, target: Target) -> None:
    identity = replace(target.identity, name=name)
    artifact = Artifact(drafter=MADE["eagle"](target), target=target, topology=TREE, identity=identity, provenance={})
    found = commands((export_artifact(artifact, target, "eagle", tmp_path / "out") / "README.md").read_text())
    for words in found:
        check(words)
    on_the_hub = name == "owner/llama"
    assert [words[0] for words in map(served_by_vllm, found) if words] == [name if on_the_hub else "../target"] * 2
    # The folder keeps no path: the reader puts theirs in its place.
    assert [words[5] for words in found if words[0] == "draftsmith"] == (
        [] if on_the_hub else [f"/path/to/{portable(name)}"])


def test_the_target_is_written_where_a_command_reads_it_and_with_the_trust_that_it_takes(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = replace(target.identity, name="tiny-random")
    drafter = MADE["draft_lm"](target)
    artifact = Artifact(drafter=drafter, target=target, topology=TREE, identity=identity, provenance={})
    vocabulary = ExportSettings(target_gguf=write_vocabulary(tmp_path / "v.gguf", target.vocab_size))
    gguf = (export_artifact(artifact, target, "gguf", tmp_path / "gguf", vocabulary) / "README.md").read_text()
    assert "../target.gguf" in gguf
    assert "`../target`" not in gguf
    assert [words[0] for words in commands(gguf)] == ["llama-server"]
    monkeypatch.setattr(type(drafter), "family", "own")
    monkeypatch.setattr(type(target.model), "__module__", "transformers_modules.model.modeling")
    monkeypatch.setattr(registry, "DRAFTERS", ())
    text = (export_artifact(artifact, target, "huggingface", tmp_path / "out") / "README.md").read_text()
    words, *_ = commands(text)
    check(words)
    assert words == ["draftsmith", "export", "--artifact", "../artifact", "--format", "target", "--out", "../target",
                     "--trust", "true", "--target.trust_remote_code", "true"]


def test_an_export_in_the_place_of_its_target_is_not_replaced_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = load_target(TargetConfig(name="tiny-random"))
    save_artifact(tmp_path / "artifact", DraftLM.create(DraftLMConfig(layers=(0,)), tiny), tiny.identity, {},
                  Topology.chain(2))
    monkeypatch.chdir(tmp_path)
    assert main(["export", "--artifact", "artifact", "--format", "huggingface", "--out", "target"]) == 0
    assert "--format target --out whole-target" in capsys.readouterr().out


@pytest.mark.parametrize(("weights", "read"), [("float32", True), ("bfloat16", True), ("int8", False)])
def test_lines_for_transformers_are_printed_where_it_reads_the_weights(
    tmp_path: Path, target: Target, weights: str, read: bool
) -> None:
    folder = written(MADE["draft_lm"](target), target, "huggingface", tmp_path / "out", ExportSettings(weights=weights))
    assert ("assistant_model" in (folder / "README.md").read_text()) == read


@pytest.mark.parametrize(("name", "layout", "pickle"), [
    ("hydra", "hydra", "hydra_lm_head.pt"), ("kangaroo", "kangaroo", "pytorch_model.bin")])
def test_python_of_a_folder_runs_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, layout: str,
                                       pickle: str) -> None:
    tiny = load_target(TargetConfig(name="tiny-random"))
    drafter = CASES[name].make(tiny)
    save_artifact(tmp_path / "artifact", drafter, tiny.identity, {}, TREE)
    for folder in (tmp_path / "artifact", written(drafter, tiny, layout, tmp_path / "out")):
        monkeypatch.chdir(folder)
        example, = blocks(Path("README.md").read_text(), "python")
        exec(compile(example, "README.md", "exec"), {})
    assert Path(pickle).is_file()


def test_commands_in_messages_are_commands() -> None:
    """`draftsmith NAME --option` in a string of the program: both exist."""
    found = set()
    for room in ("data", "export", "modules", "recipes", "trainers"):
        for file in sorted((ROOT / room).rglob("*.py")):
            texts = [node.value for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Constant)
                     and isinstance(node.value, str)]
            for text in texts:
                found |= {(name, *re.findall(r"--[a-z][\w.]*", rest)) for name, rest in re.findall(
                    r"draftsmith (\w+)((?: --[a-z][\w.]*(?: (?!--)[^\s;,)`]+)?)+)", text)}
    assert found
    for name, *given in sorted(one for one in found if one[0] != "COMMAND"):
        assert name in COMMANDS, name
        known = {one.removeprefix("--") for one in given}
        command = command_keys(name)
        home = (key.partition(".")[2] for key in command.keys if key.startswith(f"{command.home}."))
        keys = {*command.top, *home, "config", "help"}
        assert {one.split(".")[0] for one in known} <= keys, (name, given)


def test_heads_are_exported_with_a_whole_command(tmp_path: Path, target: Target) -> None:
    reduced = heads(target, output="one_copy", vocabulary_size=20)
    text = (written(reduced, target, "medusa-vllm", tmp_path / "out") / "README.md").read_text()
    for words in filter(served_by_vllm, commands(text)):
        assert served_by_vllm(words)[0] == "tiny-target"
        assert words[-2:] == ["--model-loader-extra-config", '{"enable_weights_track": false}']
    # Each place that prints a draft's command for a CPU says so.
    assert WRONG_SAMPLES in text


def test_a_folder_that_names_a_target_on_the_hub_is_served_in_one_line(tmp_path: Path, target: Target) -> None:
    for name, served in (("owner/llama", ["."]), ("./llama", ["../target", "--speculative-config"])):
        artifact = Artifact(drafter=MADE["eagle3"](target), target=target, topology=TREE, provenance={},
                            identity=replace(target.identity, name=name))
        folder = export_artifact(artifact, target, "speculators", tmp_path / portable(name))
        found = [served_by_vllm(words) for words in commands((folder / "README.md").read_text())]
        assert [words[:2] for words in found if words] == [served] * 2


def test_the_guide_starts_vllm_as_the_folders_do() -> None:
    found = [words for words in commands((ROOT / "recipes/guides/serve-vllm.md").read_text())
             if served_by_vllm(words)]
    assert len(found) == 5
    for words in found:
        check(words)
