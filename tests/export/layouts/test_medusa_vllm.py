"""vLLM's layout of Medusa heads with one output layer: what vLLM 0.32.0 asks for, the same drafts back, damage."""

import json
from pathlib import Path

import pytest
import torch
from draftsmith.export import export_artifact, import_drafter
from draftsmith.modules import MedusaConfig, Target, UserError
from draftsmith.modules.families.medusa.drafter import Medusa
from safetensors.torch import load_file, save_file
from support.artifacts import heads
from torch.nn import functional

from .test_medusa import as_artifact, head_logits

FILE = "model.safetensors"
REDUCED = {"output": "one_copy", "vocabulary_size": 20}
EVERY = [REDUCED, {"output": "one_copy", "num_layers": 2}, {"vocabulary_size": 20}, {},
         {**REDUCED, "num_layers": 3, "tie_blocks": True}]


def written(drafter: Medusa, target: Target, out: Path) -> Path:
    return export_artifact(as_artifact(drafter, target), target, "medusa-vllm", out)


def vllm_logits(folder: Path, hidden_ND: torch.Tensor) -> list[torch.Tensor]:
    """Logits [N, V] of each head, as `Medusa` of vllm/model_executor/models/medusa.py (0.32.0) makes them of a folder:
    `MedusaConfig`, `load_weights`, `forward` and `compute_logits`."""
    config, weights = json.loads((folder / "config.json").read_text()), load_file(folder / FILE)
    assert config["model_type"] == "medusa"
    assert config["original_lm_head"] is True, "without it each head has an output layer over all tokens"
    tokens = config["vocab_size"]
    rows = config.get("truncated_vocab_size", tokens)
    token_map = weights["token_map"] if rows < tokens else None
    names, found = {"lm_head.weight", *({"token_map"} if rows < tokens else ())}, []
    for head in range(config["num_heads"]):
        states_ND = hidden_ND
        for layer in range(config["num_hidden_layers"]):
            name = f"blocks.{head}.layers.{layer}"
            # The bias is read if the configuration says so, and dropped silently otherwise.
            bias_D = weights[f"{name}.bias"] if config["medusa_fc_bias"] else None
            states_ND = states_ND + functional.silu(functional.linear(states_ND, weights[f"{name}.weight"], bias_D))
            names |= {f"{name}.weight", f"{name}.bias"}
        assert weights["lm_head.weight"].shape == (rows, config["hidden_size"])
        logits_NQ = states_ND @ weights["lm_head.weight"].T
        if token_map is not None:
            assert (token_map.dtype, token_map.shape) == (torch.int64, (rows,))
            logits_NV = torch.full((len(hidden_ND), tokens), -torch.inf)
            logits_NV[..., token_map] = logits_NQ
            logits_NQ = logits_NV
        found.append(logits_NQ)
    assert set(weights) == names, "vLLM passes over any other tensor without a word"
    return found


@pytest.mark.parametrize("settings", EVERY)
def test_vllm_computes_the_heads_logits(tmp_path: Path, tiny_target: Target, settings: dict[str, object]) -> None:
    drafter, final_BLD = heads(tiny_target, **settings), torch.randn(1, 40, 32)
    ids_Q = torch.arange(100) if drafter.token_ids_Q is None else drafter.token_ids_Q
    with torch.no_grad():
        ours = head_logits(drafter, final_BLD)[:, 0]
    for head, theirs in enumerate(vllm_logits(written(drafter, tiny_target, tmp_path / "out"), final_BLD[0])):
        torch.testing.assert_close(theirs[:, ids_Q], ours[head], atol=1e-5, rtol=1e-5)
        assert torch.isinf(theirs).sum() == theirs.numel() - ours[head].numel()


@pytest.mark.parametrize("settings", EVERY)
def test_export_and_import_draft_the_same(tmp_path: Path, tiny_target: Target, settings: dict[str, object]) -> None:
    drafter, final_BLD = heads(tiny_target, **settings), torch.randn(1, 5, 32)
    back = import_drafter("medusa", written(drafter, tiny_target, tmp_path / "out"), tiny_target)
    assert (back.config.output, back.config.tie_blocks) == ("one_copy", drafter.config.tie_blocks)
    assert back.config.vocabulary_size == drafter.config.vocabulary_size
    with torch.no_grad():
        torch.testing.assert_close(head_logits(back, final_BLD), head_logits(drafter, final_BLD), atol=1e-6, rtol=1e-6)


def test_the_folder_says_who_reads_it(tmp_path: Path, tiny_target: Target) -> None:
    folder = written(heads(tiny_target, **REDUCED), tiny_target, tmp_path / "out")
    assert {path.name for path in folder.iterdir()} == {
        ".draftsmith.json", "config.json", FILE, "README.md", "origin.json", "acceptance.json"}
    config = json.loads((folder / "config.json").read_text())
    assert config == {
        "architectures": ["MedusaModel"], "base_model_name_or_path": "tiny-random", "hidden_size": 32,
        "medusa_fc_bias": True, "model_type": "medusa", "num_heads": 3, "num_hidden_layers": 1,
        "original_lm_head": True, "read_by": "vLLM up to 0.32; not Text Generation Inference",
        "truncated_vocab_size": 20, "vocab_size": 100}
    # By this key Text Generation Inference takes a folder for Medusa heads, and by the other for none.
    assert "medusa_num_heads" not in config
    text = (folder / "README.md").read_text()
    assert "--model-loader-extra-config '{\"enable_weights_track\": false}'" in text
    whole = written(heads(tiny_target, output="one_copy"), tiny_target, tmp_path / "whole")
    assert "truncated_vocab_size" not in json.loads((whole / "config.json").read_text())
    assert "enable_weights_track" not in (whole / "README.md").read_text()


def test_the_rows_stand_in_the_order_of_their_tokens(tmp_path: Path, tiny_target: Target) -> None:
    """vLLM ignores a map of the whole vocabulary: its rows must then already be in order."""
    ids_V = torch.randperm(100, generator=torch.Generator().manual_seed(0))
    drafter = Medusa.create(MedusaConfig(num_heads=2, output="one_copy", vocabulary_size=100), tiny_target, ids_V)
    weights = load_file(written(drafter, tiny_target, tmp_path / "out") / FILE)
    assert torch.equal(weights["token_map"], torch.arange(100))
    assert torch.equal(weights["lm_head.weight"], tiny_target.output_weight())


def altered(folder: Path, **changes: torch.Tensor | None) -> Path:
    """The folder with tensors exchanged, or taken out where None is given."""
    tensors = {**load_file(folder / FILE), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / FILE)
    return folder


def test_a_map_selects_rows_of_a_longer_layer(tmp_path: Path, tiny_target: Target) -> None:
    drafter = heads(tiny_target, vocabulary_size=20)
    folder = written(drafter, tiny_target, tmp_path / "out")
    altered(folder, **{"lm_head.weight": tiny_target.output_weight().clone()})
    back = import_drafter("medusa", folder, tiny_target)
    assert torch.equal(back.output_parameters(0)[0], tiny_target.output_weight()[drafter.token_ids_Q])


def test_layers_of_single_heads_are_read_too(tmp_path: Path, tiny_target: Target) -> None:
    drafter = heads(tiny_target, output="one_copy")
    folder, weight_VD = written(drafter, tiny_target, tmp_path / "out"), drafter.output_parameters(0)[0].detach()
    each = {f"lm_heads.{head}.weight": weight_VD + head for head in range(3)}
    back = import_drafter("medusa", altered(folder, **{"lm_head.weight": None}, **each), tiny_target)
    assert back.config.output == "copy"
    assert torch.equal(back.output_parameters(2)[0], weight_VD + 2)


@pytest.mark.parametrize(("changes", "told"), [
    ({"lm_head.weight": None}, "holds token_map without lm_head.weight"),
    ({"token_map": torch.arange(81, 101)}, "must hold tokens from 0 to 99, those of tiny-random"),
    ({"token_map": torch.arange(-1, 19)}, "must hold tokens from 0 to 99"),
    ({"token_map": torch.arange(20.0)}, "must hold tokens from 0 to 99"),
    ({"token_map": torch.zeros(20, dtype=torch.int64)}, "token 0 occurs 20 times in the draft vocabulary"),
    ({"lm_head.weight": torch.zeros(19, 32)}, r"does not fit .* tiny-random .*outputs\.0\.weight"),
    ({"lm_head.weight": torch.full((20, 32), torch.nan)}, "not finite"),
    ({"blocks.1.layers.0.bias": None}, r"does not fit .* tiny-random .*heads\.1\.0\.linear\.bias"),
    ({f"blocks.{head}.layers.0.{part}": None for head in range(3) for part in ("weight", "bias")},
     "num_heads must be at least 1, got 0"),
    ({"blocks.0.norm.weight": torch.zeros(32)}, r"'blocks\.0\.norm\.weight', no tensor of Medusa heads"),
])
def test_damaged_folders_are_named(
    tmp_path: Path, tiny_target: Target, changes: dict[str, torch.Tensor | None], told: str
) -> None:
    folder = written(heads(tiny_target, **REDUCED), tiny_target, tmp_path / "out")
    with pytest.raises(UserError, match=told):
        import_drafter("medusa", altered(folder, **changes), tiny_target)
