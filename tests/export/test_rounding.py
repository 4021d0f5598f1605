"""Weights of fewer bits: what an engine reads from the file, and what the drafter loses by it."""

from functools import partial
from pathlib import Path

import gguf
import pytest
import torch
from draftsmith.export import Artifact, ExportSettings, TrialSettings, export_artifact
from draftsmith.export.engines.rounding import rounded_artifact, rounding_loss
from draftsmith.export.layouts.gguf_file import rounded
from draftsmith.modules import DraftLM, DraftLMConfig, Target, UserError
from support.artifacts import TREE
from support.gguf_vocabulary import write_vocabulary


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
    assert rounding_loss(artifact, partial(rounded, weights="float32"), prompts, settings) == (3.0, 3.0)
    noisy = rounded_artifact(artifact, partial(rounded, weights="int8")).drafter.state_dict()
    changed = {name for name in before if not torch.equal(noisy[name], before[name])}
    assert {before[name].ndim for name in changed} == {2}
    assert all(torch.equal(tensor, before[name]) for name, tensor in artifact.drafter.state_dict().items())


def test_an_unknown_number_format_is_refused() -> None:
    with pytest.raises(UserError, match="weights must be one of float32, bfloat16, int8, got 'int4'"):
        ExportSettings(weights="int4")
