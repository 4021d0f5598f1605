"""The check at load: sliding windows, half precision and old architectures; what must load still loads."""

import copy
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from draftsmith.modules import DecodeSettings, Request, Target, TokenTree, UserError, decode
from draftsmith.modules.target import kv_cache
from draftsmith.modules.target import model as model_module
from draftsmith.modules.target.attention import tree_attention
from draftsmith.modules.target.loading.generation_defaults import GenerationDefaults, read_defaults
from draftsmith.modules.target.loading.model_parts import excerpt
from draftsmith.modules.target.loading.self_check import check_logits
from draftsmith.modules.target.loading.tiny_model import tiny_model, tiny_tokenizer
from draftsmith.modules.target.partial_passes import PassLayout
from support.targets import MUST_LOAD, SLIDING, TRAITS, random_model, random_trait
from support.tiers import others_long

WINDOWED = ("Qwen2", "Qwen3", "Mistral", "Mixtral", "Gemma2", "Phi3", "Cohere2", "Olmo3", "Starcoder2", "Exaone4",
            "Ministral")


def greedy(model: Any, prompt: tuple[int, ...], count: int) -> list[int]:
    out = model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                         max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0)
    found: list[int] = out[0, len(prompt):].tolist()
    return found


@pytest.mark.parametrize("family", MUST_LOAD)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_sane_models_load_in_every_number_type(family: str, dtype: torch.dtype) -> None:
    Target(random_model(family).to(dtype), tiny_tokenizer(), name=family)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_of_one_layer_loads_in_half_precision(dtype: torch.dtype) -> None:
    config = tiny_model().config
    config.num_hidden_layers = 1
    model = transformers.LlamaForCausalLM(config).to(dtype).eval()
    assert Target(model, tiny_tokenizer(), name="one layer").num_layers == 1


def test_the_bound_is_that_of_the_model_even_where_its_logits_are_wider() -> None:
    expected_1LV = torch.randn(1, 8, 100)
    check_logits("half", torch.bfloat16, expected_1LV + 0.02, expected_1LV)
    with pytest.raises(UserError, match=r"its logits differ by 0\.02 from its own forward pass"):
        check_logits("single", torch.float32, expected_1LV + 0.02, expected_1LV)


@pytest.mark.parametrize("name", others_long(TRAITS, ("gpt-oss", "gemma4-e2b", "llama4")))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_models_with_traits_of_their_own_load_in_every_number_type(name: str, dtype: torch.dtype) -> None:
    Target(random_trait(name, dtype), tiny_tokenizer(), name=name)


def _without_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    form = tree_attention.AttentionForm
    monkeypatch.setattr(tree_attention, "AttentionForm", lambda **given: form(**{**given, "sinks_H": None}))


def _one_kind_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit moves the first tensor alone: not the values of another width, nor layers of another shape."""
    monkeypatch.setattr(kv_cache.RowCache, "_written", property(lambda cache: [cache.blocks[0].storage]))


def _window_for_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_attention.AttentionForm, "near", lambda form, queries, keys: (
        queries[..., :, None] - keys[..., None, :] < (form.chunk or form.window)))


def _chunks_of_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    near = tree_attention.AttentionForm.near
    monkeypatch.setattr(tree_attention.AttentionForm, "near", lambda form, queries, keys: near(
        form, keys[:, -queries.shape[-1] :] * 0 + torch.arange(keys.shape[-1])[-queries.shape[-1] :], keys))


def _no_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_attention, "tuned", lambda module: False)


def _temperature_of_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the model's own attention has it."""
    monkeypatch.setattr(tree_attention, "tuned", lambda module: False)
    monkeypatch.setattr(model_module, "attend_by", lambda model, name: model.set_attn_implementation(name))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "broken"), [
    ("gpt-oss", _without_sinks), ("mimo-v2-flash", _without_sinks), ("deepseek-v3", _one_kind_left_behind),
    ("gemma4", _one_kind_left_behind), ("llama4", _window_for_chunk), ("llama4", _chunks_of_slots),
    ("llama4", _no_temperature), ("llama4", _temperature_of_slots),
])
def test_each_trait_is_refused_where_it_is_read_wrongly(name: str, broken: Callable[[pytest.MonkeyPatch], None],
                                                        dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    # Chunks and stages of temperature that only an excerpt with shorter ones leaves.
    longer = {"attention_chunk_size": 32, "floor_scale": 64} if name == "llama4" else {}
    model = random_trait(name, dtype, **longer)
    broken(monkeypatch)
    with pytest.raises(UserError, match="does not decode token trees exactly here"):
        Target(model, tiny_tokenizer(), name=name)


def test_chunks_that_attention_does_not_know_of_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_attention, "chunk_of", lambda module: None)
    with pytest.raises(UserError, match="layer 0 of Llama4ForCausalLM has chunks of 32 tokens by its config, but its "
                                        "attention is given no sliding window"):
        Target(random_trait("llama4", torch.float32, attention_chunk_size=32), tiny_tokenizer(), name="llama4")


@pytest.mark.parametrize("family", WINDOWED)
def test_a_window_longer_than_the_checks_text_loads_and_decodes(family: str) -> None:
    model = random_model(family, **SLIDING)
    prompt = tuple(range(3, 33))
    expected = greedy(model, prompt, 20)
    target = Target(model, tiny_tokenizer(), name=family)
    assert decode(target, [Request(prompt, 0, 20)], DecodeSettings(ignore_eos=True)).generations[0].tokens == expected
    assert target.config.sliding_window == 12
    full = random_model(family, **(SLIDING | {"sliding_window": 128}))
    assert greedy(full, prompt, 20) != expected  # the window does change the answer


@pytest.mark.parametrize("family", ["Qwen2Moe", "Phimoe", "Doge", "Moshi"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_windows_that_attention_is_not_given_are_refused(family: str, dtype: torch.dtype) -> None:
    model = random_model(family, **SLIDING).to(dtype)
    with pytest.raises(UserError, match=r"layer 0 .* sliding window of 12 tokens by its config, .* no sliding window"):
        Target(model, tiny_tokenizer(), name=family)


def test_a_window_in_attention_of_the_models_own_is_refused() -> None:
    model = random_model("GPTNeo", attention_types=[[["global", "local"], 1], [["global"], 1]], window_size=12)
    with pytest.raises(UserError, match=r"GPTNeoForCausalLM .* sliding windows cannot be checked"):
        Target(model, tiny_tokenizer(), name="gpt-neo")


def test_a_window_without_positions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model("Mistral", sliding_window=12)
    forward = type(model.model.layers[0]).forward
    monkeypatch.setattr(type(model.model.layers[0]), "forward",
                        lambda self, *args, key_positions=None, **rest: forward(self, *args, **rest))
    with pytest.raises(UserError, match=r"sliding window of 12 tokens and is not given the positions"):
        Target(model, tiny_tokenizer(), name="mistral")


def test_a_window_applied_otherwise_than_declared_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers hand the declared window over, but the model's own mask has none: only a text past it shows that."""
    model = random_model("Mistral", sliding_window=12)
    module = __import__(type(model.model).__module__, fromlist=["x"])
    monkeypatch.setattr(module, "create_sliding_window_causal_mask", module.create_causal_mask)
    with pytest.raises(UserError, match="does not decode token trees exactly"):
        Target(model, tiny_tokenizer(), name="mistral")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("wrong", ["sibling", "slot"])
def test_a_wrong_mask_or_position_is_refused_in_every_number_type(dtype: torch.dtype, wrong: str,
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    right = PassLayout.of

    def changed(tree: TokenTree, lengths_B1: Any, width: int, context_length: int) -> PassLayout:
        layout = right(tree, lengths_B1, width, context_length)
        nodes_N = torch.arange(tree.size)
        if wrong == "sibling":
            later_BNW = torch.arange(width) > lengths_B1[:, :, None] + nodes_N[:, None]
            return replace(layout, visible_BNW=~later_BNW.expand_as(layout.visible_BNW))
        return replace(layout, positions_BN=lengths_B1 + nodes_N)

    model = tiny_model(dtype=dtype)
    with torch.no_grad():
        for layer in model.model.layers:
            # A sibling then moves the logits by less than half precision is allowed to round them.
            layer.self_attn.o_proj.weight *= 0.01
    Target(copy.deepcopy(model), tiny_tokenizer(), name="tiny")
    monkeypatch.setattr(PassLayout, "of", changed)
    with pytest.raises(UserError, match="does not decode token trees exactly"):
        Target(model, tiny_tokenizer(), name="tiny")


@pytest.mark.parametrize(("family", "changes", "message"), [
    ("Bloom", {}, "takes no position_ids"),
    ("Mpt", {}, "takes no position_ids"),
    ("OpenAIGPT", {}, "takes no past_key_values"),
    ("Falcon", {"alibi": True}, "has ALiBi attention"),
    ("XLM", {}, "is an encoder"),
])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_by_cache_slots_is_refused_in_one_sentence(family: str, changes: dict[str, Any], message: str,
                                                             dtype: torch.dtype) -> None:
    with pytest.raises(UserError, match=message):
        Target(random_model(family, **changes).to(dtype), tiny_tokenizer(), name=family)


def test_the_check_forms_float32_products_in_float32() -> None:
    model, seen = tiny_model(), []
    model.lm_head.register_forward_pre_hook(lambda *_: seen.append(torch.get_float32_matmul_precision()))
    allowed = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        Target(model, tiny_tokenizer(), name="tiny")
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(allowed)
    assert set(seen) == {"highest"}


def test_an_excerpt_leaves_its_model_as_it_is_and_keeps_a_layer_of_every_kind() -> None:
    model = random_model("Gemma2", num_hidden_layers=6, sliding_window=12).to(torch.bfloat16)
    before = copy.deepcopy(model)
    small = excerpt(model, short_windows=True)
    assert len(small.model.layers) == 2  # one with a window, one without
    assert small.config.sliding_window == 4
    assert {parameter.dtype for parameter in small.parameters()} == {torch.float32}
    assert model.config.to_dict() == before.config.to_dict()
    assert len(model.model.layers) == 6
    assert {module.sliding_window for module in model.modules() if hasattr(module, "sliding_window")} == {12, None}
    for (name, mine), theirs in zip(model.named_parameters(), before.parameters(), strict=True):
        assert mine.dtype == torch.bfloat16, name
        torch.testing.assert_close(mine, theirs, atol=0, rtol=0)


# End tokens and the rest of the generation config --------------------------------------------------------------------


def with_config(**fields: Any) -> Any:
    model = tiny_model(dtype=torch.float64)
    for name, value in fields.items():
        setattr(model.generation_config, name, value)
    return model


@pytest.mark.parametrize(("declared", "expected"), [(7, (7,)), ([9, 7], (7, 9)), (None, (2,))])
def test_end_tokens_are_those_of_the_generation_config(declared: Any, expected: tuple[int, ...]) -> None:
    """The tokenizer's, 2, counts only where the config declares none; a later change of the config does not count."""
    target = Target(with_config(eos_token_id=declared), tiny_tokenizer(), name="tiny")
    assert target.eos_ids == expected
    target.model.generation_config.eos_token_id = 50
    assert target.eos_ids == expected


@pytest.mark.parametrize(("setting", "value"), [
    ("min_length", 9), ("guidance_scale", 1.5), ("num_beams", 3), ("exponential_decay_length_penalty", (5, 1.1)),
    ("encoder_repetition_penalty", 1.3), ("stop_strings", ["x"]),
])
def test_settings_that_change_greedy_answers_are_refused_by_name(setting: str, value: Any) -> None:
    with pytest.raises(UserError, match=f"asks generate for {setting}=.*remove it from generation_config.json"):
        Target(with_config(**{setting: value}), tiny_tokenizer(), name="tiny")


@pytest.mark.parametrize(("setting", "value"),
                         [("typical_p", 0.9), ("epsilon_cutoff", 0.1), ("eta_cutoff", 0.1), ("top_h", 0.4)])
def test_filters_of_samples_are_refused_where_the_config_samples(setting: str, value: float) -> None:
    Target(with_config(**{setting: value}), tiny_tokenizer(), name="tiny")
    with pytest.raises(UserError, match=f"asks generate for {setting}="):
        Target(with_config(do_sample=True, **{setting: value}), tiny_tokenizer(), name="tiny")


def test_neutral_settings_load() -> None:
    plain = transformers.GenerationConfig(**transformers.GenerationConfig._get_default_generation_params())
    assert read_defaults(plain, tiny_tokenizer(), "x", 384) == GenerationDefaults(eos_ids=(2,))


def test_the_configs_own_sampling_is_offered_and_its_penalty_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    model = with_config(do_sample=True, temperature=0.6, top_p=0.9, min_p=0.05, repetition_penalty=1.3)
    with caplog.at_level(logging.WARNING):
        defaults = Target(model, tiny_tokenizer(), name="tiny").defaults
    assert "repetition penalty of 1.3" in caplog.text
    assert defaults == GenerationDefaults(
        eos_ids=(2,), temperature=0.6, top_k=50, top_p=0.9, min_p=0.05, repetition_penalty=1.3)
    settings = DecodeSettings.as_generate(defaults, seed=4)
    assert (settings.top_k, settings.top_p, settings.min_p, settings.repetition_penalty, settings.seed) == (
        50, 0.9, 0.05, 1.3, 4)


def test_greedy_answers_with_the_configs_penalty_equal_generates_own_default() -> None:
    model = with_config(repetition_penalty=1.3)
    prompt = (5, 9, 33, 71)
    own = model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, 4, dtype=torch.long), max_new_tokens=30)
    target = Target(model, tiny_tokenizer(), name="tiny")
    found = decode(target, [Request(prompt, 0, 30)], DecodeSettings.as_generate(target.defaults)).generations[0]
    assert found.tokens == own[0, 4:].tolist()
