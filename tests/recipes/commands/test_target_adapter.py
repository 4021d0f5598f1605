"""Targets with an adapter in commands, and in the README.md of an export."""

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from draftsmith.export import Artifact, export_artifact, save_artifact
from draftsmith.export.layouts.parts.checkpoint import Contents
from draftsmith.export.layouts.parts.export_format import PLAIN
from draftsmith.export.layouts.registry import folder_readme, format_named
from draftsmith.export.stored_drafter import read_description
from draftsmith.modules import Drafter, Eagle3, Eagle3Config, Target, TargetConfig, Topology, load_target
from draftsmith.modules.target.loading.tiny_model import tiny_model
from draftsmith.recipes.__main__ import main
from peft import LoraConfig
from support.adapters import write_adapter
from support.artifacts import TREE, heads

LORA: dict[str, Any] = {"r": 12, "target_modules": ["q_proj", "down_proj"]}


def adapted(place: Path, **settings: Any) -> Target:
    write_adapter(place / "adapter", tiny_model(), LoraConfig(**LORA, **settings))
    return load_target(TargetConfig(name="tiny-random", adapter=str(place / "adapter"), dtype="float32", device="cpu"))


def test_an_artifact_asks_for_the_adapter_and_takes_the_merged_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                                      capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    target = adapted(Path())
    save_artifact(Path("artifact"), heads(target), target.identity, {}, TREE)
    assert read_description(Path("artifact"))["target"]["adapter"] == target.identity.adapter
    assert "adapter='/path/to/its/adapter'" in Path("artifact/README.md").read_text()
    asked = ["generate", "--artifact", "artifact", "--prompt", "hello", "--max_new_tokens", "12"]
    assert main(asked) == 2
    assert re.search(r"made for tiny-random with an adapter \(\w+\.\.\.\), which is loaded only if you name it; give "
                     r"--target\.adapter FOLDER, or --target\.name FOLDER of both merged", capsys.readouterr().err)
    said = []
    assert main(["export", "--artifact", "artifact", "--target.adapter", "adapter", "--format", "target", "--out",
                 "merged"]) == 0
    assert "Its adapter is merged into them." in Path("merged/README.md").read_text()
    for given in (["--target.adapter", "adapter"], ["--target.name", "merged"]):
        capsys.readouterr()
        assert main([*asked, *given]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] != ""
    assert main([*asked, "--target.name", "tiny-random"]) == 2
    assert "continue the draft by draftsmith run with train.start and --retarget" in capsys.readouterr().err


def eagle3(target: Target) -> Drafter:
    return Eagle3.create(Eagle3Config(taps=(0, 1), steps=2, vocabulary_size=None), target, None)


SAID = "Ask vLLM for the model `adapted` and SGLang for `org/base:adapted`: the base alone answers"
MERGED = "`../target` holds base and adapter merged, so that no engine has to add it."
WRITES = "draftsmith export --artifact ../artifact{} --target.adapter ../adapter --format target --out ../target"
ROWS: list[tuple[str, str, bool, list[str], list[str]]] = [
    ("eagle", "org/base", False, [
        "vllm serve org/base --speculative-config '{\"method\": \"eagle3\", \"model\": \".\", ",
        "}' --enable-lora --max-lora-rank 16 --lora-modules adapted=../adapter",
        "--model-path org/base ", " --lora-paths adapted=../adapter", SAID], [MERGED, "../target"]),
    ("eagle", "org/base", True, ["vllm serve ../target ", "--model-path ../target ", MERGED, WRITES.format("")],
     ["--enable-lora", "--lora-paths", "org/base "]),
    ("eagle", "./base", False, ["vllm serve ../target ", MERGED, WRITES.format(" --target.name /path/to/./base")],
     ["--enable-lora", "--lora-paths"]),
    ("speculators", "org/base", False, ["vllm serve org/base --spec", "--enable-lora", SAID], ["vllm serve .\n"]),
    ("speculators", "org/base", True, ["vllm serve ../target --spec"], ["--enable-lora", "vllm serve .\n"]),
    ("gguf", "org/base", False, [
        "llama-server -m ../target.gguf ", "-fa off --lora ../adapter.gguf",
        "`../adapter.gguf` is the adapter as llama.cpp's `convert_lora_to_gguf.py` writes it"], [MERGED]),
    ("gguf", "org/base", True, ["llama.cpp adds no adapter of this kind: `../target.gguf` has to be `../target` as its "
                                "`convert_hf_to_gguf.py` writes it"], ["--lora"]),
    ("openvino", "org/base", False, ["optimum-cli export openvino -m ../target ", WRITES.format("")], ["org/base "]),
    ("medusa", "org/base", False, ["vllm serve org/base ", "--enable-lora", WRITES.format("")], []),
    ("target", "org/base", False, ["vllm serve ."], ["--enable-lora", "adapter"]),
]


@pytest.mark.parametrize(("layout", "name", "dora", "held", "missing"), ROWS)
def test_the_printed_commands_add_the_adapter_or_serve_both_merged(
        layout: str, name: str, dora: bool, held: list[str], missing: list[str], tmp_path: Path) -> None:
    target = adapted(tmp_path, use_dora=dora)
    target.identity = replace(target.identity, name=name)
    drafter = heads(target) if layout == "medusa" else eagle3(target)
    artifact = Artifact(drafter=drafter, target=target, topology=Topology.chain(3), identity=target.identity,
                        provenance={})
    page = folder_readme(format_named(layout), artifact, Contents(title="Drafts"), [], PLAIN)
    assert [one for one in held if one not in page] == []
    assert [one for one in missing if one in page] == []


def test_what_a_folder_names_as_its_target_holds_the_adapter(tmp_path: Path) -> None:
    target = adapted(tmp_path)
    artifact = Artifact(drafter=heads(target), target=target, topology=Topology.chain(3), identity=target.identity,
                        provenance={})
    folder = export_artifact(artifact, target, "medusa", tmp_path / "medusa")
    assert json.loads((folder / "config.json").read_text())["base_model_name_or_path"] == "../target"


@pytest.mark.long
def test_a_draft_is_carried_over_from_the_base_to_base_and_adapter(tiny_run: Path, tmp_path: Path,
                                                                   monkeypatch: pytest.MonkeyPatch,
                                                                   capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    for name, dora in (("adapter", False), ("other", True)):
        write_adapter(Path(name), tiny_model(), LoraConfig(**LORA, use_dora=dora))
    given = ["run", "--config", "tiny", "--out", "out", "--train.start", str(tiny_run / "artifact")]
    assert main([*given, "--retarget", "--target.adapter", "nowhere"]) == 2
    assert main([*given, "--target.adapter", "adapter"]) == 2
    assert re.search(r"holds no adapter_config\.json.*train\.start and --retarget", capsys.readouterr().err, re.DOTALL)
    assert not list(Path().glob("out/data/*"))
    given += ["--retarget", "--target.adapter", "adapter"]
    assert main(given) == 0
    lossless = json.loads(Path("out/evaluation.json").read_text())["lossless"]
    assert lossless["identical"] == lossless["prompts"] > 0
    assert main(given) == 0
    assert capsys.readouterr().out.count("already complete, skipped") == 5
    for command in ("plan --config tiny --out plan", "doctor --artifact out", "evaluate --artifact out/artifact --out "
                    "evaluation --evaluate.limit 2", "chat --artifact out/artifact"):
        monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
        assert main([*command.split(), "--target.adapter", "adapter"]) == 0, command
    assert "tiny-random with an adapter; here tiny-random with an adapter" in capsys.readouterr().out
    # Another adapter is another target.
    assert main([*given[:-1], "other"]) == 2
    assert "out/data was made for the target tiny-random with weights_hash" in capsys.readouterr().err
