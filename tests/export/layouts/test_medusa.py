"""Medusa heads in the official layout and in vLLM's with one output layer: the official code's outputs, what vLLM
0.32.0 asks for, the same names after export, refused mistakes."""

import json
from pathlib import Path

import pytest
import torch
from draftsmith.export import EVERY_FORMAT, import_drafter
from draftsmith.modules import Features, MedusaConfig, Target, UserError
from draftsmith.modules.families.medusa.drafter import Medusa
from draftsmith.modules.target.loading.tiny_model import tiny_tokenizer
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.artifacts import heads
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from .test_engine_contracts import written

FILE = "model.safetensors"
REDUCED = {"output": "one_copy", "vocabulary_size": 20}
ONE_OUTPUT: list[dict[str, object]] = [REDUCED, {"output": "one_copy", "num_layers": 2}, {"vocabulary_size": 20}, {},
                                       {**REDUCED, "num_layers": 3, "tie_blocks": True}]
FIXTURES = Path(__file__).resolve().parents[4] / "shared" / "fixtures"


def target_with(head_VD: torch.Tensor, bias: bool = False) -> Target:
    """A tiny target with this output layer."""
    vocab_size, hidden_size = head_VD.shape
    model = LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, hidden_size=hidden_size, intermediate_size=64,
                                         num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                                         tie_word_embeddings=False, pad_token_id=0, bos_token_id=1, eos_token_id=2))
    if bias:
        model.lm_head = torch.nn.Linear(hidden_size, vocab_size)
    with torch.no_grad():
        model.lm_head.weight.copy_(head_VD)
    return Target(model, tiny_tokenizer(), name="tiny-target")


def head_logits(drafter: Medusa, final_BLD: torch.Tensor) -> torch.Tensor:
    """[K, B, L, Q] of the training forward."""
    rows = Features.from_rows([([1] * final_BLD.shape[1], [True] * final_BLD.shape[1])])
    hidden_BLKD = drafter(Features(tokens_BL=rows.tokens_BL, supervised_BL=rows.supervised_BL,
                                   segments_BL=rows.segments_BL, positions_BL=rows.positions_BL,
                                   final_BLD=final_BLD)).hidden_BLKD
    return torch.stack([drafter.project(hidden_BLKD[:, :, step], step) for step in range(drafter.config.num_heads)])


@pytest.mark.parametrize("name", ["medusa_1layer", "medusa_2layers_tied"])
def test_official_heads_give_official_logits_and_come_back_as_they_were(tmp_path: Path, name: str) -> None:
    path = FIXTURES / f"{name}.safetensors"
    if not path.is_file():
        pytest.skip(f"the recorded outputs of the official code are not next to the repository ({path.name})")
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        config = file.metadata()["config"]
    weights = {key.removeprefix("weight/"): value for key, value in tensors.items() if key.startswith("weight/")}
    (tmp_path / "official").mkdir()
    (tmp_path / "official" / "config.json").write_text(config)
    save_file(weights, tmp_path / "official" / "medusa_lm_head.safetensors")
    target = target_with(tensors["input/target_lm_head"])
    drafter = import_drafter("medusa", tmp_path / "official", target)
    assert drafter.config.tie_blocks == name.endswith("_tied")
    with torch.no_grad():
        logits_KBLV = head_logits(drafter, tensors["input/hidden_states"])
    torch.testing.assert_close(logits_KBLV, tensors["output/medusa_logits"], atol=1e-4, rtol=0)
    written(drafter, target, "medusa", tmp_path / "again")
    again = load_file(tmp_path / "again" / "medusa_lm_head.safetensors")
    assert again.keys() == weights.keys()
    assert all(torch.equal(tensor, weights[key]) for key, tensor in again.items())
    held = json.loads((tmp_path / "again" / "config.json").read_text())
    assert held.items() >= {key: value for key, value in json.loads(config).items()
                               if key.startswith("medusa_num")}.items()


def test_imported_tied_blocks_stay_tied_in_further_training(tmp_path: Path, tiny_target: Target) -> None:
    drafter = heads(tiny_target, num_layers=2, tie_blocks=True)
    folder = written(drafter, tiny_target, "medusa", tmp_path / "out")
    back = import_drafter("medusa", folder, tiny_target)
    assert back.config.tie_blocks
    assert len(list(back.heads.parameters())) == 3 * 2
    before = back.heads[0][0].linear.weight.detach().clone()
    optimizer = torch.optim.AdamW(back.parameters(), lr=0.1)
    back._states(torch.randn(4, 32)).square().sum().backward()
    optimizer.step()
    assert not torch.equal(before, back.heads[0][0].linear.weight)
    written(back, tiny_target, "medusa", tmp_path / "again")
    held = load_file(tmp_path / "again" / "medusa_lm_head.safetensors")
    assert all(torch.equal(held[f"{head}.0.linear.weight"], held[f"{head}.1.linear.weight"])
               for head in range(3))
    free = written(heads(tiny_target, num_layers=2), tiny_target, "medusa", tmp_path / "free")
    assert not import_drafter("medusa", free, tiny_target).config.tie_blocks


def test_the_layout_that_engines_expect(tmp_path: Path, tiny_target: Target) -> None:
    folder = written(heads(tiny_target), tiny_target, "medusa", tmp_path / "out")
    assert {path.name for path in folder.iterdir()} == {
        ".draftsmith.json", "config.json", "medusa_lm_head.safetensors", "README.md", "origin.json",
        "acceptance.json"}
    config = json.loads((folder / "config.json").read_text())
    assert config == {"base_model_name_or_path": "tiny-random", "hidden_size": 32, "medusa_fc_bias": True,
                      "medusa_num_heads": 3, "medusa_num_layers": 1, "vocab_size": tiny_target.vocab_size}
    shapes = {name: tuple(tensor.shape) for name, tensor in load_file(folder / "medusa_lm_head.safetensors").items()}
    vocabulary = tiny_target.vocab_size
    assert shapes == {f"{head}.{part}": shape for head in range(3) for part, shape in
                      (("0.linear.weight", (32, 32)), ("0.linear.bias", (32,)), ("1.weight", (vocabulary, 32)))}


@pytest.mark.parametrize(("layout", "settings"), [
    *(("medusa", settings) for settings in (
        {}, {"output": "copy", "num_layers": 2}, {"vocabulary_size": 20}, {"num_layers": 3, "tie_blocks": True},
        {"output": "one_copy"}, REDUCED, {"output": "copy", "vocabulary_size": 20})),
    *(("medusa-vllm", settings) for settings in ONE_OUTPUT)])
def test_export_and_import_draft_the_same(tmp_path: Path, tiny_target: Target, layout: str,
                                          settings: dict[str, object]) -> None:
    drafter, final_BLD = heads(tiny_target, **settings), torch.randn(1, 5, 32)
    back = import_drafter("medusa", written(drafter, tiny_target, layout, tmp_path / "out"), tiny_target)
    with torch.no_grad():
        ours, theirs = head_logits(drafter, final_BLD), head_logits(back, final_BLD)
    if drafter.token_ids_Q is not None and layout == "medusa":
        theirs = theirs[..., drafter.token_ids_Q]
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert back.config.output == ("copy" if settings.get("output") == "copy" else "one_copy")
    assert back.config.tie_blocks == drafter.config.tie_blocks
    assert layout == "medusa" or back.config.vocabulary_size == drafter.config.vocabulary_size


@pytest.mark.parametrize("output", ["copy", "one_copy"])
def test_no_token_outside_a_reduced_vocabulary_is_ever_the_best(
    tmp_path: Path, tiny_target: Target, output: str
) -> None:
    drafter = heads(tiny_target, output=output, vocabulary_size=3)
    written(drafter, tiny_target, "medusa", tmp_path / "out")
    back, final_BLD = import_drafter("medusa", tmp_path / "out", tiny_target), 3 * torch.randn(1, 2000, 32)
    with torch.no_grad():
        ours, theirs = head_logits(drafter, final_BLD), head_logits(back, final_BLD)
    # In some of these states all logits of the vocabulary are negative: rows of zeros would win there.
    assert (ours.amax(-1) < 0).any()
    assert drafter.token_ids_Q is not None
    assert torch.equal(theirs.argmax(-1), drafter.token_ids_Q[ours.argmax(-1)])
    others = theirs[..., [token for token in range(100) if token not in drafter.token_ids_Q]]
    torch.testing.assert_close(others, ours.mean(-1, keepdim=True).expand_as(others), atol=1e-4, rtol=1e-4)


def write_heads(folder: Path, tensors: dict[str, torch.Tensor], name: str = "medusa_lm_head.safetensors") -> Path:
    folder.mkdir()
    save_file(tensors, folder / name)
    return folder


def test_heads_without_output_layers_share_the_targets(tmp_path: Path, tiny_target: Target) -> None:
    tensors = {"medusa_head.0.0.linear.weight": torch.randn(32, 32), "medusa_head.0.0.linear.bias": torch.randn(32)}
    drafter = import_drafter("medusa", write_heads(tmp_path / "v2", tensors, "model.safetensors"), tiny_target)
    assert (drafter.config.output, drafter.config.num_heads, drafter.config.num_layers) == ("shared", 1, 1)


def test_damaged_checkpoints_are_named(tmp_path: Path, tiny_target: Target) -> None:
    (tmp_path / "pickle").mkdir()
    (tmp_path / "pickle" / "medusa_lm_head.pt").write_bytes(b"\x80\x04.")
    with pytest.raises(UserError, match="is a pickle, which is never read"):
        import_drafter("medusa", tmp_path / "pickle", tiny_target)
    strange = write_heads(tmp_path / "strange", {"model.embed_tokens.weight": torch.zeros(2)})
    with pytest.raises(UserError, match=r"'model\.embed_tokens\.weight', no tensor of Medusa heads"):
        import_drafter("medusa", strange, tiny_target)
    gap = write_heads(tmp_path / "gap", {"1.0.linear.weight": torch.zeros(32, 32), "1.0.linear.bias": torch.zeros(32)})
    with pytest.raises(UserError, match=r"does not fit .* tiny-random .*heads\.0\.0\.linear"):
        import_drafter("medusa", gap, tiny_target)
    wide = {"0.0.linear.weight": torch.zeros(8, 8), "0.0.linear.bias": torch.zeros(8)}
    with pytest.raises(UserError, match="size mismatch"):
        import_drafter("medusa", write_heads(tmp_path / "wide", wide), tiny_target)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(UserError, match="not a readable safetensors file"):
        import_drafter("medusa", tmp_path / "broken", tiny_target)


def test_heads_that_the_layout_cannot_hold_are_refused(tmp_path: Path, tiny_target: Target) -> None:
    with pytest.raises(UserError, match="an output layer each, the layout has one for all of them; train with output: "
                                        "one_copy or output: shared, or choose --format medusa"):
        written(heads(tiny_target, output="copy"), tiny_target, "medusa-vllm", tmp_path / "out")
    biased = target_with(torch.randn(96, 32), bias=True)
    for format_name in ("medusa", "medusa-vllm"):
        with pytest.raises(UserError, match="has a bias"):
            written(heads(biased), biased, format_name, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_unknown_formats_are_named(tmp_path: Path, tiny_target: Target) -> None:
    with pytest.raises(UserError, match=f"the format 'onnx' is none of {', '.join(EVERY_FORMAT)}; choose one of"):
        written(heads(tiny_target), tiny_target, "onnx", tmp_path / "out")


# vLLM's layout --------------------------------------------------------------------------------------------------------


def vllm_logits(folder: Path, hidden_ND: torch.Tensor) -> list[torch.Tensor]:
    """Logits [N, V] of each head, as `Medusa` of vllm/model_executor/models/medusa.py (0.32.0) makes them of a folder:
    `MedusaConfig`, `load_weights`, `forward` and `compute_logits`."""
    config, weights = json.loads((folder / "config.json").read_text()), load_file(folder / FILE)
    assert config["model_type"] == "medusa"
    assert config["original_lm_head"] is True, "without it each head has an output layer over all tokens"
    tokens = config["vocab_size"]
    rows = config.get("truncated_vocab_size", tokens)
    token_map = weights["token_map"] if rows < tokens else None
    names, found = {"lm_head.weight", *({"token_map"} if rows < tokens else ())}, []
    for head in range(config["num_heads"]):
        states_ND = hidden_ND
        for layer in range(config["num_hidden_layers"]):
            name = f"blocks.{head}.layers.{layer}"
            # The bias is read if the configuration says so, and dropped silently otherwise.
            bias_D = weights[f"{name}.bias"] if config["medusa_fc_bias"] else None
            states_ND = states_ND + functional.silu(functional.linear(states_ND, weights[f"{name}.weight"], bias_D))
            names |= {f"{name}.weight", f"{name}.bias"}
        assert weights["lm_head.weight"].shape == (rows, config["hidden_size"])
        logits_NQ = states_ND @ weights["lm_head.weight"].T
        if token_map is not None:
            assert (token_map.dtype, token_map.shape) == (torch.int64, (rows,))
            logits_NV = torch.full((len(hidden_ND), tokens), -torch.inf)
            logits_NV[..., token_map] = logits_NQ
            logits_NQ = logits_NV
        found.append(logits_NQ)
    assert set(weights) == names, "vLLM passes over any other tensor without a word"
    return found


@pytest.mark.parametrize("settings", ONE_OUTPUT)
def test_vllm_computes_the_heads_logits(tmp_path: Path, tiny_target: Target, settings: dict[str, object]) -> None:
    drafter, final_BLD = heads(tiny_target, **settings), torch.randn(1, 40, 32)
    ids_Q = torch.arange(100) if drafter.token_ids_Q is None else drafter.token_ids_Q
    with torch.no_grad():
        ours = head_logits(drafter, final_BLD)[:, 0]
    folder = written(drafter, tiny_target, "medusa-vllm", tmp_path / "out")
    for head, theirs in enumerate(vllm_logits(folder, final_BLD[0])):
        torch.testing.assert_close(theirs[:, ids_Q], ours[head], atol=1e-5, rtol=1e-5)
        assert torch.isinf(theirs).sum() == theirs.numel() - ours[head].numel()


def test_the_folder_says_who_reads_it(tmp_path: Path, tiny_target: Target) -> None:
    folder = written(heads(tiny_target, **REDUCED), tiny_target, "medusa-vllm", tmp_path / "out")
    assert {path.name for path in folder.iterdir()} == {
        ".draftsmith.json", "config.json", FILE, "README.md", "origin.json", "acceptance.json"}
    config = json.loads((folder / "config.json").read_text())
    assert config == {
        "architectures": ["MedusaModel"], "base_model_name_or_path": "tiny-random", "hidden_size": 32,
        "medusa_fc_bias": True, "model_type": "medusa", "num_heads": 3, "num_hidden_layers": 1,
        "original_lm_head": True, "read_by": "vLLM up to 0.32; not Text Generation Inference",
        "truncated_vocab_size": 20, "vocab_size": 100}
    # By this key Text Generation Inference takes a folder for Medusa heads, and by the other for none.
    assert "medusa_num_heads" not in config
    text = (folder / "README.md").read_text()
    assert "--model-loader-extra-config '{\"enable_weights_track\": false}'" in text
    whole = written(heads(tiny_target, output="one_copy"), tiny_target, "medusa-vllm", tmp_path / "whole")
    assert "truncated_vocab_size" not in json.loads((whole / "config.json").read_text())
    assert "enable_weights_track" not in (whole / "README.md").read_text()


def test_the_rows_stand_in_the_order_of_their_tokens(tmp_path: Path, tiny_target: Target) -> None:
    """vLLM ignores a map of the whole vocabulary: its rows must then already be in order."""
    ids_V = torch.randperm(100, generator=torch.Generator().manual_seed(0))
    drafter = Medusa.create(MedusaConfig(num_heads=2, output="one_copy", vocabulary_size=100), tiny_target, ids_V)
    weights = load_file(written(drafter, tiny_target, "medusa-vllm", tmp_path / "out") / FILE)
    assert torch.equal(weights["token_map"], torch.arange(100))
    assert torch.equal(weights["lm_head.weight"], tiny_target.output_weight())


def altered(folder: Path, **changes: torch.Tensor | None) -> Path:
    """The folder with tensors exchanged, or taken out where None is given."""
    tensors = {**load_file(folder / FILE), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / FILE)
    return folder


def test_a_map_selects_rows_of_a_longer_layer(tmp_path: Path, tiny_target: Target) -> None:
    drafter = heads(tiny_target, vocabulary_size=20)
    folder = written(drafter, tiny_target, "medusa-vllm", tmp_path / "out")
    altered(folder, **{"lm_head.weight": tiny_target.output_weight().clone()})
    back = import_drafter("medusa", folder, tiny_target)
    assert torch.equal(back.output_parameters(0)[0], tiny_target.output_weight()[drafter.token_ids_Q])


def test_layers_of_single_heads_are_read_too(tmp_path: Path, tiny_target: Target) -> None:
    drafter = heads(tiny_target, output="one_copy")
    folder = written(drafter, tiny_target, "medusa-vllm", tmp_path / "out")
    weight_VD = drafter.output_parameters(0)[0].detach()
    each = {f"lm_heads.{head}.weight": weight_VD + head for head in range(3)}
    back = import_drafter("medusa", altered(folder, **{"lm_head.weight": None}, **each), tiny_target)
    assert back.config.output == "copy"
    assert torch.equal(back.output_parameters(2)[0], weight_VD + 2)


@pytest.mark.parametrize(("changes", "told"), [
    ({"lm_head.weight": None}, "holds token_map without lm_head.weight"),
    ({"token_map": torch.arange(81, 101)}, "must hold tokens from 0 to 99, those of tiny-random"),
    ({"token_map": torch.arange(-1, 19)}, "must hold tokens from 0 to 99"),
    ({"token_map": torch.arange(20.0)}, "must hold tokens from 0 to 99"),
    ({"token_map": torch.zeros(20, dtype=torch.int64)}, "token 0 occurs 20 times in the draft vocabulary"),
    ({"lm_head.weight": torch.zeros(19, 32)}, r"does not fit .* tiny-random .*outputs\.0\.weight"),
    ({"lm_head.weight": torch.full((20, 32), torch.nan)}, "not finite"),
    ({"blocks.1.layers.0.bias": None}, r"does not fit .* tiny-random .*heads\.1\.0\.linear\.bias"),
    ({f"blocks.{head}.layers.0.{part}": None for head in range(3) for part in ("weight", "bias")},
     "num_heads must be at least 1, got 0"),
    ({"blocks.0.norm.weight": torch.zeros(32)}, r"'blocks\.0\.norm\.weight', no tensor of Medusa heads"),
])
def test_damaged_folders_are_named(
    tmp_path: Path, tiny_target: Target, changes: dict[str, torch.Tensor | None], told: str
) -> None:
    folder = written(heads(tiny_target, **REDUCED), tiny_target, "medusa-vllm", tmp_path / "out")
    with pytest.raises(UserError, match=told):
        import_drafter("medusa", altered(folder, **changes), tiny_target)
