"""Checkpoints that lack weights or a tokenizer, hold others, or hold values that are no numbers are named as that."""

import json
import logging
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from draftsmith.export.layouts.llama_cpp import write_model
from draftsmith.modules import DraftLM, DraftLMConfig, Target, TargetConfig, UserError, load_target
from draftsmith.modules.families.draft_lm.drafter import as_model
from draftsmith.modules.target.loading.tiny_model import tiny_model, tiny_tokenizer
from safetensors.torch import load_file, save_file
from support.target_folders import write_vocabulary
from support.targets import MUST_LOAD, random_model, random_trait
from support.tiers import others_long
from torch import Tensor

Tensors = dict[str, Tensor]
NAN, INF = float("nan"), float("inf")
UP, Q = "model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj"


def without(*names: str) -> Callable[[Tensors], Tensors]:
    """A change of a checkpoint: some tensors are missing."""
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in names}


def with_tensor(name: str, tensor: Tensor) -> Callable[[Tensors], Tensors]:
    """A change of a checkpoint: one tensor is another, or there as well."""
    return lambda tensors: tensors | {name: tensor}


def written(folder: Path, change: Callable[[Tensors], Tensors], **config: object) -> Path:
    """A folder of the tiny model with other tensors and another configuration."""
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    file = folder / "model.safetensors"
    # The exports' own copies: safetensors refuses tensors that share memory.
    changed = {name: tensor.clone() for name, tensor in change(load_file(file)).items()}
    save_file(changed, file, metadata={"format": "pt"})
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | config))
    return folder


def settings(folder: Path) -> TargetConfig:
    """Settings of a target in a folder or file."""
    return TargetConfig(name=str(folder), dtype="float32", device="cpu")


FAULTS: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "no output layer": (without("lm_head.weight"), r"lack lm_head\.weight, which its configuration asks for; they"),
    "no tensor of a layer": (without(UP), r"lack model\.layers\.1\.mlp\.up_proj\.weight, which"),
    "no last norm": (without("model.norm.weight"), r"lack model\.norm\.weight, which .* save or copy the model again"),
    "names with a prefix": (
        lambda tensors: {f"module.{name}": tensor for name, tensor in tensors.items()},
        r"lack lm_head\.weight, model\.embed_tokens\.weight, model\.layers\.0\.input_layernorm\.weight and 18 more, "
        r".*and holds module\.lm_head\.weight, .* and 18 more, which it does not have"),
    "an output layer of other tokens": (
        with_tensor("lm_head.weight", torch.ones(7, 32)),
        r"hold lm_head\.weight of shape \[7, 32\], its configuration asks for \[100, 32\]; correct it"),
    "a bias for which there is no place": (
        with_tensor(f"{Q}.bias", torch.ones(32)),
        r"hold model\.layers\.0\.self_attn\.q_proj\.bias, for which its configuration leaves no place; .*correct"),
    "a bias of the output layer": (
        with_tensor("lm_head.bias", torch.ones(100)),
        r"hold lm_head\.bias, for which its configuration leaves no place; .*correct"),
    "nan in a norm": (with_tensor("model.norm.weight", torch.full((32,), NAN)),
                      r"the tensor model\.norm\.weight of .* not finite \(nan or inf\) in float32; save or copy"),
    "infinity in a layer": (with_tensor(f"{Q}.weight", torch.full((32, 32), -INF)),
                            r"the tensor model\.layers\.0\.self_attn\.q_proj\.weight of .* not finite"),
    "nan in all embeddings": (with_tensor("model.embed_tokens.weight", torch.full((100, 32), NAN)),
                              r"the tensor model\.embed_tokens\.weight of .* not finite"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_target_whose_weights_are_not_whole_is_refused_by_name(name: str, tmp_path: Path,
                                                                 capfd: pytest.CaptureFixture[str]) -> None:
    change, says = FAULTS[name]
    config = settings(written(tmp_path, change))
    capfd.readouterr()
    with pytest.raises(UserError, match=rf"the target '.*{says}|{says.replace(' of .*', ' of the target .*')}"):
        load_target(config)
    # transformers' table of the same tensors is not printed.
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("name", FAULTS)
def test_a_draft_whose_weights_are_not_whole_is_refused_by_name(name: str, tmp_path: Path, tiny_target: Target) -> None:
    change, says = FAULTS[name]
    folder = written(tmp_path, change)
    with pytest.raises(UserError, match=f"the model in {folder}.*{says}|{says}"):
        DraftLM.create(DraftLMConfig(folder=str(folder)), tiny_target)


def test_tied_weights_are_stored_once_and_missing_where_both_are(tmp_path: Path) -> None:
    tied = {"tie_word_embeddings": True}
    for place, kept in enumerate(("model.embed_tokens.weight", "lm_head.weight")):
        other = {"model.embed_tokens.weight", "lm_head.weight"} - {kept}
        folder = written(tmp_path / str(place), without(*other), **tied)
        model = load_target(settings(folder)).model
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
        assert torch.equal(model.get_input_embeddings().weight, load_file(folder / "model.safetensors")[kept])
    folder = written(tmp_path / "none", without("model.embed_tokens.weight", "lm_head.weight"), **tied)
    with pytest.raises(UserError, match=r"lack lm_head\.weight, model\.embed_tokens\.weight, which"):
        load_target(settings(folder))


def test_an_output_layer_of_its_own_is_used_and_said_whatever_the_configuration_ties(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = written(tmp_path, with_tensor("lm_head.weight", torch.randn(100, 32)), tie_word_embeddings=True)
    with caplog.at_level(logging.WARNING):
        target = load_target(settings(folder))
    stored = load_file(folder / "model.safetensors")
    assert torch.equal(target.output_weight(), stored["lm_head.weight"])
    assert torch.equal(target.model.get_input_embeddings().weight, stored["model.embed_tokens.weight"])
    assert [record.getMessage().split(" hold ")[1] for record in caplog.records] == [
        "lm_head.weight with values of its own, which its configuration ties to the embedding; they are used, but an "
        "engine that goes by the configuration runs another model: set tie_word_embeddings to false in its config.json"]
    # All layers of the target are the target, in the file of an export too.
    text, copy = torch.arange(4, 60, 5)[None], as_model(DraftLM.create(DraftLMConfig(layers=(0, 1)), target))
    assert torch.equal(copy(text).logits, target.model(text).logits)
    assert "output.weight" in write_model(tmp_path / "d.gguf", copy, write_vocabulary(tmp_path / "v.gguf", 100))


def test_a_bias_of_a_tied_output_layer_is_refused_as_of_any_other(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> Tensors:
        return without("lm_head.weight")(tensors) | {"lm_head.bias": torch.ones(100)}

    folder = written(tmp_path, change, tie_word_embeddings=True)
    with pytest.raises(UserError, match=r"hold lm_head\.bias, for which its configuration leaves no place"):
        load_target(settings(folder))


@pytest.mark.parametrize(("value", "remedy"), [(1e5, "set target.dtype to bfloat16 or float32"), (NAN, "save or copy")])
def test_numbers_too_large_for_a_format_name_the_setting(value: float, remedy: str, tmp_path: Path) -> None:
    folder = written(tmp_path, with_tensor(UP, torch.full((64, 32), value)))
    with pytest.raises(UserError, match=rf"{UP} of .* not finite \(nan or inf\) in float16; {remedy}"):
        load_target(replace(settings(folder), dtype="float16"))


def test_nan_in_tied_weights_is_refused(tmp_path: Path) -> None:
    broken = torch.randn(100, 32)
    broken[70] = NAN
    folder = written(tmp_path, lambda tensors: without("lm_head.weight")(tensors) | {
        "model.embed_tokens.weight": broken}, tie_word_embeddings=True)
    with pytest.raises(UserError, match=r"the tensor model\.embed_tokens\.weight of .* not finite"):
        load_target(settings(folder))


@pytest.mark.parametrize(("trait", "name"), [("deepseek-v3", "model.layers.1.mlp.gate.e_score_correction_bias")])
def test_values_outside_of_parameters_are_named_too(trait: str, name: str, tmp_path: Path) -> None:
    model = random_trait(trait, torch.float32, vocab_size=len(tiny_tokenizer()))
    dict(model.named_buffers())[name][1] = NAN
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UserError, match=rf"the tensor {re.escape(name)} of .* not finite \(nan or inf\) in float32"):
        load_target(settings(tmp_path))


def test_an_adapter_without_a_model_is_named_as_one(tmp_path: Path, tiny_target: Target) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    for read in (lambda: load_target(settings(tmp_path)),
                 lambda: DraftLM.create(DraftLMConfig(folder=str(tmp_path)), tiny_target)):
        with pytest.raises(UserError, match=r"holds an adapter \(adapter_config\.json\), which names another model"):
            read()


def test_what_a_model_has_no_module_for_is_left_out_with_one_line(tmp_path: Path,
                                                                  caplog: pytest.LogCaptureFixture) -> None:
    # A layer for further tokens, as DeepSeek's, and a part for images.
    extra = {f"model.layers.2.{part}.weight": torch.ones(32, 32) for part in ("eh_proj", "self_attn.q_proj")}
    extra |= {f"vision_tower.{layer}.weight": torch.ones(3) for layer in range(4)}
    plain = load_target(settings(written(tmp_path / "plain", lambda tensors: tensors)))
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        found = load_target(settings(written(tmp_path / "extra", lambda tensors: tensors | extra)))
    assert found.identity.weights_hash == plain.identity.weights_hash
    assert [record.getMessage().split(" hold ")[1] for record in caplog.records] == [
        "model.layers.2.eh_proj.weight, model.layers.2.self_attn.q_proj.weight, vision_tower.0.weight and 3 more, "
        "which its model does not have; they are left out"]


def test_some_tokens_without_a_finite_embedding_are_said_and_used_as_before(tmp_path: Path,
                                                                            caplog: pytest.LogCaptureFixture) -> None:
    def broken(tensors: Tensors) -> Tensors:
        tensors["model.embed_tokens.weight"][70:72] = NAN
        return tensors

    with caplog.at_level(logging.WARNING):
        target = load_target(settings(written(tmp_path, broken)))
    assert target.broken_V is not None
    assert target.broken_V.nonzero().flatten().tolist() == [70, 71]
    assert "2 tokens of the target" in caplog.text


@pytest.mark.parametrize("family", others_long(MUST_LOAD, ("Llama", "Gemma2", "GPT2")))
def test_what_transformers_saves_of_each_architecture_is_whole(family: str, tmp_path: Path,
                                                               caplog: pytest.LogCaptureFixture) -> None:
    for tied in (False, True):
        model = random_model(family, tie_word_embeddings=tied)
        folder = tmp_path / str(tied)
        model.save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
        found = load_target(settings(folder)).model
        assert "left out" not in caplog.text
        for name, tensor in model.state_dict().items():
            assert torch.equal(found.state_dict()[name], tensor), name


def write_gguf(file: Path, change: Callable[[Tensors], Tensors]) -> Path:
    """A GGUF file of a Llama with one layer."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(40)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([chr(65 + token) for token in range(40)])
    writer.add_token_scores([0.0] * 40)
    writer.add_token_merges([])
    writer.add_token_types([gguf.TokenType.NORMAL] * 40)
    writer.add_eos_token_id(2)
    generator = torch.Generator().manual_seed(0)
    shapes = {"attn_q": (32, 32), "attn_k": (32, 32), "attn_v": (32, 32), "attn_output": (32, 32),
              "ffn_gate": (64, 32), "ffn_up": (64, 32), "ffn_down": (32, 64), "attn_norm": (32,), "ffn_norm": (32,)}
    tensors = {f"blk.0.{name}.weight": torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    tensors |= {"token_embd.weight": torch.randn(40, 32, generator=generator), "output_norm.weight": torch.ones(32),
                "output.weight": torch.randn(40, 32, generator=generator)}
    for name, tensor in change(tensors).items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.mark.parametrize(("change", "says"), [
    (without("blk.0.ffn_up.weight"), r"lack model\.layers\.0\.mlp\.up_proj\.weight, which"),
    (with_tensor("output_norm.weight", torch.full((32,), NAN)), r"the tensor model\.norm\.weight of .* not finite"),
    (lambda tensors: tensors, ""),
])
def test_a_gguf_file_whose_weights_are_not_whole_is_refused_by_name(change: Callable[[Tensors], Tensors], says: str,
                                                                    tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", change)
    if not says:
        assert load_target(settings(file)).num_layers == 1
        return
    with pytest.raises(UserError, match=says):
        load_target(settings(file))


def with_tokenizer(folder: Path, tokenizer: Any) -> TargetConfig:
    """Settings of the tiny model in a folder with a tokenizer."""
    tiny_model().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return TargetConfig(name=str(folder), dtype="float32", device="cpu")


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "GPT2", "Gemma"])
@pytest.mark.parametrize("rest", [False, True])
def test_a_folder_without_a_tokenizer_is_named_as_that(family: str, rest: bool, tmp_path: Path) -> None:
    # transformers fails for some architectures, and makes a tokenizer without tokens for others.
    random_model(family).save_pretrained(tmp_path)
    if rest:
        tiny_tokenizer().save_pretrained(tmp_path)
        (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"the target '.*' has no tokenizer .*copy those of the model"):
        load_target(TargetConfig(name=str(tmp_path), dtype="float32", device="cpu"))


@pytest.mark.parametrize("added", ["special", "plain", "template"])
def test_a_token_without_a_row_is_named_with_both_numbers(added: str, tmp_path: Path,
                                                          caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = tiny_tokenizer()
    if added == "special":
        tokenizer.add_special_tokens({"eos_token": "<|over|>"})
    elif added == "template":
        tokenizer.add_tokens(["<|turn|>"], special_tokens=True)
        tokenizer.chat_template = "{{ '<|turn|>' }}"
    else:
        # The model was cut, or the tokenizer is another model's.
        model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**tiny_model().config.to_dict(),
                                                                               "vocab_size": 90}))
        tokenizer.save_pretrained(tmp_path)
        model.save_pretrained(tmp_path)
    config = with_tokenizer(tmp_path, tokenizer) if added != "plain" else TargetConfig(name=str(tmp_path), device="cpu")
    token, rows = {"special": (r"<\|over\|>", 100), "template": (r"<\|turn\|>", 100), "plain": (".", 90)}[added]
    with pytest.raises(UserError, match=rf"gives '{token}' the id {rows}, but its embedding has {rows} rows; use the"):
        load_target(config)
    assert not caplog.records


def test_a_further_token_that_no_prompt_needs_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # As the mark of an image in the tokenizers of published models that read text alone.
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    with caplog.at_level(logging.WARNING):
        load_target(with_tokenizer(tmp_path, tokenizer))
    assert "gives '<image>' the id 100, but its embedding has 100 rows; text with that token" in caplog.text
