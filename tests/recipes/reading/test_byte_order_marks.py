"""Text files with a byte order mark, as editors on Windows write them, are read as they are without it."""

import json
import os
from pathlib import Path

import pytest
import torch
from draftsmith.data import read_prompts
from draftsmith.export.layouts.parts.checkpoint import Checkpoint
from draftsmith.modules import DraftLM, DraftLMConfig, Target, TargetConfig, UserError, load_target
from draftsmith.modules.files.json_records import SETTINGS_BYTES, read_json, without_marks
from draftsmith.modules.target.loading.tiny_model import CHATML, tiny_model, tiny_tokenizer
from draftsmith.recipes.chat_settings import TemplateConfig
from draftsmith.recipes.reading.recipe_files import read_recipe
from safetensors.torch import save_file

MARK = "\ufeff"
TOOLS = [{"type": "function", "function": {"name": "add"}}]
TINY = TargetConfig(name="tiny-random")


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
def test_prompts_also_where_marked_files_were_joined(tmp_path: Path, ends: str) -> None:
    rows = [json.dumps({"prompt": text}) for text in ("one", "two")]
    for name, text in {"lines": "".join(f"{MARK}{row}{ends}" for row in rows),
                       "array": f"{MARK}[{','.join(rows)}]{ends}"}.items():
        (tmp_path / name).write_bytes(text.encode())
        assert [prompt.question for prompt in read_prompts(tmp_path / name)] == ["one", "two"]


def test_recipes_templates_tools_and_records(tmp_path: Path) -> None:
    texts = {"recipe.yaml": "extends: tiny\nout: a\n", "template.jinja": CHATML, "tools.json": json.dumps(TOOLS)}
    for name, text in texts.items():
        (tmp_path / name).write_text(MARK + text, encoding="utf-8")
    assert read_recipe(str(tmp_path / "recipe.yaml"))["out"] == "a"
    target = load_target(TargetConfig(name="tiny-random", chat_template=str(tmp_path / "template.jinja")))
    template = TemplateConfig(tools=str(tmp_path / "tools.json")).build(target)
    assert template.tools == TOOLS == read_json(tmp_path / "tools.json", "")
    assert template.prompt([{"role": "user", "content": "hi"}]) == TemplateConfig().build(load_target(TINY)).prompt(
        [{"role": "user", "content": "hi"}])


def test_the_folders_of_models_and_checkpoints(tmp_path: Path) -> None:
    """Files that other libraries read, which take a mark for text."""
    folder, tokenizer = tmp_path / "model", tiny_tokenizer()
    tokenizer.chat_template = {"default": CHATML, "tool_use": CHATML}
    tiny_model().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    plain = load_target(TargetConfig(name=str(folder)))
    marked = [file for file in folder.rglob("*") if file.suffix in (".json", ".jinja")]
    assert {"config.json", "tokenizer.json", "chat_template.jinja", "tool_use.jinja"} <= {file.name for file in marked}
    for file in marked:
        file.write_text(MARK + file.read_text(encoding="utf-8"), encoding="utf-8")
    target = load_target(TargetConfig(name=str(folder)))
    assert target.identity == plain.identity
    assert target.tokenizer.chat_template == {"default": CHATML, "tool_use": CHATML}
    assert all(file.read_text(encoding="utf-8").startswith(MARK) for file in marked), "the user's files stay"
    draft = DraftLM.create(DraftLMConfig(folder=str(folder)), target)
    assert torch.equal(draft._embedding().weight.cpu(), target.model.get_input_embeddings().weight.cpu())
    assert isinstance(target, Target)
    (folder / "large.txt").write_text(MARK, encoding="utf-8")
    os.truncate(folder / "large.txt", SETTINGS_BYTES + 1)
    with pytest.raises(UserError, match=r"large.txt has 67,108,865 bytes, more than 67,108,864"):
        without_marks(folder)
    save_file({"fc.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(f'{MARK}{{"block_size": 3}}', encoding="utf-8")
    assert Checkpoint(tmp_path, "model.safetensors", "config.json").said == {"block_size": 3}
