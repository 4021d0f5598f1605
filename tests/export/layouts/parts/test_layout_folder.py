"""Tables of tensors: a missing tensor is never written; every folder shows its table."""

from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.export.layouts.parts.layout_folder import TensorForm, table_text
from safetensors.torch import load_file, save_file
from support.targets import six_layers

from ..test_engine_contracts import MADE, written

FORMATS = {"eagle3": "eagle", "eagle": "eagle-sglang", "eagle3 layers": "speculators", "medusa": "medusa",
           "medusa one_copy": "medusa-vllm", "draft_lm": "huggingface", "draft_lm tied": "huggingface"}


def test_a_draft_model_without_a_tensor_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import PreTrainedModel

    whole = PreTrainedModel.save_pretrained

    def without_a_norm(model: PreTrainedModel, folder: Path, **settings: Any) -> None:
        whole(model, folder, **settings)
        tensors = load_file(folder / "model.safetensors")
        save_file({name: tensor for name, tensor in tensors.items() if name != "model.norm.weight"},
                  folder / "model.safetensors")

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", without_a_norm)
    target = six_layers()
    with pytest.raises(ValueError, match=r"wrong tensors: model\.norm\.weight$"):
        written(MADE["draft_lm"](target), target, "huggingface", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_equal_heads_share_a_line() -> None:
    form = TensorForm((4, 4))
    assert table_text({"1.0.weight": form, "norm": TensorForm((4,), torch.bfloat16), "0.0.weight": form}) == (
        "| tensor | shape | number format |\n|---|---|---|\n| `norm` | [4] | bfloat16 |\n"
        "| `0.0.weight` to `1.0.weight` (2) | [4, 4] | float32 |")


@pytest.mark.parametrize("name", FORMATS)
def test_the_readme_lists_every_tensor(tmp_path: Path, name: str) -> None:
    target = six_layers()
    folder = written(MADE[name](target), target, FORMATS[name], tmp_path / "out")
    text, file = (folder / "README.md").read_text(), next(folder.glob("*.safetensors"))
    assert f"## Tensors of {file.name}" in text
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    assert sum(int(cell.split("(")[1].split(")")[0]) if "(" in cell else 1 for cell in cells) == len(load_file(file))
