"""Drafts carried over to another target: step 0 equals them with its parts, and what does not fit is refused."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from draftsmith.export import load_artifact, save_artifact
from draftsmith.export.stored_drafter import load_drafter
from draftsmith.modules import (
    DecodeSettings,
    Drafter,
    Request,
    StaticTree,
    Target,
    TargetConfig,
    Topology,
    UserError,
    decode,
    load_target,
)
from draftsmith.modules.target.loading.loading import sketch_target
from draftsmith.modules.target.loading.tiny_model import tiny_model, tiny_tokenizer
from draftsmith.modules.tuning.tree_search import held_out_acceptance
from draftsmith.trainers import DraftModule, fit
from draftsmith.trainers.train_config import Start
from safetensors.torch import load_file
from support.artifacts import edit
from support.cases import CycleData, asked_for, cycle_rows
from support.families import CASES, randomised
from support.target_folders import write_quantised
from support.tiers import FIRST_CASES, others_long

pytestmark = pytest.mark.filterwarnings("ignore:validation decodes only", "ignore:.*is_gradient_checkpointing")
TREE = Topology.from_paths([(0,), (1,), (0, 0)])
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


@pytest.fixture(scope="module")
def tuned() -> Target:
    """The shape of `tiny_target` with other weights."""
    return Target(tiny_model(seed=1), tiny_tokenizer(), name="tuned")


def carried(name: str, folder: Path, former: Target, target: Target) -> tuple[Drafter, DraftModule]:
    """(a drafter of the former target, a module of its family with the same settings that carries it over)."""
    case = CASES[name]
    drafter = randomised(case.make(former))
    save_artifact(folder, drafter, former.identity, {}, TREE, case.change(former))
    stored = load_drafter(folder, target, retarget=True)
    module = type(case.module(former))(target)
    same = asked_for(stored.drafter.config)
    module.config = replace(module.config, drafter=replace(module.config.drafter, **same))
    module.continue_from(Start(drafter=stored.drafter, adapter=stored.adapter,
                               weights_sha256=stored.config["weights_sha256"]))
    module.configure_model()
    module.drafter.eval()
    return drafter, module


@pytest.mark.parametrize("name", others_long(CASES))
def test_step_0_is_the_former_drafter_with_the_parts_of_the_new_target(
    name: str, tiny_target: Target, tuned: Target, tmp_path: Path
) -> None:
    drafter, module = carried(name, tmp_path, tiny_target, tuned)
    former, weights = CASES[name].change(tiny_target), drafter.state_dict()
    assert all(torch.equal(weight, weights[key]) for key, weight in module.drafter.state_dict().items())
    twin = type(drafter).rebuild(drafter.describe(), tuned.identity)
    twin.load_state_dict(weights)
    twin.bind(tuned if former is None else tuned.adapted(former))
    twin.eval()
    rows = [module.encoded(cycle_rows(number, rows=1)) for number in (1, 2)]
    verifier, answers = module.verifier(rows)
    accepted, text = held_out_acceptance(module.drafter, answers, 8), cycle_rows(3)
    torch.manual_seed(5)
    mine = module.loss(text)
    module.drafter = twin
    torch.manual_seed(5)
    assert torch.equal(mine.total, module.loss(text).total)
    assert accepted == held_out_acceptance(twin, answers, 8)
    # What is borrowed is the new target's, by the weights and not by their shapes alone.
    for here, there in zip(verifier.model.parameters(), (tuned if former is None else tuned.adapted(
            former)).model.parameters(), strict=True):
        torch.testing.assert_close(here, there)


@pytest.mark.long
@pytest.mark.parametrize("name", others_long([*FIRST_CASES, "medusa-2"], ()))
def test_a_carried_over_draft_is_trained_and_decodes_what_the_new_target_writes(
    name: str, tiny_target: Target, tuned: Target, tmp_path: Path
) -> None:
    drafter, module = carried(name, tmp_path / "former", tiny_target, tuned)
    module.config = replace(module.config, max_steps=2, validate_every=2, validation_nodes=4, precision="32-true",
                            accelerator="cpu")
    result = fit(module, CycleData(), tmp_path / "train", progress=False)
    module.restore(load_file(result.checkpoint))
    save_artifact(tmp_path / "out", module.drafter, tuned.identity, {}, TREE, module.adapter)
    with pytest.raises(UserError, match=r"made for the target tuned with weights_hash .*; load the target it was made"):
        load_artifact(tmp_path / "out", tiny_target)
    artifact = load_artifact(tmp_path / "out", tuned)
    assert artifact.drafter.describe() == drafter.describe()
    requests = [Request((5, 9, 33, 71), 0, 24), Request((30, 31), 1, 24)]
    drafted, plain = (decode(artifact.target, requests, DecodeSettings(batch_size=2), **given).generations
                      for given in ({"drafter": artifact.drafter, "policy": StaticTree(TREE)}, {}))
    assert [one.tokens for one in drafted] == [one.tokens for one in plain]


@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_a_draft_is_carried_over_to_a_rounded_form_of_its_target(
    form: str, tiny_target: Target, tmp_path: Path
) -> None:
    if form == "int8":
        pytest.importorskip("torchao")
    config = TargetConfig(name="tiny-random", dtype="float32", device="cpu", quantization="int8")
    if form != "int8":
        write_quantised(tmp_path / "model", FP8, torch.float8_e4m3fn, "weight_scale_inv", blocks=True)
        config = replace(config, name=str(tmp_path / "model"), quantization=None)
    rounded, tmp_path = load_target(config), tmp_path / "artifact"
    save_artifact(tmp_path, CASES["eagle3"].make(tiny_target), tiny_target.identity, {}, TREE)
    with pytest.raises(UserError, match=r"has .*; load the target it was made for, or, if this is another version of "
                                        r"it, continue the draft by draftsmith run with train\.start and --retarget"):
        load_drafter(tmp_path, rounded)
    assert load_drafter(tmp_path, rounded, retarget=True).drafter.family == "eagle3"
    for other in (tiny_target, sketch_target(TargetConfig(name="tiny-random"))):
        assert load_drafter(tmp_path, other, retarget=True).adapter is None


def test_another_shape_is_refused_with_both_values(tiny_target: Target, tmp_path: Path) -> None:
    save_artifact(tmp_path, CASES["medusa"].make(tiny_target), tiny_target.identity, {}, TREE)
    identity = vars(tiny_target.identity)
    for name, value, here in (("hidden_size", 48, "32"), ("vocab_size", 99, str(tiny_target.vocab_size)),
                              ("num_layers", 3, "2"), ("architecture", "Qwen2ForCausalLM", "LlamaForCausalLM")):
        edit(tmp_path, target=identity | {name: value, "weights_hash": "other"})
        for target in (tiny_target, sketch_target(TargetConfig(name="tiny-random"))):
            with pytest.raises(UserError, match=f"tiny-random with {name} {value}, but the target here, tiny-random, "
                                                f"has {here}; --retarget carries a draft over to a target of the same"):
                load_drafter(tmp_path, target, retarget=True)


def test_changes_of_layers_of_another_shape_are_refused_before_training(tiny_target: Target, tmp_path: Path) -> None:
    """Medusa-2 changes layers inside the target, whose widths no identity names."""
    config = copy.deepcopy(tiny_target.model.config)
    config.intermediate_size = 48
    wider = Target(type(tiny_target.model)(config).eval(), tiny_tokenizer(), name="wider")
    case = CASES["medusa-2"]
    save_artifact(tmp_path, case.make(tiny_target), tiny_target.identity, {}, TREE, case.change(tiny_target))
    stored = load_drafter(tmp_path, wider, retarget=True)
    with pytest.raises(UserError, match=r"the adapter changes .* of shape \(.*\), which this target has in shape"):
        case.module(wider).continue_from(Start(drafter=stored.drafter, adapter=stored.adapter, weights_sha256=""))
