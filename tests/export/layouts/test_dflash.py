"""Drafters of blocks in the layouts of DFlash, DSpark and the speculators library: the same checkpoint back, other
projects' spellings, what each engine takes for granted, and what is refused."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from shutil import copytree
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draftsmith.export import Artifact, ExportSettings, ImportSettings, import_drafter, read_description
from draftsmith.export.layouts.dflash import TEMPERATURES
from draftsmith.export.layouts.parts.export_format import Places
from draftsmith.export.layouts.parts.state_drafters import vocabulary_marks
from draftsmith.export.layouts.registry import formats_of
from draftsmith.modules import BlockDraft, BlockDraftConfig, Features, Target, UserError
from draftsmith.modules.families.block.layout import KINDS
from draftsmith.recipes.__main__ import main
from draftsmith.trainers.train_config import continued_settings
from gguf import GGUFReader
from safetensors.torch import load_file, save_file
from serving.engine_contracts import ANCHORS, CAUSAL
from support.artifacts import TREE, edit
from support.families import IDS, randomised
from support.target_folders import write_vocabulary
from support.tiers import others_long

from .test_engine_contracts import padded, written

MASK = 101  # A row of the embeddings after the tokenizer's last token
MADE: dict[str, dict[str, Any]] = {
    "dflash": {"aligned": "same", "causal": False},
    "jetspec": {"aligned": "same"},
    "dflash reduced": {"aligned": "same", "causal": False, "vocabulary_size": len(IDS)},
    "dspark": {"aligned": "next", "causal": False, "correction": "markov", "confidence": True},
    "dspark reduced": {"aligned": "next", "correction": "markov", "vocabulary_size": len(IDS)},
    "dspark gated": {"aligned": "same", "correction": "gated", "confidence": True},
    "dspark rnn": {"aligned": "next", "correction": "rnn"},
    "dflash2": {"aligned": "same", "causal": False, "correction": "selector", "conv": True},
    "xpress": {"aligned": "same", "causal": False, "correction": "refiner"},
    "domino": {"aligned": "next", "causal": False, "correction": "gru"},
}
"""Settings by name: the method, and what is special."""


@pytest.fixture(scope="module")
def target() -> Target:
    return padded()


@pytest.fixture(scope="module")
def checkpoint(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """An export in the layout dflash, which is made once."""
    @cache
    def once(name: str) -> Path:
        return written(made(name, target), target, "dflash", tmp_path_factory.mktemp("made") / "out")

    return once


def made(name: str, target: Target, **settings: Any) -> BlockDraft:
    given = {"taps": (0, 1, 3), "num_layers": 2, "block_size": 4, "mask_token_id": MASK, **MADE[name], **settings}
    given = {"rank": 6, **given} if "correction" in given else given
    ids = IDS if given.get("vocabulary_size") else None
    drafter = randomised(BlockDraft.create(BlockDraftConfig(**given), target, ids))
    if drafter.judges:
        drafter.judge_temperatures_K.copy_(torch.linspace(0.7, 1.3, drafter.config.num_steps))
    return drafter


@pytest.mark.parametrize(("name", "layout"), others_long(
    [(name, layout) for name in MADE for layout in ("dflash", "speculators")
     if not (name in ("xpress", "domino") and layout == "speculators")],
    [("dspark gated", "dflash"), ("dflash2", "dflash"), ("dflash2", "speculators"), ("xpress", "dflash"),
     ("domino", "dflash")]))
def test_a_checkpoint_comes_back_byte_for_byte(tmp_path: Path, target: Target, name: str, layout: str) -> None:
    drafter = made(name, target)
    folder = written(drafter, target, layout, tmp_path / "out")
    back = import_drafter(layout, folder, target)
    assert isinstance(back, BlockDraft)
    assert (back.config, back.block) == (drafter.config, drafter.block)
    assert all(torch.equal(tensor, back.state_dict()[key]) for key, tensor in drafter.state_dict().items())
    again = written(back, target, layout, tmp_path / "again")
    for file in ("config.json", "model.safetensors"):
        assert (folder / file).read_bytes() == (again / file).read_bytes()


def test_an_imported_dflash_goes_on_as_a_dspark_with_the_same_guesses(
    target: Target, checkpoint: Callable[[str], Path]
) -> None:
    start = import_drafter("dflash", checkpoint("dflash"), target)
    assert isinstance(start, BlockDraft)
    asked = BlockDraftConfig(aligned="same", causal=False, correction="markov", rank=5, confidence=True)
    config = continued_settings(asked, start.config)
    drafter = BlockDraft.create(config, target, start=start).eval()
    start.bind(target)
    features = target.encode(Features.from_rows([(list(range(20, 36)), [True] * 16)]), drafter.taps)
    with torch.no_grad():
        old, new = start.eval()(features).hidden_BLKD, drafter(features).hidden_BLKD
        for step in range(3):
            torch.testing.assert_close(drafter.project(new[:, :, step], step), start.project(old[:, :, step], step))


def test_dflash2_has_the_names_of_its_first_project(target: Target, checkpoint: Callable[[str], Path]) -> None:
    """The codebooks are parameters without a layer, which have no `.weight`; all keys stand where engines look."""
    config = json.loads((checkpoint("dflash2") / "config.json").read_text())
    shape = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 6, "selector_top_k": 16, "block_size": 4}
    inside = config["dflash_config"]
    assert config["architectures"] == ["DFlash2DraftModel"]
    assert shape.items() <= inside.items()
    assert (inside["causal"], config["is_causal"], inside["target_layer_ids"]) == (False, False, [0, 1, 3])
    held = load_file(checkpoint("dflash2") / "model.safetensors")
    own = {"predecessor_codebook": (104, 6), "successor_codebook": (104, 6), "hidden_projection.weight": (6, 32)}
    assert {f"candidate_selector.{name}": shape for name, shape in own.items()} == {
        name: tuple(held[name].shape) for name in held if name.startswith("candidate_")}
    for conv in ("attention_conv", "mlp_conv"):
        assert held[f"layers.1.{conv}.base_kernel"].shape == (2, 2, 32)
        assert held[f"layers.1.{conv}.kernel_projection.weight"].shape == (8, 32)


def test_xpress_has_the_names_that_vllm_reads(target: Target, checkpoint: Callable[[str], Path]) -> None:
    """vLLM multiplies the mixture by the triangle and adds the identity itself: it is written as trained."""
    config = json.loads((checkpoint("xpress") / "config.json").read_text())
    keys = {"xpress_rank": 6, "xpress_mlp_hidden": 12, "xpress_block_size": 4, "xpress_num_passes": 3}
    assert (config["architectures"], config["sample_from_anchor"]) == (["Qwen3XPressModel"], False)
    assert keys.items() <= config.items()
    held = {name.removeprefix("xpress_head."): tensor for name, tensor in load_file(
        checkpoint("xpress") / "model.safetensors").items() if name.startswith("xpress_head.")}
    assert {name: tuple(tensor.shape) for name, tensor in held.items()} == {
        "w1.weight": (104, 6), "w2.weight": (104, 6), "down_h.weight": (6, 32), "down_g.weight": (6, 32),
        "in_proj.weight": (6, 18), "mix.L": (6, 4, 4), "mlp.gate_proj.weight": (12, 6), "mlp.up_proj.weight": (12, 6),
        "mlp.down_proj.weight": (6, 12)}
    drafter = import_drafter("dflash", checkpoint("xpress"), target)
    served = held["mix.L"].tril() + torch.eye(4)
    parts = torch.randn(4, 6)
    for place in range(4):
        own = parts[place] + sum(drafter.correction.mix["L"][:, place, slot] * parts[slot] for slot in range(place + 1))
        torch.testing.assert_close(own, torch.einsum("rj,jr->r", served[:, place], parts))


def test_domino_has_the_names_that_sglang_reads(target: Target, checkpoint: Callable[[str], Path]) -> None:
    """torch's names of a GRU's weights; the alignment under the first project's name too. No command is vLLM's."""
    config = json.loads((checkpoint("domino") / "config.json").read_text())
    keys = {"projector_type": "domino", "shift_label": True, "pure_draft_prefix_len": 1, "gru_hidden_dim": 24,
            "emb_dim": 6, "sample_from_anchor": True, "block_size": 4}
    assert config["architectures"] == ["DFlashDraftModel"]
    assert keys.items() <= config["dflash_config"].items()
    held = load_file(checkpoint("domino") / "model.safetensors")
    own = {"prefix_gru.weight_ih_l0": (72, 32), "prefix_gru.weight_hh_l0": (72, 24), "embed_proj.0.weight": (6, 56),
           "embed_proj.2.weight": (104, 6)}
    assert own == {name: tuple(held[name].shape) for name in held if name.startswith(("prefix_gru", "embed_proj"))}
    # torch's own GRU with these weights gives the states after root and guesses.
    drafter = import_drafter("dflash", checkpoint("domino"), target)
    assert isinstance(drafter, BlockDraft)
    gru = torch.nn.GRU(32, 24, batch_first=True, bias=False)
    gru.load_state_dict({name.removeprefix("prefix_gru."): held[name] for name in list(own)[:2]})
    tokens_N, table_VD = torch.tensor([5, 40, 7]), target.model.get_input_embeddings().weight
    path_P = torch.zeros(24)
    with torch.no_grad():
        for step, wanted_P in enumerate(gru(table_VD[tokens_N][None])[0][0]):
            path_P, _ = drafter.correction.extend(torch.zeros(32), path_P, tokens_N[step], drafter.embed, step)
            torch.testing.assert_close(path_P, wanted_P)
    text = (checkpoint("domino") / "README.md").read_text()
    assert "--speculative-algorithm DFLASH --speculative-draft-model-path . --speculative-num-draft-tokens 4" in text
    assert "vllm" not in text


def flat(config: dict[str, Any]) -> dict[str, Any]:
    """As DeepSpec writes it: all keys at the top, none about causality or alignment."""
    gone = ("dflash_config", "is_causal", "sample_from_anchor", "draft_vocab_size")
    return {key: value for key, value in config.items() if key not in gone}


def nested(config: dict[str, Any]) -> dict[str, Any]:
    """As SpecForge writes it: slots and correction in `dflash_config`."""
    inside = config["dflash_config"]
    return {**{key: value for key, value in config.items() if key not in inside}, "architectures": ["DSparkDraftModel"]}


def of_dspark(config: dict[str, Any]) -> dict[str, Any]:
    """The same in a section by the method's own name."""
    found = nested(config)
    return {**found, "dspark_config": found.pop("dflash_config")}


def of_modelopt(config: dict[str, Any]) -> dict[str, Any]:
    """As ModelOpt writes it: the alignment by `shift_label`, DFlash's architecture whatever the correction."""
    inside = {key: value for key, value in config["dflash_config"].items() if key != "sample_from_anchor"}
    shift = {"shift_label": config["sample_from_anchor"], "use_confidence_head": True}
    return {**flat(config), "architectures": ["DFlashDraftModel"], "is_causal": config["is_causal"],
            "dflash_config": {**inside, **shift}}


@pytest.mark.parametrize(("name", "spelling", "head", "given"), [
    ("dspark", flat, "markov_head.", ImportSettings(aligned="next", causal=False)),
    ("dspark", nested, "markov_head.", ImportSettings()), ("dspark", of_dspark, "markov_head.", ImportSettings()),
    ("domino", of_modelopt, "", ImportSettings()),
    ("dspark gated", of_modelopt, "", ImportSettings()),
    ("dspark rnn", of_modelopt, "", ImportSettings())])
def test_the_spellings_of_other_projects_are_read(
    tmp_path: Path, target: Target, name: str, spelling: Callable[[dict[str, Any]], dict[str, Any]], head: str,
    given: ImportSettings,
) -> None:
    drafter = made(name, target, aligned="next", causal=False)
    folder = written(drafter, target, "dflash", tmp_path / "out")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(spelling(config)))
    held = load_file(folder / "model.safetensors")
    copies = {"embed_tokens.weight": target.model.get_input_embeddings().weight.detach().bfloat16(),
              "lm_head.weight": target.output_weight().detach().bfloat16()}
    renamed = {key.replace("markov_head.", head): tensor for key, tensor in held.items()}
    if not head:
        renamed = {key.replace("confidence_head.proj", "confidence_proj"): tensor for key, tensor in renamed.items()}
    save_file(copies | renamed, folder / "model.safetensors")
    back = import_drafter("dflash", folder, target, given)
    assert back.config == drafter.config
    assert all(torch.equal(tensor, back.state_dict()[key]) for key, tensor in drafter.state_dict().items())


def test_layers_with_a_window_are_read_and_written_and_a_mixture_warns(tmp_path: Path, target: Target) -> None:
    drafter = made("dspark", target)
    folder = written(drafter, target, "speculators", tmp_path / "out")
    written_config = json.loads((folder / "config.json").read_text())
    inner = {key: value for key, value in written_config["transformer_layer_config"].items() if key != "is_causal"}
    plain = {key: value for key, value in written_config.items()
             if key not in ("sliding_window_non_causal", "is_causal", "dflash_config")}

    def read(kinds: list[str], size: Any = 2048, **said: Any) -> BlockDraft:
        layers = {**inner, "layer_types": kinds, "sliding_window": size, "use_sliding_window": True}
        (folder / "config.json").write_text(json.dumps({**plain, "transformer_layer_config": layers, **said}))
        found = import_drafter("speculators", folder, target)
        assert isinstance(found, BlockDraft)
        return found

    window, whole = ["sliding_attention"] * 2, ["full_attention"] * 2
    assert read(window).config.causal
    assert not read(window, sliding_window_non_causal=True).config.causal
    assert not read(whole).config.causal
    with pytest.warns(UserWarning, match=r"a window over the text \(sliding_window: 2048 tokens\) next to layers"):
        mixed = read([window[0], whole[0]], sliding_window_non_causal=True).config
    assert (mixed.causal, mixed.window, read(whole).config.window, read(window).config.window) == (
        False, None, None, 2048)
    with pytest.raises(UserError, match=r"says sliding_window: null; it must be a number of tokens of at least 1"):
        read(window, None)
    with pytest.raises(UserError, match=r"window is 3, and a draft of up to 6 tokens .* \(block_size 4\)"):
        read(window, 3)
    for layout in ("dflash", "speculators"):
        windowed = BlockDraft.create(replace(drafter.config, window=64), target)
        again = written(windowed, target, layout, tmp_path / layout)
        assert import_drafter(layout, again, target).config == windowed.config
    with pytest.raises(UserError, match=r"have one kind, say --causal true or false to draft with that"):
        read([window[0], whole[0]])


@pytest.mark.parametrize(("name", "change", "tensors", "message"), [
    ("dflash", {"sample_from_anchor": None, "dflash_config": {"mask_token_id": MASK}}, {},
     r"does not say which token a slot predicts \(sample_from_anchor\); give --aligned same as in DFlash, or next"),
    ("dflash", {"is_causal": None, "dflash_config": None}, {},
     r"does not say whether a slot sees those after it \(is_causal\); give --causal false as in both"),
    ("dspark", {"is_causal": None, "sample_from_anchor": None, "dflash_config": None}, {},
     r"\(sample_from_anchor\) and whether .* give --aligned same .* and --causal false"),
    ("dflash", {"dflash_config": {"mask_token_id": 40}}, {},
     r"mask_token_id 40 is '.' to tiny-target, a token that its text has"),
    ("dflash", {"target_layer_ids": [0, 1, 6], "dflash_config": None}, {}, "tap 6 would be the state after the last"),
    ("dflash", {"target_layer_ids": [-1, 1, 3], "dflash_config": None}, {}, "tap -1 is not a layer of tiny-target"),
    ("dflash", {"target_layer_ids": [1, 3], "dflash_config": None}, {}, r"fc in .* reads 96 numbers, but the 2 taps"),
    ("dflash", {"target_layer_ids": None, "dflash_config": None}, {}, r"which layers' outputs are read .* with --taps"),
    ("dflash", {"mask_token_id": None, "dflash_config": None}, {}, "lacks mask_token_id; copy it again"),
    ("dflash", {"num_target_layers": 36}, {}, "says num_target_layers: 36, but tiny-target has 6"),
    ("dflash", {"hidden_size": 64}, {}, r"reads states 64 wide .* but those of tiny-target are 32 wide"),
    ("dflash2", {}, vocabulary_marks(IDS, SimpleNamespace(vocab_size=104)),
     r"holds a draft vocabulary of 26 tokens \(d2t\), and its selector has a row for every token of the target; cho"),
    ("dflash", {"vocab_size": 100}, {}, "says vocab_size: 100, but tiny-target has 104 tokens"),
    ("dspark", {"markov_head_type": "deep", "dflash_config": None}, {},
     'says markov_head_type: "deep"; only "vanilla", "gated", "rnn" can be imported'),
    ("dspark", {}, {"markov_head.markov_w2.weight": torch.zeros(90, 6)}, "does not fit its configuration or tiny"),
    ("dspark", {}, {"confidence_head.proj.weight": torch.zeros(1, 32)}, "does not read the token before a guess"),
    ("dflash", {}, {"input_proj.weight": torch.zeros(2, 2)},
     "holds input_proj.weight, a part that this reader knows of no method; choose a checkpoint of DFlash,"),
    ("domino", {}, {"prefix_gru.weight_hh_l0": torch.zeros(72, 20)}, "does not fit its configuration or tiny-target"),
    ("domino", {"pure_draft_prefix_len": None, "dflash_config": None}, {}, "lacks pure_draft_prefix_len; copy it"),
    ("domino", {"pure_draft_prefix_len": 2, "dflash_config": None}, {}, "pure_draft_prefix_len: 2; only 1 can be imp"),
    ("domino", {"gru_hidden_dim": 20, "dflash_config": None}, {}, "says gru_hidden_dim: 20; only 24 can be imported"),
    ("domino", {"projector_type": None, "dflash_config": None}, {},
     "says projector_type: null, and .* holds an embed_proj.2.weight of domino; copy both again"),
    ("dflash", {"projector_type": "domino", "pure_draft_prefix_len": 1}, {},
     'says projector_type: "domino", and .* holds no embed_proj.2.weight of domino; copy both again'),
    ("dflash2", {}, {"candidate_selector.successor_codebook": torch.zeros(90, 6)}, "does not fit its configuration or"),
    ("dflash2", {"selector_top_k": 8, "dflash_config": None}, {}, "says selector_top_k: 8; only 16 can be imported"),
    ("dflash2", {"dflash_config": {"conv_kernel_size": 3}}, {}, "says conv_kernel_size: 3; only 2 can be imported"),
    ("dflash", {"dflash_config": {"lilicorr_enabled": True, "lilicorr_num_layers": 2}}, {},
     "says lilicorr_enabled: true; only false can be imported"),
    ("dflash", {"output_multiplier": 2.0}, {}, "says output_multiplier: 2.0; only 1 can be imported"),
    ("dflash", {}, {"lm_head.weight": torch.ones(104, 32)}, "the output layer in .* is not that of tiny-target"),
    ("dflash reduced", {}, {"lm_head.weight": torch.ones(26, 32)}, "the output layer in .* is not that of tiny-target"),
    ("dflash", {}, {"embed_tokens.weight": torch.ones(104, 32)}, "the embedding in .* is not that of tiny-target"),
    ("dspark", {"dspark_config": {"markov_head_type": "deep"}}, {}, 'says markov_head_type: "deep"; only'),
    ("dflash", {}, {"embed_tokens.weight": torch.full((104, 32), torch.nan)},
     "the tensor embed_tokens.weight of .* holds values that are not finite"),
    ("dflash", {}, {"lm_head.weight": torch.full((104, 32), torch.inf)}, "the tensor lm_head.weight of .* not finite"),
    ("dflash", {"dflash_config": 3}, {}, "config.json is damaged: 'int' object is not a mapping; copy it again"),
    ("dflash", {"dflash_config": {"mask_token_id": 101.5}}, {},
     "is damaged: mask_token_id must be a whole number or null, got 101.5; copy it again"),
    ("dflash", {"dflash_config": {"target_layer_ids": [0, True, 3]}}, {},
     r"is damaged: taps\[1\] must be a whole number, got true; copy it again"),
    ("dflash", {"is_causal": None, "dflash_config": {"causal": "no"}}, {},
     'says causal: "no"; only false, true can be imported'),
    ("dflash", {"dflash_config": {"sample_from_anchor": "no"}}, {},
     'says sample_from_anchor: "no"; only false, true can be imported'),
    ("dflash", {"dflash_config": {"block_size": 0}}, {},
     "config.json is damaged: block_size must be at least 1, got 0; copy it again"),
    ("dflash", {"layer_types": ["chunked_attention", "full_attention"]}, {},
     r'says layer_types: \["chunked_attention"\]; only full_attention and sliding_attention can be imported'),
    ("dflash", {"partial_rotary_factor": 0.5}, {}, "says partial_rotary_factor: 0.5; only 1 can be imported"),
    ("dflash", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, {},
     "says partial_rotary_factor: 0.5; heads rotate whole here; take it out if the trainer passed over it"),
    ("dflash", {"rope_scaling": {"rope_type": "yarn"}}, {}, "config.json lacks .*factor.*; copy it again"),
    ("dflash", {"rope_scaling": {"rope_type": "linear", "factor": 0}}, {},
     'says rope_scaling: {"rope_type": "linear", "factor": 0}; only the rope_type linear, .* with factors above 0 can'),
    ("dflash", {"intermediate_size": 2**26}, {},
     r"makes 12,884,\d*,\d* parameters, but its weights have \d*,\d* bytes; correct it, or copy the model again"),
    ("dspark", {"dflash_config": {TEMPERATURES: [1.0, 1.0, 1.0, 0.0]}}, {}, "must be above 0, copy it again"),
    ("dspark gated", {"markov_head_type": "vanilla", "dflash_config": None}, {},
     "holds markov_head.gate_proj.bias, a part that this reader knows of no method"),
    ("dflash reduced", {}, {"d2t": IDS - torch.arange(len(IDS)) + 0.4},
     "(d2t and t2d in .* name different tokens|config.json is damaged: )"),
    ("dflash reduced", {}, {"d2t": torch.arange(-1, -27, -1)}, "d2t in .* names the token -1, but tiny-target has 104"),
    ("dflash reduced", {}, {"d2t": None}, "out holds t2d and no d2t, which says which token each entry of the draft"),
    ("dflash reduced", {}, {"d2t": torch.zeros(26, 1)}, "out holds a d2t that is no list of offsets, which says which"),
    ("dspark", {}, {"markov_head.markov_w1.weight": None}, "says markov_rank: 6, and .* no tensors of it; copy all"),
    ("dflash", {}, {"fc.weight": None}, r"out holds no fc\.weight, which joins the taps; copy it again"),
    ("dspark", {}, {"confidence_head.proj.weight": None}, "says enable_confidence_head: true, and .* no tensors of it"),
    ("dspark", {}, {"markov_w1.weight": torch.zeros(104, 6)}, "twice, under two names; choose a checkpoint with"),
    ("dflash2", {}, {"candidate_selector.predecessor_codebook": None}, "says selector_rank: 6, and .* no tens"),
    ("dflash2", {}, {f"layers.{layer}.attention_conv.{name}": None for layer in (0, 1) for name in (
        "base_kernel", "kernel_projection.weight")}, "says conv_kernel_size: 2, and .* no tensors of it"),
    ("dflash", {"hidden_size": 64, "target_hidden_size": 32}, {}, "its layers are 64 wide .hidden_size., and a draft"),
    ("dflash", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16,
                                 "attention_factor": 0.0}}, {}, "with factors above 0 can be imported, choose such a"),
    ("dspark", {"shift_label": False}, {}, "says sample_from_anchor: true and shift_label: false, which contradict"),
])
def test_what_is_open_or_does_not_fit_is_refused(
    tmp_path: Path, target: Target, checkpoint: Callable[[str], Path], name: str, change: dict[str, Any],
    tensors: dict[str, torch.Tensor | None], message: str,
) -> None:
    folder = Path(copytree(checkpoint(name), tmp_path / "out"))
    said = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps({key: value for key, value in said.items() if value is not None}))
    if tensors:
        held = load_file(folder / "model.safetensors") | tensors
        save_file({key: one for key, one in held.items() if one is not None}, folder / "model.safetensors")
    with pytest.raises(UserError, match=message):
        import_drafter("dflash", folder, target)


@pytest.mark.parametrize("file", ["mask_embedding.pt", "mask_embedding.safetensors"])
def test_a_mask_in_a_file_of_its_own_is_refused_by_the_files_name(
    tmp_path: Path, target: Target, checkpoint: Callable[[str], Path], file: str
) -> None:
    folder = Path(copytree(checkpoint("dflash"), tmp_path / "out"))
    (folder / file).touch()
    for layout in ("dflash", "speculators"):
        with pytest.raises(UserError, match=rf"out/{re.escape(file)} holds a mask of its own, .*; choose a checkpoint"):
            import_drafter(layout, folder, target)


@pytest.mark.parametrize("layout", ["dflash", "eagle", "huggingface"])
def test_an_adapter_as_peft_writes_it_is_named_as_one(tmp_path: Path, target: Target, layout: str) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    save_file({"base_model.model.lora_A.weight": torch.ones(2, 2)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(UserError, match=r"holds an adapter \(adapter_config\.json\).*merge the adapter into its model"):
        import_drafter(layout, tmp_path, target)


def test_a_number_in_place_of_a_truth_value_is_read_as_one(
    tmp_path: Path, target: Target, checkpoint: Callable[[str], Path]
) -> None:
    """An artifact with the number would not be read again."""
    folder = Path(copytree(checkpoint("dflash"), tmp_path / "out"))
    edit(folder, is_causal=1)
    drafter = import_drafter("dflash", folder, target)
    assert isinstance(drafter, BlockDraft)
    assert drafter.config.causal is True


T, F = True, False
STATED: list[tuple[dict[str, Any], bool, dict[str, bool], bool | str]] = [
    ({"is_causal": T}, F, {"vLLM": T, "SGLang": T, "llama.cpp": T}, T),
    ({"is_causal": T}, T, {"vLLM": T, "SGLang": T, "llama.cpp": T}, T),
    ({"is_causal": F}, F, {"vLLM": F, "SGLang": F, "llama.cpp": F}, F),
    ({"is_causal": F}, T, {"vLLM": F, "SGLang": F, "llama.cpp": F}, F),
    ({"causal": T}, F, {"vLLM": T, "SGLang": F, "llama.cpp": T}, T),
    ({"causal": T}, T, {"vLLM": T, "SGLang": T, "llama.cpp": T}, T),
    ({"causal": F}, F, {"vLLM": F, "SGLang": F, "llama.cpp": F}, F),
    ({"causal": F}, T, {"vLLM": F, "SGLang": T, "llama.cpp": F}, F),
    ({"is_causal": F, "causal": T}, F, {"vLLM": F, "SGLang": F, "llama.cpp": F}, F),
    ({"is_causal": T, "inner is_causal": F}, F, {"vLLM": T, "SGLang": T, "llama.cpp": T}, T),
    ({}, F, {"vLLM": F, "SGLang": F, "llama.cpp": F}, "is_causal"),
    ({}, T, {"vLLM": T, "SGLang": T, "llama.cpp": F}, "is_causal"),
]
"""(what a configuration states, whether its layers have a window, what engines make of it, what the import does)."""


@pytest.mark.parametrize(("stated", "window", "engines", "own"), STATED)
def test_engines_differ_in_what_they_make_of_a_configuration(
    tmp_path: Path, target: Target, checkpoint: Callable[[str], Path], stated: dict[str, bool], window: bool,
    engines: dict[str, bool], own: bool | str,
) -> None:
    folder = Path(copytree(checkpoint("jetspec"), tmp_path / "out"))
    config = json.loads((folder / "config.json").read_text())
    inside = {key: value for key, value in config["dflash_config"].items() if key != "causal"}
    inside |= {"causal": stated["causal"]} if "causal" in stated else {}
    inside |= {"is_causal": stated["inner is_causal"]} if "inner is_causal" in stated else {}
    config = {key: value for key, value in config.items() if key != "is_causal"} | {"dflash_config": inside}
    config |= {"is_causal": stated["is_causal"]} if "is_causal" in stated else {}
    config |= {"layer_types": ["sliding_attention" if window else "full_attention"] * 2, "sliding_window": 64}
    assert {engine: reader(config, 1) for engine, reader in CAUSAL.items() if engine in engines} == engines
    (folder / "config.json").write_text(json.dumps(config))
    if isinstance(own, str):
        with pytest.raises(UserError, match=own):
            import_drafter("dflash", folder, target)
    else:
        assert import_drafter("dflash", folder, target).config.causal is own


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", ["dflash", "dspark", "dspark gated", "dflash2"])
def test_an_export_leaves_no_engine_a_choice(tmp_path: Path, target: Target, name: str, causal: bool) -> None:
    drafter = made(name, target, causal=causal)
    configs = {layout: json.loads((written(drafter, target, layout, tmp_path / layout) / "config.json").read_text())
               for layout in ("dflash", "speculators")}
    for engine, reader in CAUSAL.items():
        config = configs["speculators" if "speculators" in engine else "dflash"]
        assert [reader(config, layer) for layer in range(2)] == [causal, causal], engine
    for engine, anchor in ANCHORS.items():
        config = configs["speculators" if "speculators" in engine else "dflash"]
        assert anchor(config) is (drafter.config.aligned == "next"), engine
        # Without the key engines disagree.
        assert anchor({"dflash_config": {}}) is (engine in ("vLLM, DSpark", "SGLang", "llama.cpp"))
    assert [layer - 1 for layer in configs["speculators"]["aux_hidden_state_layer_ids"]] == [0, 1, 3]
    assert configs["dflash"]["target_layer_ids"] == configs["dflash"]["dflash_config"]["target_layer_ids"] == [0, 1, 3]


def test_layers_without_a_word_of_the_speculators_library_are_not_causal(tmp_path: Path, target: Target) -> None:
    folder = written(made("dspark", target), target, "speculators", tmp_path / "out")
    inside = json.loads((folder / "config.json").read_text())["transformer_layer_config"]
    edit(folder, transformer_layer_config={key: value for key, value in inside.items() if key != "is_causal"})
    assert import_drafter("speculators", folder, target).config.causal is False
    edit(folder, speculators_model_type="mtp")
    with pytest.raises(UserError, match='"mtp"; only "eagle3", "peagle", "dflash", "dspark", "dflash2" can be'):
        import_drafter("speculators", folder, target)


@pytest.mark.parametrize(("layout", "name", "settings", "message"), [
    ("dflash", "dflash", {"mask_token_id": None}, "is a row of its own, .*; train with mask_token_id"),
    ("speculators", "dflash", {"aligned": "next"}, "aligned 'next' and correction 'none', .* train with aligned: same"),
    ("dflash", "dflash", {"conv": True}, "has correction 'none' and conv true, .* train with both, or with neither"),
    ("speculators", "dflash2", {"conv": False}, "has correction 'selector' and conv false, .* train with both,"),
    ("dflash", "xpress", {"vocabulary_size": len(IDS)}, "vLLM has XPress over the whole vocabulary alone; train"),
    ("dflash", "domino", {"vocabulary_size": len(IDS)}, "SGLang has Domino over the whole vocabulary alone; train"),
    ("dflash", "domino", {"conv": True}, "has correction 'gru' and conv true, .* train with both, or with neither"),
    ("gguf", "domino", {}, "this drafter has the correction gru; train another, or choose --format dflash"),
    ("openvino", "domino", {}, "has aligned: next and the correction gru; train another, or choose --format dflash"),
    ("speculators", "domino", {}, "the speculators library has no Domino; train another, or choose --format dflash"),
    ("gguf", "dflash2", {}, "this drafter has a width of 32, where a selector needs 272; train another"),
    ("dflash", "dflash", {"residual": True}, "no engine adds a state of the text to its slots .residual.; decode the"),
    ("gguf", "dflash", {"correction": "state"}, "no layout here holds the correction state; decode the artifact with"),
    ("gguf", "dspark gated", {}, "this drafter has the correction gated; train another, or choose --format dflash"),
    ("openvino", "jetspec", {}, "this drafter has causal slots; train another, or choose --format dflash, speculators"),
    ("openvino", "dspark", {}, "this drafter has aligned: next and the correction markov; train another"),
])
def test_what_a_layout_cannot_hold_is_refused(
    tmp_path: Path, target: Target, layout: str, name: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        written(made(name, target, **settings), target, layout, tmp_path / "out")


@pytest.mark.parametrize(("name", "readers"), [
    ("dflash", {"dflash": "vLLM, SGLang, TensorRT-LLM", "gguf": "llama.cpp", "openvino": "OpenVINO GenAI",
                "speculators": "vLLM as a model of its own, the speculators library"}),
    ("dspark reduced", {"dflash": "vLLM", "gguf": "llama.cpp",
                        "speculators": "vLLM as a model of its own, the speculators library"}),
    ("xpress", {"dflash": "vLLM"}), ("domino", {"dflash": "SGLang"})])
def test_a_format_names_the_engines_that_have_the_correction(
    target: Target, name: str, readers: dict[str, str]
) -> None:
    """As `choose` and the README of an export show them, from the same data."""
    drafter = made(name, target)
    artifact = Artifact(drafter=drafter, target=target, topology=TREE, identity=target.identity, provenance={})
    assert {one.name: one.read_by(drafter) for one in formats_of(artifact)} == readers
    served = {engine for one in formats_of(artifact) for engine in one.commands(drafter, Places())}
    assert all(engine.removesuffix(" on a CPU") in "; ".join(readers.values()) for engine in served
               if "optimum" not in engine)


def test_a_weight_that_no_setting_asks_for_is_not_written(tmp_path: Path, target: Target) -> None:
    drafter = made("dflash", target)
    drafter.own_part = torch.nn.Linear(2, 2, bias=False)
    with pytest.raises(ValueError, match=r"the export would hold wrong tensors: own_part\.weight$"):
        written(drafter, target, "dflash", tmp_path / "out")


@pytest.mark.parametrize("engine", ["vLLM", "SGLang", "TensorRT-LLM", "llama.cpp"])
def test_the_guide_names_the_same_engines(engine: str) -> None:
    text = (Path(__file__).resolve().parents[3] / "recipes/guides/block-drafters.md").read_text()
    lines = text.partition("<!-- blocks -->\n")[2].partition("<!-- /blocks -->")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    named = {name for _, corrections, engines, _ in rows if engine in engines.split(", ")
             for name in re.findall(r"`(\w+)`", corrections)}
    assert named == {name for name, kind in KINDS.items() if engine in kind.engines}


@pytest.mark.parametrize(("name", "method"), [("dflash reduced", "draft-dflash"), ("dspark", "draft-dspark"),
                                              ("dflash2", "draft-dflash")])
def test_a_gguf_file_has_all_that_llama_cpp_reads(tmp_path: Path, target: Target, name: str, method: str) -> None:
    drafter = made(name, target)
    drafter.correction.most = 5
    vocabulary = write_vocabulary(tmp_path / "v.gguf", target.vocab_size)
    folder = written(drafter, target, "gguf", tmp_path / "out", ExportSettings(target_gguf=vocabulary))
    reader = GGUFReader(folder / "draft.gguf")
    found = {key.removeprefix("dflash."): field.contents() for key, field in reader.fields.items()}
    assert found["general.architecture"] == "dflash"
    assert found["target_layers"] == [1, 2, 4]
    assert (found["block_size"], found["tokenizer.ggml.mask_token_id"]) == (4, MASK)
    assert (found["attention.causal"], found["sample_from_anchor"]) == (False, name == "dspark")
    assert found["has_confidence_head"] is (name == "dspark")
    layers = {f"blk.{layer}.{part}.weight" for layer in range(2) for part in (
        "attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "attn_q_norm", "attn_k_norm", "ffn_norm", "ffn_gate",
        "ffn_up", "ffn_down")}
    own = {"output.weight", "d2t"} if name == "dflash reduced" else {
        "markov_w1.weight", "markov_w2.weight", "conf_proj.weight", "conf_proj.bias"}
    if name == "dflash2":
        own = {f"selector_{part}.weight" for part in ("predecessor", "successor", "hidden")}
        own |= {f"blk.{layer}.{part}_conv_{end}" for layer in range(2) for part in ("attn", "ffn")
                for end in ("base", "proj.weight")}
        assert [found[f"{key}"] for key in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
                ] == [2, 16, 6, 5]
    tensors = {one.name: one.data for one in reader.tensors}
    assert set(tensors) == layers | own | {"fc.weight", "enc.output_norm.weight", "output_norm.weight"}
    # Rows of queries stay as they are: the rotary embedding is not that of a Llama.
    query = drafter.state_dict()["layers.1.self_attn.q_proj.weight"]
    assert torch.equal(torch.from_numpy(tensors["blk.1.attn_q.weight"].copy()), query)
    if "d2t" in own:
        assert tensors["d2t"].tolist() == IDS.tolist()
    text = (folder / "README.md").read_text()
    assert f"--spec-type {method} --spec-draft-n-max {drafter.config.num_steps} " in text


def test_the_command_takes_what_a_checkpoint_leaves_open(
    tmp_path: Path, target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    target.model.save_pretrained(tmp_path / "target")
    target.tokenizer.save_pretrained(tmp_path / "target")
    folder = written(made("dflash", target), target, "dflash", tmp_path / "out")
    config = flat(json.loads((folder / "config.json").read_text()))
    (folder / "config.json").write_text(json.dumps(config))
    line = ["import", "--format", "dflash", "--folder", str(folder), "--out", str(tmp_path / "back"), "--tree", "3",
            "--target.name", str(tmp_path / "target")]
    assert main(line) == 2
    assert "does not say which token a slot predicts" in capsys.readouterr().err
    assert main([*line, "--aligned", "same", "--causal", "false"]) == 0
    described = read_description(tmp_path / "back")
    assert (described["drafter"]["aligned"], described["drafter"]["causal"]) == ("same", False)
    imported = described["provenance"]["imported"]
    assert (imported["aligned"], imported["causal"]) == ("same", False)
