"""Folders without a tokenizer, and tokenizers with more tokens than a model has rows, are named as that."""

import logging
from pathlib import Path
from typing import Any

import pytest
import transformers
from draftsmith.modules import TargetConfig, UserError, load_target
from draftsmith.modules.target.loading.tiny_model import tiny_model, tiny_tokenizer
from support.architectures import random_model


def written(folder: Path, tokenizer: Any) -> TargetConfig:
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
    config = written(tmp_path, tokenizer) if added != "plain" else TargetConfig(name=str(tmp_path), device="cpu")
    token, rows = {"special": (r"<\|over\|>", 100), "template": (r"<\|turn\|>", 100), "plain": (".", 90)}[added]
    with pytest.raises(UserError, match=rf"gives '{token}' the id {rows}, but its embedding has {rows} rows; use the"):
        load_target(config)
    assert not caplog.records


def test_a_further_token_that_no_prompt_needs_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # As the mark of an image in the tokenizers of published models that read text alone.
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    with caplog.at_level(logging.WARNING):
        load_target(written(tmp_path, tokenizer))
    assert "gives '<image>' the id 100, but its embedding has 100 rows; text with that token" in caplog.text
