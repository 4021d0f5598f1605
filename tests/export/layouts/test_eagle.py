"""EAGLE drafters in the official layout, in that of the speculators library and in EAGLE-4's: recorded outputs, names
and keys, the same drafts back, refused mistakes."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draftsmith.export import ImportSettings, import_drafter
from draftsmith.export.layouts.parts.export_format import READ, Places
from draftsmith.export.layouts.registry import format_named
from draftsmith.modules import (
    Drafter,
    Eagle,
    Eagle2Tree,
    EagleConfig,
    Features,
    Hydra,
    HydraConfig,
    Kangaroo,
    KangarooConfig,
    Medusa,
    MedusaConfig,
    PEagle,
    PEagleConfig,
    Target,
    UserError,
)
from draftsmith.modules.families.eagle3.drafter import Eagle3, Eagle3Config, WideBlock
from draftsmith.modules.interfaces.proposer import Frontier, Observation
from draftsmith.modules.parts.decoder_block import AttentionContext, BlockConfig
from draftsmith.modules.parts.feature_drafter import EagleDrafter
from draftsmith.modules.parts.training_time_test import step_attentions
from draftsmith.modules.target.loading.tiny_model import tiny_tokenizer
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.families import IDS, randomised
from support.targets import random_model
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from .test_engine_contracts import written

FIXTURES = Path(__file__).resolve().parents[4] / "shared" / "fixtures"
CLOSE = {"atol": 2e-5, "rtol": 1e-5}
TREE = [(0,), (1,), (2,), (3,), (0, 0), (0, 1), (0, 2), (1, 0), (0, 0, 0), (0, 0, 0, 0)]
"""The nodes of the official tree of EAGLE-1 that have children, the root left out."""
THIRD = ImportSettings(taps=(1, 3, 4), rope_base=500000.0)  # Values that the recorded checkpoint of EAGLE-3 leaves open


def fixture(name: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    path = FIXTURES / f"{name}.safetensors"
    if not path.is_file():
        pytest.skip(f"the recorded outputs of the official code are not next to the repository ({path.name})")
    with safe_open(path, "pt") as file:
        return load_file(path), file.metadata()


def official(name: str, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], Target]:
    """(recorded outputs, the checkpoint, a target of eight layers with its embedding and output layer)."""
    tensors, said = fixture(name)
    weights = {key.removeprefix("weight/"): value for key, value in tensors.items() if key.startswith("weight/")}
    folder.mkdir()
    (folder / "config.json").write_text(said["config"])
    save_file(weights, folder / "model.safetensors")
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False, pad_token_id=0, bos_token_id=1, eos_token_id=2))
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(weights["embed_tokens.weight"])
        if "input/target_lm_head" in tensors:
            model.lm_head.weight.copy_(tensors["input/target_lm_head"])
    return tensors, weights, Target(model, tiny_tokenizer(), name="tiny-target")


def features_of(tensors: dict[str, Tensor]) -> Features:
    """Six positions with states, and the token after them."""
    tokens = torch.cat([tensors["input/first_id"], tensors["input/shifted_ids"]], dim=1)[0].tolist()
    rows = Features.from_rows([(tokens, [True] * 7)])

    def seven(states: Tensor) -> Tensor:
        return torch.cat([states, torch.zeros_like(states[:, :1])], dim=1)

    taps = {layer: seven(tensors[f"input/tap_{name}"]) for layer, name in ((1, "low"), (3, "mid"), (4, "high"))
            if f"input/tap_{name}" in tensors}
    final = tensors["input/features"] if "input/features" in tensors else tensors["input/tap_low"]
    return Features(tokens_BL=rows.tokens_BL, supervised_BL=rows.supervised_BL, segments_BL=rows.segments_BL,
                    positions_BL=rows.positions_BL, final_BLD=seven(final), taps=taps)


def observation(features: Features, first: int, end: int) -> Observation:
    return Observation(tokens_BN=features.tokens_BL[:, first:end], counts_B=torch.tensor([end - first]),
                       final_BND=features.final()[:, first:end], roots_B=features.tokens_BL[:, end],
                       taps={layer: states[:, first:end] for layer, states in features.taps.items()})


def level(nodes: list[int], parents: list[int], tokens: list[int]) -> Frontier:
    return Frontier(nodes_BF=torch.tensor([nodes]), parents_BF=torch.tensor([parents]),
                    tokens_BF=torch.tensor([tokens]))


def check_steps(drafter: EagleDrafter, features: Features, tensors: dict[str, Tensor]) -> None:
    """Four positions, two, then three single steps on the drafter's own states."""
    state = drafter.start(1, 32)
    for first, end in ((0, 4), (4, 6)):
        drafter.observe(state, torch.tensor([0]), observation(features, first, end))
    drafter.expand(state, level([0], [-1], features.tokens_BL[0, 6:].tolist()))
    for step, token in enumerate(tensors["input/step_tokens"][0].tolist()):
        found = drafter.expand(state, level([step + 1], [step], [token])).log_probs_BFHQ[:, 0, 0]
        torch.testing.assert_close(state.own_RMD[:, -1], tensors["output/step_hidden"][:, step], **CLOSE)
        torch.testing.assert_close(found, tensors["output/step_logits"][:, step].log_softmax(-1), **CLOSE)


def test_the_first_eagle_gives_the_recorded_outputs(tmp_path: Path) -> None:
    tensors, _, target = official("eagle1", tmp_path / "official")
    drafter, features = import_drafter("eagle", tmp_path / "official", target), features_of(tensors)
    assert isinstance(drafter, Eagle)
    with torch.no_grad():
        hidden = drafter(features).hidden_BLKD[:, :6, 0]
        torch.testing.assert_close(hidden, tensors["output/hidden"], **CLOSE)
        torch.testing.assert_close(drafter.project(hidden, 0), tensors["output/logits"], **CLOSE)
    check_steps(drafter, features, tensors)


def test_the_first_eagle_expands_the_recorded_tree(tmp_path: Path) -> None:
    tensors, _, target = official("eagle1", tmp_path / "official")
    drafter, features = import_drafter("eagle", tmp_path / "official", target), features_of(tensors)
    state = drafter.start(1, 32)
    drafter.observe(state, torch.tensor([0]), observation(features, 0, 6))
    best = drafter.expand(state, level([0], [-1], [0])).best(10)[0][0, :, 0]
    proposed, rows = {(): best[0].tolist()}, [best]
    for depth in range(1, 5):
        nodes = [path for path in TREE if len(path) == depth]
        frontier = level([TREE.index(path) + 1 for path in nodes],
                         [TREE.index(path[:-1]) + 1 if depth > 1 else 0 for path in nodes],
                         [proposed[path[:-1]][path[-1]] for path in nodes])
        rows.append(drafter.expand(state, frontier).best(10)[0][0, :, 0])
        proposed |= dict(zip(nodes, rows[-1].tolist(), strict=True))
    assert torch.equal(torch.cat(rows), tensors["output/tree_topk_tokens"])


def test_the_third_eagle_gives_the_recorded_outputs(tmp_path: Path) -> None:
    tensors, weights, target = official("eagle3", tmp_path / "official")
    drafter, features = import_drafter("eagle", tmp_path / "official", target, THIRD), features_of(tensors)
    assert isinstance(drafter, Eagle3)
    assert (drafter.taps, drafter.block.rope_base, drafter.block.norm_eps) == ((1, 3, 4), 5e5, 1e-5)
    assert torch.equal(drafter.token_ids_Q, torch.arange(48) + weights["d2t"])
    with torch.no_grad():
        torch.testing.assert_close(drafter.fuse(features.final(), features.taps)[:, :6], tensors["output/fused"],
                                   **CLOSE)
        own = drafter.rollout(features, 1, drafter.contexts(features))[0][:, :6]
        torch.testing.assert_close(own, tensors["output/prefix_hidden"], **CLOSE)
        logits = drafter.project(drafter.finish(own), 0)
        torch.testing.assert_close(logits, tensors["output/prefix_logits"], **CLOSE)
    check_steps(drafter, features, tensors)


def test_the_third_eagle_grows_the_recorded_tree(tmp_path: Path) -> None:
    tensors, _, target = official("eagle3", tmp_path / "official")
    drafter, features = import_drafter("eagle", tmp_path / "official", target, THIRD), features_of(tensors)
    state = drafter.start(1, 32)
    drafter.observe(state, torch.tensor([0]), observation(features, 0, 6))
    tree = Eagle2Tree(12, 4, 4).grow(drafter, state, features.tokens_BL[:, 6])
    assert torch.equal(tree.tokens_BN, tensors["output/tree_draft_tokens"])
    assert torch.equal(tree.ancestors_BNN[0], tensors["output/tree_mask"][0, 0].bool())
    assert torch.equal(tree.depths_BN[0], tensors["output/tree_position_ids"])


def test_the_official_trainer_gives_the_same_steps() -> None:
    tensors, said = fixture("eagle3_ttt")
    shape = json.loads(said["config"])
    block = WideBlock(BlockConfig(hidden_size=32, intermediate_size=64, num_heads=4, num_kv_heads=2, head_dim=8,
                                  norm_eps=shape["rms_norm_eps"]))
    block.load_state_dict({key.removeprefix("weight/midlayer."): value for key, value in tensors.items()
                           if key.startswith("weight/")})
    read, embedded = tensors["input/fused"], tensors["input/token_embeddings"]
    attentions = step_attentions(AttentionContext.training(Features.from_rows([(list(range(6)), [True] * 6)])))
    with torch.no_grad():
        for step in range(4):
            read = block(embedded[:, step : step + 6], read, next(attentions))
            torch.testing.assert_close(read, tensors["output/hidden"][step], **CLOSE)


@pytest.mark.parametrize("name", ["eagle1", "eagle3"])
def test_official_drafters_come_back_as_they_were(tmp_path: Path, name: str) -> None:
    _, weights, target = official(name, tmp_path / "official")
    drafter = import_drafter("eagle", tmp_path / "official", target, THIRD if name == "eagle3" else READ)
    again = load_file(exported(drafter, target, tmp_path / "again") / "model.safetensors")
    # Official checkpoints of EAGLE-3 hold no embedding: its code takes the target's.
    stored = {key: value for key, value in weights.items() if name == "eagle1" or key != "embed_tokens.weight"}
    assert {key: (value.shape, value.dtype) for key, value in again.items()} == \
        {key: (value.shape, value.dtype) for key, value in stored.items()}
    assert all(torch.equal(tensor, weights[key]) for key, tensor in again.items())
    before, after = (json.loads((tmp_path / part / "config.json").read_text()) for part in ("official", "again"))
    same = before.keys() & after.keys() - {"architectures", "max_position_embeddings"}
    assert {key: after[key] for key in same} == {key: before[key] for key in same}


def exported(drafter: EagleDrafter | Medusa, target: Target, out: Path, layout: str = "eagle") -> Path:
    return written(drafter, target, layout, out)


MADE = {
    "eagle": lambda target: Eagle.create(EagleConfig(rope_base=500.0), target),
    "eagle-reduced": lambda target: Eagle.create(EagleConfig(bias=False, vocabulary_size=len(IDS)), target, IDS),
    "eagle3": lambda target: Eagle3.create(Eagle3Config(norm_output=True), target),
    "eagle3.1": lambda target: Eagle3.create(Eagle3Config(fc_norm=True, norm_output=True), target),
    "eagle3-norms": lambda target: Eagle3.create(Eagle3Config(norm_before_fc=True, norm_before_residual=True), target),
    "eagle3-layers": lambda target: Eagle3.create(Eagle3Config(num_layers=3, vocabulary_size=len(IDS)), target, IDS),
    "eagle3-window": lambda target: Eagle3.create(Eagle3Config(num_layers=2, window=48), target),
    "eagle3-qk-norm": lambda target: Eagle3.create(Eagle3Config(num_layers=2, window=7, qk_norm=True), target),
    "eagle3-wide": lambda target: Eagle3.create(Eagle3Config(hidden_size=48, fc_norm=True), target),
    "eagle3-reduced": lambda target: Eagle3.create(Eagle3Config(taps=(1,), vocabulary_size=len(IDS)), target, IDS),
    "eagle3-parallel": lambda target: PEagle.create(
        PEagleConfig(steps=3, num_layers=2, fc_norm=True, vocabulary_size=len(IDS), mask_token_id=5), target, IDS),
    "eagle3-shared": lambda target: Eagle3.create(
        Eagle3Config(taps=(0,), vocabulary_size=len(IDS), output="shared"), target, IDS),
    "eagle3-borrowed": lambda target: Eagle3.create(Eagle3Config(taps=(0,), output="shared"), target),
}


@pytest.mark.parametrize(("name", "layout"), [*((name, "eagle") for name in MADE), *(
    (name, "speculators") for name in MADE if name.startswith("eagle3"))])
def test_export_and_import_draft_the_same(tmp_path: Path, tiny_target: Target, name: str, layout: str) -> None:
    drafter = randomised(MADE[name](tiny_target))
    back = import_drafter(layout, exported(drafter, tiny_target, tmp_path / "out", layout), tiny_target)
    assert (type(back), back.block, back.taps, back.window) == (
        type(drafter), drafter.block, drafter.taps, drafter.window)
    if name == "eagle3-parallel":
        assert back.describe() == {**drafter.describe(), "hidden_size": 32}
        with pytest.raises(UserError, match="all guesses in one pass"):
            exported(drafter, tiny_target, tmp_path / "gguf", "gguf")
    features = tiny_target.encode(Features.from_rows([([9, 8, 7, 30, 31, 32], [True] * 6)]), drafter.taps)
    with torch.no_grad():
        ours, theirs = drafter(features).hidden_BLKD[:, :, :3], back(features).hidden_BLKD[:, :, :3]
        assert torch.equal(ours, theirs)
        logits, found = drafter.project(ours, 0), back.project(theirs, 0)
    if drafter.token_ids_Q is not None and back.token_ids_Q is None:
        found = found[..., drafter.token_ids_Q]
    torch.testing.assert_close(found, logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("name", "said", "shapes"), [
    ("eagle3.1", ("fc_norm", "norm_output"), {"fc_norm.0.weight": (32,), "fc_norm.1.weight": (32,)}),
    ("eagle3-norms", ("norm_before_fc", "norm_before_residual"), {"input_norm.weight": (64,)})])
def test_norms_have_the_names_of_the_engines(tmp_path: Path, tiny_target: Target, name: str, said: tuple[str, ...],
                                             shapes: dict[str, tuple[int, ...]]) -> None:
    folder = exported(randomised(MADE[name](tiny_target)), tiny_target, tmp_path / "out")
    config = json.loads((folder / "config.json").read_text())
    assert {key for key in ("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual")
            if config[key]} == {*said}
    tensors = load_file(folder / "model.safetensors")
    assert {key: tuple(tensor.shape) for key, tensor in tensors.items()
            if key.startswith(("fc", "input_norm"))} == {"fc.weight": (32, 64), **shapes}


@pytest.mark.parametrize(("name", "model", "layers", "options"), [
    ("eagle3-window", "LlamaForCausalLMEagle3",
     {"model_type": "llama", "sliding_window": 48, "layer_types": ["sliding_attention"] * 2},
     "--speculative-draft-window-size 47"),
    ("eagle3-qk-norm", "Eagle3Qwen3ForCausalLM", {"model_type": "qwen3", "sliding_window": 7}, None),
    ("eagle3", "LlamaForCausalLMEagle3", {"model_type": "llama"}, "--speculative-algorithm EAGLE3"),
])
def test_windows_and_norms_of_heads_have_the_keys_of_the_engines_that_read_them(
    tmp_path: Path, tiny_target: Target, name: str, model: str, layers: dict[str, Any], options: str | None,
) -> None:
    drafter = MADE[name](tiny_target)
    for layout in ("eagle", "speculators"):
        said = json.loads((exported(drafter, tiny_target, tmp_path / layout, layout) / "config.json").read_text())
        inner = said.get("transformer_layer_config", said)
        assert {key: inner[key] for key in layers} == layers
        assert ("sliding_window" in inner) == (drafter.window is not None)
        if layout == "eagle":
            assert said["architectures"] == [model]
    layout = format_named("eagle")
    commands = layout.commands(drafter, Places())
    assert "vLLM" in commands
    assert "SGLang" not in commands if options is None else options in commands["SGLang"]
    assert ("TensorRT-LLM" in layout.read_by(drafter)) == (name == "eagle3")


@pytest.mark.parametrize(("make", "layout", "message"), [
    (lambda target: Eagle.create(EagleConfig(window=64), target), "eagle", "this drafter has window 64, which"),
    (lambda target: Eagle.create(EagleConfig(qk_norm=True), target), "eagle-sglang", "this drafter has qk_norm, which"),
    (lambda target: Hydra.create(HydraConfig(prefix=True, window=9), target), "hydra", "no window, .* one of 9 tokens"),
    (lambda target: Kangaroo.create(KangarooConfig(window=9), target), "kangaroo", "no window, .* one of 9 tokens"),
    (lambda target: Kangaroo.create(KangarooConfig(qk_norm=True), target), "kangaroo", "no norms of queries and keys"),
    (MADE["eagle3-qk-norm"], "gguf", r"nor window, this drafter has .*qk_norm and window 7; train another"),
    (MADE["eagle3-window"], "openvino", r"no window and no further norms, this drafter has .*window 48; train another"),
])
def test_windows_and_norms_that_no_reader_knows_are_refused(
    tmp_path: Path, tiny_target: Target, make: Callable[[Target], Drafter], layout: str, message: str,
) -> None:
    drafter, wanted = make(tiny_target), format_named(layout)
    assert re.search(message, wanted.refusal(drafter, tiny_target))


def test_norms_of_heads_are_the_default_where_the_target_has_them(tiny_target: Target) -> None:
    qwen = Target(random_model("Qwen3", num_hidden_layers=2), tiny_tokenizer(), name="qwen")
    assert [Eagle3.create(Eagle3Config(qk_norm=asked), one).block.qk_norm for one in (tiny_target, qwen)
            for asked in (None, True, False)] == [False, True, False, True, True, False]
    # An artifact from before the setting has none, whatever the target, and so has what continues it.
    described = Eagle3.create(Eagle3Config(qk_norm=False), qwen).describe()
    del described["qk_norm"], described["block"]["qk_norm"]
    older = randomised(Eagle3.rebuild(described, qwen.identity))
    for config in (Eagle3Config(taps=older.taps), older.config):
        found = Eagle3.create(config, qwen, start=older)
        assert (found.config.qk_norm, found.block.qk_norm) == (False, False)
    assert older.config.qk_norm is False


def test_the_taps_come_back_by_the_keys_of_engines_alone(tmp_path: Path, tiny_target: Target) -> None:
    drafter = randomised(MADE["eagle3-reduced"](tiny_target))
    folder = exported(drafter, tiny_target, tmp_path / "out")
    config = json.loads((folder / "config.json").read_text())
    assert config["num_aux_hidden_states"] == len(drafter.taps)
    without = {key: value for key, value in config.items() if key != "draftsmith_taps"}
    (folder / "config.json").write_text(json.dumps(without))
    assert import_drafter("eagle", folder, tiny_target).taps == drafter.taps


def test_the_embedding_of_the_target_is_stored_where_a_reader_asks_for_it(tmp_path: Path, tiny_target: Target) -> None:
    def names(name: str, layout: str) -> set[str]:
        return set(load_file(exported(MADE[name](tiny_target), tiny_target, tmp_path / "out", layout)
                             / "model.safetensors"))

    assert "embed_tokens.weight" in names("eagle", "eagle")
    for name, layout in (("eagle3", "eagle"), ("eagle3", "speculators"), ("eagle", "eagle-sglang")):
        assert "embed_tokens.weight" not in names(name, layout)
    assert "embed_tokens.weight" in names("eagle3-wide", "speculators")


@pytest.mark.parametrize("name", ["eagle", "eagle-reduced"])
def test_sglang_gets_a_bias_of_zeros_for_none(tmp_path: Path, tiny_target: Target, name: str) -> None:
    drafter = randomised(MADE[name](tiny_target))
    assert isinstance(drafter, Eagle)
    folder = exported(drafter, tiny_target, tmp_path / "out", "eagle-sglang")
    bias = load_file(folder / "model.safetensors")["fc.bias"]
    assert torch.equal(bias, drafter.fc.bias.detach() if drafter.config.bias else torch.zeros(32))
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["LlamaForCausalLMEagle"]
    assert "--speculative-algorithm EAGLE " in (folder / "README.md").read_text()
    assert import_drafter("eagle", folder, tiny_target).block == drafter.block


@pytest.mark.parametrize(("name", "layout", "message"), [
    ("eagle3", "eagle-sglang", "the format eagle-sglang holds EAGLE-1 drafters, this artifact is eagle3;"),
    ("eagle", "speculators", "holds EAGLE-3 drafters and drafters of blocks, this artifact is eagle;"),
    ("medusa", "eagle", "the format eagle holds EAGLE drafters, this artifact is medusa")])
def test_other_families_are_refused(tmp_path: Path, tiny_target: Target, name: str, layout: str, message: str) -> None:
    made = {**MADE, "medusa": lambda target: Medusa.create(MedusaConfig(), target)}
    with pytest.raises(UserError, match=message):
        exported(made[name](tiny_target), tiny_target, tmp_path / "out", layout)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("bias", [True, False])
def test_the_readme_says_that_vllm_drops_a_bias(tmp_path: Path, tiny_target: Target, bias: bool) -> None:
    folder = exported(Eagle.create(EagleConfig(bias=bias), tiny_target), tiny_target, tmp_path / "out")
    assert ("vLLM drops `fc.bias`" in (folder / "README.md").read_text()) == bias
    drafter = Eagle.create(EagleConfig(bias=bias), tiny_target)
    assert format_named("eagle").warning(drafter).startswith("vLLM drops `fc.bias`") == bias
    assert format_named("eagle-sglang").warning(drafter) == ""
    assert format_named("eagle").warning(MADE["eagle3"](tiny_target)) == ""


def test_several_layers_have_the_names_that_engines_read(tmp_path: Path, tiny_target: Target) -> None:
    folder = exported(randomised(MADE["eagle3-layers"](tiny_target)), tiny_target, tmp_path / "out")
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 3
    shapes = {name: tuple(tensor.shape) for name, tensor in load_file(folder / "model.safetensors").items()}
    assert not [name for name in shapes if name.startswith("midlayer")]
    assert [shapes[f"layers.{layer}.self_attn.q_proj.weight"] for layer in range(3)] == [(32, 64), (32, 32), (32, 32)]
    tensors = load_file(folder / "model.safetensors")
    for layer in (1, 2):
        # vLLM reads the one, SGLang and TensorRT-LLM the other.
        assert torch.equal(tensors[f"layers.{layer}.hidden_norm.weight"],
                           tensors[f"layers.{layer}.input_layernorm.weight"])


def test_another_width_is_written_and_checked(tmp_path: Path, tiny_target: Target) -> None:
    folder = exported(randomised(MADE["eagle3-wide"](tiny_target)), tiny_target, tmp_path / "out")
    config = json.loads((folder / "config.json").read_text())
    assert (config["hidden_size"], config["target_hidden_size"]) == (48, 32)
    shapes = {name: tuple(tensor.shape) for name, tensor in load_file(folder / "model.safetensors").items()}
    assert (shapes["embed_tokens.weight"], shapes["lm_head.weight"]) == ((100, 48), (100, 48))
    assert (shapes["fc.weight"], shapes["fc_norm.0.weight"]) == ((48, 64), (32,))

    def refused(match: str, **keys: object) -> None:
        (folder / "config.json").write_text(json.dumps(config | keys))
        with pytest.raises(UserError, match=match):
            import_drafter("eagle", folder, tiny_target)

    refused(r"reads states 48 wide \(hidden_size, without a target_hidden_size\), but those of tiny-random are 32 wide",
            target_hidden_size=None)
    refused(r"reads states 64 wide \(target_hidden_size\), but those of tiny-random are 32", target_hidden_size=64)
    first = exported(randomised(MADE["eagle"](tiny_target)), tiny_target, tmp_path / "first")
    folder, config = first, json.loads((first / "config.json").read_text())
    refused("target_hidden_size: 32 and hidden_size: 48; EAGLE-1 is as wide as its", hidden_size=48,
            target_hidden_size=32)
    refused("says num_hidden_layers: 2; EAGLE-1 has 1", num_hidden_layers=2)


@pytest.mark.parametrize(("settings", "message"), [
    ({"feature_sampling": True}, "this drafter has feature_sampling, which"),
    ({"partial_alignment": True}, "this drafter has partial_alignment, which"),
    ({"feature_sampling": True, "partial_alignment": True}, "this drafter has feature_sampling and partial_alignment, "
                                                            "which no layout holds and no serving engine runs; "
                                                            "train without it to export"),
])
def test_drafters_that_no_engine_runs_are_refused(
    tmp_path: Path, tiny_target: Target, settings: dict[str, bool], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        exported(Eagle.create(EagleConfig(**settings), tiny_target), tiny_target, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_damaged_checkpoints_are_named(tmp_path: Path, tiny_target: Target) -> None:
    folder = exported(randomised(MADE["eagle3-reduced"](tiny_target)), tiny_target, tmp_path / "out")
    path, tensors = folder / "model.safetensors", load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())

    def refused(match: str, tensor: dict[str, Tensor] | None = None, **keys: object) -> None:
        save_file(tensors | (tensor or {}), path)
        (folder / "config.json").write_text(json.dumps(config | keys))
        with pytest.raises(UserError, match=match):
            import_drafter("eagle", folder, tiny_target)

    refused(r"says rope_scaling: \{\"factor\": 8\}; only the rope_type linear, .* can be imported",
            rope_scaling={"factor": 8})
    refused(r"does not fit its configuration .*Missing key.*layers\.1\.self_attn", num_hidden_layers=2)
    refused("fc in .* reads 32 numbers, but the 2 taps .* are 64; .* with --taps", draftsmith_taps=[0, 1])
    refused("tap 2 would be the state after the last norm of tiny-random", draftsmith_taps=[2])
    refused("names the token 200, but tiny-random has 100", {"d2t": tensors["d2t"] + 140})
    refused("d2t and t2d in .* name different tokens", {"d2t": tensors["d2t"] + 1})
    refused("does not fit its configuration .*Unexpected key.*midlayer.self_attn.q_proj.bias",
            {"midlayer.self_attn.q_proj.bias": torch.zeros(3)})
    refused("belong to another target",
            {"embed_tokens.weight": tiny_target.model.get_input_embeddings().weight.detach().roll(1, 0)})
    foreign = {key: value for key, value in config.items()
               if key not in ("draftsmith_taps", "eagle_aux_hidden_state_layer_ids")}
    (folder / "config.json").write_text(json.dumps(foreign | {"eagle_config": {
        "eagle_aux_hidden_state_layer_ids": [5]}}))
    save_file(tensors, path)
    with pytest.raises(UserError, match=r"the layers \[5\], but does not say .*--taps: '\[5\]' for outputs, '\[4\]"):
        import_drafter("eagle", folder, tiny_target)
    given = ImportSettings(taps=(1,), rope_base=7.0)
    assert import_drafter("eagle", folder, tiny_target, given).block.rope_base == 7.0
    (folder / "config.json").write_text("{}")
    with pytest.raises(UserError, match="lacks hidden_size, intermediate_size, num_attention_heads"):
        import_drafter("eagle", folder, tiny_target)
    (folder / "config.json").unlink()
    with pytest.raises(UserError, match=r"cannot read .*config\.json: No such file.*copy it again"):
        import_drafter("eagle", folder, tiny_target)


# The layout of the speculators library --------------------------------------------------------------------------------


def speculators(name: str, target: Target, out: Path) -> tuple[EagleDrafter, Path]:
    drafter = randomised(MADE[name](target))
    return drafter, written(drafter, target, "speculators", out)


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


# EAGLE-4 --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def deep() -> Target:
    """A target with layers enough for three taps."""
    torch.manual_seed(2)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False, pad_token_id=0, bos_token_id=1, eos_token_id=2))
    return Target(model, tiny_tokenizer(), name="tiny-target")


def fourth(target: Target, **settings: Any) -> Eagle3:
    config = Eagle3Config(**{"taps": (2, 3, 5), "fc_norm": True, "norm_output": True, "rope_base": 500000.0,
                             "head_rank": 6, "candidates": 40, **settings})
    return randomised(Eagle3.create(config, target, IDS if config.vocabulary_size else None))


@pytest.mark.parametrize("settings", [{"window": 16}, {"output": "shared", "fc_norm": False}])
def test_eagle4_is_written_as_its_readers_know_it_and_comes_back(
    settings: dict[str, Any], deep: Target, tmp_path: Path
) -> None:
    drafter = fourth(deep, **settings)
    folder = exported(drafter, deep, tmp_path / "out", "eagle4")
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    assert config["architectures"] == ["LlamaForCausalLMEagle4"]
    assert config["eagle_config"] == {"eagle_aux_hidden_state_layer_ids": [2, 3, 5]}
    assert config["efficient_lm_head_config"] == {"type": "low_rank", "rank": 6, "num_candidates": 40}
    assert (config["fc_norm"], config["norm_output"]) == (drafter.config.fc_norm, True)
    assert (config["draft_vocab_size"], config["rope_theta"], config["attention_bias"]) == (100, 500000.0, False)
    # Its readers refuse what they do not know, as this one does.
    assert not [key for key in config if key.startswith("draftsmith")]
    assert {name for name in tensors if "layers" not in name and "norm" not in name} == {
        "fc.weight", "lm_head.weight", "efficient_lm_head.weight", "efficient_lm_head_down_proj.weight"}
    assert tuple(tensors["efficient_lm_head_down_proj.weight"].shape) == (6, 32)
    back = import_drafter("eagle4", folder, deep)
    assert isinstance(back, Eagle3)
    assert (back.taps, back.block, back.config.head_rank, back.config.candidates) == (
        drafter.taps, drafter.block, 6, 40)
    assert config.get("sliding_window") == back.window == settings.get("window")
    assert config.get("layer_types") == (["sliding_attention"] if back.window else None)
    features = deep.encode(Features.from_rows([([9, 8, 7, 30, 31, 32], [True] * 6)]), drafter.taps)
    with torch.no_grad():
        ours, theirs = drafter(features).hidden_BLKD, back(features).hidden_BLKD[:, :, :7]
        assert torch.equal(ours, theirs)
        torch.testing.assert_close(back.project(theirs, 0), drafter.project(ours, 0))
    again = load_file(exported(back, deep, tmp_path / "again", "eagle4") / "model.safetensors")
    assert {name: one.tolist() for name, one in again.items()} == {name: one.tolist() for name, one in tensors.items()}
    # Engines that know no candidate head draft with the whole output layer.
    plain = load_file(exported(drafter, deep, tmp_path / "plain", "eagle") / "model.safetensors")
    assert not [name for name in plain if "head." in name and name != "lm_head.weight"]


@pytest.mark.parametrize("kind", ["low_rank", "weighted_low_rank"])
def test_factors_that_a_file_lacks_are_the_svd_of_its_rows(kind: str, deep: Target, tmp_path: Path) -> None:
    drafter = fourth(deep)
    folder = exported(drafter, deep, tmp_path / "out", "eagle4")
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    config["efficient_lm_head_config"] |= {"type": kind, "smooth_factor": 0.5}
    (folder / "config.json").write_text(json.dumps(config))
    whole = {name: one for name, one in tensors.items() if not name.startswith("efficient")}
    save_file(whole, folder / "model.safetensors")
    counts = torch.arange(100.0)
    if kind == "weighted_low_rank":
        for content, told in ((None, "holds neither factors nor token_frequency.npy, by which weighted_low_rank"),
                              (counts[:7], "must hold a count of each of the 100 tokens of tiny-target; copy it again"),
                              (counts - 1, "must hold a count of each of the 100 tokens")):
            if content is not None:
                np.save(folder / "token_frequency.npy", content.numpy())
            with pytest.raises(UserError, match=told):
                import_drafter("eagle4", folder, deep)
        np.save(folder / "token_frequency.npy", counts.numpy())
    back = import_drafter("eagle4", folder, deep)
    assert isinstance(back, Eagle3)
    assert back.head is not None
    weight_V1 = ((counts + 0.5).sqrt() if kind == "weighted_low_rank" else torch.ones(100))[:, None].double()
    rows = whole["lm_head.weight"].double()
    left, sizes, right = torch.linalg.svd(weight_V1 * rows, full_matrices=False)
    nearest = (left[:, :6] * sizes[:6]) @ right[:6] / weight_V1
    product = (back.head.up.weight @ back.head.down.weight).detach().double()
    torch.testing.assert_close(product, nearest, atol=1e-4, rtol=1e-3)
    # One factor without the other is a damaged file.
    save_file({name: one for name, one in tensors.items() if name != "efficient_lm_head.weight"},
              folder / "model.safetensors")
    with pytest.raises(UserError, match="does not fit its configuration"):
        import_drafter("eagle4", folder, deep)


@pytest.mark.parametrize(("keys", "told"), [
    ({"attention_sinks": 4}, "says attention_sinks: 4, which is no key of EAGLE-4 here; take it out if it changes"),
    ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3], "gate": True}}, "says eagle_config.gate: true"),
    ({"efficient_lm_head_config": {"type": "low_rank", "rank": 6, "num_candidates": 9, "groups": 2}},
     "says efficient_lm_head_config.groups: 2, which is no key"),
    ({"efficient_lm_head_config": {"type": "clusters", "rank": 6, "num_candidates": 9}},
     'says efficient_lm_head_config.type: "clusters"; only low_rank and weighted_low_rank can be imported'),
    ({"efficient_lm_head_config": {"type": "low_rank", "rank": 40, "num_candidates": 9}},
     "head_rank must be at most 32, the width of the draft's states, got 40"),
    ({"efficient_lm_head_config": {"type": "low_rank", "rank": 6, "num_candidates": 101}},
     "candidates must be at most 100, the draft vocabulary, got 101"),
    ({"efficient_lm_head_config": None}, "config.json is damaged"),
    ({"eagle_config": {}}, "config.json lacks 'eagle_aux_hidden_state_layer_ids'; copy it again"),
    ({"draft_vocab_size": 50}, "says draft_vocab_size: 50, but EAGLE-4 guesses all 100 tokens of tiny-target"),
    ({"attn_norm": True}, "says attn_norm: true; only false can be imported"),
    ({"use_rope": False}, "says use_rope: false; only true can be imported"),
    ({"attention_bias": True}, "says attention_bias: true; only false can be imported"),
    ({"num_hidden_layers": 2}, "says num_hidden_layers: 2; only 1 can be imported"),
])
def test_what_eagle4_cannot_say_is_refused(keys: dict[str, Any], told: str, deep: Target, tmp_path: Path) -> None:
    folder = exported(fourth(deep), deep, tmp_path / "out", "eagle4")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | keys))
    with pytest.raises(UserError, match=told):
        import_drafter("eagle4", folder, deep)


@pytest.mark.parametrize(("settings", "told"), [
    ({"head_rank": None}, "which has no candidate head; set drafter.head_rank, with train.start"),
    ({"taps": (1, 2)}, "which reads 2 layers of the target and not three; train with three taps"),
    ({"num_layers": 2}, "which has 2 layers and not one; train with num_layers: 1"),
    ({"vocabulary_size": len(IDS), "candidates": 9}, "which has a reduced vocabulary; train with vocabulary_size: nu"),
    ({"hidden_size": 24}, "which is of another width than its target; leave hidden_size out"),
    ({"qk_norm": True}, "which has norms of queries and keys; train with qk_norm: false"),
    ({"norm_before_residual": True}, "which has norm_before_fc or norm_before_residual; train with fc_norm"),
])
def test_a_drafter_that_is_no_eagle4_is_refused(settings: dict[str, Any], told: str, deep: Target, tmp_path: Path
                                                ) -> None:
    with pytest.raises(UserError, match=told):
        exported(fourth(deep, **settings), deep, tmp_path / "out", "eagle4")
    assert not (tmp_path / "out").exists()
