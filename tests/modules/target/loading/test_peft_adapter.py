"""Targets with an adapter: peft's own logits, another identity, one hash in each number format, and what is refused."""

import json
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.modules import DecodeSettings, Request, Target, TargetConfig, UserError, decode, load_target
from draftsmith.modules.target.loading import peft_adapter
from draftsmith.modules.target.loading.loading import load_in_format, sketch_target
from draftsmith.modules.target.loading.tiny_model import tiny_model, tiny_tokenizer
from peft import IA3Config, LoraConfig, PeftModel, PromptTuningConfig
from safetensors.torch import load_file, save_file
from support.adapters import write_adapter as written
from support.target_folders import write_quantised
from transformers import AutoModelForCausalLM

TOKENS = torch.tensor([[5, 9, 30, 31, 60, 7, 8, 44]])
LAYERS = ["q_proj", "down_proj"]
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
KINDS: dict[str, Any] = {
    "LoRA": LoraConfig(r=4, target_modules=LAYERS),
    "rsLoRA of several ranks": LoraConfig(r=4, target_modules=LAYERS, use_rslora=True, rank_pattern={"q_proj": 2},
                                          alpha_pattern={"down_proj": 3}),
    "DoRA": LoraConfig(r=4, target_modules=LAYERS, use_dora=True),
    "PiSSA": LoraConfig(r=4, target_modules=LAYERS, init_lora_weights="pissa"),
    "LoRA of embedding and output": LoraConfig(r=4, target_modules=[*LAYERS, "embed_tokens", "lm_head"]),
    "whole output layer": LoraConfig(r=4, target_modules=LAYERS, modules_to_save=["lm_head"]),
    "some tokens": LoraConfig(r=4, target_modules=LAYERS, trainable_token_indices=[5, 9]),
    "IA3": IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
}


def write_adapter(folder: Path, *given: Any, **more: Any) -> Path:
    written(folder, *given, **more)
    return folder


def folder_of(place: Path, *, tied: bool = False, dtype: torch.dtype = torch.float32) -> Path:
    """A tiny model in a folder."""
    model = tiny_model(dtype=dtype)
    if tied:
        model.lm_head.weight, model.config.tie_word_embeddings = model.model.embed_tokens.weight, True
    model.save_pretrained(place)
    tiny_tokenizer().save_pretrained(place)
    return place


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(TOKENS).logits
    return found.float()


def settings(name: Path | str, adapter: Path, dtype: str = "float32", **more: Any) -> TargetConfig:
    return TargetConfig(name=str(name), adapter=str(adapter), dtype=dtype, device="cpu", **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [False, True])
def test_the_logits_are_those_of_pefts_own_model(kind: str, tied: bool, tmp_path: Path) -> None:
    model = folder_of(tmp_path / "model", tied=tied)
    adapter = write_adapter(tmp_path / "adapter", AutoModelForCausalLM.from_pretrained(model), KINDS[kind])
    target = load_target(settings(model, adapter))
    expected = logits(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), adapter))
    with target.native() as merged:
        torch.testing.assert_close(logits(merged), expected, atol=1e-4, rtol=1e-4)
        assert float((expected - logits(AutoModelForCausalLM.from_pretrained(model))).abs().max()) > 0.1
        merged.save_pretrained(tmp_path / "merged")
    # A folder of both is the same target.
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")), expected, atol=1e-4,
                               rtol=1e-4)
    plain, sketch = load_target(TargetConfig(name=str(model), dtype="float32", device="cpu")), sketch_target(
        settings(model, adapter))
    assert target.identity.weights_hash != plain.identity.weights_hash
    assert target.identity.adapter == sketch.identity.adapter != plain.identity.adapter == ""
    assert "adapter" not in plain.identity.fields()
    # Engines add the plain kind to a base; others are merged.
    assert target.adapter is not None
    assert target.adapter.rank == (4 if kind == "LoRA" else 0)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_base_and_adapter_are_one_target_in_every_number_format(stored: torch.dtype, tmp_path: Path) -> None:
    model = folder_of(tmp_path / "model", dtype=stored)
    adapter = write_adapter(tmp_path / "adapter", tiny_model(), KINDS["LoRA"])
    found = [load_target(settings(model, adapter, dtype)) for dtype in ("float32", "bfloat16")]
    assert found[0].identity == found[1].identity
    cast = load_in_format(settings(model, adapter), found[0], torch.bfloat16)
    assert cast.identity == found[1].identity
    for one, other in zip(cast.model.parameters(), found[1].model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_rounded_target_with_an_adapter_is_the_rounded_one_and_the_adapter(tmp_path: Path) -> None:
    adapter, folder = write_adapter(tmp_path / "adapter", tiny_model(), KINDS["LoRA"]), tmp_path / "fp8"
    write_quantised(folder, FP8, torch.float8_e4m3fn, "weight_scale_inv", blocks=True)
    rounded = load_target(TargetConfig(name=str(folder), dtype="float32", device="cpu"))
    target = load_target(settings(folder, adapter))
    with rounded.native() as model, target.native() as merged:
        torch.testing.assert_close(logits(merged), logits(PeftModel.from_pretrained(model, adapter)), atol=1e-4,
                                   rtol=1e-4)


def test_it_decodes_as_the_merged_model_generates(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", tiny_model(), KINDS["LoRA"])
    target: Target = load_target(settings("tiny-random", adapter))
    found = decode(target, [Request((5, 9, 33, 71), 0, 20)], DecodeSettings()).generations[0].tokens
    own = PeftModel.from_pretrained(tiny_model(), adapter).eval().generate(
        input_ids=torch.tensor([[5, 9, 33, 71]]), max_new_tokens=20, do_sample=False)[0, 4:].tolist()
    assert list(found) == own[: len(found)]


def edited(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], Any]:
    def edit(folder: Path) -> None:
        tensors = load_file(folder / peft_adapter.WEIGHTS)
        change(tensors)
        save_file(tensors, folder / peft_adapter.WEIGHTS)
    return edit


def said(**fields: Any) -> Callable[[Path], Any]:
    def edit(folder: Path) -> None:
        file = folder / peft_adapter.CONFIG
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return edit


def grown(tensors: dict[str, torch.Tensor]) -> None:
    tensors["base_model.model.lm_head.weight"] = torch.zeros(105, 32)


FAULTS: list[tuple[Callable[[Path], Any], str]] = [
    (lambda folder: (folder / peft_adapter.CONFIG).unlink(), r"holds no adapter_config\.json; give a folder that"),
    (lambda folder: (folder / peft_adapter.WEIGHTS).rename(folder / "adapter_model.bin"), r"holds no \S+ \S+ a folder"),
    (lambda folder: (folder / peft_adapter.WEIGHTS).write_bytes(b"1234"), r"header too small\); copy it again"),
    (lambda folder: (folder / peft_adapter.WEIGHTS).write_bytes(b""), r"cannot be merged .*; copy it again"),
    (lambda folder: (folder / peft_adapter.CONFIG).write_text("{"), r"adapter_config\.json.* save or copy the adapter"),
    (edited(lambda tensors: next(iter(tensors.values())).fill_(float("nan"))), r"holds base_model\S+ with values"),
    (edited(lambda tensors: tensors.popitem()), r"1 tensors, such as model\.layers\.\S+, are in one"),
    (edited(grown), r"was trained with 105 tokens \(\S+lm_head\.weight\), and tiny-random has 100; resize the model"),
    (said(target_modules=["c_attn"]), r"cannot be merged into tiny-random \(.*c_attn.* base \(org/m\)"),
    (said(r=5), r"into tiny-random .*size mismatch for .*; give its own base \(org/m\) as target\.name"),
    (said(peft_type="NEW"), "is of the kind NEW, which peft does not know; update it"),
    (said(target_modules="(", base_model_name_or_path=None), r"\(missing \), .*\); give its own base as target\.name"),
    (said(rank_pattern={"(": 3}), r"\(missing \), .*\); give its own base \(org/m\) as target\.name"),
    (said(alora_invocation_tokens=[5]), "cannot be merged into tiny-random"),
    (said(layer_replication=[[0, 2], [1, 2]]), "cannot be merged into tiny-random"),
    (said(megatron_config={"a": 1}, megatron_core="os"), "a megatron_config, which imports modules that it names"),
]


@pytest.mark.parametrize(("spoil", "sentence"), FAULTS, ids=[sentence[:30] for _, sentence in FAULTS])
def test_what_is_no_adapter_of_the_target_is_refused_by_its_shapes(spoil: Callable[[Path], Any], sentence: str,
                                                                   tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", tiny_model(), KINDS["LoRA"], base="org/m")
    spoil(adapter)
    for load in (sketch_target, load_target):
        with pytest.raises(UserError, match=sentence):
            load(settings("tiny-random", adapter))


@pytest.mark.parametrize("alpha", [1e39, float("inf")])
def test_an_adapter_that_leaves_no_finite_number_is_named(alpha: float, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", tiny_model(), KINDS["LoRA"])
    said(lora_alpha=alpha)(adapter)
    with pytest.raises(UserError, match=rf"target\.adapter {adapter} (gives logits that are not f|cannot be m)"):
        load_target(settings("tiny-random", adapter))


def test_what_adds_to_a_model_without_changing_it_is_refused(tmp_path: Path) -> None:
    prompt = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, token_dim=32, num_layers=2,
                                num_attention_heads=4)
    adapter = write_adapter(tmp_path, tiny_model(), prompt)
    with pytest.raises(UserError, match=r"is of the kind PROMPT_TUNING, which adds to a model .* train a LoRA"):
        sketch_target(settings("tiny-random", adapter))


def test_without_peft_and_with_parts_of_layers_a_sentence_says_what_to_do(tmp_path: Path,
                                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = write_adapter(tmp_path, tiny_model(), KINDS["LoRA"])
    with pytest.raises(UserError, match=r"target\.placement is layers; merge it by merge_and_unload of peft"):
        settings("tiny-random", adapter, placement="layers")
    monkeypatch.setattr(peft_adapter, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"is read by peft, which is not installed; install it \(pip install peft\)"):
        sketch_target(settings("tiny-random", adapter))


def test_another_name_of_the_base_and_a_chat_template_of_its_own_are_said(tmp_path: Path,
                                                                         caplog: pytest.LogCaptureFixture) -> None:
    adapter = write_adapter(tmp_path / "adapter", tiny_model(), KINDS["LoRA"], base="org/Tiny-Random")
    with caplog.at_level(logging.WARNING):
        load_target(settings("tiny-random", adapter))
        assert not caplog.records
        other = Path(shutil.copytree(adapter, tmp_path / "other"))
        said(base_model_name_or_path="org/model\x1b[2J")(other)
        (other / "chat_template.jinja").write_text("{{ messages[0].content }}")
        load_target(settings("tiny-random", other))
    said_now = " ".join(record.getMessage() for record in caplog.records)
    assert re.search(r"names 'org/model\\x1b\[2J' as its base, and is merged into tiny-random, which it fits", said_now)
    assert "chat_template.jinja is a chat template of the adapter's own, and that of tiny-random is used" in said_now
    assert len(caplog.records) == 2
