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
LARGE = {"8b": (4096, 14336, 32, 32), "70b": (8192, 28672, 80, 64)}
"""Width, width inside, layers and heads of the models of Llama 3."""
PARAMETERS = {"8b": r"8,030,261,248 parameters, (15\.0|29\.9) GiB",
              "70b": r"70,553,706,496 parameters, 19\.9 GiB a process"}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders with the shapes of Llama 3 and no weights."""
    folders = {}
    for name, (width, inside, layers, heads) in LARGE.items():
        folders[name] = tmp_path_factory.mktemp(f"llama-{name}")
        LlamaConfig(vocab_size=128256, hidden_size=width, intermediate_size=inside, num_hidden_layers=layers,
                    num_attention_heads=heads, num_key_value_heads=8, max_position_embeddings=131072,
                    architectures=["LlamaForCausalLM"]).save_pretrained(folders[name])
    return folders


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
    recipe: str, large: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    kind = recipe.rpartition("_")[2]
    words = ["--target.name", str(large[kind])] if kind in large else []
    assert main(["plan", "--config", recipe, *words]) == 0
    message = capsys.readouterr().out
    assert re.search(r"drafter +[\d,]+ trained parameters", message)
    assert re.search(r"training +[\d.]+ [GMK]iB a device", message)
    if kind in large:
        assert re.search(PARAMETERS[kind], message)


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


def test_split_drafters_take_less_in_each_process() -> None:
    """Heads are gathered together, the layers of a language model one after the other."""
    def planned(family: str, *words: str) -> tuple[int, int]:
        given = COMMANDS["run"].parse(["--config", "tiny", "--family", family, *words]).values
        plan = plan_recipe(given, sketch_target(given.target))
        return plan.drafter_parameters, plan.drafter

    split = ("--train.devices", "4", "--train.strategy", "fsdp2")
    trained, whole = planned("medusa", "--train.devices", "4")
    assert whole == 16 * trained
    assert planned("medusa", *split) == (trained, 4 * trained + 8 * trained)
    layers = ("--drafter.num_layers", "3")
    trained, held = planned("draft_lm", *split, *layers)
    one = (trained - planned("draft_lm", *split, "--drafter.num_layers", "2")[0])
    assert held == 4 * trained + 8 * (trained - 2 * one)
