"""Medusa heads in the official layout: the official code's outputs, the same names after export, refused mistakes."""

import json
from pathlib import Path

import pytest
import torch
from draftsmith.export import EVERY_FORMAT, Artifact, export_artifact, import_drafter
from draftsmith.modules import Features, Target, UserError
from draftsmith.modules.families.medusa.drafter import Medusa
from draftsmith.modules.target.loading.tiny_model import tiny_tokenizer
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.artifacts import TREE, heads
from transformers import LlamaConfig, LlamaForCausalLM

FIXTURES = Path(__file__).resolve().parents[4] / "shared" / "fixtures"


def as_artifact(drafter: Medusa, target: Target) -> Artifact:
    return Artifact(drafter=drafter, target=target, topology=TREE, identity=target.identity, provenance={})


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
    export_artifact(as_artifact(drafter, target), target, "medusa", tmp_path / "again")
    again = load_file(tmp_path / "again" / "medusa_lm_head.safetensors")
    assert again.keys() == weights.keys()
    assert all(torch.equal(tensor, weights[key]) for key, tensor in again.items())
    written = json.loads((tmp_path / "again" / "config.json").read_text())
    assert written.items() >= {key: value for key, value in json.loads(config).items()
                               if key.startswith("medusa_num")}.items()


def test_imported_tied_blocks_stay_tied_in_further_training(tmp_path: Path, tiny_target: Target) -> None:
    drafter = heads(tiny_target, num_layers=2, tie_blocks=True)
    folder = export_artifact(as_artifact(drafter, tiny_target), tiny_target, "medusa", tmp_path / "out")
    back = import_drafter("medusa", folder, tiny_target)
    assert back.config.tie_blocks
    assert len(list(back.heads.parameters())) == 3 * 2
    before = back.heads[0][0].linear.weight.detach().clone()
    optimizer = torch.optim.AdamW(back.parameters(), lr=0.1)
    back._states(torch.randn(4, 32)).square().sum().backward()
    optimizer.step()
    assert not torch.equal(before, back.heads[0][0].linear.weight)
    export_artifact(as_artifact(back, tiny_target), tiny_target, "medusa", tmp_path / "again")
    written = load_file(tmp_path / "again" / "medusa_lm_head.safetensors")
    assert all(torch.equal(written[f"{head}.0.linear.weight"], written[f"{head}.1.linear.weight"])
               for head in range(3))
    free = export_artifact(as_artifact(heads(tiny_target, num_layers=2), tiny_target), tiny_target, "medusa",
                           tmp_path / "free")
    assert not import_drafter("medusa", free, tiny_target).config.tie_blocks


def test_the_layout_that_engines_expect(tmp_path: Path, tiny_target: Target) -> None:
    folder = export_artifact(as_artifact(heads(tiny_target), tiny_target), tiny_target, "medusa", tmp_path / "out")
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


@pytest.mark.parametrize("settings", [
    {}, {"output": "copy", "num_layers": 2}, {"vocabulary_size": 20}, {"num_layers": 3, "tie_blocks": True},
    {"output": "one_copy"}, {"output": "one_copy", "vocabulary_size": 20}, {"output": "copy", "vocabulary_size": 20},
])
def test_export_and_import_draft_the_same(tmp_path: Path, tiny_target: Target, settings: dict[str, object]) -> None:
    drafter = heads(tiny_target, **settings)
    export_artifact(as_artifact(drafter, tiny_target), tiny_target, "medusa", tmp_path / "out")
    back = import_drafter("medusa", tmp_path / "out", tiny_target)
    final_BLD = torch.randn(1, 5, 32)
    with torch.no_grad():
        ours, theirs = head_logits(drafter, final_BLD), head_logits(back, final_BLD)
    if drafter.token_ids_Q is not None:
        theirs = theirs[..., drafter.token_ids_Q]
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert back.config.output == ("copy" if settings.get("output") == "copy" else "one_copy")


@pytest.mark.parametrize("output", ["copy", "one_copy"])
def test_no_token_outside_a_reduced_vocabulary_is_ever_the_best(
    tmp_path: Path, tiny_target: Target, output: str
) -> None:
    drafter = heads(tiny_target, output=output, vocabulary_size=3)
    export_artifact(as_artifact(drafter, tiny_target), tiny_target, "medusa", tmp_path / "out")
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
        export_artifact(as_artifact(heads(tiny_target, output="copy"), tiny_target), tiny_target, "medusa-vllm",
                        tmp_path / "out")
    biased = target_with(torch.randn(96, 32), bias=True)
    for format_name in ("medusa", "medusa-vllm"):
        with pytest.raises(UserError, match="has a bias"):
            export_artifact(as_artifact(heads(biased), biased), biased, format_name, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_unknown_formats_are_named(tmp_path: Path, tiny_target: Target) -> None:
    with pytest.raises(UserError, match=f"the format 'onnx' is none of {', '.join(EVERY_FORMAT)}; choose one of"):
        export_artifact(as_artifact(heads(tiny_target), tiny_target), tiny_target, "onnx", tmp_path / "out")
