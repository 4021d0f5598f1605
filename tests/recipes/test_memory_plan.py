"""Every shipped recipe can be planned: parsed, its drafter shaped, its memory stated, no weight read."""

import re
from pathlib import Path

import pytest
import torch
from draftsmith.modules import TargetConfig, TokenTree, UserError, load_target
from draftsmith.modules.target.loading import sketch_target
from draftsmith.recipes.__main__ import main
from draftsmith.recipes.memory_plan import cache_bytes, plan_recipe
from draftsmith.recipes.pipeline import COMMANDS
from transformers import LlamaConfig

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
TRAINING = sorted(file.stem for file in RECIPES.glob("*.yaml") if "\nfamily:" in file.read_text())
LARGE = [name for name in TRAINING if name.endswith("_8b")]


@pytest.fixture(scope="module")
def eight_billion(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the shape of Llama-3.1-8B and no weights."""
    folder = tmp_path_factory.mktemp("llama-8b")
    LlamaConfig(vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
                num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=131072,
                architectures=["LlamaForCausalLM"]).save_pretrained(folder)
    return folder


def test_a_sketch_has_the_shape_of_the_target_and_no_values() -> None:
    sketch, target = sketch_target(TargetConfig(name="tiny-random")), load_target(TargetConfig(name="tiny-random"))
    same = {**target.identity.to_dict(), "weights_hash": ""}
    assert sketch.identity.to_dict() == same
    assert sketch.output_weight().device == torch.device("meta")
    assert sketch.eos_ids == () or set(sketch.eos_ids) <= set(target.eos_ids)


def test_a_name_that_leads_nowhere_is_told_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no config\.json"):
        sketch_target(TargetConfig(name=str(tmp_path)))


@pytest.mark.parametrize("recipe", TRAINING)
def test_every_recipe_states_its_memory(
    recipe: str, eight_billion: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--target.name", str(eight_billion)] if recipe in LARGE else []
    assert main(["plan", "--config", recipe, *words]) == 0
    message = capsys.readouterr().out
    assert re.search(r"drafter +[\d,]+ trained parameters", message)
    assert re.search(r"training +[\d.]+ [GMK]iB a device", message)
    if recipe in LARGE:
        assert "8,030,261,248 parameters, 15.0 GiB" in message or "8,030,261,248 parameters, 29.9 GiB" in message


def test_the_figures_are_those_of_the_real_drafter() -> None:
    parsed = COMMANDS["run"].parse(["--config", "tiny"])
    target = load_target(TargetConfig(name="tiny-random"))
    plan = plan_recipe(parsed.values, sketch_target(parsed.values.target))
    module = parsed.values.module(target, torch.ones(target.vocab_size))
    module.configure_model()
    assert plan.drafter_parameters == sum(parameter.numel() for parameter in module.drafter.parameters())
    assert plan.target_parameters == sum(parameter.numel() for parameter in target.model.parameters())
    rows = target.start(1, 10)
    rows.run(TokenTree.prompts(torch.tensor([[5]]), torch.tensor([1])))
    assert rows.cache.storage is not None
    assert rows.cache.storage.nbytes == 10 * cache_bytes(target)
