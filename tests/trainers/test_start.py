"""Trainings that continue a drafter, or carry it over to another target: step 0 equals it with that target's parts, its
settings are followed, further parts change nothing, and what does not fit is refused."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.export import load_artifact, save_artifact
from draftsmith.export.stored_drafter import load_drafter
from draftsmith.modules import (
    Adapter,
    BlockDraft,
    BlockDraftConfig,
    DecodeSettings,
    Drafter,
    DraftLMConfig,
    Eagle3Config,
    EagleConfig,
    HydraConfig,
    KangarooConfig,
    Medusa,
    MedusaConfig,
    PromptTokensConfig,
    Request,
    StaticTree,
    Target,
    TargetConfig,
    Topology,
    UserError,
    decode,
    load_target,
)
from draftsmith.modules.target.draft_vocabulary import OwnOutput
from draftsmith.modules.target.loading.loading import sketch_target
from draftsmith.modules.target.loading.tiny_model import tiny_model, tiny_tokenizer
from draftsmith.modules.tuning.tree_search import held_out_acceptance
from draftsmith.trainers import DraftModule, draft_module, fit
from draftsmith.trainers.families import family_module
from draftsmith.trainers.medusa2 import LoraConfig
from draftsmith.trainers.train_config import Start
from safetensors.torch import load_file
from support.artifacts import edit
from support.cases import CycleData, asked_for, cycle_rows, interrupted
from support.families import CASES, randomised
from support.target_folders import write_quantised
from support.tiers import FIRST_CASES, others_long

pytestmark = pytest.mark.filterwarnings("ignore:validation decodes only", "ignore:.*is_gradient_checkpointing")
TREE = Topology.from_paths([(0,), (1,), (0, 0)])
IDS, OTHERS = torch.tensor([0, 1, 2, 5, 9, 30, 40]), torch.tensor([1, 2, 3, 9, 30, 31, 32, 40])
"""Two reduced vocabularies, which share five tokens."""


def stored(folder: Path, target: Target, drafter: Drafter, adapter: Adapter | None = None,
           other: Target | None = None) -> Start:
    """A start as the recipe reads it, from an artifact with this drafter, carried over to another target or not."""
    save_artifact(folder, drafter, target.identity, {}, TREE, adapter)
    found = load_drafter(folder, target if other is None else other, retarget=other is not None)
    return Start(drafter=found.drafter, adapter=found.adapter, weights_sha256=found.config["weights_sha256"])


def continuing(module: DraftModule, start: Start) -> DraftModule:
    """The module with its drafter built from the start."""
    module.continue_from(start)
    module.configure_model()
    module.drafter.eval()
    return module


def carried(name: str, folder: Path, former: Target, target: Target | None = None) -> tuple[Drafter, DraftModule]:
    """(a drafter of the former target, a module of its family with the same settings that continues it, or carries it
    over to another target)."""
    case = CASES[name]
    drafter = randomised(case.make(former))
    start = stored(folder, former, drafter, case.change(former), target)
    module = type(case.module(former))(former if target is None else target)
    # The family's defaults: every setting that shapes the drafter follows the start, unless the family says otherwise.
    same = asked_for(start.drafter.config)
    module.config = replace(module.config, drafter=replace(module.config.drafter, **same), start=str(folder))
    return drafter, continuing(module, start)


@pytest.mark.parametrize("name", others_long(CASES))
def test_loss_and_acceptance_start_as_those_of_the_start(name: str, tiny_target: Target, tmp_path: Path) -> None:
    _, module = carried(name, tmp_path, tiny_target)
    before = load_artifact(tmp_path, tiny_target)
    assert module.drafter.describe() == before.drafter.describe()
    text = cycle_rows(3)
    torch.manual_seed(5)
    mine = module.loss(text)
    rows = [module.encoded(cycle_rows(number, rows=1)) for number in (1, 2)]
    verifier, answers = module.verifier(rows)
    accepted = held_out_acceptance(module.drafter, answers, 8)
    module.drafter = before.drafter
    torch.manual_seed(5)
    theirs = module.loss(text)
    assert torch.equal(mine.total, theirs.total)
    assert torch.equal(mine.sums_KC, theirs.sums_KC)
    assert accepted == held_out_acceptance(before.drafter, answers, 8)
    for mine_weight, theirs_weight in zip(verifier.model.parameters(), before.target.model.parameters(), strict=True):
        torch.testing.assert_close(mine_weight, theirs_weight)


MEDUSA, HYDRA, EAGLE3 = MedusaConfig(num_heads=2), HydraConfig(num_heads=2), Eagle3Config(steps=2, taps=(1,))
SLOTS: dict[str, Any] = {"aligned": "same", "causal": False}
DFLASH = BlockDraftConfig(num_layers=1, taps=(1,), block_size=3, **SLOTS)
DSPARK = BlockDraftConfig(num_layers=1, taps=(1,), block_size=3, correction="markov", rank=6)
CARRIED: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "medusa, heads": ("medusa", replace(MEDUSA, output="copy"), {"num_heads": 5}),
    "medusa, blocks": ("medusa", MEDUSA, {"num_layers": 3}),
    "medusa, tokens": ("medusa", replace(MEDUSA, output="copy", vocabulary_size=7), {"vocabulary_size": 8}),
    "medusa, fewer tokens": ("medusa", replace(MEDUSA, output="one_copy"), {"vocabulary_size": 8}),
    "medusa2, heads": ("medusa2", MEDUSA, {"num_heads": 3}),
    "hydra, heads": ("hydra", replace(HYDRA, output="copy", vocabulary_size=7), {"num_heads": 3}),
    "hydra, a first tied block": ("hydra", HYDRA, {"num_layers": 3}),
    "hydra, blocks": ("hydra", replace(HYDRA, tie_blocks=False, num_layers=2), {"num_layers": 3, "tie_blocks": False}),
    "hydra, tokens": ("hydra", replace(HYDRA, output="copy", vocabulary_size=7), {"vocabulary_size": 8}),
    "eagle, tokens": ("eagle", EagleConfig(vocabulary_size=7), {"vocabulary_size": 8, "noise": 0.2}),
    "eagle3, taps": ("eagle3", EAGLE3, {"taps": (0, 1)}),
    "eagle3, normed taps": ("eagle3", replace(EAGLE3, fc_norm=True, norm_output=True), {"taps": (0, 1)}),
    "eagle3, layers": ("eagle3", EAGLE3, {"num_layers": 3, "steps": 4}),
    "eagle3, tokens": ("eagle3", replace(EAGLE3, vocabulary_size=7), {"vocabulary_size": 8}),
    "eagle3, everything": ("eagle3", replace(EAGLE3, vocabulary_size=7, fc_norm=True),
                           {"vocabulary_size": 8, "taps": (0, 1), "num_layers": 2}),
    "block, DFlash to DSpark": ("block", DFLASH, {**SLOTS, "correction": "markov", "rank": 6, "confidence": True}),
    "block, DFlash to DFlash 2": ("block", replace(DFLASH, vocabulary_size=7),
                                  {**SLOTS, "correction": "selector", "conv": True, "rank": 6}),
    "block, DFlash to a state": ("block", DFLASH, {**SLOTS, "correction": "state", "num_layers": 3, "taps": (0, 1)}),
    "block, rank of a table": ("block", replace(DSPARK, confidence=True), {"rank": 9, "block_size": 4}),
    "block, rank of a selector": ("block", replace(DSPARK, correction="selector"), {"rank": 9}),
    "block, rank of a state": ("block", replace(DSPARK, correction="state"), {"rank": 9}),
    "block, tokens of a table": ("block", replace(DSPARK, vocabulary_size=7), {"vocabulary_size": 8, "rank": 9}),
    "block, slots": ("block", DSPARK, {"block_size": 4}),
    "block, fewer slots": ("block", replace(DSPARK, block_size=4), {"block_size": 3}),
    "draft_lm, fewer tokens": ("draft_lm", DraftLMConfig(num_layers=1, hidden_size=24), {"vocabulary_size": 8}),
    "draft_lm, mask token": ("draft_lm", DraftLMConfig(num_layers=1, hidden_size=24, depths=2),
                             {"mask_token_id": 4, "depths": 2}),
}
"""A family, settings of the start, and what the recipe sets."""
LONGER = {"block, DFlash to a state", "block, rank of a table", "block, rank of a selector", "block, rank of a state",
          "block, slots"}
"""Cases of block drafters that others are like."""


def wanted(family: str, target: Target, **settings: Any) -> DraftModule:
    """A module of the family's defaults but for these settings of the drafter."""
    kind, counts_V = family_module(family), torch.zeros(target.vocab_size)
    counts_V[OTHERS] = 1.0
    defaults = kind(target).config
    config = replace(defaults, drafter=type(defaults.drafter)(**settings))  # type: ignore[arg-type]
    return kind(target, config, token_counts=counts_V)


@pytest.mark.parametrize("name", others_long(CARRIED, CARRIED.keys() - LONGER))
def test_further_parts_change_nothing_of_what_the_start_computes(
    name: str, tiny_target: Target, tmp_path: Path
) -> None:
    family, config, settings = CARRIED[name]
    target, ids_Q = tiny_target, None if config.vocabulary_size is None else IDS
    before = randomised(family_module(family).drafter_class.create(config, target, ids_Q))
    module = continuing(wanted(family, target, **settings), stored(tmp_path, target, before))
    after = module.drafter
    for key, value in settings.items():
        assert getattr(after.config, key) == value
    old, new = (drafter(target.encode(cycle_rows(2), drafter.taps)) for drafter in (before, after))
    steps, width = (min(one.hidden_BLKD.shape[axis] for one in (old, new)) for axis in (2, 3))
    if family == "block":
        # A correction's own numbers come after the slot's state.
        width = target.hidden_size
    torch.testing.assert_close(new.hidden_BLKD[:, :, :steps, :width], old.hidden_BLKD[:, :, :steps, :width])
    every_V = torch.arange(target.vocab_size)
    tokens_P, tokens_Q = (every_V if ids is None else ids for ids in (before.token_ids_Q, after.token_ids_Q))
    shared = sorted(set(tokens_P.tolist()) & set(tokens_Q.tolist()))
    for step in range(steps):
        theirs, mine = (drafter.project(drafts.hidden_BLKD[:, :, step], step)
                        for drafter, drafts in ((before, old), (after, new)))
        if settings.get("correction") == "selector":
            # Minus infinity for all but its candidates.
            mine = after.output_rows()(new.hidden_BLKD[:, :, step, :width])
        columns_P, columns_Q = ([tokens.tolist().index(token) for token in shared] for tokens in (tokens_P, tokens_Q))
        torch.testing.assert_close(mine[..., columns_Q], theirs[..., columns_P])
    assert all(bool(weight.isfinite().all()) for weight in after.parameters())
    if settings.get("vocabulary_size"):
        # All tokens of the start, and then the most frequent others, of which equal ones by their ids.
        wanted_Q = OTHERS if ids_Q is None else torch.tensor([0, 1, 2, 3, 5, 9, 30, 40])
        assert tokens_Q.equal(wanted_Q)
        new_Q = [place for place, token in enumerate(wanted_Q.tolist()) if token not in tokens_P.tolist()]
        for layer in (part for part in after.modules() if isinstance(part, OwnOutput)):
            # The rows of a correction's output add nothing yet.
            own = family == "block"
            rows = torch.zeros(len(new_Q), config.rank + 3) if own else target.output_weight()[wanted_Q[new_Q]]
            torch.testing.assert_close(layer.weight[new_Q], rows)


@pytest.mark.parametrize(("former", "settings"), [({}, {**SLOTS, "block_size": 4}), (SLOTS, {"block_size": 2}),
                                                  (SLOTS, {"aligned": "same"})])
def test_slots_of_another_alignment_and_sight_start_with_all_weights(
    former: dict[str, Any], settings: dict[str, Any], tiny_target: Target, tmp_path: Path
) -> None:
    """Also where the recipe asks for the family's defaults, as DSpark's and JetSpec's do."""
    before = randomised(BlockDraft.create(replace(DSPARK, **former), tiny_target))
    after = continuing(wanted("block", tiny_target, **settings), stored(tmp_path, tiny_target, before)).drafter
    assert (after.config.correction, after.config.aligned, after.config.causal) == (
        "markov", settings.get("aligned", "next"), settings.get("causal", True))
    assert before.state_dict().keys() == after.state_dict().keys()
    assert all(torch.equal(weight, after.state_dict()[name]) for name, weight in before.state_dict().items())


def test_a_vocabulary_of_the_same_size_keeps_the_starts_tokens(tiny_target: Target, tmp_path: Path) -> None:
    before = randomised(family_module("eagle3").drafter_class.create(replace(EAGLE3, vocabulary_size=7), tiny_target,
                                                                     IDS))
    for number, settings in enumerate(({}, {"vocabulary_size": 7})):
        module = continuing(wanted("eagle3", tiny_target, **settings),
                            stored(tmp_path / str(number), tiny_target, before))
        assert module.drafter.token_ids_Q is not None
        assert module.drafter.token_ids_Q.equal(IDS)


@pytest.mark.parametrize(("family", "config", "settings", "message"), [
    ("medusa", MedusaConfig(num_heads=3), {"num_heads": 2}, r"drafter\.num_heads is 2, and .* has 3, whose weights"),
    ("medusa", MedusaConfig(tie_blocks=True, num_layers=2), {"num_layers": 3, "tie_blocks": True},
     r"drafter\.num_layers is 3, and the drafter of train\.start has 2"),
    ("medusa", MEDUSA, {"output": "copy"},
     r"drafter\.output is 'copy', .* has 'shared', whose .* set drafter\.output to 'shared'"),
    ("hydra", replace(HYDRA, num_layers=2), {"num_layers": 3}, r"drafter\.num_layers is 3, .* has 2"),
    ("hydra", HYDRA, {"prefix": True}, r"drafter\.prefix is true, .* has false"),
    ("eagle", EagleConfig(), {"partial_alignment": True}, r"drafter\.partial_alignment is true, .* has false"),
    ("eagle", EagleConfig(), {"rope_base": 500.0}, r"drafter\.rope_base is 500\.0, .* has null"),
    ("eagle3", EAGLE3, {"taps": (0,)}, r"drafter\.taps is \[0\], .* has \[1\]"),
    ("eagle3", replace(EAGLE3, norm_before_fc=True), {"taps": (0, 1)}, r"drafter\.taps is \[0, 1\], .* has \[1\]"),
    ("eagle3", replace(EAGLE3, num_layers=3), {"num_layers": 2}, r"drafter\.num_layers is 2, .* has 3"),
    ("eagle3", EAGLE3, {"norm_output": True}, r"drafter\.norm_output is true, .* has false"),
    ("block", DSPARK, {"rank": 5}, r"drafter\.rank is 5, .* has 6"),
    ("block", replace(DSPARK, correction="rnn"), {"rank": 9}, r"drafter\.rank is 9, .* has 6"),
    ("block", DSPARK, {"correction": "state"}, r"drafter\.correction is 'state', .* has 'markov'"),
    ("block", DSPARK, {"residual": True}, r"drafter\.residual is true, .* has false"),
    ("block", replace(DSPARK, taps=(0, 1)), {"taps": (1,)}, r"drafter\.taps is \[1\], .* has \[0, 1\]"),
    ("kangaroo", KangarooConfig(), {"rope_base": None}, r"drafter\.rope_base is null, .* has 10000\.0"),
    ("prompt_tokens", PromptTokensConfig(num_tokens=2), {"num_tokens": 4}, r"drafter\.num_tokens is 4, .* has 2"),
    ("draft_lm", DraftLMConfig(num_layers=1), {"num_layers": 3}, r"drafter\.num_layers is 3, .* has 1"),
    ("draft_lm", DraftLMConfig(num_layers=1), {"folder": "x"}, r"drafter\.folder is 'x', .* has null"),
])
def test_what_is_not_carried_over_is_refused_with_both_values(
    family: str, config: Any, settings: dict[str, Any], message: str, tiny_target: Target, tmp_path: Path
) -> None:
    start = stored(tmp_path, tiny_target, family_module(family).drafter_class.create(config, tiny_target))
    kind = family_module(family)
    module = kind(tiny_target)
    module.config = replace(module.config, drafter=type(config)(**settings))
    with pytest.raises(UserError, match=message):
        module.continue_from(start)


def test_a_draft_model_has_no_rows_for_further_tokens(tiny_target: Target, tmp_path: Path) -> None:
    small = DraftLMConfig(num_layers=1, vocabulary_size=7)
    start = stored(tmp_path, tiny_target, family_module("draft_lm").drafter_class.create(small, tiny_target, IDS))
    with pytest.raises(UserError, match=r"vocabulary_size 8 would need output rows of 1 tokens that the start of 7"):
        continuing(wanted("draft_lm", tiny_target, vocabulary_size=8), start)


def test_another_family_and_changes_of_the_target_are_refused(tiny_target: Target, tmp_path: Path) -> None:
    start = stored(tmp_path / "a", tiny_target, CASES["hydra"].make(tiny_target))
    with pytest.raises(UserError, match=r"train\.start holds a drafter of the family hydra, and this recipe"):
        draft_module(Medusa)(tiny_target).continue_from(start)
    both = CASES["medusa-2"]
    start = stored(tmp_path / "b", tiny_target, both.make(tiny_target), both.change(tiny_target))
    with pytest.raises(UserError, match="for a changed target, whose changes only medusa2 trains; set family to medu"):
        draft_module(Medusa)(tiny_target).continue_from(start)
    module = both.module(tiny_target, lora=LoraConfig(rank=8))
    with pytest.raises(UserError, match=r"train\.lora\.rank is 8, and the changes of the target in .* have rank 4"):
        module.continue_from(start)


def test_heads_alone_continue_with_the_target(tiny_target: Target, tmp_path: Path) -> None:
    heads = randomised(CASES["medusa"].make(tiny_target))
    module = continuing(family_module("medusa2")(tiny_target), stored(tmp_path / "a", tiny_target, heads))
    assert module.verifier([])[0] is tiny_target
    assert module.weights(4)[0] == 0, "the heads are first trained alone, as the target is unchanged"
    both = CASES["medusa-2"]
    start = stored(tmp_path / "b", tiny_target, both.make(tiny_target), both.change(tiny_target))
    module = family_module("medusa2")(tiny_target)
    module.continue_from(start)
    assert module.weights(4)[0] == 1, "a changed target is not trained as if it were the original"


def test_the_warm_up_is_a_quarter(tiny_target: Target, tmp_path: Path) -> None:
    start = stored(tmp_path, tiny_target, CASES["medusa"].make(tiny_target))
    rates = []
    for module in (draft_module(Medusa)(tiny_target), continuing(draft_module(Medusa)(tiny_target), start)):
        module.configure_model()
        made = module.configure_optimizers()
        rates.append(made["lr_scheduler"]["scheduler"].lr_lambdas[0](1))  # type: ignore[index, typeddict-item]
    assert rates == pytest.approx([2 / 20, 2 / 5])


def test_an_interrupted_run_ends_in_the_same_bits_and_a_changed_start_is_refused(
    tiny_target: Target, tmp_path: Path
) -> None:
    start = stored(tmp_path / "start", tiny_target, randomised(CASES["medusa"].make(tiny_target)))
    defaults = draft_module(Medusa)(tiny_target).config
    config = replace(defaults, max_steps=6, validate_every=3, checkpoint_every=2, validation_nodes=4, lr=1e-3,
                     precision="32-true", accelerator="cpu", start="anywhere")

    def run(out: str, first: Start = start, **more: Any) -> Any:
        module = draft_module(Medusa)(tiny_target, replace(config, **more))
        module.continue_from(first)
        return fit(module, CycleData(), tmp_path / out, progress=False)

    whole = run("whole")
    with interrupted(draft_module(Medusa), 5):
        run("parts")
    other = replace(start, weights_sha256="0" * 64)
    with pytest.raises(UserError, match=r"config\.start is '0000.*', was '"):
        run("parts", other)
    # The folder of the start may have moved.
    parts = run("parts", start="elsewhere")
    assert whole.curve == parts.curve
    assert load_file(whole.checkpoint).keys() == load_file(parts.checkpoint).keys()
    assert whole.checkpoint.read_bytes() == parts.checkpoint.read_bytes()


def test_a_training_that_helps_nothing_keeps_the_start(tiny_target: Target, tmp_path: Path) -> None:
    before = randomised(CASES["medusa"].make(tiny_target))
    start, defaults = stored(tmp_path / "start", tiny_target, before), draft_module(Medusa)(tiny_target).config
    config = replace(defaults, max_steps=1, lr=1e-9, precision="32-true", accelerator="cpu", validation_nodes=4)
    module = draft_module(Medusa)(tiny_target, config)
    module.continue_from(start)
    result = fit(module, CycleData(), tmp_path / "out", progress=False)
    assert result.step == 0
    assert result.accepted_length == result.curve[0].accepted_length
    assert all(torch.equal(weight, before.state_dict()[name]) for name, weight in load_file(result.checkpoint).items())


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


@pytest.fixture(scope="module")
def tuned() -> Target:
    """The shape of `tiny_target` with other weights."""
    return Target(tiny_model(seed=1), tiny_tokenizer(), name="tuned")


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
    start = stored(tmp_path, tiny_target, case.make(tiny_target), case.change(tiny_target), wider)
    with pytest.raises(UserError, match=r"the adapter changes .* of shape \(.*\), which this target has in shape"):
        case.module(wider).continue_from(start)
