"""Quantised targets: the values of their files, identity, rows for drafters, and what cannot be read."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.modules import DecodeSettings, Request, Target, TargetConfig, UserError, decode, load_target
from draftsmith.modules.target.adapter import choose_layers
from draftsmith.modules.target.draft_vocabulary import OutputRows
from draftsmith.modules.target.linear_forms import Packing
from draftsmith.modules.target.loading import stored_weights
from draftsmith.modules.target.loading.loading import load_in_format, sketch_target
from draftsmith.modules.target.loading.tiny_model import tiny_model, tiny_tokenizer
from safetensors.torch import load_file, save_file
from support.target_folders import compressed_tensors, write_quantised
from transformers import LlamaConfig, LlamaForCausalLM

PROMPT = (5, 9, 33, 71)
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def fp8(folder: Path) -> dict[str, torch.Tensor]:
    return write_quantised(folder, FP8, torch.float8_e4m3fn, "weight_scale_inv", blocks=True)


def int8(folder: Path) -> dict[str, torch.Tensor]:
    pytest.importorskip("compressed_tensors")
    return write_quantised(folder, compressed_tensors("int", ["lm_head"]), torch.int8)


def int8_whole(folder: Path) -> dict[str, torch.Tensor]:
    pytest.importorskip("compressed_tensors")
    return write_quantised(folder, compressed_tensors("int", []), torch.int8, whole=True)


def float8(folder: Path) -> dict[str, torch.Tensor]:
    pytest.importorskip("compressed_tensors")
    return write_quantised(folder, compressed_tensors("float", ["lm_head"]), torch.float8_e4m3fn)


def answers(target: Target) -> Any:
    return decode(target, [Request(PROMPT, 0, 20)], DecodeSettings()).generations


def settings(name: Path | str, dtype: str = "float32", **changes: Any) -> TargetConfig:
    return TargetConfig(name=str(name), dtype=dtype, device="cpu", **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("write", [fp8, int8, int8_whole, float8])
def test_the_weights_of_a_quantised_folder_are_the_values_that_it_stands_for(
    write: Callable[[Path], dict[str, torch.Tensor]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    values = write(tmp_path)
    with caplog.at_level(logging.WARNING):
        target = load_target(settings(tmp_path))
    said = [record.message for record in caplog.records if record.name.startswith("draftsmith")]
    assert len(said) == 1
    assert "and dequantised on reading" in said[0]
    for name, value in target.model.state_dict().items():
        torch.testing.assert_close(value, values[name], atol=0, rtol=1e-6)
    # The identity is not that of the model that was rounded, and the answers are those of the values.
    assert target.identity.weights_hash != Target(tiny_model(), tiny_tokenizer(), name="plain").identity.weights_hash
    plain = tiny_model()
    plain.load_state_dict(values)
    twin = Target(plain, tiny_tokenizer(), name="twin")
    assert twin.identity.weights_hash == target.identity.weights_hash
    assert target.identity.quantization == sketch_target(settings(tmp_path)).identity.quantization != ""
    assert answers(target) == answers(twin)
    # Rows for a drafter, and every layer in the form that is fastest.
    rows = OutputRows(target, torch.tensor([4, 50]))
    torch.testing.assert_close(rows.weight_QD, values["lm_head.weight"][[4, 50]], atol=0, rtol=1e-6)
    target.linears.use(Packing(packed_from=1))
    assert target.linears.packed is not None
    assert len(target.linears.packed.layers) == 15


@pytest.mark.parametrize("write", [fp8, int8])
def test_a_quantised_target_is_the_same_in_every_number_format(write: Callable[[Path], dict[str, torch.Tensor]],
                                                               tmp_path: Path) -> None:
    write(tmp_path)
    target, half = load_target(settings(tmp_path)), load_target(settings(tmp_path, "bfloat16"))
    assert half.dtype is torch.bfloat16
    half.identity.require_same(target.identity)
    assert load_in_format(settings(tmp_path), target, torch.bfloat16).identity == half.identity


@pytest.mark.parametrize("form", ["int8", "float8", "nf4"])
def test_weights_that_are_rounded_on_reading_are_the_same_in_every_number_format(form: str, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes" if form == "nf4" else "torchao")
    torch.manual_seed(0)
    given = LlamaForCausalLM(LlamaConfig(
        vocab_size=100, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
        initializer_range=0.3, pad_token_id=0, bos_token_id=1, eos_token_id=2)).bfloat16()
    given.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    target = load_target(settings(tmp_path, quantization=form))
    load_target(settings(tmp_path, "bfloat16", quantization=form)).identity.require_same(target.identity)
    assert target.identity.quantization == form
    for name, value in target.model.state_dict().items():
        weight = given.state_dict()[name].float()
        if "proj" not in name:
            torch.testing.assert_close(value, weight, atol=0, rtol=0)
            continue
        # The largest step between two values, of a row's or block's largest weight: 1/127, 1/8 of the value, and 0.304.
        largest = (weight.view(-1, 64) if form == "nf4" else weight).abs().amax(1, keepdim=True)
        step = (weight.abs() / 8).view(*largest.shape[:1], -1) if form == "float8" else largest * (
            0.304 if form == "nf4" else 1 / 127)
        gap = (value - weight).view(len(largest), -1).abs()
        assert bool((gap <= 0.51 * step + 1e-3 * largest).all())
        assert bool((gap > 0).any())


def test_layers_of_torchao_that_a_target_keeps_are_checked_hashed_and_left_alone() -> None:
    """A target on an accelerator keeps them; such a model may also be given."""
    torchao = pytest.importorskip("torchao.quantization")

    def quantised(dtype: torch.dtype = torch.float32) -> Any:
        model = tiny_model(dtype=dtype)
        torchao.quantize_(model.model, torchao.Int8WeightOnlyConfig())
        return model

    kept = Target(quantised(), tiny_tokenizer(), name="kept", pack=1)
    assert kept.linears.packed is not None
    assert list(kept.linears.packed.layers) == [kept.head]
    plain = tiny_model()
    for name, weight in quantised().named_parameters():
        if "proj" in name:
            plain.get_parameter(name).data.copy_(weight.dequantize())
    twin = Target(plain, tiny_tokenizer(), name="twin")
    assert kept.identity.weights_hash == twin.identity.weights_hash
    changed = quantised()
    changed.model.layers[1].mlp.up_proj.weight.scale.mul_(1.01)
    assert Target(changed, tiny_tokenizer(), name="changed").identity.weights_hash != kept.identity.weights_hash
    assert answers(kept) == answers(twin)
    assert Target(quantised(torch.bfloat16), tiny_tokenizer(), name="half").dtype is torch.bfloat16
    with pytest.raises(UserError, match=r"an adapter changes plain weights, and the target's are quantised; choose"):
        choose_layers(kept.model, [], without=kept.head)


@pytest.mark.parametrize("find", ["config", "read"])
@pytest.mark.parametrize(("stored", "wanted", "message"), [
    ({"quant_method": "exl3"}, None, r"are quantised by 'exl3', and this version reads compressed-tensors, .*choose"),
    (compressed_tensors("int", []), None, r"compressed-tensors, for which compressed-tensors is not installed; inst"),
    ({"load_in_4bit": True}, None, r"format bitsandbytes, for which bitsandbytes accelerate is not installed; "),
    (FP8, "int8", r"already quantised, and target\.quantization int8 would round them again; leave it out"),
    (None, "nf4", r"in the format nf4, for which bitsandbytes accelerate is not installed; install it \(pip install"),
    (None, "int8", r"in the format int8, for which torchao is not installed; install it \(pip install torchao\), or"),
])
def test_what_cannot_be_read_here_is_refused_with_what_it_needs(
    find: str, stored: Any, wanted: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_weights, "find_spec", lambda name: None)
    tiny_model().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    if stored is not None:
        config = tiny_model().config
        config.quantization_config = stored
        config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=message):
        (sketch_target if find == "config" else load_target)(settings(tmp_path, quantization=wanted))


def test_weights_of_a_gguf_file_are_not_rounded_again() -> None:
    assert stored_weights.quantisation_of(None, None, "x.gguf") == ""
    with pytest.raises(UserError, match=r"already quantised, and target\.quantization int8 would round them again"):
        stored_weights.quantisation_of(None, "int8", "x.gguf")


def test_blocks_that_cross_rows_are_refused_where_their_package_misreads_them() -> None:
    pytest.importorskip("bitsandbytes")
    with pytest.raises(UserError, match=r"has 4-bit blocks that cross rows, which bitsandbytes does not read on a"):
        load_target(settings("tiny-random", quantization="nf4"))


@pytest.mark.parametrize(("plain", "kept", "told"), [
    (False, False, r"hold model\.layers\.0\.self_attn\.q_proj\.weight in float8 and lack its scale"),
    (True, True, r"q_proj\.weight_scale_inv, the scale of a float8 weight, and .*q_proj\.weight is none"),
])
def test_float8_weights_and_their_scales_come_together(plain: bool, kept: bool, told: str, tmp_path: Path) -> None:
    """transformers reads one without the other as other values."""
    fp8(tmp_path)
    stored, name = load_file(tmp_path / "model.safetensors"), "model.layers.0.self_attn.q_proj.weight"
    if plain:
        stored[name] = stored[name].float()
    if not kept:
        del stored[f"{name}_scale_inv"]
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=told):
        load_target(TargetConfig(name=str(tmp_path)))
