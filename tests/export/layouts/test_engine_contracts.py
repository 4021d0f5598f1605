"""Exported folders against what each serving engine reads of them; a fault in a folder is a fault in the contract.
Tables of tensors; the table of families and engines in export/README.md; refusals by shapes alone."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.export import Artifact, ExportSettings, export_artifact, load_artifact, save_artifact
from draftsmith.export.layouts.parts.checkpoint import TensorForm, table_text
from draftsmith.export.layouts.registry import EXPORT_FORMATS, format_named, writer_of
from draftsmith.modules import Adapter, Drafter, DraftLM, DraftLMConfig, Target, TargetConfig, Topology, UserError
from draftsmith.modules.families.block.drafter import BlockDraft, BlockDraftConfig
from draftsmith.modules.families.eagle.drafter import Eagle, EagleConfig
from draftsmith.modules.families.eagle3.drafter import Eagle3, Eagle3Config
from draftsmith.modules.target.loading.loading import sketch_target
from safetensors.torch import load_file, save_file
from serving.engine_contracts import (
    CONTRACTS,
    Folder,
    states_of_llama_cpp,
    states_of_sglang,
    states_of_vllm,
    third_for_sglang,
    third_for_tensorrt,
)
from serving.engine_table import README, engine_table, figures, product, with_engines
from serving.prove import ENGINES
from support.artifacts import TREE, edit, heads
from support.families import CASES, IDS, randomised
from support.targets import six_layers, tied_target

TAPS = (1, 2, 4)


@pytest.fixture(scope="module")
def target() -> Target:
    return six_layers()


def third(target: Target, **settings: Any) -> Eagle3:
    size = settings.get("vocabulary_size")
    return Eagle3.create(Eagle3Config(**{"taps": TAPS, **settings}), target, None if size is None else IDS)


@cache
def padded() -> Target:
    """The same target with rows of the embedding after the tokenizer's last token, one of which stands for a mask."""
    return six_layers(rows=104)


def target_of(name: str, target: Target) -> Target:
    """The target of a drafter."""
    return padded() if name.startswith("block") else target


def blocks(**settings: Any) -> BlockDraft:
    config = BlockDraftConfig(taps=TAPS, block_size=4, mask_token_id=101, **settings)
    return BlockDraft.create(config, padded(), IDS if config.vocabulary_size else None)


REDUCED = {"vocabulary_size": len(IDS)}
MADE: dict[str, Callable[[Target], Drafter]] = {
    "eagle3": lambda target: third(target, **REDUCED),
    "eagle3 whole": lambda target: third(target),
    "eagle3 wide": lambda target: third(target, hidden_size=48),
    "eagle3 layers": lambda target: third(target, num_layers=3),
    "eagle3 norms": lambda target: third(target, fc_norm=True, norm_output=True),
    "eagle3 one norm": lambda target: third(target, norm_before_fc=True),
    "eagle": lambda target: Eagle.create(EagleConfig(), target),
    "eagle bias-free": lambda target: Eagle.create(EagleConfig(bias=False), target),
    "medusa": lambda target: heads(target),
    "medusa one_copy": lambda target: heads(target, output="one_copy", vocabulary_size=20, num_layers=2),
    "block": lambda target: blocks(aligned="same", causal=False),
    "block reduced": lambda target: blocks(aligned="same", **REDUCED),
    "block dspark": lambda target: blocks(correction="markov", causal=False, confidence=True),
    "block jetspec": lambda target: blocks(aligned="same"),
    "block rnn": lambda target: blocks(correction="rnn", causal=False),
    "block gated": lambda target: blocks(correction="gated", causal=False),
    "block dflash2": lambda target: blocks(aligned="same", causal=False, correction="selector", conv=True),
    "block domino": lambda target: blocks(correction="gru", causal=False, rank=6),
    "draft_lm": lambda target: DraftLM.create(DraftLMConfig(num_layers=2, hidden_size=16), target),
    "draft_lm tied": lambda target: DraftLM.create(DraftLMConfig(num_layers=1, hidden_size=16), tied_target()),
    "draft_lm, mask tokens": lambda target: DraftLM.create(DraftLMConfig(layers=(0, 5), depths=3, mask_token_id=3),
                                                           target),
}
"""Drafters, named after their family and what is special about them."""
NOT_FOR = {"llama.cpp": {"eagle3 layers", "eagle3 norms"}, "SGLang 0.5.23": {"block reduced"},
           "TensorRT-LLM": {"block reduced", "block jetspec", "block dflash2", "block domino"}}
"""Drafters that an engine cannot run."""


def of_family(family: str) -> list[str]:
    return [name for name in MADE if name == family or ("," not in family and name.split(",")[0].split()[0] == family)]


READ = [(family, layout, engine, name) for family, layout, engine in CONTRACTS for name in of_family(family)]


def written(drafter: Drafter, target: Target, layout: str, out: Path, settings: ExportSettings | None = None) -> Path:
    artifact = Artifact(drafter=drafter, target=target, topology=TREE, identity=target.identity, provenance={})
    return export_artifact(artifact, target, layout, out, settings or ExportSettings())


@pytest.mark.parametrize(("family", "layout", "engine", "name"), READ)
def test_an_engine_reads_all_that_was_trained(
    tmp_path: Path, target: Target, family: str, layout: str, engine: str, name: str
) -> None:
    folder = Folder.read(written(MADE[name](target), target_of(name, target), layout, tmp_path / "out"))
    faults = CONTRACTS[family, layout, engine](folder)
    assert bool(faults) == (name in NOT_FOR.get(engine, ())), faults
    if (product := engine.split(" 0.")[0]) in format_named(layout).readers:
        assert bool(faults) == (product not in format_named(layout).read_by(MADE[name](target)))
    numbers = {"d2t": torch.int64, "t2d": torch.bool}
    assert folder.dtypes == {tensor: numbers.get(tensor, torch.float32) for tensor in folder.shapes}


@pytest.mark.parametrize("engine", [states_of_sglang, states_of_vllm, states_of_llama_cpp])
def test_the_tapped_layers_are_those_that_the_drafter_was_trained_on(
    tmp_path: Path, target: Target, engine: Callable[[dict[str, Any]], list[int]]
) -> None:
    folder = Folder.read(written(third(target), target, "eagle", tmp_path / "out"))
    # hidden_states[v] is the output of layer v - 1, of the embedding for v = 0.
    assert [place - 1 for place in engine(folder.config)] == list(TAPS)
    text = (tmp_path / "out" / "README.md").read_text()
    # TensorRT-LLM is given the layers by the user, counted by their outputs.
    assert "eagle3_layers_to_capture: [1, 2, 4]}`" in text


def test_the_layers_in_the_layout_of_speculators(tmp_path: Path, target: Target) -> None:
    folder = Folder.read(written(third(target), target, "speculators", tmp_path / "out"))
    assert [place - 1 for place in states_of_vllm(folder.config)] == list(TAPS)


@pytest.mark.parametrize(("contract", "settings", "fault"), [
    (third_for_sglang, {"norm_before_residual": True}, "norm_before_residual is True, not False"),
    (third_for_tensorrt, {"norm_before_residual": True}, "norm_before_residual is True, not False"),
    (third_for_sglang, {"taps": (2,)}, "fc is passed over"),
    (third_for_tensorrt, {"taps": (2,)}, "no fc with a single layer"),
])
def test_what_an_engine_does_not_know_is_in_the_readme(
    tmp_path: Path, target: Target, contract: Callable[[Folder], list[str]], settings: dict[str, Any], fault: str
) -> None:
    folder = written(third(target, **settings), target, "eagle", tmp_path / "out")
    assert any(fault in found for found in contract(Folder.read(folder)))
    said = "do not know `norm_before_residual`, and accept less" if "taps" not in settings else (
        "pass over `fc`")
    assert f"SGLang and TensorRT-LLM {said}" in (folder / "README.md").read_text()


def without(folder: Path, *names: str, **added: torch.Tensor) -> None:
    """Take tensors out of a folder and add others."""
    file = next(folder.glob("*.safetensors"))
    save_file({name: tensor for name, tensor in load_file(file).items() if name not in names} | added, file)


@pytest.mark.parametrize(("name", "layout", "engine", "lost"), [
    ("eagle3", "eagle", "SGLang 0.5.23", "midlayer.hidden_norm.weight"),
    ("eagle3 layers", "eagle", "SGLang 0.5.23", "layers.1.hidden_norm.weight"),
    ("eagle3 layers", "eagle", "TensorRT-LLM", "layers.2.hidden_norm.weight"),
    ("eagle3", "eagle", "TensorRT-LLM", "d2t"),
    ("eagle3", "eagle", "llama.cpp", "norm.weight"),
    ("eagle bias-free", "eagle-sglang", "SGLang 0.5.23", "fc.bias"),
    ("block", "dflash", "SGLang 0.5.23", "layers.0.self_attn.q_norm.weight"),
    ("block dspark", "dflash", "SGLang 0.5.23", "markov_head.markov_w2.weight"),
    ("block dflash2", "dflash", "SGLang 0.5.23", "layers.1.mlp_conv.base_kernel"),
    ("medusa", "medusa", "TGI 3", "2.0.linear.bias"),
    ("draft_lm", "huggingface", "SGLang 0.5.23", "model.norm.weight"),
    ("draft_lm", "huggingface", "TensorRT-LLM", "model.layers.1.mlp.up_proj.weight"),
])
def test_a_missing_or_unknown_tensor_breaks_a_contract(
    tmp_path: Path, target: Target, name: str, layout: str, engine: str, lost: str
) -> None:
    folder = written(MADE[name](target), target_of(name, target), layout, tmp_path / "out")
    without(folder, lost, stray=torch.zeros(1))
    found = CONTRACTS[name.split()[0], layout, engine](Folder.read(folder))
    assert {f"no tensor for {lost}", "nothing reads stray"} == set(found)


def test_wrong_keys_break_contracts(tmp_path: Path, target: Target) -> None:
    folder = written(MADE["eagle3 one norm"](target), target, "eagle", tmp_path / "out")
    inside = json.loads((folder / "config.json").read_text())["eagle_config"]
    edit(folder, eagle_config={key: value for key, value in inside.items() if key != "norm_before_fc"})
    assert third_for_tensorrt(Folder.read(folder)) == ["nothing reads input_norm.weight"]
    edit(folder, architectures=["LlamaForCausalLM"])
    assert "no EAGLE-3 by its architecture" in third_for_tensorrt(Folder.read(folder))
    medusa = written(MADE["medusa"](target), target, "medusa", tmp_path / "medusa")
    edit(medusa, architectures=["MedusaModel"])
    assert CONTRACTS["medusa", "medusa", "TGI 3"](Folder.read(medusa)) == ["architectures is there"]
    masks = written(MADE["draft_lm, mask tokens"](target), target, "huggingface", tmp_path / "masks")
    edit(masks, pard_token=100)
    assert CONTRACTS["draft_lm, mask tokens", "huggingface", "TensorRT-LLM"](Folder.read(masks)) == [
        "pard_token is 100"]


# Tables of tensors ----------------------------------------------------------------------------------------------------


FORMATS = {"eagle3": "eagle", "eagle": "eagle-sglang", "eagle3 layers": "speculators", "medusa": "medusa",
           "medusa one_copy": "medusa-vllm", "draft_lm": "huggingface", "draft_lm tied": "huggingface"}


def test_a_draft_model_without_a_tensor_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import PreTrainedModel

    whole = PreTrainedModel.save_pretrained

    def without_a_norm(model: PreTrainedModel, folder: Path, **settings: Any) -> None:
        whole(model, folder, **settings)
        tensors = load_file(folder / "model.safetensors")
        save_file({name: tensor for name, tensor in tensors.items() if name != "model.norm.weight"},
                  folder / "model.safetensors")

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", without_a_norm)
    target = six_layers()
    with pytest.raises(ValueError, match=r"wrong tensors: model\.norm\.weight$"):
        written(MADE["draft_lm"](target), target, "huggingface", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_equal_heads_share_a_line() -> None:
    form = TensorForm((4, 4))
    assert table_text({"1.0.weight": form, "norm": TensorForm((4,), torch.bfloat16), "0.0.weight": form}) == (
        "| tensor | shape | number format |\n|---|---|---|\n| `norm` | [4] | bfloat16 |\n"
        "| `0.0.weight` to `1.0.weight` (2) | [4, 4] | float32 |")


@pytest.mark.parametrize("name", FORMATS)
def test_the_readme_lists_every_tensor(tmp_path: Path, name: str) -> None:
    target = six_layers()
    folder = written(MADE[name](target), target, FORMATS[name], tmp_path / "out")
    text, file = (folder / "README.md").read_text(), next(folder.glob("*.safetensors"))
    assert f"## Tensors of {file.name}" in text
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    assert sum(int(cell.split("(")[1].split(")")[0]) if "(" in cell else 1 for cell in cells) == len(load_file(file))


# The table in export/README.md ----------------------------------------------------------------------------------------


def test_the_readme_holds_the_generated_table() -> None:
    text = README.read_text()
    assert with_engines(text, figures()) == text, \
        "write them again with record(figures()) of serving.engine_table"
    with pytest.raises(UserError, match=r"need the lines <!-- engines --> and <!-- /engines -->; add them"):
        with_engines("", figures())


def test_every_case_is_recorded_and_holds() -> None:
    recorded = {(product(one["engine"]).lower(), one["name"], one["layout"], one["weights"], one["wrong"]): one
                for one in figures()}
    known = {(engine, case.name, case.layout, case.weights, case.wrong): case
             for engine, (_, cases) in ENGINES.items() for case in cases}
    assert recorded.keys() == known.keys()
    for key, one in recorded.items():
        assert one["holds"]
        assert one["equal"] == one["answers"] > 0
        assert (one["accepted"] >= known[key].least * one["drafted"]) != bool(one["wrong"])


def cells(outcomes: list[dict[str, Any]], family: str, layout: str) -> dict[str, str]:
    """The cells of a family's format that are not empty, by engine."""
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in engine_table(outcomes).splitlines()]
    found = next(row for row in rows if row[0].startswith(family) and row[1] == f"`{layout}`")
    return {product(engine): cell for engine, cell in zip(rows[0][2:], found[2:], strict=True) if cell}


def test_an_engine_runs_what_was_proven_alone() -> None:
    assert cells(figures(), "EAGLE-3", "eagle") == {
        "vLLM": "runs", **dict.fromkeys(("SGLang", "TensorRT-LLM", "llama.cpp"), "checked")}
    assert cells(figures(), "EAGLE-3", "openvino") == {"OpenVINO GenAI": "runs"}
    assert cells(figures(), "draft language model", "openvino") == {"OpenVINO GenAI": "runs"}
    assert cells(figures(), "EAGLE-3", "gguf") == {"llama.cpp": "runs"}
    assert cells(figures(), "EAGLE-1", "eagle") == {"vLLM": "runs; vLLM drops the bias"}
    assert cells(figures(), "EAGLE-1", "eagle-sglang") == {"SGLang": "checked"}
    assert cells(figures(), "Hydra", "hydra") == {}
    failed = [{**one, "holds": one["name"] != "eagle3, two layers"} for one in figures()]
    assert "vLLM" not in cells(failed, "EAGLE-3", "eagle")
    controls = [one for one in figures() if one["wrong"]]
    assert "vLLM" not in cells(controls, "EAGLE-3", "eagle")
    assert product("llama.cpp b11549") == product("llama.cpp") == "llama.cpp"
    assert product("OpenVINO GenAI 2026.4") == "OpenVINO GenAI"


# Refusals of a sketch -------------------------------------------------------------------------------------------------


def refusals(artifact: Artifact) -> dict[str, str]:
    """The sentence of each format that cannot hold an artifact; empty for those that can."""
    found = dict[str, str]()
    for chosen in EXPORT_FORMATS:
        try:
            writer_of(chosen, artifact, artifact.target, ExportSettings())
            found[chosen.name] = ""
        except UserError as error:
            found[chosen.name] = str(error)
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_sketch_is_refused_as_the_artifact_is(name: str, tiny_target: Target, tmp_path: Path) -> None:
    case, folder = CASES[name], tmp_path / "artifact"
    save_artifact(folder, randomised(case.make(tiny_target)), tiny_target.identity, {}, Topology.chain(1),
                  case.change(tiny_target))
    whole, sketch = (load_artifact(folder, target) for target in (
        tiny_target, sketch_target(TargetConfig(name="tiny-random"))))
    found = refusals(whole)
    assert any(found.values())
    assert refusals(replace(sketch, adapter=whole.adapter and Adapter({}, 1.0))) == found
