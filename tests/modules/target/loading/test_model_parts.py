"""Models that read pictures too are loaded as their text, with the wrapper's own answers; and rotary parameters that a
configuration nests by kind of layer."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.modules import DecodeSettings, Request, Target, TargetConfig, TokenTree, UserError, decode, load_target
from draftsmith.modules.parts.feature_drafter import block_like
from draftsmith.modules.target.loading.loading import sketch_target
from draftsmith.modules.target.loading.model_parts import rope_by_kind
from draftsmith.modules.target.loading.tiny_model import tiny_tokenizer
from safetensors.torch import load_file, save_file
from support.targets import WRAPPERS, random_model, random_wrapper
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, Gemma3TextConfig, Olmo3Config

PROMPT = tuple(range(5, 25))


@pytest.fixture(params=WRAPPERS)
def written(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Any]:
    """A folder with the names of published checkpoints, and the model as transformers reads it from there."""
    random_wrapper(request.param).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    # Recurrent layers form their decays in float32.
    dtype = torch.float32 if request.param == "qwen3_5" else torch.float64
    return tmp_path, AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=dtype).eval()


def settings(folder: Path, wrapper: Any) -> TargetConfig:
    return TargetConfig(name=str(folder), dtype=str(wrapper.dtype).removeprefix("torch."),  # type: ignore[arg-type]
                        device="cpu")


def test_the_text_of_a_folder_has_the_logits_of_the_wrapper_along_every_path_of_a_tree(
    written: tuple[Path, Any]
) -> None:
    folder, wrapper = written
    target = load_target(settings(folder, wrapper))
    rows = target.start(1, 40)
    count = torch.tensor([len(PROMPT)])
    rows.run(TokenTree.prompts(torch.tensor([PROMPT]), count))
    rows.commit(torch.arange(len(PROMPT))[None], count, count.tolist(), moved=False)
    parents, tokens = [-1, 0, 0, 1, 2, 2], [7, 8, 9, 10, 11, 12]
    found_NV = rows.run(TokenTree.from_parents(torch.tensor([tokens]), torch.tensor([parents]))).logits_BMV[0]
    for node in range(len(parents)):
        path, step = list[int](), node
        while step >= 0:
            path, step = [tokens[step], *path], parents[step]
        with torch.no_grad():
            expected_V = wrapper(input_ids=torch.tensor([[*PROMPT, *path]])).logits[0, -1]
        torch.testing.assert_close(found_NV[node], expected_V, atol=1e-4 if target.recurrent else 1e-9, rtol=0)


def test_nothing_of_the_wrapper_is_left_and_its_own_answers_are_the_reference(written: tuple[Path, Any]) -> None:
    folder, wrapper = written
    target, ids = load_target(settings(folder, wrapper)), torch.tensor([PROMPT])
    expected = wrapper.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False,
                                         eos_token_id=None, pad_token_id=0)[0, len(PROMPT):].tolist()
    drafted = decode(target, [Request(PROMPT, 0, 12)], DecodeSettings(ignore_eos=True)).generations[0].tokens
    with target.native() as model:
        native = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False,
                                eos_token_id=None, pad_token_id=0)[0, len(PROMPT):].tolist()
    assert drafted == native == expected
    parts = {id(parameter) for part in (target.decoder, target.head) for parameter in part.parameters()}
    assert {id(parameter) for parameter in target.model.parameters()} == parts
    sketch = sketch_target(settings(folder, wrapper))
    assert sketch.model.state_dict().keys() == target.model.state_dict().keys()
    assert sketch.identity.architecture == target.identity.architecture


def test_a_target_saved_again_is_the_same_target(written: tuple[Path, Any], tmp_path: Path) -> None:
    """Merged exports save the text without the towers, as a text or as the wrapper of one."""
    target = load_target(settings(*written))
    again = tmp_path / "again"
    with target.native() as model:
        model.save_pretrained(again)
    target.tokenizer.save_pretrained(again)
    load_target(settings(again, written[1])).identity.require_same(target.identity)


def test_weights_of_the_towers_may_be_missing_and_those_of_the_text_may_not(written: tuple[Path, Any],
                                                                            caplog: pytest.LogCaptureFixture) -> None:
    (folder, wrapper), file = written, written[0] / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    text = {name: tensor for name, tensor in tensors.items() if "language_model" in name or "lm_head" in name}
    assert len(text) < len(tensors)
    expected = load_target(settings(folder, wrapper)).identity
    save_file(text, file, metadata={"format": "pt"})
    with caplog.at_level(logging.WARNING):
        load_target(settings(folder, wrapper)).identity.require_same(expected)
    assert not caplog.records
    name = next(name for name in text if name.endswith("layers.1.mlp.up_proj.weight"))
    save_file({key: tensor for key, tensor in text.items() if key != name}, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lack model\..*layers\.1\.mlp\.up_proj\.weight, which its configuration"):
        load_target(settings(folder, wrapper))


def test_a_model_that_needs_a_picture_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_wrapper("qwen3_vl")
    forward = type(model).forward
    monkeypatch.setattr(type(model), "forward", lambda self, pixel_values, **rest: forward(self, **rest))
    with pytest.raises(UserError, match=r"cannot run a pass .*'pixel_values'\)\. Choose another target"):
        Target(model, tiny_tokenizer(), name="pictures only")


PLAIN = {"rope_type": "default", "rope_theta": 10_000.0}
LONG = {"rope_type": "longrope", "rope_theta": 1_000_000.0, "factor": 4.0, "original_max_position_embeddings": 48,
        "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}


def nested(config: type[Any], rope: dict[str, Any]) -> Target:
    """A random target of two kinds of layers, of which those with full attention are rotated by `rope`."""
    settings = config(
        vocab_size=len(tiny_tokenizer()), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=192, sliding_window=16,
        layer_types=["sliding_attention", "full_attention"], pad_token_id=0, bos_token_id=1, eos_token_id=2,
        rope_parameters={"sliding_attention": PLAIN, "full_attention": rope})
    return Target(AutoModelForCausalLM.from_config(settings).eval(), tiny_tokenizer(), name="nested")


@pytest.mark.parametrize("config", [Gemma3TextConfig, Olmo3Config])
def test_a_nested_longrope_bounds_the_context_where_its_frequencies_switch(config: type[Any]) -> None:
    assert nested(config, LONG).context_length == 48
    assert nested(config, {**PLAIN, "rope_theta": 1_000_000.0}).context_length == 192


def test_a_context_ends_where_the_length_of_a_pass_decides_what_is_attended_to() -> None:
    """Doge keeps the best keys beyond its window; of equal ones, of repeated tokens, another pass keeps others."""
    assert Target(random_model("Doge", keep_window_size=24), None, name="doge").context_length == 24
    assert Target(random_model("Llama"), None, name="llama").context_length == 128


def test_a_drafters_layers_are_rotated_as_those_with_full_attention() -> None:
    block = block_like(nested(Gemma3TextConfig, {**PLAIN, "rope_theta": 500_000.0}))
    assert (block.rope_base, block.rope_scaling) == (500_000.0, None)


def test_parameters_without_kinds_are_of_one_kind() -> None:
    assert rope_by_kind(PLAIN) == {"": PLAIN}
    assert rope_by_kind(None) == {"": {}}
    assert rope_by_kind({"sliding_attention": PLAIN}) == {"sliding_attention": PLAIN}
