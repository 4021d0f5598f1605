"""EAGLE-3 in the layout of the speculators library: names and keys, the same drafts back, refused families."""

import json
from pathlib import Path

import pytest
import torch
from draftsmith.export import import_drafter
from draftsmith.modules import Eagle3, Features, Target, UserError
from draftsmith.modules.parts.feature_drafter import EagleDrafter
from safetensors.torch import load_file
from support.families import IDS, randomised

from .test_eagle import MADE
from .test_engine_contracts import written

THIRD = [name for name in MADE if name.startswith("eagle3")]


def speculators(name: str, target: Target, out: Path) -> tuple[EagleDrafter, Path]:
    drafter = randomised(MADE[name](target))
    return drafter, written(drafter, target, "speculators", out)


@pytest.mark.parametrize("name", THIRD)
def test_export_and_import_draft_the_same(tmp_path: Path, tiny_target: Target, name: str) -> None:
    drafter, folder = speculators(name, tiny_target, tmp_path / "out")
    back = import_drafter("speculators", folder, tiny_target)
    assert isinstance(back, Eagle3)
    assert (back.block, back.taps) == (drafter.block, drafter.taps)
    features = tiny_target.encode(Features.from_rows([([9, 8, 7, 30, 31, 32], [True] * 6)]), drafter.taps)
    with torch.no_grad():
        ours, theirs = drafter(features).hidden_BLKD[:, :, :3], back(features).hidden_BLKD[:, :, :3]
        torch.testing.assert_close(back.project(theirs, 0), drafter.project(ours, 0), atol=1e-5, rtol=1e-5)


def test_names_and_keys_are_those_of_the_library(tmp_path: Path, tiny_target: Target) -> None:
    drafter, folder = speculators("eagle3-layers", tiny_target, tmp_path / "out")
    tensors = load_file(folder / "model.safetensors")
    layers = {f"layers.{layer}.{name}.weight" for layer in range(3) for name in (
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
        "mlp.down_proj", "input_layernorm", "post_attention_layernorm")}
    assert set(tensors) == layers | {"layers.0.hidden_norm.weight", "fc.weight", "norm.weight",
                                     "lm_head.weight", "d2t", "t2d"}
    config = json.loads((folder / "config.json").read_text())
    assert "model_type" not in config
    assert config["speculators_model_type"] == "eagle3"
    assert config["draft_vocab_size"] == len(IDS)
    # vLLM takes a missing key for true.
    assert config["norm_before_residual"] is False
    assert config["eagle_aux_hidden_state_layer_ids"] == [tap + 1 for tap in drafter.taps]
    inner = config["transformer_layer_config"]
    assert (inner["model_type"], inner["num_hidden_layers"], inner["vocab_size"]) == ("llama", 3, 100)
    assert inner["num_aux_hidden_states"] == len(drafter.taps)
    assert inner["rope_parameters"]["rope_theta"] == inner["rope_theta"] == drafter.block.rope_base
    assert config["speculators_config"]["verifier"] == {"name_or_path": "tiny-random",
                                                        "architectures": tiny_target.config.architectures or []}


def test_the_output_layer_of_the_target_is_left_out(tmp_path: Path, tiny_target: Target) -> None:
    # A reduced vocabulary has rows of its own, even where they are copies.
    for name, held in (("eagle3-borrowed", False), ("eagle3-shared", True), ("eagle3", True)):
        _, folder = speculators(name, tiny_target, tmp_path / name)
        assert ("lm_head.weight" in load_file(folder / "model.safetensors")) == held


def test_other_families_are_refused(tmp_path: Path, tiny_target: Target) -> None:
    with pytest.raises(UserError, match="holds EAGLE-3 drafters and drafters of blocks, this artifact is eagle;"):
        speculators("eagle", tiny_target, tmp_path / "out")
    assert not (tmp_path / "out").exists()
