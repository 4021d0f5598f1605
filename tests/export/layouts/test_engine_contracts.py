"""Exported folders against what each serving engine reads of them; a fault in a folder is a fault in the contract."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.export import Artifact, ExportSettings, export_artifact
from draftsmith.export.layouts.registry import format_named
from draftsmith.modules import (
    BlockDraft,
    BlockDraftConfig,
    Drafter,
    DraftLM,
    DraftLMConfig,
    Eagle,
    Eagle3,
    Eagle3Config,
    EagleConfig,
    Target,
)
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
from support.artifacts import TREE, edit, heads
from support.families import IDS
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


CASES = [(family, layout, engine, name) for family, layout, engine in CONTRACTS for name in of_family(family)]


def written(drafter: Drafter, target: Target, layout: str, out: Path, settings: ExportSettings | None = None) -> Path:
    artifact = Artifact(drafter=drafter, target=target, topology=TREE, identity=target.identity, provenance={})
    return export_artifact(artifact, target, layout, out, settings or ExportSettings())


@pytest.mark.parametrize(("family", "layout", "engine", "name"), CASES)
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
