"""Draft language models: initial models, mask tokens, decoding, and their export as a Hugging Face folder."""

import copy
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.parts.campaign_drafters import build
from draftsmith.export import Artifact, export_artifact
from draftsmith.modules import (
    Chain,
    DecodeSettings,
    DraftLM,
    DraftLMConfig,
    Features,
    Observation,
    Request,
    StaticTree,
    Target,
    TargetConfig,
    Topology,
    UserError,
    decode,
    measure_cost,
    ranked_text,
)
from draftsmith.modules.families.draft_lm.settings import planned
from draftsmith.modules.parts.causal_drafter import conditional_drop, pack, useful, visible
from draftsmith.modules.target.loading.hf_folder import folder_digest
from draftsmith.modules.target.loading.loading import sketch_target
from draftsmith.modules.target.loading.tiny_model import tiny_tokenizer
from draftsmith.modules.tuning.step_timing import BATCHES
from draftsmith.trainers import draft_module, train_config
from families.draft_lm.reference import state_behind
from support.answers import frontier, native_greedy, observe, requests_for
from support.families import randomised
from support.targets import random_model, random_target, tied_target
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

IDS = torch.tensor([2, 5, 9, 30, 31, 60])
DEPTHS = DraftLMConfig(num_layers=2, hidden_size=32, depths=3)
TREE = Topology((-1, 0, 0, 1), (0, 0, 1, 0))


def made(config: DraftLMConfig, target: Target) -> DraftLM:
    ids = None if config.vocabulary_size is None else IDS
    return randomised(DraftLM.create(config, target, ids))


def two_turns() -> Features:
    """Two conversations in a row, padding after them, supervision with a gap."""
    tokens = torch.arange(5, 18)[None]
    segments = torch.tensor([[0] * 6 + [1] * 5 + [-1] * 2])
    positions = torch.tensor([[*range(6), *range(5), 0, 0]])
    supervised = torch.tensor([[False, True, True, False, True, True, False, True, True, True, True, False, False]])
    return Features(tokens_BL=tokens, supervised_BL=supervised, segments_BL=segments, positions_BL=positions)


# Beginnings -----------------------------------------------------------------------------------------------------------


def test_a_copy_of_all_layers_equals_the_target(tiny_target_f64: Target) -> None:
    target = tiny_target_f64
    drafter = DraftLM.create(DraftLMConfig(layers=(0, 1)), target)
    requests = requests_for(target, 4, 30)
    for policy in (Chain(4), StaticTree(Topology.from_paths([(0,), (1,), (0, 0), (0, 0, 0)]))):
        result = decode(target, requests, DecodeSettings(batch_size=2, ignore_eos=True), drafter=drafter,
                        policy=policy)
        assert [one.tokens for one in result.generations] == [
            native_greedy(target, request.tokens, request.max_new_tokens) for request in requests]
        whole = policy.topology.depth + 1
        assert all(count == whole for one in result.generations for count in one.emitted[:-1])


def test_chosen_layers_are_copied_in_order() -> None:
    target = random_target(5)
    drafter = DraftLM.create(DraftLMConfig(layers=(0, 3, 4)), target)
    for place, layer in enumerate((0, 3, 4)):
        for name, parameter in target.layers[layer].named_parameters():
            assert torch.equal(drafter.get_parameter(f"decoder.layers.{place}.{name}"), parameter)
    assert torch.equal(drafter._embedding().weight, target.model.get_input_embeddings().weight)


def test_copied_layers_keep_their_sliding_windows() -> None:
    target = random_target(4, head_dim=8, sliding_window=6)
    drafter = DraftLM.create(DraftLMConfig(layers=(1, 2)), target)
    assert drafter.architecture.layer_types == target.config.layer_types[1:3]
    text = list(range(4, 30))
    state = drafter.start(1, 64)
    observe(drafter, state, [0], [text])
    drafter.expand(state, frontier([0], [-1], [[text[-1]]]))
    found = drafter.expand(state, frontier([1, 2], [0, 0], [[9, 8]])).log_probs_BFHQ[0, :, 0]
    for column, token in enumerate((9, 8)):
        features = Features.from_rows([([*text, token], [True] * 27)])
        with torch.no_grad():
            expected = drafter.project(drafter(features).hidden_BLKD[0, -1, 0], 0).log_softmax(-1)
        torch.testing.assert_close(found[column], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", ["GPT2", "GPTJ", "OPT"])
def test_a_smaller_model_of_a_kind_with_other_names_drafts(family: str) -> None:
    target = Target(random_model(family), tiny_tokenizer(), name="odd")
    drafter = DraftLM.create(DraftLMConfig(num_layers=1, hidden_size=16), target).eval()
    requests = requests_for(target, 2, 12)
    found = decode(target, requests, DecodeSettings(ignore_eos=True), drafter=drafter, policy=Chain(2)).generations
    assert [one.tokens for one in found] == [
        native_greedy(target, request.tokens, request.max_new_tokens) for request in requests]


@pytest.mark.parametrize("frozen", [True, False])
def test_a_frozen_embedding_is_not_trained_nor_a_tied_output(frozen: bool) -> None:
    config = DraftLMConfig(num_layers=1, hidden_size=16, freeze_embedding=frozen)
    drafter = DraftLM.create(config, tied_target())
    assert bool(drafter.output_parameters(0)) is not frozen
    assert drafter.head is None
    features = Features.from_rows([([5, 6, 7], [True] * 3)])
    drafter.project(drafter(features).hidden_BLKD, 0).sum().backward()
    assert (drafter._embedding().weight.grad is None) is frozen


def test_rotary_frequencies_are_never_rounded(tiny_target: Target) -> None:
    drafter = DraftLM.create(DraftLMConfig(num_layers=1), tiny_target)
    before = drafter.decoder.rotary_emb.inv_freq.clone()
    drafter.to(torch.bfloat16)
    assert drafter._embedding().weight.dtype == torch.bfloat16
    assert torch.equal(drafter.decoder.rotary_emb.inv_freq, before)


# Decoding -------------------------------------------------------------------------------------------------------------


def scores_at_root(drafter: DraftLM, text: list[int]) -> torch.Tensor:
    state = drafter.start(1, 64)
    observe(drafter, state, [0], [text])
    return drafter.expand(state, frontier([0], [-1], [[text[-1]]])).log_probs_BFHQ[0, 0]


def test_changed_weights_are_packed_again(tiny_target: Target) -> None:
    drafter = made(DraftLMConfig(num_layers=1, vocabulary_size=6), tiny_target)
    scores_at_root(drafter, [5, 6, 7])
    for parameter in drafter.parameters():
        parameter.data.mul_(1.5)
    for one in (drafter, copy.deepcopy(drafter)):
        with torch.no_grad():
            hidden = one(Features.from_rows([([5, 6, 7], [True] * 3)])).hidden_BLKD[0, -1, 0]
            expected = one.project(hidden, 0).log_softmax(-1)
        torch.testing.assert_close(scores_at_root(one, [5, 6, 7])[0], expected, atol=1e-5, rtol=1e-4)
        assert not any("forward" in module.__dict__ for module in one.modules())


def test_mask_tokens_score_all_depths_from_the_root(tiny_target: Target) -> None:
    drafter = made(DEPTHS, tiny_target)
    state = drafter.start(1, 64)
    observe(drafter, state, [0], [[5, 6, 7]])
    drafter.expand(state, frontier([0], [-1], [[7]]))
    with pytest.raises(ValueError, match="every depth from the root at once"):
        drafter.expand(state, frontier([1], [0], [[9]]))


def test_a_pass_with_mask_tokens_equals_passes_over_each_text(tiny_target: Target) -> None:
    drafter, text = made(DEPTHS, tiny_target), [5, 9, 11, 20, 7]
    found = scores_at_root(drafter, text)
    for depth in range(3):
        expected = drafter.project(state_behind(drafter, text, depth), depth).log_softmax(-1)
        torch.testing.assert_close(found[depth], expected, atol=1e-5, rtol=1e-4)


def test_mask_tokens_are_never_committed(tiny_target: Target) -> None:
    """Observations in pieces with drafts in between give the same scores: mask tokens are not committed."""
    drafter, text = made(DEPTHS, tiny_target), list(range(5, 30))
    state = drafter.start(1, 64)
    for start, stop in ((0, 4), (3, 5), (4, 9), (8, 25)):
        observe(drafter, state, [0], [text[start:stop]])
        found = drafter.expand(state, frontier([0], [-1], [[text[stop - 1]]])).log_probs_BFHQ[0, 0]
        torch.testing.assert_close(found, scores_at_root(drafter, text[:stop]), atol=1e-5, rtol=1e-4)


# Mask tokens in training ----------------------------------------------------------------------------------------------


def test_the_attention_mask_equals_a_written_one() -> None:
    features = two_turns()
    kept = torch.zeros(1, 13, 3, dtype=torch.bool)
    kept[0, 1, 1] = kept[0, 1, 2] = kept[0, 7, 1] = True
    slots = pack(kept)
    assert slots.anchors_BS.tolist() == [[1, 1, 7]]
    assert slots.depths_BS.tolist() == [[1, 2, 1]]
    mask = visible(features, slots)[0]
    assert mask[:13, :13].equal(features.visible()[0])
    assert not mask[:13, 13:].any()
    assert [row.nonzero()[:, 0].tolist() for row in mask[13:]] == [[0, 1, 13], [0, 1, 13, 14], [6, 7, 15]]


def test_mask_tokens_guess_labels_of_the_same_answer_only() -> None:
    found = useful(two_turns(), 3)[0].nonzero().tolist()
    # Index 0 guesses 1 and 2 and stops at the gap at 3; index 9 guesses 10, the end of its conversation.
    assert [pair for pair in found if pair[0] in (0, 1, 9, 10)] == [[0, 0], [0, 1], [1, 0], [9, 0]]


def test_the_drop_is_nested_and_has_the_given_share() -> None:
    everywhere = torch.ones(2, 100, 5, dtype=torch.bool)
    kept = conditional_drop(everywhere, 0.7, 0.3)
    assert kept.sum(1).tolist() == [[100, 70, 49, 34, 30]] * 2
    assert not bool((kept[..., 1:] & ~kept[..., :-1]).any())
    assert not kept[0].equal(kept[1])


def test_dropped_mask_tokens_change_no_other_state(tiny_target: Target) -> None:
    drafter, features = made(DEPTHS, tiny_target), two_turns()
    with torch.no_grad():
        whole = drafter(features)
        dropped = drafter.train()(features)
    assert whole.valid_BLK is None
    assert dropped.valid_BLK is not None
    kept = dropped.valid_BLK
    assert 0 < int(kept[..., 1:].sum()) < int(useful(features, 3)[..., 1:].sum()) + 1
    torch.testing.assert_close(dropped.hidden_BLKD[kept], whole.hidden_BLKD[kept], atol=1e-5, rtol=1e-4)


def test_training_runs_the_kept_mask_tokens_only(tiny_target: Target) -> None:
    drafter, seen = made(replace(DEPTHS, depths=6), tiny_target).train(), []
    drafter.decoder.layers[0].register_forward_pre_hook(
        lambda _module, args, kwargs: seen.append((args[0] if args else kwargs["hidden_states"]).shape[1]),
        with_kwargs=True)
    drafter(Features.from_rows([(list(range(4, 84)), [True] * 80)]))
    # 80 tokens and 79 anchors: 55 + 38 + 27 + 18 + 15 mask tokens at most, less those after the end.
    assert 80 + 140 <= seen[0] <= 80 + 153


# Calibration and cost -------------------------------------------------------------------------------------------------


def test_ranks_follow_the_unrolled_step(tiny_target: Target) -> None:
    drafter, features = made(DraftLMConfig(num_layers=1), tiny_target), two_turns()
    table, expected = ranked_text(drafter, [features], 5).ranks_PK, []
    with torch.no_grad():
        logits = drafter.project(drafter(features).hidden_BLKD[0, :, 0], 0)
    labels, valid = features.labels(1)
    for place in range(13):
        ranks = []
        for later in range(place, place + 8):
            known = later < 13 and bool(valid[0, later]) and features.segments_BL[0, later] == \
                features.segments_BL[0, place]
            order = logits[later].argsort(descending=True).tolist() if known else []
            ranks.append(min(order.index(int(labels[0, later])), 5) if known else 5)
        if bool(valid[0, place]):
            expected.append(ranks)
    assert table.tolist() == expected


def test_the_cost_is_measured_with_a_context(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, read = made(DraftLMConfig(num_layers=1), tiny_target), []
    right = DraftLM.observe

    def watched(self: DraftLM, state: Any, rows_R: torch.Tensor, observation: Observation) -> None:
        right(self, state, rows_R, observation)
        read.append(state.host_lengths[0])

    monkeypatch.setattr(DraftLM, "observe", watched)
    measure_cost(tiny_target, drafter, Topology.chain(3), context=40, repeats=1)
    # Each number of rows lets it read its context before timing starts, and copying once more; a step adds a token.
    assert read.count(40) == len(BATCHES) + 1
    assert min(read) == 40
    assert read[-1] > 40


# The Hugging Face folder ----------------------------------------------------------------------------------------------


FOLDERS = {
    "tied": DraftLMConfig(num_layers=1, hidden_size=16),
    "untied": DraftLMConfig(layers=(1,)),
    "reduced": DraftLMConfig(layers=(0, 1), vocabulary_size=6),
    "reduced-tied": DraftLMConfig(num_layers=1, hidden_size=16, vocabulary_size=6),
}


def exported(drafter: DraftLM, target: Target, out: Path) -> Path:
    artifact = Artifact(drafter=drafter, target=target, topology=TREE, identity=target.identity, provenance={})
    return export_artifact(artifact, target, "huggingface", out)


@pytest.mark.parametrize("name", FOLDERS)
def test_an_exported_folder_gives_the_same_logits(name: str, tiny_target: Target, tmp_path: Path) -> None:
    target = tied_target() if name.endswith("tied") and name != "untied" else tiny_target
    drafter = made(FOLDERS[name], target)
    folder = exported(drafter, target, tmp_path / "draft")
    model = AutoModelForCausalLM.from_pretrained(folder)
    text = torch.tensor([[5, 9, 11, 20, 7]])
    with torch.no_grad():
        found = model(text).logits[0]
        hidden = drafter(Features.from_rows([(text[0].tolist(), [True] * 5)])).hidden_BLKD[0]
        expected = drafter.project(hidden[:, 0], 0)
    ids = drafter.token_ids_Q
    torch.testing.assert_close(found if ids is None else found[:, ids], expected, atol=1e-5, rtol=1e-4)
    assert found.shape[-1] == target.vocab_size
    assert model.generation_config.eos_token_id == target.model.generation_config.eos_token_id
    assert AutoTokenizer.from_pretrained(folder).get_vocab() == target.tokenizer.get_vocab()
    again = made_from(folder, target)
    with torch.no_grad():
        state = again(Features.from_rows([(text[0].tolist(), [True] * 5)])).hidden_BLKD[0, :, 0]
        torch.testing.assert_close(again.project(state, 0), found, atol=1e-5, rtol=1e-4)


def made_from(folder: Path, target: Target) -> DraftLM:
    return DraftLM.create(DraftLMConfig(folder=str(folder)), target).eval()


def test_a_tied_folder_holds_one_embedding(tiny_target: Target, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    target = tied_target()
    folder = exported(made(FOLDERS["tied"], target), target, tmp_path / "draft")
    tables = [name for name, tensor in load_file(folder / "model.safetensors").items() if tensor.shape == (100, 16)]
    assert len(tables) == 1
    exported(made(FOLDERS["untied"], tiny_target), tiny_target, tmp_path / "draft")
    config = json.loads((folder / "config.json").read_text())
    assert config["rope_theta"] == 10000.0
    assert config["torch_dtype"] == "float32"


def test_transformers_assisted_generation_runs_it(tiny_target: Target, tmp_path: Path) -> None:
    folder = exported(DraftLM.create(DraftLMConfig(layers=(0, 1)), tiny_target), tiny_target, tmp_path / "draft")
    prompt = torch.tensor([[5, 9, 11]])
    with tiny_target.native() as model:
        answers = [model.generate(prompt, max_new_tokens=12, do_sample=False, pad_token_id=0, **settings).tolist()
                   for settings in ({}, {"assistant_model": AutoModelForCausalLM.from_pretrained(folder)})]
    assert answers[0] == answers[1]


def test_a_mask_token_is_exported_as_the_reserved_token(tiny_target: Target, tmp_path: Path) -> None:
    drafter = made(replace(DEPTHS, mask_token_id=3), tiny_target)
    folder = exported(drafter, tiny_target, tmp_path / "draft")
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["pard_token"] == 3
    with torch.no_grad():
        found = model(torch.tensor([[5, 9, 11, 3, 3]])).logits[0, 2:].log_softmax(-1)
    torch.testing.assert_close(found, scores_at_root(drafter, [5, 9, 11]), atol=1e-5, rtol=1e-4)


def test_a_second_stage_starts_from_the_folder(tiny_target: Target, tmp_path: Path) -> None:
    first = made(DraftLMConfig(num_layers=1, hidden_size=16), tiny_target)
    folder = exported(first, tiny_target, tmp_path / "draft")
    second = DraftLM.create(DraftLMConfig(folder=str(folder), depths=3, vocabulary_size=6), tiny_target, IDS)
    for name, parameter in first.decoder.named_parameters():
        assert torch.equal(second.decoder.get_parameter(name), parameter)
    assert second.head is not None
    assert first.head is not None
    assert torch.equal(second.head.weight, first.head.weight[IDS])


def test_a_folder_can_be_planned_with_a_meta_target(tiny_target: Target, tmp_path: Path) -> None:
    """A meta target has neither weights nor a tokenizer."""
    first = made(DraftLMConfig(num_layers=1, hidden_size=16), tiny_target)
    config = DraftLMConfig(folder=str(exported(first, tiny_target, tmp_path / "draft")))
    assert planned(config, sketch_target(TargetConfig(name="tiny-random"))).hidden_size == 16
    config = DraftLMConfig(folder=str(foreign(tmp_path / "other", 90)))
    with pytest.raises(UserError, match="vocabulary of 90 tokens"):
        planned(config, sketch_target(TargetConfig(name="tiny-random")))


def test_a_folder_digest_depends_on_its_model_alone(tiny_target: Target, tmp_path: Path) -> None:
    config = DraftLMConfig(num_layers=1, hidden_size=16)
    folder = exported(made(config, tiny_target), tiny_target, tmp_path / "draft")
    known = folder_digest(folder)
    assert folder_digest(Path(shutil.copytree(folder, tmp_path / "elsewhere"))) == known
    (folder / "README.md").write_text("changed")
    assert folder_digest(folder) == known
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    other = folder_digest(folder)
    weights.rename(folder / "model-00001.safetensors")
    renamed = folder_digest(folder)
    (folder / "config.json").write_text((folder / "config.json").read_text() + " ")
    assert len({known, other, renamed, folder_digest(folder), folder_digest(tmp_path / "none")}) == 5


def test_a_checkpoint_of_another_model_in_the_folder_is_refused(tiny_target: Target, tmp_path: Path) -> None:
    """Same settings and same folder with another model in it."""
    config, none = DraftLMConfig(num_layers=1, hidden_size=16), {"total": {"ready": 0}, "current": {"ready": 0}}
    checkpoint: dict[str, Any] = {"global_step": 0, "loops": {"fit_loop": {"epoch_loop.batch_progress": none}}}
    settings = train_config(DraftLM)(drafter=DraftLMConfig(folder=str(tmp_path / "draft")))
    for model in (made(config, tiny_target), DraftLM.create(config, tiny_target)):
        exported(model, tiny_target, tmp_path / "draft")
        module = draft_module(DraftLM)(tiny_target, settings)
        module.configure_model()
        if "draftsmith" in checkpoint:
            with pytest.raises(UserError, match=r"other settings \(model_in_folder is '\w{64}', was '\w{64}'\)"):
                module.on_load_checkpoint(checkpoint)
        checkpoint["state_dict"] = module.state_dict()
        module.on_save_checkpoint(checkpoint)
        module.on_load_checkpoint(checkpoint)


# Errors ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("settings", "told"), [
    ({"num_layers": 0}, "num_layers must be at least 1, got 0"),
    ({"depths": 0}, "depths"), ({"vocabulary_size": 1.5}, "got 1.5"),
    ({"layers": (0,), "folder": "x"}, "set `layers` or `folder`, not both"),
    ({"layers": (0,), "hidden_size": 16}, "hidden_size is set by layers"),
    ({"folder": "x", "num_layers": 2}, "num_layers is set by folder"),
    ({"mask_token_id": 3}, "has no effect with depths 1"),
    ({"taps": (0,)}, r"taps \[0\] are read for mask tokens, and a draft with depths 1 reads tokens alone; set depths"),
    ({"taps": (1, 0), "depths": 2}, r"ascending numbers of layers, got \[1, 0\]"),
])
def test_impossible_settings_are_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        DraftLMConfig(**settings)


@pytest.mark.parametrize(("settings", "told"), [
    ({"layers": (0, 2)}, r"from 0 to 1, .* got \[0, 2\]"), ({"layers": ()}, "at least one"),
    ({"layers": (1, 0)}, "ascending"),
    ({"hidden_size": 24, "num_heads": 5}, "does not divide into 5 heads"),
    ({"depths": 2, "mask_token_id": 100}, "between 0 and 99, got 100"),
    ({"depths": 2, "taps": (2,)}, "tap 2 would be the state after the last norm.*choose from 0 to 1"),
])
def test_settings_that_do_not_fit_the_target_are_refused(
    settings: dict[str, Any], told: str, tiny_target: Target
) -> None:
    with pytest.raises(UserError, match=told):
        draft_module(DraftLM)(tiny_target, train_config(DraftLM)(drafter=DraftLMConfig(**settings)))


def foreign(folder: Path, vocab_size: int) -> Path:
    LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                 num_attention_heads=2, num_key_value_heads=1)).save_pretrained(folder)
    return folder


def test_another_vocabulary_is_refused(tiny_target: Target, tmp_path: Path) -> None:
    config = DraftLMConfig(folder=str(foreign(tmp_path, 90)))
    with pytest.raises(UserError, match=r"vocabulary of 90 tokens, tiny-random one of 100; .*leave folder out"):
        draft_module(DraftLM)(tiny_target, train_config(DraftLM)(drafter=config))
    other = made(DraftLMConfig(num_layers=1), tiny_target)
    with pytest.raises(UserError, match="vocabulary of 100 tokens, odd one of 90"):
        other.bind(Target(AutoModelForCausalLM.from_pretrained(tmp_path), tiny_tokenizer(), name="odd"))


def test_another_tokenizer_of_the_same_size_is_refused(tiny_target: Target, tmp_path: Path) -> None:
    folder = foreign(tmp_path, 100)
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"100 tokens, tiny-random's 100; they differ first at id \d+"):
        planned(DraftLMConfig(folder=str(folder)), tiny_target)


def test_unreadable_folders_are_refused(tiny_target: Target, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no config\.json"):
        planned(DraftLMConfig(folder=str(tmp_path)), tiny_target)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        planned(DraftLMConfig(folder=str(tmp_path)), tiny_target)
    foreign(tmp_path, 100)
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(UserError, match="is no readable safetensors file"):
        made_from(tmp_path, tiny_target)


@pytest.mark.parametrize("config", [DraftLMConfig(num_layers=1, hidden_size=16, vocabulary_size=6),
                                    DraftLMConfig(layers=(0,), vocabulary_size=6)], ids=["new", "of the target"])
def test_an_exported_reduced_layer_drafts_no_other_token(
    config: DraftLMConfig, tiny_target: Target, tmp_path: Path
) -> None:
    drafter = made(config, tiny_target)
    with torch.no_grad():
        # Rows of a trained layer are shorter than those of the target, which would win.
        drafter.output_parameters(0)[0].mul_(0.01)
    model = AutoModelForCausalLM.from_pretrained(exported(drafter, tiny_target, tmp_path / "draft"))
    assert torch.isin(model(torch.arange(4, 90)[None]).logits.argmax(-1), IDS).all()


def test_a_reduced_vocabulary_needs_counts(tiny_target: Target) -> None:
    with pytest.raises(UserError, match="were not counted"):
        draft_module(DraftLM)(tiny_target, train_config(DraftLM)(drafter=DraftLMConfig(vocabulary_size=7)))


def test_another_familys_artifact_is_no_language_model(tiny_target: Target, tmp_path: Path) -> None:
    from draftsmith.modules import Medusa, MedusaConfig

    artifact = Artifact(drafter=Medusa.create(MedusaConfig(), tiny_target), target=tiny_target, topology=TREE,
                        identity=tiny_target.identity, provenance={})
    with pytest.raises(UserError, match="this artifact is medusa"):
        export_artifact(artifact, tiny_target, "huggingface", tmp_path / "draft")


def test_layers_of_a_target_with_own_names_for_its_sizes_make_a_draft() -> None:
    """GPT-2's configuration says n_layer where others say num_hidden_layers."""
    target = build("GPT2")
    drafter = DraftLM.create(DraftLMConfig(layers=(0, 1)), target)
    assert len(drafter.kept) == 2
    requests = [Request((5, 20 + index, 7), index, 12) for index in range(3)]
    plain = decode(target, requests, DecodeSettings(ignore_eos=True)).generations
    drafted = decode(target, requests, DecodeSettings(ignore_eos=True), drafter=drafter, policy=Chain(3)).generations
    assert [one.tokens for one in drafted] == [one.tokens for one in plain]
