"""Weights of fewer bits: what an engine reads from the file, and what the drafter loses by it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import gguf
import pytest
import torch
from draftsmith.export import Artifact, ExportSettings, TrialSettings, export_artifact
from draftsmith.export.engines.trial import rounded_artifact, rounding_loss
from draftsmith.export.layouts.parts.gguf_file import rounded
from draftsmith.export.layouts.registry import format_named
from draftsmith.modules import DraftLM, DraftLMConfig, Eagle3, Eagle3Config, Target, UserError
from safetensors.torch import load_file
from support.artifacts import TREE
from support.families import IDS
from support.target_folders import write_vocabulary
from support.targets import six_layers

from .layouts.test_engine_contracts import written


def as_exported(name: str, weights: str) -> Callable[[torch.Tensor, bool], torch.Tensor]:
    """The weights as an engine reads them from a format."""
    return lambda weight, linear: format_named(name).as_read(weight, weights, linear)


@pytest.fixture(scope="module")
def artifact(tiny_target: Target) -> Artifact:
    drafter = DraftLM.create(DraftLMConfig(layers=(0, 1)), tiny_target)
    return Artifact(drafter=drafter, target=tiny_target, topology=TREE, identity=tiny_target.identity, provenance={})


@pytest.mark.parametrize(("weights", "kinds", "error"), [
    ("float32", {"F32"}, 0.0), ("bfloat16", {"F32", "BF16"}, 2 ** -8), ("int8", {"F32", "Q8_0"}, 1 / 127),
])
def test_a_file_holds_the_weights_that_are_measured(
    tmp_path: Path, artifact: Artifact, weights: str, kinds: set[str], error: float
) -> None:
    settings = ExportSettings(target_gguf=write_vocabulary(tmp_path / "target.gguf", artifact.target.vocab_size),
                              weights=weights)
    file = export_artifact(artifact, artifact.target, "gguf", tmp_path / "out", settings) / "draft.gguf"
    read = {one.name: one for one in gguf.GGUFReader(file).tensors}
    assert {one.tensor_type.name for one in read.values()} == kinds
    held = read["blk.1.ffn_down.weight"]
    found = torch.from_numpy(gguf.quants.dequantize(held.data, held.tensor_type).copy())
    own = artifact.drafter.state_dict()["decoder.layers.1.mlp.down_proj.weight"]
    torch.testing.assert_close(found, rounded(own, weights), rtol=0, atol=0)
    assert (found - own).abs().max() <= error * own.abs().max()
    assert bool(error) == bool((found != own).any())
    number = {"float32": "float32", "bfloat16": "bfloat16", "int8": "int8"}[weights]
    assert f"`blk.0.ffn_down.weight` to `blk.1.ffn_down.weight` (2) | [32, 64] | {number} |" in (
        tmp_path / "out" / "README.md").read_text()


def test_rows_without_whole_blocks_stay_in_bfloat16() -> None:
    weight = torch.randn(4, 40, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(rounded(weight, "int8"), weight.bfloat16().float(), rtol=0, atol=0)
    torch.testing.assert_close(rounded(weight[0], "int8"), weight[0], rtol=0, atol=0)


def test_the_loss_is_measured_on_a_copy(artifact: Artifact) -> None:
    before = {name: tensor.clone() for name, tensor in artifact.drafter.state_dict().items()}
    prompts, settings = [[5, 9, 11], [7, 8]], TrialSettings(draft_tokens=2, max_new_tokens=6)
    # A draft that is the target itself: every guess is accepted.
    assert rounding_loss(artifact, as_exported("gguf", "float32"), prompts, settings) == (3.0, 3.0)
    noisy = rounded_artifact(artifact, as_exported("gguf", "int8")).drafter.state_dict()
    changed = {name for name in before if not torch.equal(noisy[name], before[name])}
    assert {before[name].ndim for name in changed} == {2}
    assert all(torch.equal(tensor, before[name]) for name, tensor in artifact.drafter.state_dict().items())


@pytest.mark.parametrize(("weights", "number", "error"), [("int8", torch.int8, 0.5001 / 127),
                                                          ("float8", torch.float8_e4m3fn, 2 ** -4)])
def test_a_folder_holds_the_weights_that_are_measured(
    tmp_path: Path, artifact: Artifact, weights: str, number: torch.dtype, error: float
) -> None:
    settings = ExportSettings(weights=weights)
    folder = export_artifact(artifact, artifact.target, "huggingface", tmp_path / "out", settings)
    held = load_file(folder / "model.safetensors")
    own = rounded_artifact(artifact, as_exported("huggingface", weights)).drafter.state_dict()
    trained = artifact.drafter.state_dict()
    for name, tensor in held.items():
        # The rows of a matrix have scales of their own; the embedding has none, norms keep all bits.
        scales = held.get(f"{name}_scale")
        whole = torch.float32 if tensor.ndim < 2 or "scale" in name else torch.bfloat16
        assert tensor.dtype == (whole if scales is None else number), name
        if "scale" not in name:
            read = tensor.float() * (1.0 if scales is None else scales)
            inside = name.replace("model.", "decoder.", 1).replace("lm_head", "head")
            torch.testing.assert_close(own[inside], read, rtol=0, atol=0)
            rows = trained[inside].abs().amax(-1, keepdim=True) if scales is not None else trained[inside].abs()
            assert ((read - trained[inside]).abs() <= rows * (error if scales is not None else 2 ** -8)).all(), name
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in held if name.endswith("_scale")} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"}
    config = json.loads((folder / "config.json").read_text())
    kind = "int" if weights == "int8" else "float"
    assert config["quantization_config"]["format"] == f"{kind}-quantized"
    assert config["quantization_config"]["config_groups"]["group_0"]["weights"]["type"] == kind
    assert config["quantization_config"]["ignore"] == []
    assert config["quantization_config"]["config_groups"]["group_0"]["targets"] == ["Linear", "re:.*lm_head"]


@pytest.mark.parametrize("layout", ["eagle", "speculators"])
@pytest.mark.parametrize("output", ["copy", "shared"])
def test_eagle_3_in_fewer_bits(tmp_path: Path, layout: str, output: Literal["copy", "shared"]) -> None:
    target = six_layers()
    drafter = Eagle3.create(Eagle3Config(taps=(1, 2, 4), vocabulary_size=len(IDS), output=output), target, IDS)
    held = {}
    for weights in ("float32", "bfloat16", "int8"):
        folder = written(drafter, target, layout, tmp_path / weights, ExportSettings(weights=weights))
        held[weights] = load_file(folder / "model.safetensors")
        assert ("quantization_config" in json.loads((folder / "config.json").read_text())) == (weights == "int8")
    first = "midlayer" if layout == "eagle" else "layers.0"
    own = ["lm_head.weight"] if output == "copy" else []
    for name in ("fc.weight", f"{first}.self_attn.q_proj.weight", *own):
        torch.testing.assert_close(held["int8"][name] * held["int8"][f"{name}_scale"], held["float32"][name], rtol=0,
                                   atol=float(held["float32"][name].abs().max()) / 127)
    assert held["int8"]["lm_head.weight"].dtype == (torch.int8 if own else torch.bfloat16)
    assert held["bfloat16"]["lm_head.weight"].dtype == held["bfloat16"]["fc.weight"].dtype == torch.bfloat16
    said = json.loads((tmp_path / "int8" / "config.json").read_text())["quantization_config"]
    assert said["ignore"] == ([] if own else ["lm_head"]), "vLLM shares the target's output layer where both are equal"
    assert {held["int8"][name].dtype for name in ("d2t", "t2d", "norm.weight")} == {
        torch.int64, torch.bool, torch.float32}


def test_an_unknown_number_format_is_refused(tmp_path: Path, artifact: Artifact) -> None:
    for layout, weights, said in (
        ("gguf", "float8", r"weights must be one of float32, bfloat16, int8 in the format gguf, got 'float8'"),
        ("huggingface", "int4", r"weights must be one of .* in the format huggingface, got 'int4'"),
        ("medusa", "int8", r"the format medusa holds its weights as they were trained, got weights 'int8'; leave it "
                           r"out, or choose --format dflash, eagle, huggingface, speculators, gguf"),
    ):
        with pytest.raises(UserError, match=said):
            export_artifact(artifact, artifact.target, layout, tmp_path / "out", ExportSettings(weights=weights))
    assert not (tmp_path / "out").exists()
